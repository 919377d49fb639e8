"""The recipe, and users' files and scripts, under the transformers versions that images' bases bring (`make
test-versions`); questions as the last pipeline for them, of transformers 4.57, answers them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support.job_tree import Tree
from tests.support.paths import ROOT
from tests.support.serving_kit import TEXTS, WORDS, Handlers, assert_close, save

HERE = Path(__file__).parent


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ \n]+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["neuron-xla", "image-transformers4"])
def test_the_versions_of_images_with_transformers_4_are_their_locks(name: str) -> None:
    lock = pins(ROOT / "container" / "locks" / f"{name}.txt")
    here = pins(HERE / "4.57.txt")
    shared = here.keys() & lock.keys()
    assert {name: here[name] for name in shared} == {name: lock[name] for name in shared}
    assert here.keys() == shared


@pytest.mark.versions
@pytest.mark.parametrize("version", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_imports_a_training_a_resume_and_a_prediction(version: Path, tmp_path: Path) -> None:
    """Trained for 10 steps, and again from step 5 of them: the checkpoint is that of the end of an epoch,
    without the evaluation that the second asks for."""
    program = """
import importlib, json, pathlib, pkgutil, shutil, subprocess, sys
import inference, recipe, transformers
from recipe import arguments, errors
from recipe.compat import parts
from tests.support.serving_kit import save
for module in pkgutil.walk_packages(recipe.__path__, "recipe."):
    importlib.import_module(module.name)
code, folder = map(pathlib.Path, sys.argv[1:])
try:
    arguments.parse(["--learning_rat", "1"])
except errors.RecipeError as error:
    refusal = str(error)
