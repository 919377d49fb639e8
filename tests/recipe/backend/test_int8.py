"""Encoders in int8: what is written, what of it is served, and what is refused.

What has run CTranslate2 cannot be forked, so it runs in forks of a process that has not (`preloaded`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.backend.engines import int8
from recipe.backend.padded_rows import EQUAL, PaddedRows
from recipe.errors import ModelError, RecipeError
from recipe.runtime.device import cpu_flags
from recipe.storage import checksums
from tests.support import tasks
from tests.support.jobs import QUICK, Job
from tests.support.paths import ROOT
from tests.support.preloading import run_script
from tests.support.serving_kit import TEXTS, Handlers, assert_close
from tests.support.tasks import CASES

ANY = ("--max_flips", "1", "--max_score_loss", "100")
"""Bounds for models that have learned nothing."""
# The other texts of a call change rounding to int8; where the CPU computes in bfloat16, so does the
# head.
CLOSE = 0.05 if "bf16" in Path("/proc/cpuinfo").read_text() else 0.02
# Loads models as the worker does before it forks, and then asks them as a worker does. A model of
# two small layers is faster in PyTorch: only the choice by time is taken out.
SERVES = """
import json, os, sys, types
import torch
torch.set_num_threads(1)
from recipe.backend.proofs import int8_trial
from recipe.backend.engines import int8
kept = int8_trial.try_out
def try_out(*arguments):
    trial = kept(*arguments)
    return int8.Trial("", trial.milliseconds) if trial.milliseconds else trial
int8_trial.try_out = try_out
import inference
plan = json.loads(sys.argv[1])
models = []
for folder, _ in plan:
    models.append(inference.model_fn(folder))
    inference.model_warmup_fn(folder, models[-1])
assert "ctranslate2" not in sys.modules, "what has loaded a model could not be forked any more"
answers = []
for model, (_, bodies) in zip(models, plan):
    inference.turns_fn(model, lambda *_, **__: None)
    requests = []
    for body in bodies:
        body = body if isinstance(body, dict) else {"inputs": body}
        inputs, is_list = body["inputs"], isinstance(body["inputs"], list)
        parsed = {"inputs": inputs if is_list else [inputs], "single": not is_list,
                  "parameters": body.get("parameters", {})}
        requests.append(inference.request_fn(parsed, model))
    merged = inference.predict_batch_fn(requests, model)
    answers.append([one["entries"][0] if one["single"] else one["entries"] for one in merged])
engines = [inference.describe_fn(folder, model)["engine"] for model, (folder, _) in zip(models, plan)]
print("ANSWERS", json.dumps([answers, [engine == "CTranslate2 in int8" for engine in engines]]))
"""


# The encoder by CTranslate2 alone, a text at a time, under the head of transformers.
ALONE = """
import json, sys
import ctranslate2, numpy as np, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, texts = map(json.loads, sys.argv[1:])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
encoder = ctranslate2.Encoder(folder + "/int8", compute_type="int8_float32", intra_threads=1)
answers = []
for text in texts:
    encoded = tokenizer(*text)
    output = encoder.forward_batch([encoded.input_ids], token_type_ids=[encoded.token_type_ids])
    vector = torch.tensor(np.array(output.last_hidden_state)).mean(1)
    with torch.no_grad():
        scores = model.classifier(torch.tensor(np.array(output.pooler_output))).softmax(1)
    answers.append([(vector / vector.norm()).tolist()[0], scores.tolist()[0]])
print("ANSWERS", json.dumps(answers))
"""


Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def quick(preloaded: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of a job that costs neither imports nor a report."""
    return {**preloaded, **QUICK}


