"""Rows of a few fixed lengths whose kernels one CUDA graph launches all at once.

A small encoder's call is a hundred launches and more, which take longer than what they compute. A
graph is recorded once for each length of a row and replayed with other numbers in the same memory.
What a graph cannot change is in its `Shape`: a row with fewer tokens and texts is filled up.

What depends on CUDA is in `CudaTape`; tests put another tape in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

LENGTHS: Sequence[int] = tuple(1 << power for power in range(14, 5, -1))
"""Tokens of the rows that graphs are recorded for, 16,384 to 64."""
MEMORY_SHARE = 0.125
"""Of the memory that is free when the first graph is recorded: the most that all graphs take."""
_TEXT_TOKENS = 16
"""Tokens of a text, on average, at least: a row of shorter ones may not fit its graph."""
_LEAST_TEXTS = 8


@dataclass(frozen=True)
class Shape:
    """Of a row of texts end to end: what the kernels that compute it are made for."""

    tokens: int
    texts: int
    """The most of a row."""
    longest: int
    """Tokens of the longest text, at most."""
    has_types: bool

    @classmethod
    def of_graph(cls, tokens: int, longest: int, has_types: bool) -> Shape:
        """Of the graph for rows of so many tokens, of texts of at most `longest`."""
        texts = max(_LEAST_TEXTS, tokens // _TEXT_TOKENS)
        return cls(tokens, texts, min(tokens, longest), has_types)

    @property
    def numbers(self) -> int:
        """How many describe a row (`offsets`): ids, positions, maybe types, and starts."""
        return self.tokens * (3 if self.has_types else 2) + self.texts + self._pieces + 1

    @property
    def _pieces(self) -> int:
        return -(-self.tokens // self.longest)

    def starts(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each text begins, and the end: as many numbers whatever the texts.

        What no text fills is cut into pieces of at most `longest` tokens, since attention computes
        no more of a piece, and what it leaves out may be no number. Those left over are empty.
        """
        ends = np.cumsum(lengths)
        starts = np.full(self.texts + self._pieces + 1, self.tokens, dtype=np.int64)
        starts[0] = 0
        starts[1 : len(ends) + 1] = ends
        pieces = np.arange(int(ends[-1]) + self.longest, self.tokens, self.longest)
        starts[len(ends) + 1 : len(ends) + 1 + len(pieces)] = pieces
        return starts

    def parts(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Ids [1, tokens], positions [1, tokens], types [1, tokens] or None, and starts, of the
        numbers of a row."""
        rows = numbers[: self.numbers - self.texts - self._pieces - 1].view(-1, 1, self.tokens)
        starts = numbers[rows.numel() : self.numbers]
        return rows[0], rows[1], rows[2] if self.has_types else None, starts


class Tape(Protocol):
    """What records the kernels of a call."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What makes `work` be done again on the memory that it read and wrote then, and gives the
        tensor that it returned then, with other numbers."""
        ...

    def is_in_order(self) -> bool:
        """Whether what this thread gives the device now is done in order with what is replayed."""
        ...

    def taken(self) -> int:
        """Bytes of the device that recording has taken."""
        ...

    def free(self) -> int:
        """Bytes of the device that nobody has taken."""
        ...


class CudaTape:
    """CUDA graphs that share one pool of memory, in the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.current_stream(device)
        self._before = torch.cuda.memory_reserved(device)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A graph of `work`, which has been done once before: what libraries set up in their first
        call cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def is_in_order(self) -> bool:
        """Whether this thread's current stream is the graphs'."""
        return bool(torch.cuda.current_stream(self._device) == self._stream)

    def taken(self) -> int:
        """Bytes that torch has reserved since."""
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)

    def free(self) -> int:
        """Bytes that the driver has left."""
        return int(torch.cuda.mem_get_info(self._device)[0])


@dataclass(frozen=True)
class Graph:
    """One that was recorded."""

    shape: Shape
    replay: Callable[[], Tensor]


