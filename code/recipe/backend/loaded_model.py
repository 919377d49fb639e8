"""A saved model that computes batches of texts, in the layout that `loading` has chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.backend import bounds, turns
from recipe.backend.bounds import Bound
from recipe.backend.engines.ctranslate import Forward
from recipe.backend.engines.int8 import Trial
from recipe.backend.packed_rows import PackedRows
from recipe.backend.padded_rows import ALONE, PaddedRows
from recipe.backend.requests.payloads import BadRequest, Request, Text
from recipe.backend.rows import CopiedValues, OutputKind, Reading, TokenRow, Values
from recipe.spec import TEXT, TEXT_PAIR, TRAINED_TASK
from recipe.tokenization.encoding import encode, encode_pairs, truncate_on

CALLS_AHEAD: Mapping[str, int] = {"cuda": 1}
"""Calls that a device computes while the host lays out the next one; 0 for other devices."""
PARAMETERS = {"truncation", "truncation_direction", "max_length", "padding"}
"""Parameters of tokenization. `padding` does not change an answer."""
UNCUT = (False, "do_not_truncate")
"""Values of `truncation` that forbid truncation."""


class CallLayout(Protocol):
    """Computes rows in calls of a model: padded, packed, or in compiled shapes."""

    def cuts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of the rows of each call."""

    def values(
        self, model: PreTrainedModel, rows: Sequence[TokenRow], reading: OutputKind
    ) -> Values:
        """Return the values of the rows of one call."""