@pytest.fixture
def run(preloaded: Mapping[str, str], tmp_path: Path) -> Run:
    """run(program, *arguments): what it prints after ANSWERS, and all that it prints."""

    def start(program: str, *arguments: Any, **environ: str) -> tuple[Any, str]:
        script = tmp_path / "program.py"
        script.write_text(program)
        variables = {**os.environ, **preloaded, "PYTHONPATH": f"{ROOT / 'code'}:{ROOT}",
                     "TMPDIR": str(tmp_path), **environ}  # fmt: skip
        done = run_script(
            preloaded, [str(script), *map(json.dumps, arguments)], variables, tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
        log = done.stdout + done.stderr
        return [json.loads(line.removeprefix("ANSWERS ")) for line in lines], log

    return start


def alone(run: Run, folder: Path, texts: list[Any]) -> list[tuple[list[float], list[float]]]:
    """Return the normalized vector and the scores of texts, or of pairs."""
    rows = [text if isinstance(text, list) else [text] for text in texts]
    (answers,), _ = run(ALONE, str(folder), rows)
    return list(answers)


def served(run: Run, plan: Any, **environ: str) -> tuple[Any, list[bool], str]:
    """Return the answers, whether int8 gave those of each model, and the log."""
    ((answers, are_int8),), log = run(SERVES, plan, **environ)
    return answers, are_int8, log


def quantized(
    base: Path, case: str, environ: Mapping[str, str], *argv: str, epochs: str = "1"
) -> Job:
    """Train a case of the contract with quantize=int8."""
    job = CASES[case]
    channel = tasks.write(base / "data" / "train", job.rows(tasks.TRAIN_ROWS))
    start = job.model(base / "start", 0.0)
    given = ("--model_id", str(start), "--epochs", epochs, "--lr", "3e-3", "--quantize", "int8")
    return Job(base, {"train": channel}, (*given, *job.arguments, *ANY), environ).finish(*argv)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]) -> Job:
    """A classifier of texts in float and in int8."""
    base = tmp_path_factory.mktemp("classes")
    return quantized(base, "text-classification", preloaded, epochs="4")


def test_texts_of_other_lengths_share_a_call_if_they_need_little_padding() -> None:
    lengths = [31, 10, 90, 12, 30, 11, 29, 33, 200, 10]
    rows = PaddedRows(pad=0, inputs=frozenset(), most=512)
    assert [len(call) for call in rows.cuts(lengths)] == [10]
    calls = list(replace(rows, call_padding=10).cuts(lengths))
    assert [[lengths[row] for row in call] for call in calls] == [
        [10, 10, 11, 12], [29, 30, 31, 33], [90], [200]
    ]  # fmt: skip
    equal = replace(rows, call_padding=10, merging=EQUAL).cuts(lengths)
    assert [len(call) for call in equal] == [2, 1, 1, 1, 1, 1, 1, 1, 1]


def test_int8_has_to_be_faster_for_texts_alone_and_together_in_all() -> None:
    assert int8.why_slower({"alone": (7.1, 2.5), "together": (1.8, 2.6)}) == ""
    assert "as fast" in int8.why_slower({"alone": (4.0, 4.0), "together": (2.0, 2.0)})
    assert "as fast" in int8.why_slower({"alone": (4.0, 3.0), "together": (2.0, 3.5)})


@pytest.mark.heavy
def test_a_model_has_its_proof_and_is_served_in_int8(
    classifier: Job, run: Run, tmp_path: Path
) -> None:
    model = classifier.base / "model"
    proof = json.loads((model / "int8" / "proof.json").read_text())
    assert proof["evaluated"] > 0 and 0 <= proof["changed"] <= 1 and proof["tolerance"] < 10
    assert not {"rows", "types"} & proof.keys(), "rows of users would leave with the model"
    assert {*proof["milliseconds"]} == {"alone", "together"}
    assert proof["score"] == pytest.approx(classifier.metrics[f"eval_{proof['metric']}"], abs=1e-4)
    card = (model / "README.md").read_text()
    report = (classifier.base / "output" / "data" / "report.html").read_text()
    shown = f"{proof['metric']} {proof['score_int8']:.4f} instead of {proof['score']:.4f}"
    assert shown in card and shown in classifier.log and shown in report
    body = {"inputs": [*TEXTS, "a", "the film was good " * 8], "parameters": {"top_k": None}}
    (answers,), (is_int8,), log = served(run, [(str(model), [body])], CT2_VERBOSE="1")
    assert is_int8 and "engine: CTranslate2" in log
    if {"avx512bw", "avx512_vbmi2"} <= cpu_flags():
        assert "Selected ISA: AVX512" in log
    exact = Handlers(model, AMPHORA_DTYPE="float32").ask(body)
    assert answers[0] != exact, "the answers are those of the float weights"
    names = json.loads((model / "config.json").read_text())["id2label"]
    for answer, (_, scores) in zip(answers[0], alone(run, model, body["inputs"]), strict=True):
        expected = {names[str(number)]: score for number, score in enumerate(scores)}
        assert_close({one["label"]: one["score"] for one in answer},
                     {one["label"]: expected[one["label"]] for one in answer}, CLOSE)  # fmt: skip
    assert not list(tmp_path.glob("int8-*")), "files were left behind"


