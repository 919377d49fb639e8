"""What `generate` writes, token by token: its text, its end, its log-probabilities."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

LENGTH, END, STOPPED = "length", "eos_token", "stop_sequence"
_HALF = "\ufffd"
"""What the bytes of a character are decoded to before its last one is there."""
_SPACE = "\u2581"
"""SentencePiece's letter for a space."""
UNLIKELY = -9999.0
"""OpenAI's log-probability of what hardly can be; JSON has no infinity."""


@dataclass
class Token:
    """A token that was generated, or might have been."""

    id: int
    text: str
    """What it adds to a text. U+FFFD stands for bytes that are no character by themselves."""
    is_special: bool
    start: int = 0
    """Characters of its text before it; all bytes of a character have the same."""
    data: bytes | None = None
    """Its bytes, if they are no characters by themselves and the tokenizer tells them."""
    logprob: float | None = None
    likeliest: list[Token] = field(default_factory=list)
    """The tokens that the model held likeliest in its place."""


@dataclass
class Completion:
    """A text that was, or is being, generated."""

    prompt: int
    """The place of its prompt in its request."""
    place: int
    """Which of its prompt's texts it is."""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str = ""
    """`LENGTH`, `END` or `STOPPED`; empty while it is being written."""


@dataclass(frozen=True)
class Event:
    """A token of a stream, and the text that it adds."""

    prompt: int
    place: int
    """Which of its prompt's texts it is of."""
    token: Token
    text: str
    finished: Completion | None
    """The whole text, with its last token."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What ends a text."""

    ids: frozenset[int]
    """End tokens."""
    stop: tuple[str, ...]
    most: int
    """Tokens."""


class Writer:
    """Makes a `Completion` of tokens, one after the other."""

    def __init__(
        self,
        written: Completion,
        tokenizer: PreTrainedTokenizerBase,
        ends: Ends,
        *,
        follows: bool,
        goes_on: bool,
    ) -> None:
        """
        Args:
            written: Empty still.
            tokenizer: The model's.
            ends: What ends the text.
            follows: Whether each token's text is wanted, and not only the whole one's.
            goes_on: Whether it goes on with a text: then the space between both is its own.
        """
        self.written = written
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._ends = ends
        self._follows = follows or bool(ends.stop)
        self._goes_on = goes_on
        self._anchor: tuple[list[int], str] | None = None
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def take(self, number: int, logprobs: torch.Tensor | None = None, count: int = 0) -> str:
        """Add a token; returns the text that it adds.

        Args:
            number: The token's id.
            logprobs: Of every token in its place, shape (vocabulary,).
            count: How many of the likeliest are noted.
        """
        self._ids.append(number)
        written = self.written
        token = Token(number, "", number in self._special, len(written.text))
        if self._follows:
            token = self._token(number, len(written.text))
        if logprobs is not None:
            token.logprob = max(float(logprobs[number]), UNLIKELY)
            best = logprobs.topk(min(count, len(logprobs)))
            for other, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                # What the settings forbid is not among the likeliest, however few are left.
                if value > UNLIKELY:
                    likely = self._token(other, token.start)
                    likely.logprob = value
                    token.likeliest.append(likely)
        written.tokens.append(token)
        shown = written.text
        if self._follows:
            written.text += self._piece()
            # What stood before it may have been a character's beginning, and became U+FFFD by it.
            if token.text and written.text.endswith(token.text):
                token.start = len(written.text) - len(token.text)
        tail = written.text[max(0, len(shown) - max(map(len, self._ends.stop), default=0)) :]
        if any(stop in tail for stop in self._ends.stop):
            written.finish = STOPPED
        elif number in self._ends.ids:
            written.finish = END
        elif len(self._ids) >= self._ends.most:
            written.finish = LENGTH
        if written.finish:
            # As pipelines decode: pieces may differ from the whole if a tokenizer tidies up.
            written.text = self._first(self._ids)
        return written.text[len(shown) :] if written.text.startswith(shown) else ""

    def end(self) -> None:
        """Note that all is written: if nothing of `ends` has ended the text, the model's own
        settings have."""
        if not self.written.finish:
            at_most = len(self._ids) >= self._ends.most
            self.written.finish = LENGTH if at_most else STOPPED
            self.written.text = self._first(self._ids)

    def _token(self, number: int, start: int) -> Token:
        """A token in the place that comes. Its text is that behind another token, unless it is the
        first: by themselves tokens of some tokenizers lose the space before them."""
        if self._anchor is None:
            anchor = self._tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
            self._anchor = anchor, self._decode(anchor, keep=True)
        anchor, before = self._anchor
        both = self._decode([*anchor, number], keep=True) if self.written.tokens else ""
        is_behind = bool(both) and both.startswith(before)
        text = both[len(before) :] if is_behind else self._first([number], keep=True)
        data = _bytes_of(self._tokenizer, number) if _HALF in text else None
        return Token(number, text, number in self._special, start, data)

    def _first(self, ids: Sequence[int], *, keep: bool = False) -> str:
        """The text of the first tokens, with the space before it: tokenizers of SentencePiece's kin
        take it away where a text begins, but here it may go on with one."""
        text = self._decode(ids, keep=keep)
        if not self._goes_on or text.startswith(" "):
            return text
        shown = next((number for number in ids if keep or number not in self._special), None)
        name = "" if shown is None else str(self._tokenizer.convert_ids_to_tokens(shown))
        return f" {text}" if name.startswith(_SPACE) else text

    def _decode(self, ids: Sequence[int], *, keep: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not keep))

    def _piece(self) -> str:
        """The text that the last tokens add; nothing while a character is half there."""
        decode = self._decode if self._start else self._first
        known = decode(self._ids[self._start : self._shown])
        text = decode(self._ids[self._start :])
        if len(text) <= len(known) or text.endswith(_HALF):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