class PendingCalls:
    """Calls of a model whose values may not be on the host yet.

    Args:
        rows: The number of rows of all calls.
        kind: The device that computes them.
    """

    def __init__(self, rows: int, kind: str) -> None:
        self._results = [torch.empty(0)] * rows
        self._ahead = CALLS_AHEAD.get(kind, 0)
        self._calls: deque[tuple[Sequence[int], Sequence[CopiedValues]]] = deque()

    def add(self, members: Sequence[int], values: Sequence[CopiedValues]) -> None:
        """Add a call, with the positions of its rows, and pause. The host prepares the next call
        while the device computes this one."""
        self._calls.append((members, values))
        if len(self._calls) > self._ahead:
            self._take_first()
        turns.pause()

    def finish(self) -> list[torch.Tensor]:
        """Return the values of all rows."""
        while self._calls:
            self._take_first()
        return self._results

    def _take_first(self) -> None:
        members, values = self._calls.popleft()
        if self._ahead:
            turns.pause(lambda: all(part.copy.is_complete() for part in values), polls=True)
        rows = [row for part in values for row in part.wait()]
        for index, row in zip(members, rows, strict=True):
            self._results[index] = row


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and the layout of its calls."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Longest input in tokens, unless a request allows more."""
    positions: int = 0
    """Positions of the model, which may exceed `max_length`; 0: the same number."""
    typed: bool = False
    """Whether single texts need `token_type_ids`, since omitting them changes the answers."""
    answers_questions: bool = False
    """Whether inputs are questions with contexts: Longformer then refuses single texts."""
    padded: PaddedRows
    """The layout of padded rows."""
    layout: CallLayout | None = None
    """The layout that replaces padding: packed rows, or programs of fixed shapes."""
    engine: Forward | None = None
    """The encoder in int8 as CTranslate2 computes it; None: PyTorch computes it."""
    trial: Trial | None = None
    """The outcome of trying the encoder in int8 on this host, if the model has one."""

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """Return the columns of the training data by the keys of an input; empty if unknown."""
        # It is read for each input, and an attribute of a configuration takes 2 us.
        trained = getattr(self.model.config, TRAINED_TASK, None) or {}
        names = getattr(self.model.config, "text_columns", None) or ()  # of older trainings
        former = dict(zip((TEXT.role, TEXT_PAIR.role), names, strict=False))
        columns: Mapping[str, Any] = trained.get("columns", former)
        return columns

    @property
    def width(self) -> int:
        """Return the size of a hidden state; 0 if the configuration does not have it."""
        return int(getattr(self.model.config.get_text_config(), "hidden_size", 0) or 0)

    def release_replaced(self) -> None:
        """Compute the encoder in int8 from now on, if it was chosen, and free its float weights,
        which become NaN.

        Until then PyTorch computes: a process that has run CTranslate2's threads cannot be forked.
        """
        if self.engine is None:
            return
        self.engine.replace(self.model)
        encoder: Any = self.model.base_model
        for module in encoder.modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                empty = weight.new_full((), float("nan")).expand(weight.shape)
                setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))

    def encode(
        self,
        request: Request,
        texts: Sequence[Text],
        prefix: str = "",
        languages: Mapping[str, str | None] | None = None,
        tokenize: Callable[[Sequence[Any], int], list[TokenRow]] | None = None,
        needed: int | None = None,
    ) -> Request:
        """Tokenize the texts or pairs of a request; its `work` has a row for each. Raise BadRequest
        for one without a token, or a longer one than is read if the parameter `truncation` forbids
        to truncate it.

        Args:
            prefix: The text before each text.
            languages: The `src_lang` with which a multilingual tokenizer marks the texts; None for
                no mark.
            tokenize: Called with texts, each after the prefix, and the length at which to cut them,
                instead of the tokenizer.
            needed: A token without which a text is invalid.
        """
        read, tokenizer = 0, self.tokenizer
        limit = self.limit(request.parameters)
        # By default the tokenizer's, as in training.
        side = request.parameters.get("truncation_direction", tokenizer.truncation_side).lower()
        bounds.hold(Bound.ROWS, len(texts))
        rows: list[TokenRow] = []
        is_paired = not all(isinstance(text, str) for text in texts)
        if is_paired and request.parameters.get("truncation") == "only_first":
            raise BadRequest(
                "truncation is only_first: of a pair the longer text is cut. Give true."
            )
        for piece in bounds.pieces(texts, len(prefix)):
            for name, language in (languages or {}).items():
                # Other requests may have set theirs in the meantime.
                setattr(tokenizer, name, language)
            some = texts[piece.start : piece.stop]
            some = [prefix + text if isinstance(text, str) else text for text in some]
            with truncate_on(tokenizer, side):
                rows += (tokenize or self._tokenize)(some, limit)
            read += sum(len(row.ids) for row in rows[piece.start :])
            bounds.hold(Bound.READ, read)
        # For a text without tokens the model would compute nothing, or the padding.
        lacking = "has no token: it is empty, or has nothing that the model's tokenizer knows."
        if needed is not None:
            word = tokenizer.convert_ids_to_tokens(needed)
            lacking = f"has no {word} among its first {limit} tokens."
            lacking += " Write it where a word is missing."
        too_long = f"is longer than the {limit} tokens that are read."
        too_long += " Shorten it, or leave truncation out to truncate it."
        truncated = []
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            is_cut = len(row.ids) == limit and self.is_longer(text, limit, prefix)
            name = f"Input {index + 1}" if len(texts) > 1 else "The input"
            if not row.ids or (needed is not None and needed not in row.ids):
                raise BadRequest(f"{name} {lacking}")
            if is_cut and request.parameters.get("truncation") in UNCUT:
                raise BadRequest(f"{name} {too_long}")
            if is_cut:
                truncated.append(index)
        sizes = [len(row.ids) for row in rows]
        return replace(
            request, values=texts, sizes=sizes, tokens=sum(sizes), truncated=truncated, work=rows
        )

    def _tokenize(self, texts: Sequence[Text], limit: int) -> list[TokenRow]:
        if self.typed or not all(isinstance(text, str) for text in texts):
            return [self._typed_row(text, limit) for text in texts]
        heads = [bounds.beginning(self.tokenizer, str(text), limit) for text in texts]
        return list(map(TokenRow, encode(self.tokenizer, heads, limit)))

    def _typed_row(self, text: Text, limit: int) -> TokenRow:
        """Return the tokens of a text or a pair, with their types."""
        if isinstance(text, str):
            head = bounds.beginning(self.tokenizer, text, limit)
            encoded = self.tokenizer(head, truncation=True, max_length=limit)
            return TokenRow(encoded["input_ids"], encoded.get("token_type_ids"))
        # Which of two long texts keeps one more token depends on all of both.
        bounds.hold_text(*text)
        (ids,), types = encode_pairs(self.tokenizer, [text[0]], [text[1]], limit)
        return TokenRow(ids, types[0] if types else None)

    def limit(self, parameters: Mapping[str, Any]) -> int:
        """Return the longest input in tokens for a request. It may exceed the tokenizer's limit if
        the model has more positions."""
        most = max(self.positions, self.max_length)
        if requested := parameters.get("max_length"):
            return min(most, int(requested))
        return most if parameters.get("truncation") in UNCUT else self.max_length

    def is_longer(self, text: Text, limit: int, prefix: str = "") -> bool:
        """Return whether a text after a prefix, or a pair, has more than `limit` tokens."""
        turns.pause()
        parts = [prefix + text] if isinstance(text, str) else text
        decisive = [bounds.beginning(self.tokenizer, part, limit) for part in parts]
        return len(self.tokenizer(*decisive, verbose=False)["input_ids"]) > limit

    def rows(self, prepared: Sequence[Request], reading: Reading) -> list[list[torch.Tensor]]:
        """Compute the texts of all requests together. Return for each request a tensor for each
        of its texts, in float32 on the CPU."""
        results = iter(self.forward([row for some in prepared for row in some.work], reading))
        return [[next(results) for _ in some.work] for some in prepared]

    def forward(self, rows: Sequence[TokenRow], reading: OutputKind) -> list[torch.Tensor]:
        """Compute the values of each row, in float32 on the CPU, with a pause after each call."""
        calls = PendingCalls(len(rows), self.model.device.type)
        kept = len(rows)
        if reading is Reading.TOKENS:
            kept = sum(len(row.ids if row.keep is None else row.keep) for row in rows)
        layout = self.layout or self.padded
        for indices in layout.cuts([len(row.ids) for row in rows]):
            some = [rows[index] for index in indices]
            # Rows of equal length need no packing, unless a graph computes them.
            is_even = isinstance(layout, PackedRows) and layout.graphs is None
            is_even &= len({len(row.ids) for row in some}) == 1
            values = self.call(self.padded if is_even else layout, some, reading)
            width = values.whole.shape[-1]
            bounds.hold(Bound.SCORES, kept * width, f"{kept:,} x {width:,}")
            calls.add(indices, [values.copy()])
        return calls.finish()

    def call(self, layout: CallLayout, rows: Sequence[TokenRow], reading: OutputKind) -> Values:
        """Return the values of the rows of one call."""
        return layout.values(self.model, rows, reading)

    def alone(self) -> LoadedModel:
        """Return the same model with one row in each call, the reference for all layouts."""
        return replace(self, layout=None, padded=replace(self.padded, merging=ALONE))

    def probes(self) -> list[TokenRow]:
        """Return a short text and a longer one, to compare answers with."""
        return [self.probe(text) for text in ("a b c", "d " * 12)]

    def longest(self) -> TokenRow:
        """Return a text of the longest length, but of at most 4,096 tokens."""
        limit = min(self.max_length, 4096)
        return self.probe("d e f " * limit, limit)

    def probe(self, text: str, limit: int | None = None) -> TokenRow:
        """Return the tokens of a text, or of a question with the text as its context."""
        limit = limit or self.max_length
        if self.answers_questions:
            (ids,), _ = encode_pairs(self.tokenizer, ["a"], [text], limit)
        else:
            (ids,) = encode(self.tokenizer, [text], limit)
        return TokenRow(ids)
