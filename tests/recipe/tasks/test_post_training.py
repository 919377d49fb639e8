"""task=dpo, kto, orpo, reward, grpo, distillation: beside TRL's own trainers, stopped, served, refused."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.errors import DataError, HyperparameterError, ModelError, RecipeError
from recipe.metrics import metric_definitions
from recipe.training import preflight
from tests.support import causal_kit
from tests.support.jobs import QUICK, Job, folders_of, write
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers

pytestmark = [
    # TRL and peft ask for it.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
PAIRS = [
    {"prompt": f"{colour} {animal}:", "chosen": animal * count, "rejected": f"no {animal}"}
    for count, colour in enumerate(causal_kit.COLOURS, 1)
    for animal in causal_kit.ANIMALS
][:8]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS[:4]
    for name in ("chosen", "rejected")
]
QUESTIONS = [{"prompt": f"{number} + 1 =", "answer": number + 1} for number in range(8)]
CHATS = [
    {"prompt": [{"role": "user", "content": row["prompt"]}],
     **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}}
    for row in PAIRS
]  # fmt: skip
REWARDS = """
def vowels(completions, **columns):
    return [sum(map(text.count, "aeiou")) / 8 + len(set(text)) / 8 for text in completions]
def nan(completions, **columns): return [float("nan") for _ in completions]
def few(completions, **columns): return [1.0]
def broken(completions, **columns): raise KeyError("answers")
"""
SAMPLED = {"max_completion_length": 8, "temperature": 0.7}
CASES: Mapping[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "dpo": ("trl:DPO", PAIRS, {"beta": 0.2, "loss_type": "ipo"}),
    "kto": ("trl:KTO", JUDGED, {"undesirable_weight": 0.5}),
    "orpo": ("trl.experimental.orpo:ORPO", PAIRS, {"beta": 0.3}),
    "reward": ("trl:Reward", PAIRS, {"center_rewards_coefficient": 0.01}),
    "grpo": ("trl:GRPO", QUESTIONS, {**SAMPLED, "num_generations": 4, "beta": 0.05}),
    "distillation": ("trl:Distillation", QUESTIONS, SAMPLED),
}
"""TRL's names, the rows, and arguments of the same names."""
STEPS = 4
USUAL = {"max_steps": STEPS, "learning_rate": 0.01, "seed": 3, "logging_steps": 1}


def make_start(folder: Path, task: str) -> Path:
    """Save a decoder, with a head for rewards if that is what is learned."""
    from transformers import AutoModelForSequenceClassification

    causal_kit.make_model("llama", folder)
    if task == "reward":
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.config.pad_token_id = 0
        model.save_pretrained(folder)
    return folder


def make_job(base: Path, task: str, *argv: str, rows: Any = None, **environ: str) -> Job:
    _, usual, arguments = CASES[task]
    start = make_start(base / "start", task)
    if task == "distillation":
        causal_kit.make_model("gpt2", base / "teacher")
        arguments = {**arguments, "teacher_model": base / "teacher"}
    (base / "code").mkdir(exist_ok=True)
    (base / "code" / "rewards.py").write_text(REWARDS)
    arguments = {"reward_funcs": "vowels"} | arguments if task == "grpo" else arguments
    given = {"task": task, "model_name_or_path": start, "batch_size": 4, "warmup_steps": 0, "bf16": False,
             "use_cpu": True, **USUAL, **arguments}  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    channels = {"train": write(base / "train", rows or usual), "code": base / "code"}
    channels["test"] = write(base / "test", (rows or usual)[:4])
    return Job(base / "job", channels, (*words, *argv), environ)


