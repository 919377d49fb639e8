"""OpenVINO in the place of PyTorch: the same answers, or a refusal that says why.

What has run OpenVINO cannot be forked, so that it runs in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.backend import precision
from recipe.backend.padded_rows import cheapest_cuts
from recipe.errors import ModelError
from tests.support.paths import ROOT
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save

# Loads every model as the worker does before it forks, and then asks them as a worker does.
SERVES = """
import json, os, sys, types
import torch
torch.set_num_threads(1)
import inference
route = types.SimpleNamespace(path="/invocations")
plan = json.loads(sys.argv[1])
models = []
for folder, environ, _ in plan:
    os.environ.update(environ)
    models.append(inference.model_fn(folder))
    inference.model_warmup_fn(folder, models[-1])
assert "openvino" not in sys.modules, "what has loaded a model could not be forked any more"
for model in models:
    inference.turns_fn(model, lambda *_, **__: None)
assert "openvino" in sys.modules
answers = []
for model, (_, _, bodies) in zip(models, plan):
    requests = []
    for body in bodies:
        requests.append(inference.input_fn(json.dumps(body).encode(), "application/json", route))
        inference.tokens_fn(requests[-1], model)
    merged = inference.predict_batch_fn(requests, model)
    answers.append([json.loads(inference.output_fn(each, "application/json")[0]) for each in merged])
print("ANSWERS", json.dumps(answers))
"""
# Which of several kinds of models OpenVINO takes, and how far it is off for shapes that were never
# compared when it was chosen.
KINDS = """
import json, os
import numpy as np, torch, transformers
torch.set_num_threads(1)
from recipe.errors import ModelError
from recipe.backend import precision
from recipe.backend.engines import conversion
from recipe.backend.padded_rows import pad_rows
from recipe.backend.rows import TokenRow
from tests.support.packed_batches import KINDS, SMALL, make
made = {kind: make(kind) for kind in ("roberta", "distilbert", "modernbert")}
config = transformers.LongformerConfig(
    **{**SMALL, "attention_window": 8, "max_position_embeddings": 82, "sep_token_id": 3}
)
made["longformer"] = transformers.LongformerForSequenceClassification(config).eval()
said, forwards = {}, {}
for kind, model in made.items():
    try:
        forwards[kind] = conversion.converted(model, ["attention_mask", "input_ids"], 78)
    except ModelError as error:
        said[kind] = str(error)
random = np.random.default_rng(5)
for kind, forward in forwards.items():
    said[kind] = 0.0
    for lengths in ((1,), (3, 4), (23, 61, 7), (77,), (11,) * 9, (78, 1)):
        rows = [TokenRow(random.integers(4, 50, length).tolist()) for length in lengths]
        batch = pad_rows(rows, max(lengths), 1, torch.device("cpu"))
        with torch.no_grad():
            expected = made[kind](**batch).logits
        far = (forward(**batch).logits - expected).abs().max() / expected.abs().max()
        said[kind] = max(said[kind], float(far))
print("ANSWERS", json.dumps(said))
"""


def answers_of(program: str, folder: Path, *arguments: str, **environ: str) -> tuple[Any, str]:
    """What a program prints behind ANSWERS, and all that it says."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={
            **os.environ, "PYTHONPATH": f"{ROOT / 'code'}:{ROOT}", "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1", "AMPHORA_DTYPE": "float32", **environ,
        },
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(line.removeprefix("ANSWERS ")), log


