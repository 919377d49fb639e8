"""Continuous batching: texts join and leave at every token while others are written.

A new prompt is read beside the batch, in pieces if it is long, and joins; a text that has ended
leaves. Whoever waits for a text makes the next step for all of them, and lets others have their
turn after it: there is no thread that writes, and nothing is written that nobody waits for.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from recipe.inference import turns
from recipe.inference.generation.batch import Batch, Rows
from recipe.inference.generation.decoding import Event, Notes, NotFinite, Writer

MOST_ROWS = 64
"""Texts that are written at once."""
_PIECE_SECONDS = 0.1
_LEAST_PIECE, _FIRST_PIECE, _MOST_PIECE = 32, 256, 4096
# Steps after which as many rows as ever are tried again, where a device was full.
_CAUTIOUS_STEPS = 256


@dataclass(kw_only=True, eq=False)
class Row:
    """A text that is to be, or is being, written."""

    ids: list[int]
    """Of the prompt, and of what has been written after it."""
    longest: int
    """Tokens of the prompt and of all that may be written after it."""
    writer: Writer
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    """What ends the text beside the writer's `Ends`."""
    generator: torch.Generator | None
    """What draws its tokens; None: the likeliest is taken."""
    notes: Notes | None = None
    count: int = 0
    """How many of the likeliest tokens are noted."""
    events: deque[Event] | None = None
    """Where a stream's tokens go."""
    is_over: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class _Prompt:
    """Rows with the same tokens, which are not read yet, or in part."""

    rows: list[Row]
    read: Batch = field(default_factory=Batch)
    is_alone: bool = False
    """Whether it is to be read with no other, to find out which one fails."""

    @property
    def ids(self) -> list[int]:
        return self.rows[0].ids

    @property
    def rest(self) -> int:
        """Tokens to read."""
        return len(self.ids) - self.read.padded