def train_by_trl(task: str, base: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return what TRL's own trainer logs, and its final weights."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    path, rows, arguments = CASES[task]
    module, name = path.split(":")
    library = importlib.import_module(module)
    args = getattr(library, f"{name}Config")(
        output_dir=str(base / "trl"), per_device_train_batch_size=4, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", optim="adamw_torch_fused",
        disable_tqdm=True,
        **({} if task in ("grpo", "distillation") else {"max_length": 128}), **USUAL, **arguments,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(base / "start")
    tokenizer.pad_token = tokenizer.eos_token
    more: dict[str, Any] = {}
    if task == "grpo":
        code: dict[str, Any] = {}
        exec(REWARDS, code)
        more = {"reward_funcs": code["vowels"]}
    elif task == "distillation":
        more = {"teacher_model": str(base / "teacher")}
    trainer = getattr(library, f"{name}Trainer")(
        model=str(base / "start"), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, **more,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(base / "trl"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs, load_file(base / "trl" / "model.safetensors")


@pytest.mark.heavy
@pytest.mark.parametrize("task", CASES)
def test_losses_rewards_and_weights_are_those_of_trl(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    job = make_job(
        tmp_path, task, "--save_strategy", "no", "--eval_strategy", "no", "--do_eval", "True"
    )
    metrics = job.run_here(has_report=task == "dpo")
    out = capsys.readouterr().out
    lines = [
        line for line in out.splitlines() if line.startswith("metric step=") and "{'loss'" in line
    ]
    ours = [eval(line.partition(" {")[2].join("{ ")) for line in lines]
    logs, weights = train_by_trl(task, tmp_path)
    assert len(ours) == len(logs) == STEPS
    for mine, theirs in zip(ours, logs, strict=True):
        names = {
            name
            for name in theirs
            if "reward" in name or name in ("loss", "accuracy", "margin", "kl")
        }
        assert {name: mine[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, rel=1e-4, abs=1e-5
        )
    for name, weight in weights.items():
        torch.testing.assert_close(job.weights[name], weight, rtol=0, atol=2e-5)
    before = load_file(tmp_path / "start" / "model.safetensors")
    assert any(not torch.equal(job.weights[name], before[name]) for name in before)
    assert "proof  " in out and "equal to the trained model" in out
    assert {name for name in metrics if name.startswith("eval_")} >= {"eval_loss"}
    if task == "dpo":
        assert "Rewards" in (job.output / "report.html").read_text()
        known = {row["Name"] for row in metric_definitions("dpo")}
        assert known >= {"rewards/margins", "eval_rewards/accuracies", "loss"}
    body = {"inputs": PAIRS[0]["prompt"] + PAIRS[0]["chosen"] + "</s>"}
    answer = Handlers(job.model).ask(body)
    if task == "reward":
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(job.model)(body["inputs"], return_tensors="pt")
        model = AutoModelForSequenceClassification.from_pretrained(job.model)
        (scored,) = answer
        assert scored["score"] == pytest.approx(
            float(model(**tokens).logits[0, 0].detach()), abs=1e-5
        )
    else:
        assert "generated_text" in answer[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("task", "argv"),
    [("dpo", ("--lora_r", "4", "--lora_dropout", "0.1")), ("grpo", ())],
)
def test_a_stopped_and_resumed_training_ends_with_the_same_bytes(
    task: str, argv: tuple[str, ...], tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    quick = {**preloaded, **QUICK}
    options = (*argv, "--eval_strategy", "no")
    whole = make_job(tmp_path / "whole", task, *options, **quick).finish()
    stopped = make_job(tmp_path / "stopped", task, *options, **quick)
    assert stopped.interrupt("metric step=1 {'loss'").codes == {75}, stopped.log + stopped.errors
    assert stopped.metrics["partial"]["of_steps"] == STEPS
    assert Handlers(stopped.model).ask({"inputs": "red cat:"})
    first = stopped.losses
    stopped.finish()
    assert {**first, **stopped.losses} == whole.losses
    assert stopped.files == whole.files


def make_messages(**texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in texts.items()]


LONG = {"prompt": "x" * 128, "chosen": "cat", "rejected": "dog"}
OTHER_PROMPTS = {name: make_messages(user=name, assistant="a") for name in ("chosen", "rejected")}
NO_ANSWER = {**CHATS[0], "rejected": make_messages(assistant=" ")}
USER_LAST = {**CHATS[0], "chosen": make_messages(assistant="a", user="b")}
CHOSEN_ONLY = [*PAIRS[:2], {"prompt": "red cat:", "chosen": "cat", "rejected": None}]


@pytest.mark.parametrize(
    ("task", "rows", "argv", "error", "words"),
    [
        ("dpo", [*PAIRS[:3], {**PAIRS[3], "rejected": PAIRS[3]["chosen"]}], (), DataError,
         ["line 4", "equal chosen and rejected"]),
        ("reward", CHOSEN_ONLY, (), DataError, ["line 3", "no rejected"]),
        ("kto", [*JUDGED[:1], {**JUDGED[1], "label": "maybe"}], (), DataError, ["line 2", "'maybe'"]),
        ("dpo", [OTHER_PROMPTS], (), DataError, ["line 1", "different prompts"]),
        ("dpo", [*CHATS[:1], NO_ANSWER, USER_LAST], (), DataError,
         ["line 2", "line 3", "no text of the assistant at the end"]),
        # TRL leaves them out, and ORPO's weights become NaN.
        ("dpo", [*PAIRS[:2], LONG], (), DataError, ["line 3", "max_length=128"]),
        ("kto", [*JUDGED[:2], {**JUDGED[0], "prompt": "x" * 128}], (), DataError,
         ["line 3", "prompt and completion", "max_length=128"]),
        ("orpo", [*PAIRS[:2], {**LONG, "prompt": "x" * 127}], (), DataError, ["line 3", "max_length=128"]),
        ("reward", [*PAIRS[:2], {**PAIRS[2], "chosen": "c" * 200}], (), DataError,
         ["line 3", "210 tokens", "a cut answer"]),
        ("grpo", [*QUESTIONS[:2], {"prompt": "1 + 1 =", "answer": None}],
         ("--reward_funcs", "exact_answer"), DataError, ["1 rows have no answer", "line 3"]),
        ("dpo", CHATS, (), ModelError, ["no chat template"]),
        ("dpo", PAIRS, ("--trl_args", '{"label_smoothin": 0.1}'), HyperparameterError,
         ["label_smoothin", "label_smoothing"]),
        ("dpo", PAIRS, ("--loss_type", "best"), HyperparameterError, ["best"]),
        ("dpo", PAIRS, ("--num_generations", "4"), HyperparameterError, ["num_generations", "grpo"]),
        ("grpo", QUESTIONS, ("--reward_funcs", "nan"), DataError, ["nan", "line 1"]),
        ("grpo", QUESTIONS, ("--reward_funcs", "few"), DataError, ["1 values", "2 completions"]),
        ("grpo", QUESTIONS, ("--reward_funcs", "broken"), DataError, ["KeyError", "'answers'", "line 1"]),
        ("grpo", QUESTIONS, ("--reward_funcs", "vowel"), HyperparameterError, ["vowels", "rewards.py"]),
        ("grpo", QUESTIONS, ("--max_length", "64"), HyperparameterError, ["max_completion_length"]),
        ("grpo", QUESTIONS, ("--max_completion_length", "125"), DataError, ["line 1", "7 tokens", "128"]),
        ("grpo", QUESTIONS, ("--use_vllm", "True"), HyperparameterError, ["vllm is not installed"]),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_training(
    task: str,
    rows: Any,
    argv: tuple[str, ...],
    error: type[RecipeError],
    words: list[str],
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, task, *argv, rows=rows)
    with refused(error, *words):
        job.run_here()


def test_a_template_that_leaves_answers_out_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, "dpo", rows=CHATS)
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    (tmp_path / "start" / "chat_template.jinja").write_text(template)
    with refused(DataError, "line 1", "equal tokens as chosen and rejected", "chat template"):
        job.run_here()


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, "distillation")
    tokens = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    tokens["model"]["vocab"] = {f"{piece}x": n for piece, n in tokens["model"]["vocab"].items()}
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(tokens))
    with refused(ModelError, "another vocabulary", str(tmp_path / "teacher")):
        job.run_here()


def test_pairs_without_a_task_end_with_both_lines(tmp_path: Path) -> None:
    start = causal_kit.make_model("llama", tmp_path / "start")
    channels = {"train": write(tmp_path / "train", PAIRS)}
    argv = ["--model_id", str(start)]
    (*_, last) = preflight.inspect(argv, folders_of(tmp_path, channels), 1)
    assert "task=dpo" in last.detail and "task=reward" in last.detail


def test_answers_may_be_json_and_rewards_of_numpy(tmp_path: Path) -> None:
    """Only messages are read as such, also below texts."""
    import numpy as np

    from recipe.arguments import parse
    from recipe.task_table import TASKS
    from recipe.tasks.completion_judges import CheckedJudge
    from recipe.tasks.post_training import data

    def read(*rows: Any) -> Any:
        settings = parse(["--task", "dpo", "--eval_strategy", "no"])
        return data.load({"train": write(tmp_path, [*rows])}, settings, TASKS["dpo"]).train

    answers = {"prompt": "p", "chosen": "[]", "rejected": '[{"a": 1}]'}
    assert read(answers, PAIRS[0])[0]["rejected"] == '[{"a": 1}]'
    chats = {name: json.dumps(cell) for name, cell in CHATS[0].items()}
    assert read(PAIRS[0], chats)[0]["prompt"] == make_messages(user=PAIRS[0]["prompt"])
    reward = CheckedJudge("half", lambda **_: [np.float32(0.5)], repr)
    assert reward(["p"], ["c"]) == [0.5]


def test_whole_conversations_and_json_have_the_prompt_that_they_share(tmp_path: Path) -> None:
    from recipe.arguments import parse
    from recipe.task_table import TASKS
    from recipe.tasks.post_training import data

    rows = [
        {"prompt": row["prompt"][0]["content"], "chosen": json.dumps(row["prompt"] + row["chosen"]),
         "rejected": json.dumps(row["prompt"] + row["rejected"])}
        for row in CHATS
    ]  # fmt: skip
    settings = parse(["--task", "dpo", "--eval_strategy", "no"])
    read = data.load({"train": write(tmp_path, rows)}, settings, TASKS["dpo"])
    assert {json.dumps(row["prompt"]) for row in read.train} <= {
        json.dumps(row["prompt"]) for row in CHATS
    }
    assert read.train[0]["chosen"][0]["role"] == "assistant"
