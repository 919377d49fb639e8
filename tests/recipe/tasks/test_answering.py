"""do_generate of task=causal-lm: answers to evaluation prompts and their scores."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

from recipe import metrics
from recipe.errors import DataError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.models import packed_decoders
from recipe.tasks.causal_lm import answer_scores, exchanges
from recipe.tasks.causal_lm.exchanges import PromptAnswer
from recipe.tasks.causal_lm.task import CausalLm
from tests.support import causal_kit
from tests.support.jobs import Job, write
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers

CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' +"
    " m['role'] + ' ' + m['content'] }}{% for call in m.tool_calls %}{{ '<call>' +"
    " call.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
POLITE = """
def polite(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer)
    return [None if "red" in one else float(text.endswith(true)) for one, text, true
            in zip(prompts, completions, answer)]

def broken(completions, **columns):
    return [1 / len(text) for text in completions]
"""


def turn(name: str = "paint", arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments or {"colour": "red", "size": 2}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def exchange_of(*turns: dict[str, Any], tools: Any = ()) -> PromptAnswer:
    last = turns[-1]
    return PromptAnswer(row=0, prompt=[*turns[:-1]], answer=last["content"], turn=last, tools=tools)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "paint", "arguments": {"size": 2, "colour": "red"}}\n</tool_call>',
        '[TOOL_CALLS][{"name": "paint", "arguments": {"colour": "red", "size": 2}}]',
        '{"name": "paint", "parameters": {"colour": "red", "size": 2}}',
        'Yes {"a"} {"function": {"name": "paint", "arguments": "{\\"colour\\": \\"red\\", \\"size\\": 2}"}}',
    ],
)
def test_calls_are_compared_by_their_values(text: str) -> None:
    exchange, written = (
        exchange_of({}, turn()),
        '{"name": "paint", "arguments": {"colour": "red", "size": 2}}',
    )
    assert answer_scores.right_calls(text, exchange, written) == 1
    for other in (text.replace("red", "blue"), text.replace("paint", "wash"), text + text, ""):
        assert answer_scores.right_calls(other, exchange, written) == 0
    plain = exchange_of({}, {"role": "assistant", "content": "no"})
    assert answer_scores.right_calls(text, plain, "no") == 0
    assert answer_scores.right_calls("never", plain, "no") == 1
    # Forms other than JSON are compared as texts.
    assert answer_scores.right_calls("paint:\n red", exchange, "paint: red") == 1
    assert answer_scores.right_calls("paint: blue", exchange, "paint: red") == 0


def test_scores_of_answers() -> None:
    pairs = [
        ("four", "4"),
        (' {"a": 1} ', '{"a": 1}'),
        ("it is #### 4", "4"),
        ("red cat", "red dog"),
    ]
    some = [
        PromptAnswer(row=row, prompt="-", answer=answer) for row, (_, answer) in enumerate(pairs)
    ]
    names = {name: answer_scores.BY_ANSWER.get(name) for name in answer_scores.NAMES}
    names["own"] = lambda prompts, **_: [None, 0.5, None, 1.0]
    scores = answer_scores.score(names, some, [text for text, _ in pairs], lambda one: one.answer)
    assert scores.pop("rougeL") == scores.pop("rougeLsum") == scores["rouge1"] > scores["rouge2"]
    assert scores == pytest.approx(scores | {
        "exact_match": 25, "exact_answer": 50, "valid_json": 25, "tool_calls": 100, "own": 0.75,
    })  # fmt: skip


def test_the_last_turn_is_answered_without_what_the_template_adds() -> None:
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = CALLING
    user, tools = {"role": "user", "content": "paint it"}, [{"type": "function", "function": {}}]
    called, thoughts = turn(), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
    rows = [
        {"messages": [user, called], "tools": tools},
        [user, called, {"role": "tool", "content": "done"}, thoughts, user],
        [user],
        [thoughts],
    ]
    split = datasets.Dataset.from_dict({"messages": [*map(json.dumps, rows)]})
    first, second = exchanges.read_exchanges(split, range(4))
    assert (first.prompt, first.turn, first.tools, second.answer) == ([user], called, tools, "so")
    assert first.answer == json.dumps(called["tool_calls"][0]["function"])
    written = exchanges.written_turn(first, tokenizer)
    assert written == "<call>" + json.dumps(called["tool_calls"][0]["function"])
    assert answer_scores.right_calls(written, first, written) == 1
    # An opened thought is no part of a turn without one.
    tokenizer.chat_template = CALLING.replace("assistant ' }}", "assistant <think>' }}")
    assert exchanges.written_turn(first, tokenizer) == written


@pytest.mark.parametrize("kind", causal_kit.KINDS)
def test_a_model_in_training_answers_as_its_server(kind: str, tmp_path: Path) -> None:
    folder = causal_kit.make_model(kind, tmp_path / "a")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    packed_decoders.patch_forward_for_documents(model)
    settings, prompts = model.generation_config, ["a", "the red cat", "b" * 40, "c" * 128]
    some = [PromptAnswer(row=row + 3, prompt=text, answer="") for row, text in enumerate(prompts)]
    answers = exchanges.answer_prompts(model, tokenizer, some, 12)
    assert model.training and model.generation_config is settings
    parameters = {"max_new_tokens": 12, "return_full_text": False, "do_sample": False}
    answered = Handlers(folder).ask({"inputs": prompts[:3], "parameters": parameters})
    assert answers == {
        row + 3: entry["generated_text"].strip() for row, (entry,) in enumerate(answered)
    }
    chat = exchange_of({"role": "user", "content": "hi"}, {"role": "assistant", "content": "-"})
    lines = exchanges.answer_prompts(model, tokenizer, [chat], 12)
    body = {"messages": [*chat.prompt], "max_tokens": 12, "temperature": 0}
    tokenizer.save_pretrained(folder)
    (text,) = Handlers(folder).ask(body)["choices"]
    assert lines == {0: text["message"]["content"].strip()}


def test_what_cannot_be_answered_or_scored_is_refused(tmp_path: Path) -> None:
    rows = write(tmp_path / "train", causal_kit.pairs(40))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards.py").write_text(POLITE)
    channels = {"train": rows, "code": tmp_path / "code"}
    texts = {"train": write(tmp_path / "texts", [{"text": "a"}, {"text": "b"}])}
    for given, options, files, words in (
        (
            {},
            {"generated_scores": "polit"},
            channels,
            ["generated_scores has value 'polit'", "polite"],
        ),
        ({}, {}, texts, ["the data has texts without"]),
        ({"fsdp": "full_shard"}, {}, channels, ["fsdp=True shards them"]),
        ({"metric_for_best_model": "rouge2"}, {}, channels, ["exact_match, rougeL"]),
        ({"do_predict": True}, {"do_generate": False}, channels, ["Give do_generate=True"]),
    ):
        with refused(HyperparameterError, *words):
            CausalLm(files, hyperparameters(given, options))
    with refused(DataError, "The score broken raised ZeroDivisionError", "train.jsonl line"):
        CausalLm(channels, hyperparameters({}, {"generated_scores": "broken"}))


def hyperparameters(passed: dict[str, Any], options: dict[str, Any]) -> Hyperparameters:
    values = {"do_generate": True, **options}
    return Hyperparameters(task="causal-lm", passed=passed, task_values=values)


@pytest.mark.heavy
def test_a_job_answers_prompts_at_each_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards.py").write_text(POLITE)
    channels = {"train": write(tmp_path / "in", causal_kit.pairs(160)),
                "test": write(tmp_path / "test", causal_kit.pairs(12), "test"),
                "code": tmp_path / "code", "model": causal_kit.make_model("llama", tmp_path / "start")}  # fmt: skip
    argv = ("--task", "causal-lm", "--epochs", "3", "--lr", "1e-2", "--batch_size", "16")
    answering = ("--do_generate", "True", "--generated_scores", "exact_match,rougeL,polite",
                 "--max_completion_length", "30", "--metric_for_best_model", "exact_match",
                 "--do_predict", "True", "--load_best_model_at_end", "True")  # fmt: skip
    job = Job(tmp_path / "job", channels, (*argv, *answering))
    result = job.run_here(has_report=True)
    lines = capsys.readouterr().out
    evaluations = re.findall(r"^metric step=\d+ \{'eval_loss.*", lines, re.MULTILINE)
    assert len(evaluations) == 4, "of three epochs, and of the best weights"
    read = [
        {one["Name"]: float(match[1]) for one in metrics.metric_definitions("causal-lm", "polite")
         if (match := re.search(one["Regex"], line))}
        for line in evaluations
    ]  # fmt: skip
    best = max(read, key=lambda scores: scores["eval_exact_match"])
    assert best["eval_exact_match"] > 20 and 0 <= best["eval_polite"] <= 1 < best["eval_rougeL"]
    # The saved model, and the scores and lines of its answers, are those of the best evaluation.
    texts = [row["prompt"] for row in causal_kit.pairs(12)]
    parameters = {"max_new_tokens": 30, "return_full_text": False, "do_sample": False}
    answered = Handlers(job.model).ask({"inputs": texts, "parameters": parameters})
    written = [*map(json.loads, (job.output / "predictions.jsonl").read_text().splitlines())]
    assert [row["text"] for row in written] == [entry["generated_text"] for (entry,) in answered]
    assert [row["line"] for row in written] == [*range(1, 13)]
    right = [row["text"] == row["true"] for row in written]
    assert result["eval_exact_match"] == pytest.approx(100 * sum(right) / 12)
    page = (job.output / "report.html").read_text()
    table = page[page.index("Answers, evaluation data</h2>") :].partition("</table>")[0]
    assert [re.sub(r"\W", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table)] == [
        "prompt", "expected", "before", "after"]  # fmt: skip
    assert "The scores are of 12 of 12 rows." in table and written[0]["text"] in table
    # What is generated does not change what is trained.
    plain = Job(tmp_path / "plain", channels, (*argv, "--eval_strategy", "no"))
    plain.run_here()
    last = Job(tmp_path / "last", channels, (*argv, *answering[:6]))
    last.run_here()
    assert last.files == plain.files != {}


@pytest.mark.heavy
def test_two_processes_answer_together(tmp_path: Path) -> None:
    channels = {"train": write(tmp_path / "in", causal_kit.pairs(64)),
                "test": write(tmp_path / "test", causal_kit.pairs(9), "test"),
                "model": causal_kit.make_model("gpt2", tmp_path / "start")}  # fmt: skip
    argv = ("--task", "causal-lm", "--max_steps", "4", "--lr", "1e-2", "--batch_size", "8",
            "--do_generate", "True", "--max_completion_length", "8", "--lora_r", "4")  # fmt: skip
    job = Job(tmp_path / "job", channels, argv).finish(processes=2)
    scores = {name: value for name, value in job.metrics.items() if name.startswith("eval_")}
    alone = Job(tmp_path / "alone", {**channels, "model": job.model}, (
        *("--task", "causal-lm", "--do_train", "False", "--do_eval", "True"), *argv[8:12]))  # fmt: skip
    again = alone.run_here()
    for name in ("eval_exact_match", "eval_rougeL", "eval_loss"):
        assert again[name] == pytest.approx(scores[name], abs=1e-3)
