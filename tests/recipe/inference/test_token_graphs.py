"""Rows that are computed by replaying what was recorded: bookkeeping, and answers, on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe.inference.packed.graphs import Graphs, Shape
from recipe.inference.packed.rows import PackedRows
from recipe.inference.rows import TokenRow
from recipe.models import flat_attention
from tests.support.graph_tape import Rerun
from tests.support.packed_batches import KINDS, PAD

LENGTHS, LONGEST = (64, 128, 256), 60
CPU = torch.device("cpu")


def packed_model(kind: str) -> tuple[Any, PackedRows]:
    name, values = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**values))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    inputs = frozenset(model.forward.__code__.co_varnames)
    packed = PackedRows.of(model, "AutoModel", inputs, {})
    assert packed is not None
    flat_attention.use(model)
    return model.eval(), packed


def recorded(model: Any, packed: PackedRows, tape: Rerun) -> tuple[PackedRows, Graphs, str]:
    graphs = Graphs(tape, model, lambda numbers, shape: packed.computed(model, numbers, shape))
    shapes = [Shape.of_graph(tokens, LONGEST, packed.takes_types) for tokens in LENGTHS]
    why_not = graphs.record(shapes, CPU, time.monotonic() + 60)
    return replace(packed, graphs=graphs), graphs, why_not


def rows_of(lengths: list[int], seed: int = 0, types: bool = False) -> list[TokenRow]:
    random = np.random.default_rng(seed)
    return [
        TokenRow(
            random.integers(PAD + 1, 50, length).tolist(),
            random.integers(0, 2, length).tolist() if types else None,
        )
        for length in lengths
    ]


@torch.inference_mode()
def states(model: Any, packed: PackedRows, rows: list[TokenRow]) -> Tensor:
    return packed.states(model, rows)[0]


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_what_no_text_fills_is_cut_into_pieces(count: int) -> None:
    lengths = np.asarray([7, 1, 20, 3, 9, 4, 2, 5][:count] or [0])
    shape = Shape(128, 8, 20, has_types=False)
    starts = shape.starts(lengths)
    assert len(starts) == len(shape.starts(np.asarray([20])))
    assert (starts[0], starts[-1]) == (0, 128)
    assert np.diff(starts)[: len(lengths)].tolist() == lengths.tolist()
    assert 0 <= np.diff(starts).min() <= np.diff(starts).max() <= 20


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_text_alone(kind: str) -> None:
    model, packed = packed_model(kind)
    tape = Rerun()
    by_graph, graphs, why_not = recorded(model, packed, tape)
    assert (why_not, graphs.lengths) == ("", [64, 128, 256])
    random = np.random.default_rng(1)
    for seed, (most, least, longest, length) in enumerate(
        [
            (64, 1, 1, 64),  # one text of one token
            (64, 60, 60, 64),  # the longest text that its graph takes
            (64, 1, 20, 64),
            (128, 8, 60, 128),
            (128, 60, 60, 128),
            (256, 20, 60, 256),
            (64, 1, 20, 64),
        ]
    ):
        lengths = [int(random.integers(least, longest + 1))]
        while (more := int(random.integers(least, longest + 1))) + sum(lengths) <= most:
            if len(lengths) == 8 or longest == 1:
                break
            lengths.append(more)
        used = next(each for each in LENGTHS if each >= sum(lengths))
        assert used == length
        rows = rows_of(lengths, seed, types=packed.takes_types and seed % 2 == 0)
        tape.replays.clear()
        found = states(model, by_graph, rows)
        assert tape.replays == [length]
        expected = torch.cat([states(model, packed, [row]) for row in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([50, 50, 50, 50, 57], "more tokens than the longest row"),
        ([1] * 9, "more texts than the graph of its row takes"),
        ([61], "a longer text than graphs take"),
    ],
)
def test_a_row_that_fits_no_graph_is_computed_without(lengths: list[int], why: str) -> None:
    model, packed = packed_model("bert")
    tape = Rerun()
    by_graph, _, _ = recorded(model, packed, tape)
    rows = rows_of(lengths)
    found = states(model, by_graph, rows)
    assert tape.replays == [], why
    expected = torch.cat([states(model, packed, [row]) for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_states_stay_while_others_are_computed() -> None:
    model, packed = packed_model("modernbert")
    by_graph, _, _ = recorded(model, packed, Rerun())
    first = states(model, by_graph, rows_of([9, 30], 1))
    kept = first.clone()
    states(model, by_graph, rows_of([50, 3], 2))
    assert torch.equal(first, kept)


def test_threads_do_not_write_to_each_others_rows() -> None:
    model, packed = packed_model("bert")
    by_graph, _, _ = recorded(model, packed, Rerun(seconds=0.002))
    calls = [rows_of([9, 30, 2 + number], number) for number in range(4)]
    expected = [states(model, packed, rows) for rows in calls]
    worst: list[float] = []

    def ask(number: int) -> None:
        for _ in range(5):
            found = states(model, by_graph, calls[number])
            worst.append(float((found - expected[number]).abs().max().nan_to_num(9.0)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 20
    assert max(worst) < 1e-5


def test_another_stream_is_not_given_replays_of_this_one() -> None:
    model, packed = packed_model("bert")
    tape = Rerun()
    by_graph, _, _ = recorded(model, packed, tape)
    tape.in_order = False
    rows = rows_of([9, 30])
    torch.testing.assert_close(states(model, by_graph, rows), states(model, packed, rows))
    assert tape.replays == []


@pytest.mark.parametrize("change", ["half", "one weight"])
def test_a_model_whose_weights_move_has_graphs_no_more(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, packed = packed_model("bert")
    tape = Rerun()
    by_graph, graphs, _ = recorded(model, packed, tape)
    if change == "half":
        model.double()
    else:
        weight = model.encoder.layer[1].output.dense.weight
        weight.data = weight.data * 2
    rows = rows_of([9, 30])
    torch.testing.assert_close(states(model, by_graph, rows), states(model, packed, rows))
    assert (tape.replays, graphs.lengths) == ([], [])
    assert "weights of the model were moved" in capsys.readouterr().out


class Failing(Rerun):
    """Fails for rows of 128 tokens."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if len(work()) == 128:
            raise self._error
        return super().record(work)