start, whole, cut, data = (folder / name for name in ("start", "whole", "cut", "in"))
save("BertModel", start)
data.mkdir()
rows = [{"text": f"the film was {word}", "label": word} for word in ("good", "bad")] * 10
(data / "train.jsonl").write_text("\\n".join(map(json.dumps, rows)))
def train(base, *more):
    argv = ["--model_id", start, "--batch_size", "4", "--epochs", "2", "--save_strategy", "steps",
            "--save_steps", "5", "--save_total_limit", "9", *more]
    command = ["env", f"SAGEMAKER_BASE_DIR={base}", sys.executable, code / "train.py", *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
log = train(whole, "--eval_strategy", "no")
shutil.copytree(whole / "checkpoints/checkpoint-5", cut / "checkpoints/checkpoint-5")
resumed = train(cut)
first, second = ((base / "model/model.safetensors").read_bytes() for base in (whole, cut))
model = inference.model_fn(str(whole / "model"))
request = inference.request_fn({"inputs": ["the film was good"]}, model)
((answer,),) = (one["entries"] for one in inference.predict_batch_fn([request], model))
print(json.dumps({
    "transformers": transformers.__version__, "refusal": refusal, "log": log, "answer": answer,
    "missing": [*parts.missing()], "same": first == second, "resumed": resumed,
}))
"""
    channels = {f"SM_CHANNEL_{name}": str(tmp_path / "in") for name in ("TRAIN", "VALIDATION")}
    environ = {
        "HF_HUB_OFFLINE": "1",
        "USE_TORCH_XLA": "0",
        "PYTHONPATH": f"{ROOT}:{ROOT}/code:{ROOT}/container",
    }
    python = ROOT / "build" / "versions" / version.stem / "bin" / "python"
    done = subprocess.run(
        [python, "-c", program, ROOT / "code", tmp_path], env=os.environ | environ | channels,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert actual["transformers"] == pins(version)["transformers"]
    assert "learning_rat" in actual["refusal"] and "learning_rate" in actual["refusal"]
    assert "packed into" in actual["log"] and "metric step=1 " in actual["log"]
    answer = actual["answer"]
    assert answer["label"] in ("good", "bad") and 0.5 <= answer["score"] <= 1
    assert actual["missing"] == []
    assert actual["same"], "a resumed training ends with other weights"
    assert "checkpoint-5" in actual["resumed"] and "metric step=4 " not in actual["resumed"]
    assert re.search(r"metric step=5 \{'eval_loss': ", actual["resumed"]), "the due evaluation"


@pytest.mark.versions
def test_version_4_writes_in_groups_what_each_prompt_alone_gives() -> None:
    python = ROOT / "build/versions/4.57/bin/python"
    file = "tests/recipe/backend/test_generation.py"
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", "each_alone"],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "container")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.versions
@pytest.mark.parametrize("major", ["4", "5"])
def test_version_4_serves_each_file_and_5_names_the_line_and_both_remedies(
    tmp_path: Path, major: str
) -> None:
    """Files as public repositories have them; test_transformers4.py has what else 5 ignores."""
    loads = (
        "import json, torch\nfrom transformers import AutoTokenizer, {auto}\n"
        "def model_fn(d): return {auto}.from_pretrained(d).eval(), AutoTokenizer.from_pretrained(d)\n"
        "def input_fn(body, content_type): return json.loads(body)['inputs']\n"
        "def predict_fn(data, m):\n    model, tok = m\n    "
    )
    bert = loads.format(auto="AutoModelForSequenceClassification")
    chat = loads.format(auto="AutoModelForCausalLM") + (
        "ids = tok.apply_chat_template([{'role': 'user', 'content': data}],"
        " chat_template=\"{{ messages[0]['content'] }}\", return_tensors='pt'%s)\n"
        "    return model.generate(ids, max_new_tokens=2)[0].tolist()"
    )
    pipe = "from transformers import pipeline\ndef model_fn(d): return pipeline(%s, model=d%s)\n"
    asks = "def predict_fn(data, model): return str(model(%s))"
    classifier, written = "BertForSequenceClassification", "T5ForConditionalGeneration"
    files = [
        (classifier, pipe % ("'text-classification'", ""), ""),
        (classifier, pipe % ("'text-classification'", ", return_all_scores=True"), "top_k=None"),
        (classifier, pipe % ("'zero-shot-classification'", "")
         + asks % "data['inputs'], ['a', 'b'], multi_class=True", "multi_label"),
        (classifier, bert + "return model(**tok(data, return_tensors='pt')).logits.tolist()", ""),
        (classifier, bert + "return model(**tok.encode_plus(data, return_tensors='pt'))[0].tolist()", "tokenizer(text"),
        (classifier, bert + "return model(**tok(data, return_tensors='pt'), head_mask=torch.ones(2, 2))[0].tolist()",
         "head_mask"),
        ("BertForTokenClassification", pipe % ("'ner'", ", grouped_entities=True") + asks % "data['inputs']",
         "aggregation_strategy"),
        ("BertForQuestionAnswering", pipe % ("'question-answering'", "") + asks % "question='who', context=data['inputs']",
         "HF_TASK"),
        (written, pipe % ("'summarization'", "") + asks % "data['inputs'], max_new_tokens=3", "HF_TASK"),
        (written, loads.format(auto="AutoModelForSeq2SeqLM")
         + "return model.generate(tok([data, 'a'], padding=True, return_tensors='pt').input_ids).tolist()",
         "attention_mask"),
        ("GPT2LMHeadModel", chat % "", "return_dict"),
        ("GPT2LMHeadModel", chat % ", return_dict=False", ""),
    ]  # fmt: skip
    program = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
from tests.support.serving_kit import save
from tests.support.worker_front import ask, load_runner, write_code
outcomes = []
for number, (kind, code, _) in enumerate(json.loads(sys.argv[2])):
    model = save(kind, pathlib.Path(sys.argv[1], str(number)))
    try:
        runner = load_runner(write_code(model, {"code/inference.py": code}))
        outcomes.append("answer: " + ask(runner, b'{"inputs": "the film was good"}')[0].decode())
    except Exception as error:
        outcomes.append(str(error))
    sys.modules.pop("inference", None)
print(json.dumps(outcomes))
"""
    python = {"4": ROOT / "build/versions/4.57/bin/python", "5": sys.executable}[major]
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT}/code:{ROOT}/container", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-c", program, tmp_path, json.dumps(files)], env=os.environ | environ,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (_, code, words), outcome in zip(
        files, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        if major == "5" and words:
            assert words in outcome and "--transformers 4" in outcome, code
            assert "inference.py, line " in outcome, code
        else:
            assert outcome.startswith("answer: "), (code, outcome)


PYTHON_4 = ROOT / "build/versions/4.57/bin/python"


@pytest.mark.versions
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("python", "plain"),
    [pytest.param(PYTHON_4, ["tensorboard"], id="4"), pytest.param(sys.executable, [], id="5")],
)
def test_trackers_of_the_image_do_not_join_a_script(
    tmp_path: Path, python: Path | str, plain: list[str]
) -> None:
    """Unless it names or configures them; without a server, MLflow keeps its runs as files."""
    trackers = """
import json, os, mlflow, torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def arguments(**options):
    return TrainingArguments("out", max_steps=1, use_cpu=True, disable_tqdm=True, **options)


def train(**options):
    args, rows = arguments(**options), [{"x": torch.ones(4), "labels": torch.ones(1)}] * 4
    trainer = Trainer(model=Net(), args=args, train_dataset=rows)
    trainer.train()
    trainer.evaluate(rows)
    return args.report_to


def accelerated(name):
    accelerator = Accelerator(log_with=name, project_dir="out", cpu=True)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    return [tracker.name for tracker in accelerator.trackers]


# As in a cross-validation: MLflow refuses other arguments in one run.
found = {
    "plain": [train(), train(learning_rate=0.1)],
    "all": [train(report_to="all"), train(report_to="all", learning_rate=0.1)],
    "accelerate's all": accelerated("all"),
    "named": [train(report_to="mlflow"), accelerated("mlflow")],
}
os.environ["WANDB_MODE"] = "offline"
mlflow.set_tracking_uri("file:///tmp/elsewhere")
found["configured"] = arguments(report_to="all").report_to
print("found", json.dumps(found))
"""
    environ = {"PYTHONPATH": str(ROOT / "container"), "CUDA_VISIBLE_DEVICES": ""}
    tree = Tree(tmp_path, environ | {"HF_HUB_OFFLINE": "1"}, str(python))
    done = tree.configure({"sagemaker_program": "script.py"}).script(trackers).train(timeout=400)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.rpartition("found ")[2].splitlines()[0])
    assert actual.pop("plain") == [plain, plain]
    assert actual.pop("all") == [["tensorboard"], ["tensorboard"]]
    assert actual.pop("accelerate's all") == ["tensorboard"]
    assert actual.pop("named") == [["mlflow"], ["mlflow"]]
    assert set(actual.pop("configured")) == {"mlflow", "tensorboard", "wandb"}
    runs = list((tmp_path / "output/data/mlflow").glob("*/*/meta.yaml"))
    assert len(runs) == 3, "of train, of evaluate after it, and of accelerate"


