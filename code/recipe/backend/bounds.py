"""Bounds on the cost of a request, checked before memory is allocated.

A task computes a figure, such as the rows that the model would read or the numbers in the answer,
and calls `hold`. Work within the bounds pauses between its pieces (`turns.pause`).
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from recipe.backend import turns
from recipe.backend.requests.payloads import BadRequest, Text
from recipe.tokenization import encoding
from recipe.tokenization.windows import count_windows

_PIECE_TEXTS, _PIECE_BYTES = 512, 65536
"""How much is tokenized between two pauses: about 0.1 s of CPU time."""


class TooCostly(BadRequest):
    """A request costs more than a bound allows."""

    status_code = 413
    code = "too_costly"


class Bound(enum.Enum):
    """A kind of cost: its variable, its default, and what it counts."""

    TEXT = "AMPHORA_MAX_TEXT_BYTES", 500_000, "bytes of text that are tokenized at once"
    ROWS = "AMPHORA_MAX_ROWS", 131_072, "texts, pairs and windows that the model reads"
    READ = "AMPHORA_MAX_TOKENS_READ", 4_194_304, "tokens that the model reads"
    WRITTEN = "AMPHORA_MAX_TOKENS_WRITTEN", 262_144, "tokens that may be generated"
    SCORES = "AMPHORA_MAX_SCORES", 67_108_864, "numbers that the model computes for the answer"
    ANSWER = "AMPHORA_MAX_ANSWER_VALUES", 4_194_304, "numbers and names in the answer"
    PIXELS = "AMPHORA_MAX_PIXELS", 64_000_000, "pixels of a request's images"
    SECONDS = "AMPHORA_MAX_AUDIO_SECONDS", 600, "seconds of audio"

    def __init__(self, variable: str, usual: int, what: str) -> None:
        self.variable = variable
        self.usual = usual
        self.what = what
        self.most = usual
        """In this process."""


def read(environ: Mapping[str, str]) -> None:
    """Set the bounds of this process. Raise ValueError with all variables that are not whole
    numbers above 0."""
    wrong = []
    for bound in Bound:
        text = environ.get(bound.variable, "") or str(bound.usual)
        if text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0:
            bound.most = int(text)
        else:
            wrong.append(f"{bound.variable} is {text[:40]!r}: give a whole number above 0.")
    if wrong:
        raise ValueError(" ".join(wrong))


@contextlib.contextmanager
def shared(spent: dict[Bound, int]) -> Iterator[None]:
    """Hold a request to what the requests before it in the same body have left of each bound.

    Args:
        spent: What those cost; afterwards with the cost of this one, unless it is refused.
    """
    cost = _RequestCost(before=dict(spent))
    token = _COST.set(cost)
    try:
        yield
    finally:
        _COST.reset(token)
    for bound, figure in cost.figures.items():
        spent[bound] = cost.before.get(bound, 0) + figure


@dataclass
class _RequestCost:
    """The cost of a request, and of those before it in its body."""

    before: Mapping[Bound, int]
    figures: dict[Bound, int] = field(default_factory=dict)


_COST: contextvars.ContextVar[_RequestCost | None] = contextvars.ContextVar("cost", default=None)


def hold(bound: Bound, figure: int, reason: str = "") -> None:
    """Raise TooCostly if a request's cost, or the part known so far, exceeds a bound. `reason` says
    how the figure was computed, such as "1,000 texts x 500 labels"."""
    if (cost := _COST.get()) is not None:
        cost.figures[bound] = max(figure, cost.figures.get(bound, 0))
        figure += cost.before.get(bound, 0)
    if figure > bound.most:
        why = f" ({reason})" if reason else ""
        raise TooCostly(
            f"The request asks for {figure:,} {bound.what}{why}; {bound.most:,} are allowed"
            f" ({bound.variable}). Send less in one request."
        )


def hold_text(*texts: str) -> None:
    """Raise TooCostly for texts that are too long to be tokenized together."""
    most = Bound.TEXT.most
    # A character has at most 4 bytes in UTF-8.
    if 4 * sum(map(len, texts)) > most:
        hold(Bound.TEXT, sum(size_of(text) for text in texts))


def size_of(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """Return the beginning of a text that determines its first `limit` tokens. Raise TooCostly if
    it is longer than a text that may be tokenized."""
    head = encoding.beginning(tokenizer, text, limit, Bound.TEXT.most)
    hold_text(head)
    return head


def hold_windows(tokenizer: PreTrainedTokenizerBase, text: str, room: int, shared: int) -> None:
    """Raise TooCostly for a text that would be read in too many windows. It is tokenized only if
    its length does not already exclude this.

    Args:
        room: Tokens of the text in each window.
        shared: Tokens that a window shares with the one before it.
    """
    step = max(1, room - shared)
    most = min(Bound.ROWS.most, Bound.READ.most // max(1, room))
    if size_of(text) // step < most:
        return
    tokens = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    turns.pause()
    windows = count_windows(tokens, room, shared)
    reason = f"{tokens:,} tokens, {room:,} in each, {shared:,} of them shared"
    hold(Bound.ROWS, windows, reason)
    hold(Bound.READ, windows * room, f"{windows:,} windows: {reason}")


def pieces(texts: Sequence[Text], prefix: int = 0) -> Iterator[range]:
    """Yield the positions of texts that are tokenized together, with a pause after each piece.
    `prefix` is the number of characters that are tokenized before each text."""
    start, size = 0, 0
    for index, text in enumerate(texts):
        length = prefix + (len(text) if isinstance(text, str) else sum(map(len, text)))
        if index > start and (size + length > _PIECE_BYTES or index - start >= _PIECE_TEXTS):
            yield range(start, index)
            turns.pause()
            start, size = index, 0
        size += length
    yield range(start, len(texts))
    turns.pause()
