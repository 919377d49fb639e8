"""Predictions of every kind as answers, and which type of answer a client gets."""

import base64
import io
import json
import math
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import sparse
from transformers.modeling_outputs import SequenceClassifierOutput

from amphora.serving.api import write
from amphora.serving.api.write import Unencodable, encode
from amphora.serving.protocol.media_types import Fault

JSON, LINES, CSV = "application/json", "application/jsonlines", "text/csv"
NPY, TEXT = "application/x-npy", "text/plain"


def as_json(value: Any) -> Any:
    body, kind = encode(value, JSON)
    assert kind == JSON
    assert isinstance(body, bytes)
    return json.loads(body)


PNG = io.BytesIO()
Image.new("1", (1, 1)).save(PNG, format="PNG")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(True), True),
        ({"deep": [torch.tensor(0.5).to(torch.float8_e4m3fn)]}, {"deep": [0.5]}),
        (torch.tensor([]), []),
        (torch.tensor(2**60), 2**60),
        (torch.ones(2, requires_grad=True) * 2, [2.0, 2.0]),
        (torch.tensor([[0, 5.0]]).to_sparse(), [[0.0, 5.0]]),
        (np.bool_(True), True),
        (np.array([["a", "b"]]), [["a", "b"]]),
        (np.array([1, "x", None], dtype=object), [1, "x", None]),
        (np.ma.masked_array([1, 2], mask=[False, True]), [1, None]),
        (sparse.csr_matrix([[0, 1]]), [[0, 1]]),
        ({"a": {1: [np.int8(1)]}}, {"a": {"1": [1]}}),
        ({np.int64(4): 1, None: 3}, {"4": 1, "null": 3}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (SequenceClassifierOutput(logits=torch.ones(1, 2)), {"logits": [[1.0, 1.0]]}),
        (namedtuple("Pair", "one other")(1, "b"), [1, "b"]),
        ({3, 1, 2}, [1, 2, 3]),
        (deque([1]), [1]),
        ({"k": 1}.values(), [1]),
        ({"inner": (character for character in "ab")}, {"inner": ["a", "b"]}),
        ([date(2026, 1, 2), datetime(2026, 1, 2, 3, 4)], ["2026-01-02", "2026-01-02 03:04:00"]),
        (pd.Index(["a"]), ["a"]),
        ("half \ud800", "half \ud800"),
        (Image.new("1", (1, 1)), base64.b64encode(PNG.getvalue()).decode()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_prediction_is_its_json(value: Any, expected: Any) -> None:
    assert as_json(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "prediction is nan"),
        ({"a": [1, float("inf")]}, r"prediction\['a'\]\[1\] is inf"),
        (torch.tensor([[1.0, float("-inf")]]), r"prediction\[0\]\[1\] is -inf"),
        ([object()], "holds a object"),
        ({"frame": pd.DataFrame({"a": [1]})}, "DataFrame.*return dicts, lists"),
        (pd.Series([1, None], dtype="Int64"), "holds a .*NAType"),
        ({"raw": b"bytes"}, "holds a bytes"),
        (torch.tensor([1j]), "complex64"),
        (np.array(["NaT"], dtype="datetime64[s]"), "datetime64"),
        ({(1, 2): 3}, "A key of the prediction is a tuple"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_answer_can_hold_is_named(value: Any, words: str) -> None:
    with pytest.raises(Unencodable, match=words):
        encode(value, JSON)


def test_what_cannot_be_written_or_accepted_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(Unencodable, match="cannot be written as JSON"):
        encode(endless, JSON)
    with pytest.raises(Fault, match="text/html") as caught:
        encode([1], "text/html")
    assert caught.value.status == 406


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ([1.5, 2], CSV, "1.5\n2\n"),
        (torch.tensor([[0.5, 1.0]]), CSV, "0.5,1.0\n"),
        (
            {"score": np.float32(0.5), "all": np.array([[0.75]], np.float32)},
            CSV,
            "score,all\n0.5,[[0.75]]\n",
        ),
        ({"label": "a", "score": 1}, CSV, "label,score\na,1\n"),
        ([{"a": 1}, {"b": [2]}], CSV, "a,b\n1,\n,[2]\n"),
        ("one, two", CSV, '"one, two"\n'),
        (["a", {"b": 1}], LINES, '"a"\n{"b":1}\n'),
        ("a text", TEXT, "a text"),
        ({"a": "é"}, TEXT, '{"a":"é"}'),
    ],
)
def test_rows_lines_and_text(value: Any, kind: str, expected: str) -> None:
    body, answered = encode(value, kind)
    assert isinstance(body, bytes)
    assert (body.decode(), answered) == (expected, kind)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (torch.ones(2, 3), "float32", (2, 3)),
        (torch.ones(1, dtype=torch.bfloat16), "float32", (1,)),
        ([[1.0, 2.0]], "float64", (1, 2)),
        (np.float32(1), "float32", ()),
        (["ab"], "<U2", (1,)),
    ],
)
def test_npy_holds_the_array(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    body, _ = encode(value, NPY)
    assert isinstance(body, bytes)
    array = np.load(io.BytesIO(body))
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)


@pytest.mark.parametrize("value", [{"a": 1}, [[1], [2, 3]], [None, "x"], [{"a": 1}]])
def test_what_is_no_array_is_no_npy(value: Any) -> None:
    with pytest.raises(Fault, match="not an array"):
        encode(value, NPY)
    assert encode(value, f"{NPY}, application/json;q=0.1")[1] == JSON


@pytest.mark.parametrize(
    ("body", "accepted", "kind"),
    [
        (b'{"a": 1}', JSON, JSON),
        (b"\x89PNG", JSON, "application/octet-stream"),
        (b"\0", "image/png", "image/png"),
        (b"\0", "*/*", "application/octet-stream"),
        (bytearray(b"1"), "*/*", JSON),
    ],
)
def test_bytes_are_sent_as_they_are(body: bytes, accepted: str, kind: str) -> None:
    assert encode(body, accepted) == (bytes(body), kind)


@pytest.mark.parametrize(
    ("pieces", "accepted", "expected", "kind"),
    [
        (["a", "b"], JSON, [b"a", b"b"], TEXT),
        ([b"\0"], "*/*", [b"\0"], "application/octet-stream"),
        ([{"a": 1}, [torch.ones(1)]], JSON, [b'{"a":1}\n', b"[[1.0]]\n"], LINES),
        ([], JSON, [], LINES),
    ],
)
def test_a_generator_is_streamed(
    pieces: list[Any], accepted: str, expected: list[bytes], kind: str
) -> None:
    body, answered = encode((piece for piece in pieces), accepted)
    assert isinstance(body, Iterator)
    assert (list(body), answered) == (expected, kind)


@settings(max_examples=40)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=5,
    )
)
def test_an_answer_is_the_prediction_or_an_error(value: Any) -> None:
    """No value becomes another one on its way, and no answer is invalid JSON."""
    try:
        body, _ = encode(value, JSON)
    except Unencodable:
        assert "nan" in repr(value) or "inf" in repr(value)
        return
    assert isinstance(body, bytes)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(body, parse_constant=refuse) == write.plain(value)


@settings(max_examples=50)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_tensors_keep_their_numbers(numbers: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    expected = tensor.to(torch.float64).tolist()
    if all(map(math.isfinite, expected)):
        assert as_json(tensor) == expected
    else:
        with pytest.raises(Unencodable):
            encode(tensor, JSON)