@pytest.mark.parametrize(
    ("error", "lengths"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), [256]),
        (torch.OutOfMemoryError("CUDA out of memory"), [64, 256]),
    ],
)
def test_what_cannot_be_recorded_is_computed_without(error: Exception, lengths: list[int]) -> None:
    model, packed = packed_model("bert")
    by_graph, graphs, why_not = recorded(model, packed, Failing(error))
    assert graphs.lengths == lengths
    assert why_not == f"128 tokens: {type(error).__name__}: {error}"
    rows = rows_of([50, 50])
    torch.testing.assert_close(
        states(model, by_graph, rows), states(model, packed, rows), rtol=0, atol=1e-5
    )


def test_graphs_take_no_more_memory_than_they_may_and_no_more_time() -> None:
    model, packed = packed_model("bert")
    _, graphs, why_not = recorded(model, packed, Rerun(free=800, each_takes=60))
    assert (graphs.lengths, why_not) == ([256], "64 tokens: they would take more than 0 MB")
    assert "no time for 64 tokens" in graphs.record([Shape(64, 8, 60, False)], CPU, 0.0)


class NoHost(TorchDispatchMode):
    """Refuses operations on tensors of the host: a graph would record none of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        everything = [*args, *(kwargs or {}).values(), result]
        nested = [part for each in everything if isinstance(each, (list, tuple)) for part in each]
        for each in [*everything, *nested]:
            if isinstance(each, Tensor) and each.device.type == "cpu":
                raise AssertionError(f"{func} reads or makes a tensor on the host")
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_computed_without_the_host(kind: str) -> None:
    """On tensors without numbers, as by flash attention: a copy from the device raises by itself,
    one to it is an operation on the host."""
    model, packed = packed_model(kind)
    model = model.to("meta", torch.bfloat16)
    shape = Shape.of_graph(128, LONGEST, packed.takes_types)
    numbers = torch.zeros(shape.numbers, dtype=torch.int64, device="meta")
    with torch.inference_mode(), flat_attention.by_flash(), NoHost():
        hidden = packed.computed(model, numbers, shape)
    assert hidden.shape[0] == 128
    assert hidden.device.type == "meta"