def _bytes_of(tokenizer: Any, number: int) -> bytes | None:
    """The bytes of a token; None if its tokenizer does not tell them."""
    name = tokenizer.convert_ids_to_tokens(number)
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(match[1])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in name) if set(name) <= set(letters) else None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class NotFinite(ArithmeticError):
    """A model's scores are no numbers: the likeliest of them would be a token that means nothing,
    and its text an answer like any other."""

    def __init__(self) -> None:
        super().__init__(
            "the model's scores are NaN or infinity, so that no token can be chosen: see what it"
            " computes, or serve it with AMPHORA_DTYPE=float32"
        )


class Finite(LogitsProcessor):
    """Raises `NotFinite` where the scores of a text that is still written are no numbers."""

    def __init__(self, ends: Iterable[int]) -> None:
        """
        Args:
            ends: What comes after an end token is no text.
        """
        self._ends = list(ends)
        self._start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are; shapes (texts, tokens), (texts, vocabulary)."""
        if self._start is None:
            self._start = input_ids.shape[1]
        new = input_ids[:, self._start :]
        over = torch.isin(new, torch.tensor(self._ends, device=new.device)).any(-1)
        best = scores.amax(-1)
        if bool(((best.isnan() | (best == torch.inf)) & ~over).any()):
            raise NotFinite
        return scores


class Penalties(LogitsProcessor):
    """OpenAI's penalties, on tokens that the text has already, and biases of single tokens."""

    def __init__(
        self, prompt: int, frequency: float, presence: float, bias: Sequence[tuple[int, float]]
    ) -> None:
        self._prompt = prompt
        self._frequency = frequency
        self._presence = presence
        self._bias = bias

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with penalties and biases; shapes (texts, tokens), (texts, vocabulary)."""
        new = input_ids[:, self._prompt :]
        if new.shape[1] and (self._frequency or self._presence):
            counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new).to(scores))
            scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if self._bias:
            ids, values = zip(*self._bias, strict=True)
            scores = scores.clone()
            scores[:, list(ids)] += torch.tensor(values, device=scores.device, dtype=scores.dtype)
        return scores


class Notes(LogitsProcessor):
    """Keeps the log-probabilities of the step that comes, before temperature and top_p."""

    def __init__(self) -> None:
        self.logprobs: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        self.logprobs = scores.float().log_softmax(-1)
        return scores


class Watch(StoppingCriteria):
    """Gives each step's tokens to the writers of their texts, and ends those that are finished."""

    def __init__(
        self,
        writers: Sequence[Writer],
        notes: Notes | None,
        count: int,
        tell: Callable[[Completion, str], None] | None = None,
    ) -> None:
        self.is_left = threading.Event()
        """Set when nobody reads on."""
        self._writers = writers
        self._notes = notes
        self._count = count
        self._tell = tell

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """Which texts are finished, shape (texts,)."""
        rows: Any = None if self._notes is None else self._notes.logprobs
        for place, number in enumerate(input_ids[:, -1].tolist()):
            writer = self._writers[place]
            if not writer.written.finish:
                row = None if rows is None else rows[place]
                piece = writer.take(number, row, self._count)
                if self._tell is not None:
                    self._tell(writer.written, piece)
        left = self.is_left.is_set()
        done = [left or bool(writer.written.finish) for writer in self._writers]
        return torch.tensor(done, device=input_ids.device)


class Pauses(StoppingCriteria):
    """Ends nothing, but lets others have their turn before each step; what these draw meanwhile
    weighs nothing."""

    def __init__(self, pause: Callable[[], None], *, draws: bool) -> None:
        """
        Args:
            pause: What it raises ends the generation.
            draws: Whether tokens are drawn.
        """
        self._pause = pause
        self._draws = draws

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """That no text is finished, shape (texts,)."""
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=self._draws):
            self._pause()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
