"""What is measured at start on a GPU, with a tape and a clock of a CPU."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.inference import loaded_model, turns
from recipe.inference.packed import choice as packing_choice
from recipe.inference.packed.choice import Choice, examples, farthest
from recipe.inference.packed.rows import PackedRows
from recipe.inference.rows import Coming, Values
from recipe.models import flat_attention
from tests.support.graph_tape import Rerun
from tests.support.packed_batches import make
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save

LENGTHS = (256, 128, 64)
LONGEST = 80


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(packing_choice, "LENGTHS", LENGTHS)
    monkeypatch.setattr(packing_choice, "SECONDS", 240.0)  # this host may be busy with other tests
    found = make("bert")
    flat_attention.use(found)
    return found


def choice(model: Any, tape: Rerun | None = None, **environ: str) -> Choice:
    packed = PackedRows.of(model, "AutoModelForSequenceClassification", frozenset(), environ)
    assert packed is not None
    return Choice(model, packed, LONGEST, environ, tape or Rerun())


Times = dict[int, dict[str, float]]
GRAPHS_UP_TO_128: Times = {
    64: {"padded": 4.0, "end to end": 6.0, "graph": 1.0},
    128: {"padded": 4.0, "end to end": 4.0, "graph": 2.0},
    256: {"padded": 8.0, "end to end": 4.0, "graph": 3.9},
}
PADDING: Times = {tokens: {"padded": 1.0, "end to end": 2.0, "graph": 1.9} for tokens in LENGTHS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[int]]:
    """Gives what was measured; returns the list of what is measured from then on."""

    def show(times: Times) -> list[int]:
        asked: list[int] = []

        def look(_: Choice, tokens: int) -> dict[str, float]:
            asked.append(tokens)
            return times[tokens]

        monkeypatch.setattr(Choice, "_times", look)
        return asked

    return show


@pytest.mark.parametrize(
    ("times", "environ", "graphs"),
    [
        (GRAPHS_UP_TO_128, {}, [64, 128]),
        (GRAPHS_UP_TO_128, {"AMPHORA_GRAPHS": "1"}, [64, 128, 256]),
        (PADDING, {}, None),
        (PADDING, {"AMPHORA_PACKING": "1"}, []),
        (PADDING, {"AMPHORA_PACKING": "1", "AMPHORA_GRAPHS": "1"}, [64, 128, 256]),
    ],
)
def test_the_faster_way_is_taken_unless_one_is_asked_for_and_others_are_told(
    times: Times,
    environ: dict[str, str],
    graphs: list[int] | None,
    model: Any,
    clock: Callable[[Times], list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = clock(times)
    for _ in range(2):
        packed = choice(model, **environ).make()
        assert (packed is None) == (graphs is None)
        if packed is not None:
            assert (packed.graphs.lengths if packed.graphs else []) == graphs
    assert measured == [64, 128, 256], "the second worker has measured again"
    first, second = capsys.readouterr().out.splitlines()
    if graphs is None:
        assert first == "batches: texts are padded: 2.00 times as fast as end to end"
        assert "another worker has found to be faster" in second
    else:
        assert "texts end to end, " in first
        assert " times as fast as padded, graphs for rows of " in first
        assert "as another worker has measured" in second
    # What is measured with other settings is another worker's own affair.
    choice(model, AMPHORA_GRAPHS="0", **{k: v for k, v in environ.items() if "PACK" in k}).make()
    assert len(measured) == 6


def test_a_file_that_is_none_is_measured_again(
    model: Any, clock: Callable[[Times], list[int]], tmp_path: Path
) -> None:
    measured = clock(GRAPHS_UP_TO_128)
    choice(model).make()
    (file,) = tmp_path.glob("amphora-*/packing-*.json")
    for text in ("", "[]", '{"graphs": ["a"]}', '{"graphs": 1}'):
        file.write_text(text)
        assert choice(model).make() is not None
    assert len(measured) == 15


def test_no_time_means_padding_and_nobody_is_told(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing_choice, "SECONDS", -1.0)
    assert choice(model).make() is None
    assert "no time for 256 tokens" in capsys.readouterr().out
    assert list(tmp_path.glob("amphora-*/*")) == []
    packed = choice(model, AMPHORA_PACKING="1").make()
    assert packed is not None
    assert packed.graphs is None


class Stale(Rerun):
    """Gives what was computed when it was recorded."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = work().clone()
        return lambda: output