@pytest.mark.versions
def test_answers_are_those_of_the_last_pipeline(tmp_path: Path) -> None:
    """Short contexts, and long ones that are read in parts, with all parameters in turn."""
    odd = [
        "München",
        "film-noir",
        "3.5",
        "(1999)",
        "O'Neil",
        "日本",
        "don't",
        "e\u0301te",
        "🙂",
        "\n",
    ]
    random = Random(1)

    def text(words: int) -> str:
        return " ".join(random.choice([*WORDS, *odd]) for _ in range(words)).strip() or "who"

    bodies = []
    for number in range(50):
        is_long = number >= 40
        context = text(random.randint(40, 70) if is_long else random.randint(1, 18))
        parameters: dict[str, Any] = {"doc_stride": 4 + 2 * (number % 3)} if is_long else {}
        if number % 4 == 1:
            parameters["top_k"] = random.randint(2, 6)
        if number % 5 == 2:
            parameters["handle_impossible_answer"] = True
        if number % 6 == 3:
            parameters["max_answer_len"] = random.randint(1, 4)
        if number % 7 == 4:
            parameters["align_to_words"] = False
        if is_long and number % 3 == 0:
            parameters["max_seq_len"] = 32 + 8 * (number % 2)
        if is_long and number % 5 == 0:
            parameters["padding"] = "max_length"
        inputs = {"question": text(random.randint(1, 4)), "context": context}
        bodies.append({"inputs": inputs, "parameters": parameters})
    two = [
        {"question": "who", "context": "anna was good"},
        {"question": "in", "context": "paris ."},
    ]
    bodies += [
        {"inputs": two, "parameters": {}},
        {"inputs": two[:1], "parameters": {"top_k": 2}},
        {"inputs": {"question": "who", "context": "  anna   was\tgood  "}, "parameters": {"top_k": 3}},
        {"inputs": {"question": "is", "context": "good good Good GOOD good"}, "parameters": {"top_k": 4}},
        {"inputs": {"question": "who", "context": "a"}, "parameters": {"top_k": 10}},
    ]  # fmt: skip

    def save_byte_level(folder: Path) -> Path:
        """A model whose tokens are bytes of words, and which marks no part of a pair."""
        import torch
        from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForQuestionAnswering

        base: Any = Tokenizer(models.BPE())
        base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        base.decoder = decoders.ByteLevel()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        base.train_from_iterator(TEXTS * 3, trainer)
        base.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), add_prefix_space=False
        )
        reader: Any = PreTrainedTokenizerFast(
            tokenizer_object=base, bos_token="<s>", cls_token="<s>", pad_token="<pad>",
            eos_token="</s>", sep_token="</s>", unk_token="<unk>", mask_token="<mask>",
            model_max_length=512,
        )  # fmt: skip
        torch.manual_seed(3)
        config = RobertaConfig(
            vocab_size=len(reader), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=514, initializer_range=0.3, pad_token_id=1,
            type_vocab_size=1,
        )  # fmt: skip
        RobertaForQuestionAnswering(config).save_pretrained(folder)
        reader.save_pretrained(folder)
        return folder

    def drop_impossible(answer: Any) -> Any:
        """Leave out what the pipeline answers with probability 0: the token for no answer, unasked."""
        if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
            return answer
        kept = [entry for entry in answer if entry["score"] > 0]
        return kept[0] if len(kept) == 1 else kept

    program = """
import json, sys, torch, transformers, warnings
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
answers = []
for folder in sys.argv[2:]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    pipeline = transformers.pipeline("question-answering", model=folder, tokenizer=tokenizer)
    answers.append([])
    for body in json.load(open(sys.argv[1])):
        try:
            answers[-1].append(pipeline(body["inputs"], **body["parameters"]))
        except (TypeError, ValueError):
            answers[-1].append(None)
print(json.dumps(answers, default=float))
"""
    python = ROOT / "build" / "versions" / "4.57" / "bin" / "python"
    folders = [
        save("BertForQuestionAnswering", tmp_path / "bert", 11),
        save_byte_level(tmp_path / "bytes"),
    ]
    (tmp_path / "bodies.json").write_text(json.dumps(bodies))
    done = subprocess.run(
        [python, "-c", program, tmp_path / "bodies.json", *folders],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder, theirs in zip(folders, json.loads(done.stdout), strict=True):
        served = Handlers(folder, HF_TASK="question-answering")
        # Alone, and merged with all others.
        merged = served.ask_all(bodies)
        for body, answer, theirs_answer in zip(bodies, merged, theirs, strict=True):
            expected = drop_impossible(theirs_answer)
            assert_close(answer, expected, 2e-5, f"{folder.name}: {body}")
            if len(str(body)) < 400:
                assert_close(served.ask(body), expected, 2e-5, f"{folder.name}, alone: {body}")