@pytest.mark.heavy
def test_vectors_and_pairs_are_served_in_int8(
    quick: Mapping[str, str], run: Run, tmp_path: Path
) -> None:
    """Sentence-transformers' own modules read the encoder's states; pairs have types."""
    texts = {"inputs": [*TEXTS, "who was anna"]}
    pairs = {"inputs": [{"text": "who was", "text_pair": text} for text in TEXTS]}
    models = {
        case: quantized(tmp_path / case, case, quick).model
        for case in ("sentence-embedding", "pairs")
    }
    plan = [(str(models["sentence-embedding"]), [texts]), (str(models["pairs"]), [pairs])]
    (vectors, labels), are_int8, _ = served(run, plan)
    assert are_int8 == [True, True]
    ours, theirs = (
        np.array(some) / np.linalg.norm(some, axis=1, keepdims=True)
        for some in (vectors[0], Handlers(models["sentence-embedding"]).ask(texts))
    )
    expected = [vector for vector, _ in alone(run, models["sentence-embedding"], texts["inputs"])]
    assert_close(ours.tolist(), expected, CLOSE)
    assert 0.5 < (ours * theirs).sum(1).min() < 1 - 1e-9
    expected = [
        max(scores)
        for _, scores in alone(run, models["pairs"], [[*pair.values()] for pair in pairs["inputs"]])
    ]
    assert_close([one["score"] for one in labels[0]], expected, CLOSE)


@pytest.mark.heavy
def test_vectors_are_compared_by_their_loss_if_all_scores_are_equal(
    quick: Mapping[str, str], tmp_path: Path
) -> None:
    """Correlations with them are NaN."""
    rows = [
        {"sentence1": text, "sentence2": "who was", "score": n / 4} for n, text in enumerate(TEXTS)
    ]
    alike = [{**row, "score": 1} for row in rows]
    channels = {name: tasks.write(tmp_path / name, some)
                for name, some in (("train", rows), ("validation", alike))}  # fmt: skip
    start = CASES["sentence-embedding"].model(tmp_path / "start", 0.0)
    argv = (
        "--task", "sentence-embedding", "--model_id", str(start), "--epochs", "1",
        "--quantize", "int8", *ANY,
    )  # fmt: skip
    job = Job(tmp_path / "job", channels, argv, quick).finish()
    assert json.loads((job.model / "int8" / "proof.json").read_text())["metric"] == "loss"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case",
    ["question-answering", *(pytest.param(name, marks=pytest.mark.long) for name in ("reranking", "multiple-choice"))],
)  # fmt: skip
def test_each_other_task_has_its_proof(case: str, quick: Mapping[str, str], tmp_path: Path) -> None:
    # Adapters are merged. Spans of a model that has learned nothing have near ties, which bfloat16
    # decides; the other tasks compute in it.
    argv = {"reranking": ("--lora_r", "2"), "question-answering": ("--bf16", "False")}
    job = quantized(tmp_path, case, quick, *argv.get(case, ()))
    assert (job.model / "int8").is_dir(), job.log
    proof = json.loads((job.model / "int8" / "proof.json").read_text())
    assert proof["score"] == pytest.approx(job.metrics[f"eval_{proof['metric']}"], abs=1e-4)
    assert {*proof["milliseconds"]} == {"alone", "together"}


@pytest.mark.heavy
def test_float_weights_answer_where_int8_does_not_as_it_was_proved(
    classifier: Job, run: Run, tmp_path: Path
) -> None:
    body = {"inputs": TEXTS}
    model = shutil.copytree(classifier.base / "model", tmp_path / "model")
    (expected,), (is_int8,), log = served(run, [(str(model), [body])], AMPHORA_DTYPE="float32")
    assert not is_int8 and "PyTorch instead of int8: AMPHORA_DTYPE is float32" in log
    weights = (model / "model.safetensors").read_bytes()
    (model / "SHA256SUMS").unlink()
    (model / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")  # trained further
    _, (is_int8,), log = served(run, [(str(model), [body])], AMPHORA_PROOF="off")
    assert not is_int8 and "it was made of other weights" in log
    (model / "model.safetensors").write_bytes(weights)
    file = model / "int8" / int8.PROOF
    file.write_text(json.dumps({**json.loads(file.read_text()), "tolerance": 1e-6}))
    checksums.write(model / "int8")
    (answers,), (is_int8,), log = served(run, [(str(model), [body])])
    assert not is_int8 and "in int8 on this processor, the answer to probe" in log
    assert_close(answers, expected, 0.02)
    (model / "int8" / "model.bin").write_bytes(b"\x63\0\0\0")  # that of a later CTranslate2
    checksums.write(model / "int8")
    (answers,), (is_int8,), log = served(run, [(str(model), [body])])
    assert not is_int8 and "PyTorch instead of int8: The model cannot be computed" in log


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.bin", "", "model.bin has changed"),
        ("config.json", None, "config.json is missing"),
    ],
)
def test_a_damaged_file_ends_the_start_with_its_name(
    classifier: Job, tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    folder = shutil.copytree(classifier.base / "model" / "int8", tmp_path / "int8")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=reason):
        int8.Artefact.find(str(tmp_path))