def sentence_model(folder: Path) -> Path:
    """Vectors by sentence-transformers' own modules: the first token's state, a dense layer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as parts

    first = parts.Transformer(str(save("BertModel", folder / "encoder")), max_seq_length=40)
    dense = parts.Dense(32, 8)
    modules = [first, parts.Pooling(32, pooling_mode="cls"), dense]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "whole"))
    return folder / "whole"


def test_texts_share_calls_that_cost_least() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 90).tolist()

    def cost(calls: list[list[int]]) -> int:
        longest = [max(-(-lengths[index] // 8) * 8 for index in call)
                   for call in calls]  # fmt: skip
        return sum(32 + length * len(call) for length, call in zip(longest, calls, strict=True))

    calls = list(cheapest_cuts(lengths))
    assert sorted(index for call in calls for index in call) == list(range(90))
    order = sorted(range(90), key=lengths.__getitem__)
    for size in (1, 4, 8, 16, 32):
        assert cost(calls) < cost([order[start : start + size] for start in range(0, 90, size)])
    assert list(cheapest_cuts([])) == [] and list(cheapest_cuts([7])) == [[0]]
    assert max(map(len, cheapest_cuts([5] * 200))) == 32


@pytest.mark.heavy
def test_openvino_answers_as_pytorch(tmp_path: Path) -> None:
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    question = {"question": "who said it ?", "context": "anna said paris was bad ."}
    long = "the film was good again " * 20
    classifier = save("BertForSequenceClassification", tmp_path / "labels", **labels)
    texts = {"inputs": [*TEXTS, "a", long], "parameters": {"top_k": None}}
    pairs = {"inputs": [{"text": "who", "text_pair": text} for text in TEXTS]}
    ranked = {"query": "who was bad", "texts": TEXTS}
    requests: list[tuple[Path, Mapping[str, str], list[Any]]] = [
        (classifier, {}, [texts, {"inputs": "who"}, pairs]),
        (save("BertForSequenceClassification", tmp_path / "rank", num_labels=1), {}, [ranked]),
        (save("BertForTokenClassification", tmp_path / "tags", **labels), {}, [{"inputs": TEXTS}]),
        (save("BertForQuestionAnswering", tmp_path / "spans"), {}, [{"inputs": question}]),
        (save("BertModel", tmp_path / "mean"), {}, [{"inputs": [*TEXTS, long]}]),
        (sentence_model(tmp_path / "sentences"), {}, [{"inputs": [*TEXTS, long]}]),
        (tmp_path / "mean", {"AMPHORA_ANSWERS": "huggingface"}, [{"inputs": TEXTS}]),
    ]
    expected = [Handlers(folder, **environ).ask_all(bodies) for folder, environ, bodies in requests]
    plan = json.dumps([(str(folder), environ, bodies) for folder, environ, bodies in requests])
    got, log = answers_of(SERVES, tmp_path, plan, AMPHORA_ENGINE="openvino")
    assert log.count("engine: OpenVINO") == len(requests)
    assert_close(got, expected, 1e-4)
    assert not list(tmp_path.glob("openvino-*")), "a graph's files were left behind"


@pytest.mark.heavy
def test_in_the_precision_that_is_usual_on_this_cpu(tmp_path: Path) -> None:
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    classifier = save("BertForSequenceClassification", tmp_path / "labels", **labels)
    encoder = save("BertModel", tmp_path / "mean")
    texts = [*TEXTS, *TEXTS, *TEXTS, "a", "the film was good again " * 20]
    requests: list[tuple[Path, list[Any]]] = [
        (classifier, [{"inputs": texts, "parameters": {"top_k": None}}]),
        (encoder, [{"inputs": texts}]),
    ]
    expected = [Handlers(folder).ask_all(bodies) for folder, bodies in requests]  # in float32
    plan = json.dumps([(str(folder), {}, bodies) for folder, bodies in requests])
    got, log = answers_of(SERVES, tmp_path, plan, AMPHORA_ENGINE="openvino", AMPHORA_DTYPE="")
    assert log.count("engine: OpenVINO") == len(requests)
    usual = precision.chosen({})[1]
    assert log.count(f"on cpu in {usual}") == len(requests)
    for answers in (got, expected):  # nearly equal scores may change places
        answers[0] = [
            dict(sorted((text["label"], text["score"]) for text in one)) for one in answers[0][0]
        ]
    # In bfloat16 a part of what is largest, which kernels for other CPUs round otherwise.
    is_exact = usual == "float32"
    assert_close(got[0], expected[0], 1e-4 if is_exact else 0.03)
    largest = np.abs(np.array(expected[1][0])).max()
    assert_close(got[1], expected[1], 1e-4 if is_exact else 0.02 * largest)


@pytest.mark.heavy
def test_a_graph_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    log, _ = answers_of(KINDS, tmp_path)
    assert log["roberta"] < 1e-5 and log["distilbert"] < 1e-5
    # NaN where a padded place sees no token; windows that tracing has frozen.
    assert "answers to 3 texts of up to 30 tokens differ" in log["modernbert"]
    assert "cannot be converted" in log["longformer"]


def test_without_being_asked_for_openvino_is_not_imported(tmp_path: Path) -> None:
    model = save("BertForSequenceClassification", tmp_path / "model", num_labels=2)
    plan = json.dumps([(str(model), {}, [{"inputs": TEXTS}])])
    program = SERVES.replace('assert "openvino" in', 'assert "openvino" not in')
    _, log = answers_of(program, tmp_path, plan)
    assert "engine" not in log


@pytest.mark.parametrize(
    ("kind", "environ", "reason"),
    [
        ("GPT2LMHeadModel", {}, "this model is none of them"),
        ("BertForMaskedLM", {}, "of masked texts few tokens are read"),
        ("BertModel", {"AMPHORA_DTYPE": "int8"}, "AMPHORA_DTYPE is int8"),
        ("GPT2ForSequenceClassification", {}, "cannot be: "),
    ],
)
def test_what_openvino_cannot_compute_is_refused(
    kind: str, environ: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inference

    folder = save(kind, tmp_path / "model")
    for name, value in {"AMPHORA_DTYPE": "float32", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AMPHORA_ENGINE", "openvino")
    with pytest.raises(ModelError, match=reason):
        inference.model_fn(str(folder))
    monkeypatch.setenv("AMPHORA_ENGINE", "onnx")
    with pytest.raises(ValueError, match=r"AMPHORA_ENGINE is 'onnx'\. Give torch or openvino"):
        inference.model_fn(str(folder))