class Engine:
    """Writes all rows that were added, a token of each at every step."""

    def __init__(self, rows: Rows, most_tokens: int, most_rows: int = MOST_ROWS) -> None:
        """
        Args:
            rows: The model.
            most_tokens: For how many tokens, padding included, there is room, which the engines of
                a process share. What does not fit beside others waits; a prompt for which there is
                no room at all is tried alone.
            most_rows: How many texts are written at once.
        """
        self.rows = rows
        self._most_tokens = most_tokens
        self.most_rows = self._limit = most_rows
        _ENGINES.add(self)
        self._waiting: deque[_Prompt] = deque()
        self._running: list[Row] = []
        self._batch = Batch()
        self._is_driven = False
        self._lock = threading.Lock()
        self._tokens_per_second = _FIRST_PIECE / _PIECE_SECONDS
        self._steps = 0
        self._long_is_next = False

    @property
    def held(self) -> int:
        """Tokens for which room is kept, padding included."""
        begun = (prompt.rows for prompt in list(self._waiting) if prompt.read.lengths)
        inside = [*self._running, *itertools.chain.from_iterable(begun)]
        return len(inside) * max((row.longest for row in inside), default=0)

    def __len__(self) -> int:
        """Texts that are written or wait."""
        waiting = sum(len(prompt.rows) for prompt in list(self._waiting))
        return waiting + len(self._running)

    def add(self, rows: Sequence[Row]) -> None:
        """Rows of one prompt, all to be written."""
        with self._lock:
            self._waiting.append(_Prompt(list(rows)))

    def until(self, is_wanted: Callable[[], bool]) -> None:
        """Make steps until `is_wanted()`, or wait while another one makes them."""
        while not is_wanted():
            if self._is_driven:
                turns.pause(lambda: is_wanted() or not self._is_driven)
                if is_wanted():
                    return
                # Who takes no turns cannot wait for another's. That one stands still between two
                # steps, so that this one can make the next.
                if self._is_driven:
                    turns.in_one_thread(self.step)
                    continue
            self._is_driven = True
            try:
                turns.in_one_thread(self.step)
                turns.pause()
            finally:
                self._is_driven = False

    def finish(self, rows: Sequence[Row]) -> None:
        """Write rows to their ends. Raises what has ended one of them."""
        try:
            self.until(lambda: all(row.is_over for row in rows))
        finally:
            self.leave(rows)
        if (error := next((row.error for row in rows if row.error), None)) is not None:
            raise error

    def events(self, rows: Sequence[Row], queue: deque[Event]) -> Iterator[Event]:
        """The rows' tokens as they are written. Raises what has ended one of them."""
        try:
            while True:
                self.until(lambda: bool(queue) or all(row.is_over for row in rows))
                while queue:
                    yield queue.popleft()
                if (error := next((row.error for row in rows if row.error), None)) is not None:
                    raise error
                if all(row.is_over for row in rows):
                    return
        finally:
            self.leave(rows)

    def leave(self, rows: Sequence[Row]) -> None:
        """Nobody waits for these rows any longer: their room is free."""
        for row in rows:
            row.is_over = True
        with self._lock:
            self._forget()
            if all(row.is_over for row in self._running):
                # There may be no next step for a long time.
                self._running, self._batch = [], Batch()

    def step(self) -> None:
        """A token more of each row, and a piece of the prompts that wait."""
        with self._lock:
            self._forget()
            self._steps += 1
            if self._steps % _CAUTIOUS_STEPS == 0:
                self._limit = self.most_rows
            try:
                self._keep_living()
                if self._running:
                    scores, self._batch = self.rows.extend(
                        self._batch, [row.ids[-1:] for row in self._running]
                    )
                    choose(self._running, scores)
                    self._keep_living()
            except Exception as error:
                rows, self._running, self._batch = self._running, [], Batch()
                self._limit = max(1, len(rows) // 2)
                self._try_again([_Prompt(rows)], error)
            reading = self._next_prompts()
            try:
                if reading:
                    self._read(reading)
            except Exception as error:
                self._try_again(reading, error)

    def _forget(self) -> None:
        """Drop what waits and nobody waits for."""
        for prompt in self._waiting:
            prompt.rows = [row for row in prompt.rows if not row.is_over]
        self._waiting = deque(prompt for prompt in self._waiting if prompt.rows)

    def _keep_living(self) -> None:
        """Drop the rows that have ended from the batch."""
        living = [place for place, row in enumerate(self._running) if not row.is_over]
        if len(living) < len(self._running):
            self._running = [self._running[place] for place in living]
            self._batch = self._batch.of(living) if living else Batch()

    @property
    def _piece(self) -> int:
        """Tokens that are read in one call, so that others wait for no more than that."""
        tokens = int(self._tokens_per_second * _PIECE_SECONDS)
        return min(_MOST_PIECE, max(_LEAST_PIECE, tokens))

    def _next_prompts(self) -> list[_Prompt]:
        """The prompts to read now, taken from those that wait: as many short ones as make a piece,
        or one that is longer than a piece; each kind every other time. Nobody overtakes who waits
        for room."""
        begun = [prompt for prompt in self._waiting if prompt.read.lengths]
        inside = [*self._running, *(row for prompt in begun for row in prompt.rows)]
        longest = max((row.longest for row in inside), default=0)
        count = len(inside)
        room = self._most_tokens - sum(other.held for other in list(_ENGINES) if other is not self)
        admitted = list(begun)
        for prompt in self._waiting:
            if prompt.read.lengths:
                continue
            count += len(prompt.rows)
            longest = max(longest, prompt.rows[0].longest)
            fits = count <= self._limit and count * longest <= room
            if not fits and (inside or admitted):
                break
            admitted.append(prompt)
        piece = self._piece
        long = [prompt for prompt in admitted if prompt.rest > piece or prompt.read.lengths][:1]
        chosen: list[_Prompt] = []
        if not (long and self._long_is_next):
            widest = 0
            for prompt in admitted:
                if prompt.read.lengths or prompt.rest > piece:
                    continue
                widest = max(widest, prompt.rest)
                if chosen and (prompt.is_alone or (len(chosen) + 1) * widest > piece):
                    break
                chosen.append(prompt)
                if prompt.is_alone:
                    break
        self._long_is_next = bool(chosen)
        chosen = chosen or long
        for prompt in chosen:
            self._waiting.remove(prompt)
        return chosen

    def _read(self, prompts: Sequence[_Prompt]) -> None:
        """Read prompts as far as a piece goes; those that are read as a whole join the batch."""
        # On a CPU that others use too its own time tells what it reads; a step, which is all that
        # anyone waits for, takes as much longer there.
        clock = time.thread_time if self.rows.model.device.type == "cpu" else time.monotonic
        began = clock()
        if len(prompts) == 1:
            (prompt,) = prompts
            start = prompt.read.padded
            # Pieces of equal length: each costs a call, whatever it holds.
            pieces = -(-prompt.rest // self._piece)
            tokens = prompt.ids[start : start + -(-prompt.rest // pieces)]
            scores, prompt.read = self.rows.extend(prompt.read, [tokens])
            count, new = len(tokens), prompt.read
        else:
            scores, new = self.rows.extend(Batch(), [prompt.ids for prompt in prompts])
            count = len(prompts) * new.padded
        # A few tokens tell nothing of the rate: a call has its price, too.
        if count >= _LEAST_PIECE:
            rate = count / max(1e-6, clock() - began)
            self._tokens_per_second = 0.7 * self._tokens_per_second + 0.3 * rate
        if len(prompts) == 1 and prompts[0].rest:
            self._waiting.appendleft(prompts[0])
            return
        rows = [row for prompt in prompts for row in prompt.rows]
        places = [place for place, prompt in enumerate(prompts) for _ in prompt.rows]
        choose(rows, scores[places])
        living = [number for number, row in enumerate(rows) if not row.is_over]
        if living:
            joining = new.of([places[number] for number in living])
            self._batch = self._batch.joined(joining)
            self._running += [rows[number] for number in living]

    def _try_again(self, failed: Sequence[_Prompt], error: Exception) -> None:
        """A call has failed: its rows are read anew, one by one. What fails alone has failed, but
        where memory lacks beside others it waits for these.

        Args:
            failed: The prompts that were read, or one that stands for all rows that were written.
            error: What the call has raised.
        """
        rows = [row for prompt in failed for row in prompt.rows if not row.is_over]
        is_full = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
        if len(rows) == 1 and not (is_full and self._running):
            rows[0].error, rows[0].is_over = error, True
            return
        if is_full:
            self._limit = max(1, min(self._limit - 1, len(self._running) or len(rows) // 2))
            for prompt in self._waiting:
                prompt.read = Batch()
        self._waiting.extendleft(_Prompt([row], is_alone=True) for row in reversed(rows))
        if self.rows.model.device.type == "cuda":
            torch.cuda.empty_cache()


# Those of this process, as adapters of one base have one each.
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


@torch.inference_mode()
def choose(rows: Sequence[Row], scores: torch.Tensor) -> None:
    """Give each row its next token. What fails is the row's `error`.

    Args:
        rows: All of them go on.
        scores: The model's, float32 of shape (rows, vocabulary).
    """
    best, likeliest = (part.tolist() for part in scores.max(-1))
    for place, row in enumerate(rows):
        number = likeliest[place]
        try:
            if not best[place] < math.inf:
                raise NotFinite
            if row.processors or row.generator is not None:
                ids: Any = torch.tensor([row.ids], device=scores.device)
                own = row.processors(ids, scores[place : place + 1].clone())
                if row.generator is None:
                    number = int(own.argmax(-1))
                else:
                    chances = torch.softmax(own, -1)
                    number = int(torch.multinomial(chances, 1, generator=row.generator))
            row.ids.append(number)
            noted = row.notes.logprobs[0] if row.notes and row.notes.logprobs is not None else None
            piece = row.writer.take(number, noted, row.count)
            if not row.writer.written.finish and row.criteria:
                ids = torch.tensor([row.ids], device=scores.device)
                if bool(row.criteria(ids, scores)):
                    row.writer.end()
        except Exception as error:
            row.error, row.is_over = error, True
            continue
        written = row.writer.written
        row.is_over = bool(written.finish)
        if row.events is not None:
            finished = written if row.is_over else None
            row.events.append(
                Event(written.prompt, written.place, written.tokens[-1], piece, finished)
            )
