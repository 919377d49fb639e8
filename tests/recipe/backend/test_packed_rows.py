"""Texts end to end in one row, against each text alone; and where they are padded instead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe.backend import loaded_model, packed_rows
from recipe.backend.packed_rows import PackedRows
from recipe.backend.padded_rows import values_from_padded
from recipe.backend.rows import Reading, TokenRow
from recipe.models import flat_attention
from tests.support.packed_batches import KINDS, PAD, make
from tests.support.replays import Replays
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (kind, head)
        for kind in KINDS
        for head in ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
                     "ForMaskedLM")
        # Families differ in how they pool and in the layers of a head for masked tokens.
        if kind in ("bert", "modernbert")
        or head == "ForSequenceClassification"
        or (head == "ForMaskedLM" and kind != "modernbert, mean")
    ],
)  # fmt: skip
def test_each_text_is_answered_as_if_it_were_alone(kind: str, head: str) -> None:
    @torch.inference_mode()
    def alone(model: Any, row: TokenRow, reading: Reading) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor([row.ids])}
        if row.types is not None:
            inputs["token_type_ids"] = torch.tensor([row.types])
        mask = torch.ones_like(inputs["input_ids"])
        (value,) = values_from_padded(
            reading, model(**inputs, attention_mask=mask), mask, [row]
        ).split()
        return value

    def rows_of(model: Any, types: bool) -> list[TokenRow]:
        random = np.random.default_rng(0)
        rows = []
        for length in [30, 5, 17, 1, 41, 17, 9, 5]:
            ids = random.integers(4, 50, length).tolist()
            owners = [int(index > length // 2) for index in range(length)] if types else None
            rows.append(TokenRow(ids, owners))
        # Padding that a text spells, as "<pad>" does.
        rows[2].ids[4] = PAD
        return rows

    readings = {"Model": Reading.MEAN, "ForSequenceClassification": Reading.LABELS}
    reading = readings.get(head, Reading.TOKENS)
    model: Any = make(kind, head, num_labels=2 if head == "ForQuestionAnswering" else 3)
    has_types = "token_type_ids" in model.forward.__code__.co_varnames and kind != "roberta"
    has_types &= getattr(model.config, "type_vocab_size", 0) > 1
    rows = rows_of(model, has_types)
    if head == "ForMaskedLM":
        rows[0] = TokenRow(rows[0].ids, rows[0].types, keep=[7, 2])
        rows[4] = TokenRow(rows[4].ids, rows[4].types, keep=[])
    expected = [alone(model, row, reading) for row in rows]
    packed = PackedRows.from_model(
        model, f"AutoModel{head.removeprefix('Model')}", frozenset({"token_type_ids"}), {}
    )
    assert packed is not None
    flat_attention.use(model)
    with torch.inference_mode():
        together = packed.values(model, rows, reading).split()
    for one, other in zip(together, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_rows_are_no_longer_than_they_may_be_and_hold_every_text_once() -> None:
    packed = PackedRows(packed_rows.packed_encoders.FAMILIES["bert"], "head", 64, False)
    lengths = [30, 5, 17, 100, 41, 17, 9, 5, 64, 1]
    cuts = list(packed.cuts(lengths))
    assert sorted(index for cut in cuts for index in cut) == list(range(len(lengths)))
    for cut in cuts:
        cut_lengths = [lengths[index] for index in cut]
        assert cut_lengths == sorted(cut_lengths)
        assert len(cut) == 1 or sum(cut_lengths) <= 64
    assert list(packed.cuts([500])) == [[0]]


def test_a_model_whose_texts_would_see_each_other_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"inputs": [*TEXTS, TEXTS[1]], "top_k": None}
    expected = Handlers(save("BertForSequenceClassification", tmp_path / "model", 7)).ask(texts)
    right = flat_attention.inputs_of

    def merge_texts(starts: torch.Tensor, longest: int, *others: Any) -> dict[str, Any]:
        return right(starts[[0, -1]], int(starts[-1]), *others)

    monkeypatch.setattr(flat_attention, "inputs_of", merge_texts)
    served = Handlers(tmp_path / "model")
    assert served.model.loaded.layout is None  # type: ignore[attr-defined]
    assert "batches: not packed texts, since the answer to probe" in capsys.readouterr().out
    assert served.model.loaded.model.config._attn_implementation == "sdpa"  # type: ignore[attr-defined]
    assert_close(served.ask(texts), expected)


def test_models_of_no_known_family_are_padded(tmp_path: Path) -> None:
    for family, is_packed in (("GPT2", False), ("Bert", True)):
        folder = save(f"{family}ForSequenceClassification", tmp_path / family, 7)
        served: Any = Handlers(folder).model
        assert (served.loaded.layout is not None) == is_packed


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_computed_without_the_host(kind: str) -> None:
    """On tensors without numbers, as by flash attention: a copy from the device raises by itself,
    one to it is an operation on the host."""

    class NoHost(TorchDispatchMode):
        """Refuses operations on tensors of the host: each would wait for the device."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            everything = [*args, *(kwargs or {}).values(), result]
            nested = [
                part for item in everything if isinstance(item, (list, tuple)) for part in item
            ]
            for argument in [*everything, *nested]:
                if isinstance(argument, Tensor) and argument.device.type == "cpu":
                    raise AssertionError(f"{func} reads or makes a tensor on the host")
            return result

    model: Any = make(kind, "Model")
    packed = PackedRows.from_model(model, "AutoModel", frozenset({"token_type_ids"}), {})
    assert packed is not None
    flat_attention.use(model)
    model = model.to("meta", torch.bfloat16)
    tokens, starts = torch.zeros(64, dtype=torch.int64, device="meta"), 6
    parts = [tokens, tokens, torch.zeros(starts, dtype=torch.int64, device="meta"), tokens]
    with torch.inference_mode(), NoHost():
        hidden = packed.computed(model, parts if packed.takes_types else parts[:3], 30)
    assert hidden.shape[0] == 64
    assert hidden.device.type == "meta"


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_answers_with_calls_ahead_are_those_without(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers' own path, as on a GPU: calls that are not waited for."""
    longer = " ".join(TEXTS)
    body = {"inputs": [*TEXTS, longer, longer[8:], *TEXTS, longer[5:60], "who", longer]}
    monkeypatch.setitem(packed_rows.ROW_TOKENS, "cpu", 64)  # type: ignore[misc]
    expected = Handlers(save(kind, tmp_path / "model", 7)).ask(body)
    monkeypatch.setitem(loaded_model.CALLS_AHEAD, "cpu", 1)  # type: ignore[misc]
    assert_close(Handlers(tmp_path / "model").ask(body), expected)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_graphs_answer_as_kernels_one_by_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a recorder that is tested in the place of CUDA's: a graph for each shape, and none for
    rows beyond them."""
    monkeypatch.setattr(packed_rows, "_GRAPH_TOKENS", (128, 64))
    monkeypatch.setattr(packed_rows, "_GRAPH_LONGEST", (32, 8))
    monkeypatch.setitem(packed_rows.ROW_TOKENS, "cpu", 160)  # type: ignore[misc]
    Replays.made.clear()
    environ = {"AMPHORA_DTYPE": "float32", "AMPHORA_BLOCKED_WEIGHTS": "0"}
    usual: Any = Handlers(save(kind, tmp_path / "model", 7), **environ)
    environ["AMPHORA_CUDA_GRAPHS"] = "1"
    assert Handlers(tmp_path / "model", **environ).model.loaded.layout.graphs is None  # type: ignore[attr-defined]
    monkeypatch.setitem(packed_rows.RECORDERS, "cpu", Replays)  # type: ignore[misc]
    served: Any = Handlers(tmp_path / "model", **environ)
    (recorder,) = Replays.made
    assert len(recorder.recordings) == 4
    longer = " ".join(TEXTS)
    for texts in (["who"], [*TEXTS, longer], TEXTS * 2, [longer, "who"] * 4, TEXTS * 5):
        before = recorder.replayed
        body = {"inputs": texts}
        expected, answer = usual.ask(body), served.ask(body)
        assert (recorder.replayed > before) == (len(texts) < 20)
        if len(texts) > 1:  # one text alone is padded to another length
            assert answer == expected
    assert len(recorder.recordings) == 4
    # A graph that reads what was recorded, and not what it is given.
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *arguments, **options: None)
    capsys.readouterr()
    assert Handlers(tmp_path / "model", **environ).model.loaded.layout.graphs is None  # type: ignore[attr-defined]
    assert (
        "batches: no graphs, since states of rows of 128 tokens differ" in capsys.readouterr().out
    )