def test_a_graph_whose_states_are_others_is_not_used(
    model: Any, clock: Callable[[Times], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    clock({tokens: {"padded": 2.0, "end to end": 1.0} for tokens in LENGTHS})
    packed = choice(model, Stale()).make()
    assert packed is not None
    assert packed.graphs is None
    assert "graphs: none for 64 tokens: its states are others" in capsys.readouterr().out


def test_texts_that_see_each_other_are_padded_even_if_end_to_end_was_asked_for(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = flat_attention.inputs_of

    def without_a_border(starts: Tensor, longest: int) -> dict[str, Any]:
        return right(torch.cat([starts[:1], starts[2:]]), 2 * longest)

    monkeypatch.setattr(flat_attention, "inputs_of", without_a_border)
    assert choice(model, AMPHORA_PACKING="1").make() is None
    assert "states are others than those of padded texts" in capsys.readouterr().out


def test_a_device_that_fails_means_padding(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packing_choice, "states_of_padded", full)
    assert choice(model, AMPHORA_PACKING="1").make() is None
    said = "batches: texts are padded: OutOfMemoryError: CUDA out of memory"
    assert said in capsys.readouterr().out


def test_what_is_measured_by_a_clock_is_used(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = choice(model, AMPHORA_PACKING="1", AMPHORA_GRAPHS="1").make()
    assert packed is not None
    assert packed.graphs is not None
    assert packed.graphs.lengths == [64, 128, 256]
    assert "rows of 64 to 256 tokens were measured in " in capsys.readouterr().out
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert farthest(states, states) == 0
    assert farthest(states * float("nan"), states) == float("inf")
    for tokens in LENGTHS:
        for call in examples(tokens, LONGEST, model.config):
            assert sum(len(row.ids) for row in call) == tokens * 3 // 4
            assert max(len(row.ids) for row in call) <= LONGEST


def test_a_cpu_measures_nothing_and_a_wrong_setting_is_refused(model: Any) -> None:
    packed = PackedRows.of(model, "AutoModelForSequenceClassification", frozenset(), {})
    assert packing_choice.settled(model, packed, LONGEST, {"AMPHORA_GRAPHS": "1"}) is packed
    assert packing_choice.settled(model, None, LONGEST, {}) is None
    with pytest.raises(ValueError, match="AMPHORA_GRAPHS is 'yes'"):
        packing_choice.settled(model, packed, LONGEST, {"AMPHORA_GRAPHS": "yes"})


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_answers_by_graphs_and_with_calls_ahead_are_those_without(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers' own path, as on a GPU: a choice at start, calls that are not waited for."""
    longer = " ".join(TEXTS)
    body = {"inputs": [*TEXTS, longer, longer[8:], *TEXTS, longer[5:60], "who", longer]}
    expected = Handlers(save(kind, tmp_path / "model", 7)).ask(body)
    tape = Rerun()

    def settled(model: Any, packed: PackedRows | None, longest: int, environ: Any) -> Any:
        assert packed is not None
        environ = {"AMPHORA_PACKING": "1", "AMPHORA_GRAPHS": "1"}
        small = dataclasses.replace(packed, most=64)
        return Choice(model, small, longest, environ, tape).make()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(packing_choice, "LENGTHS", LENGTHS)
    monkeypatch.setattr(packing_choice, "SECONDS", 240.0)
    monkeypatch.setattr(packing_choice, "settled", settled)
    monkeypatch.setitem(loaded_model.CALLS_AHEAD, "cpu", 1)  # type: ignore[misc]
    served = Handlers(tmp_path / "model")
    tape.replays.clear()
    assert_close(served.ask(body), expected)
    assert len(tape.replays) > 1


def test_others_have_their_turns_while_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    coming = Coming(Values(torch.arange(6.0).view(3, 2), [1, 2]))

    class Event:
        def query(self) -> bool:
            return len(pauses) == 3

        def synchronize(self) -> None:
            pauses.append(-1)

    coming._is_there = Event()
    monkeypatch.setattr(turns, "_pause", lambda until, **how: pauses.append(0))
    one, two = coming.wait()
    assert pauses == [0, 0, 0, -1]
    assert (one.tolist(), two.tolist()) == ([[0, 1]], [[2, 3], [4, 5]])