@pytest.mark.heavy
def test_beyond_the_bounds_nothing_is_saved(
    classifier: Job, quick: Mapping[str, str], tmp_path: Path
) -> None:
    """A training ends well, with a warning; `amphora quantize` fails."""
    shutil.copytree(classifier.base / "model", tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "int8")
    command = [
        sys.executable, "-m", "amphora", "quantize", "--model", str(tmp_path / "model"),
        "--data", str(classifier.channels["train"] / tasks.FILE),
    ]  # fmt: skip

    def quantize(*settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *settings], env={**os.environ, **quick},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    refused = quantize("max_flips=1", "max_score_loss=1", "metric_for_best_model=unknown")
    assert refused.returncode == 1 and "metric_for_best_model" in refused.stderr
    done = quantize("max_flips=1", "max_score_loss=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model" / "int8" / "proof.json").is_file()
    assert int8.Artefact.find(str(tmp_path / "model")) is not None
    (tmp_path / "job" / "model" / "int8").mkdir(parents=True)  # that of an earlier model
    job = quantized(tmp_path / "job", "numbers", quick, "--max_flips", "0")
    assert "WARNING: not saved: " in job.log and "exceeds max_flips=0" in job.log
    assert (job.base / "model" / "config.json").is_file()
    assert not (job.base / "model" / "int8").exists()


@pytest.mark.heavy
def test_a_model_is_compared_before_training(run: Run) -> None:
    compared = """
import json, types
import torch, transformers
torch.set_num_threads(1)
from recipe.backend.engines import int8
from recipe.errors import ModelError
from tests.support.packed_batches import make, spread
models = {kind: make(kind) for kind in ("bert", "distilbert", "roberta", "xlm-roberta", "camembert")}
models["no pooler"] = transformers.BertForTokenClassification(models["bert"].config)
models["narrow"] = make("electra")
models["electra"] = make("electra", embedding_size=models["narrow"].config.hidden_size)
sizes = {name: getattr(models["bert"].config, name) for name in (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
for kind, name in (("mpnet", "MPNet"), ("deberta", "DebertaV2")):
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=202)
    models[kind] = spread(getattr(transformers, f"{name}ForSequenceClassification")(config))
models["mpnet with pooler"] = spread(transformers.MPNetModel(models["mpnet"].config))
models["tanh"] = make("bert", hidden_act="tanh")
models["decoder"] = make("bert", is_decoder=True)
models["relative"] = make("bert")
models["relative"].config.position_embedding_type = "relative_key"
names = ["input_ids", "attention_mask", "token_type_ids"]
for kind, model in models.items():
    try:
        int8.check_encoder(model.eval(), types.SimpleNamespace(model_input_names=names), 60)
        print("ANSWERS", json.dumps([kind, "is computed"]))
    except ModelError as error:
        print("ANSWERS", json.dumps([kind, str(error)]))
"""
    pairs, _ = run(compared)
    outcomes = dict(pairs)
    for kind in (
        "bert",
        "distilbert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "no pooler",
        "electra",
        "mpnet",
        "mpnet with pooler",
    ):
        assert outcomes[kind] == "is computed", outcomes[kind]
    for kind, reason in (
        ("narrow", "its embeddings are narrower than its layers"),
        ("deberta", "the model is deberta-v2, and the encoders known are bert, "),
        ("tanh", "KeyError: 'tanh'"),
        ("decoder", "states of texts of up to 80 tokens differ"),
        ("relative", "position_embedding_type is relative_key"),
    ):
        assert outcomes[kind].startswith("The model cannot") and reason in outcomes[kind]


@pytest.mark.parametrize(
    ("case", "argv", "reason"),
    [
        (
            "causal-lm",
            (),
            "quantize has value 'int8', but belongs to .*, and the task is causal-lm",
        ),
        ("text-classification", ("--do_eval", "False"), "nothing is evaluated"),
        (
            "text-classification",
            ("--lora_r", "2", "--lora_save", "adapter"),
            "a whole model is quantized",
        ),
        ("text-classification", ("--max_flips", "-1"), "max_flips has value -1.0. Give 0 or more"),
    ],
)
def test_what_cannot_be_quantized_is_refused_at_the_plan(
    case: str, argv: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    job = CASES[case]
    channel = tasks.write(tmp_path / "train", job.rows(8))
    given = ["--model_id", str(job.model(tmp_path / "start", 0.0)), "--quantize", "int8"]
    with pytest.raises(RecipeError, match=reason):
        Job(tmp_path, {"train": channel}, (*given, *job.arguments, *argv)).run_here()