class Graphs:
    """The graphs of one model, all of which read their numbers from the same memory."""

    def __init__(
        self, tape: Tape, model: nn.Module, compute: Callable[[Tensor, Shape], Tensor]
    ) -> None:
        """
        Args:
            tape: What records and replays.
            model: Whose weights a graph reads where they lay when it was recorded.
            compute: The states [tokens, hidden] of a row of some shape by its numbers, which lie on
                the device, without a copy from there.
        """
        self._tape = tape
        self._compute = compute
        self._weights = [*model.parameters(), *model.buffers()]
        self._places = [weight.data_ptr() for weight in self._weights]
        self._graphs: list[Graph] = []
        self._numbers: Tensor | None = None
        self._lock = threading.Lock()

    @property
    def lengths(self) -> list[int]:
        """Tokens of the rows that there are graphs for, shortest first."""
        return [graph.shape.tokens for graph in self._graphs]

    @torch.inference_mode()
    def record(self, shapes: Sequence[Shape], device: torch.device, end: float) -> str:
        """Record a graph for each shape, the largest first: smaller ones find room in its memory.

        Args:
            shapes: Those that are wanted.
            device: The model's.
            end: The time, by time.monotonic, after which none is begun.

        Returns:
            Why some are not recorded; empty if all are.
        """
        most, why_not = self._tape.free() * MEMORY_SHARE, ""
        ordered = sorted(shapes, key=lambda shape: shape.tokens, reverse=True)
        room = max((shape.numbers for shape in ordered), default=0)
        numbers = self._numbers = torch.zeros(room, dtype=torch.int64, device=device)
        for shape in ordered:
            if time.monotonic() > end:
                return f"no time for {shape.tokens} tokens"
            # A row without texts: it is cut into pieces.
            starts = torch.from_numpy(shape.starts(np.zeros(1, dtype=np.int64)))
            numbers.zero_()
            shape.parts(numbers)[-1].copy_(starts)
            try:
                work = partial(self._compute, numbers, shape)
                work()  # libraries set themselves up
                graph = Graph(shape, self._tape.record(work))
            except Exception as error:
                why_not = f"{shape.tokens} tokens: {type(error).__name__}: {str(error)[:200]}"
                if not isinstance(error, torch.OutOfMemoryError):
                    break
                continue
            if self._tape.taken() > most:
                why_not = f"{shape.tokens} tokens: they would take more than {most / 1e6:.0f} MB"
                continue
            self._graphs.insert(0, graph)
        return why_not

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget all graphs but those for rows of these lengths."""
        self._graphs = [graph for graph in self._graphs if graph.shape.tokens in lengths]

    def fitting(self, lengths: npt.NDArray[np.int64], has_types: bool) -> Graph | None:
        """The graph for a row of texts of these lengths; None if it is computed without one."""
        tokens = int(lengths.sum())
        graph = next((each for each in self._graphs if each.shape.tokens >= tokens), None)
        if graph is None or not self._tape.is_in_order():
            return None
        shape = graph.shape
        if len(lengths) > shape.texts or int(lengths.max()) > shape.longest:
            return None
        if has_types and not shape.has_types:
            return None
        # model.half() and its kin put the weights elsewhere: a graph would read what is there now.
        if self._places != [weight.data_ptr() for weight in self._weights]:
            print("graphs: not used any more, since weights of the model were moved", flush=True)
            self._graphs = []
            return None
        return graph

    @torch.inference_mode()
    def run(self, graph: Graph, numbers: Tensor, tokens: int) -> Tensor:
        """The states [tokens, hidden] of a row's first tokens, in memory of their own.

        Args:
            graph: One that fits the row.
            numbers: int64 [graph.shape.numbers] on the host, pinned where the device is CUDA's.
            tokens: How many of the row's are its texts'.
        """
        assert self._numbers is not None
        # Other threads' rows may come between a copy and its replay, not between their kernels.
        with self._lock:
            self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
            # The next replay writes over it, maybe before these states were read.
            return graph.replay()[:tokens].clone()
