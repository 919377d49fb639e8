"""Calls of a few shapes: which bucket a text goes into, and what a model answers in them, under
TorchNeuron's rules for torch.compile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.backend import loading, programs
from recipe.backend.programs import Bucket, Buckets
from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from recipe.runtime import device
from tests.support.serving_kit import WORDS, Handlers, assert_close, save

MANY = [" ".join(WORDS[: 1 + number % 11]) for number in range(15)] + ["who " * 90]


def test_usual_buckets_reach_what_the_model_reads() -> None:
    assert str(Buckets.read({}, 48)) == "1x32,8x32,32x32,1x48,8x48,32x48"
    assert Buckets.read({}, 512).longest == 512
    long = Buckets.read({}, 1 << 30)
    assert long.longest == 2048
    assert max(shape.rows * shape.length for shape in long.shapes) <= 16384


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, f"AMPHORA_BUCKETS is '{text}'. Give pairs")
            for text in ("0x32", "4x32;8x32", "-1x8")
        ),
        ("1x16 8x64", "names 8x64, and the model reads 48 tokens at most"),
    ],
)
def test_what_is_no_bucket_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Buckets.read({"AMPHORA_BUCKETS": text}, 48)


def test_every_text_is_in_one_call_that_it_fits() -> None:
    buckets = Buckets.read({"AMPHORA_BUCKETS": "1x8,4x8,2x32"}, 48)
    lengths = [3, 9, 8, 32, 1, 7, 8, 8, 20, 5]
    calls = list(buckets.cuts(lengths))
    assert sorted(index for positions in calls for index in positions) == list(range(10))
    of_calls = [
        buckets.bucket(max(lengths[p] for p in positions), len(positions)) for positions in calls
    ]
    for bucket, members in zip(of_calls, calls, strict=True):
        assert len(members) <= bucket.rows
        assert max(lengths[index] for index in members) <= bucket.length
    assert of_calls == [Bucket(8, 4), Bucket(8, 4), Bucket(32, 2), Bucket(32, 2)]
    assert buckets.bucket(5, 1) == Bucket(8, 1)
    with pytest.raises(BadRequest, match="33 tokens"):
        list(buckets.cuts([33]))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[int, ...]]]]:
    """The input shapes of each graph that torch.compile makes; this CPU stands for a device that
    compiles a program for each shape."""
    seen: list[list[tuple[int, ...]]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes = [
            size for tensor in inputs if isinstance(tensor, torch.Tensor) for size in tensor.shape
        ]
        assert not [size for size in (*inputs, *sizes) if isinstance(size, torch.SymInt)]
        seen.append([tuple(tensor.shape) for tensor in inputs if tensor.dtype == torch.int64])
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests of this process, which may have breaks
    for module in (programs, loading):
        monkeypatch.setattr(module, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(device.KINDS["cpu"], "compiler", staticmethod(backend))
    # torch.compile gives up after one, unless the server says how many shapes there are.
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=1):
        yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("BertForSequenceClassification", {"inputs": MANY, "parameters": {"top_k": None}}),
        ("BertForQuestionAnswering", {"inputs": {"question": "who", "context": "anna said " * 30}}),
        ("BertModel", {"inputs": MANY}),
    ],
)
def test_each_head_is_one_graph_for_each_bucket_without_breaks(
    kind: str, body: Any, tmp_path: Path, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(kind, tmp_path / "model", num_hidden_layers=1)
    shapes = ["1x16", "4x48"] if kind == "BertForSequenceClassification" else ["4x48"]
    served = Handlers(folder, AMPHORA_BUCKETS=",".join(shapes))
    assert len(graphs) == len(shapes)
    answer = served.ask(body)
    assert len(graphs) == len(shapes)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    for module in (programs, loading):
        monkeypatch.setattr(module, "DEVICES", frozenset())
    assert_close(answer, Handlers(folder).ask(body))


def test_a_model_with_a_break_in_its_graph_is_not_served(
    tmp_path: Path, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(model: Any, kind: str, reading: Any) -> None:
        model.register_forward_hook(lambda *_: torch._dynamo.graph_break())

    monkeypatch.setattr(programs, "move", breaks)
    folder = save("BertForSequenceClassification", tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(Exception, match="graph_break"):
        Handlers(folder, AMPHORA_BUCKETS="1x16")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("LlamaForCausalLM", "shapes grow.*vLLM image that serves decoders"),
        ("T5ForConditionalGeneration", "shapes grow"),
        ("BertForMaskedLM", "scores of the whole vocabulary"),
    ],
)
def test_models_without_fixed_shapes_are_refused(
    kind: str, why: str, tmp_path: Path, graphs: list[Any]
) -> None:
    with pytest.raises(ModelError, match=why):
        Handlers(save(kind, tmp_path / "model"))
