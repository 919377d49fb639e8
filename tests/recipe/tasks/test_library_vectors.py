"""Sparse and multi-vector encoders are served as sentence-transformers computes them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentence_transformers
import torch

import inference
from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models.pretrained import Source
from recipe.tasks.sentence_embedding import model as sentence_encoder
from tests.support import serving_kit
from tests.support.serving_kit import Handlers, assert_close

TEXTS = ["who was good", "anna said paris was in the film again and again"]
KINDS = {"SparseEncoder": "/embed_sparse", "MultiVectorEncoder": "/embed_all"}


def _saved(kind: str, folder: Path) -> Any:
    """A model of the library around a tiny encoder, and its folder."""
    serving_kit.save("BertForMaskedLM", folder / "encoder")
    torch.manual_seed(3)
    prompts = {"query": "who ", "document": ""}
    model = getattr(sentence_transformers, kind)(str(folder / "encoder"), prompts=prompts)
    model.save_pretrained(str(folder / "saved"))
    return model


def _as_json(actual: Any) -> list[Any]:
    if isinstance(actual, torch.Tensor):
        dense = actual.to_dense()
        return [{int(index): float(row[index]) for index in row.nonzero()[:, 0]} for row in dense]
    return [vectors.tolist() for vectors in actual]


def _plain(answer: list[Any]) -> list[Any]:
    if isinstance(answer[0][0], dict):
        return [{entry["index"]: entry["value"] for entry in row} for row in answer]
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_librarys(kind: str, tmp_path: Path) -> None:
    model = _saved(kind, tmp_path)
    served = Handlers(tmp_path / "saved")
    route = KINDS[kind]
    assert served.model.routes == [route, "/tokenize"]
    for name, encode in (
        (None, model.encode), ("query", model.encode_query), ("document", model.encode_document),
    ):  # fmt: skip
        expected = _as_json(encode(TEXTS))
        parameters = {} if name is None else {"prompt_name": name}
        actual = _plain(served.ask({"inputs": TEXTS, "parameters": parameters}))
        assert_close(actual, expected, 1e-5, str(name))
        body = inference.input_fn(
            json.dumps({"inputs": TEXTS, "truncate": True, **parameters}).encode(),
            "application/json", SimpleNamespace(path=route, headers={}),
        )  # fmt: skip
        encoded, _ = inference.output_fn(
            inference.predict_fn(body, served.model), "application/json"
        )
        assert_close(_plain(json.loads(encoded)), expected, 1e-5)
    left = {"truncation_direction": "Left"}
    ends = served.ask({"inputs": TEXTS[1] + " good" * 60, "parameters": left})
    assert_close(_plain(ends), _as_json(model.encode(["good " * 60])), 1e-5)
    with pytest.raises(BadRequest, match="prompt_name 'passage' is not one of document, query"):
        served.ask({"inputs": TEXTS, "parameters": {"prompt_name": "passage"}})
    with pytest.raises(BadRequest, match="longer than the 48 tokens"):
        served.ask({"inputs": "good " * 60, "parameters": {"truncation": False}})


@pytest.mark.parametrize("kind", KINDS)
def test_training_refuses_them_with_the_script_that_trains_them(kind: str, tmp_path: Path) -> None:
    """Loaded by task=sentence-embedding, they would become encoders with mean pooling."""
    _saved(kind, tmp_path)
    with pytest.raises(ModelError, match=rf"is a {kind} of.*examples/retrieval/train_encoder.py"):
        sentence_encoder.load(
            Source(name=str(tmp_path / "saved"), is_local=True), Hyperparameters()
        )
