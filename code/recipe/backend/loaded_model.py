"""A saved model that runs over batches of texts, as `loading` has settled how it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.backend import bounds, turns
from recipe.backend.bounds import Bound
from recipe.backend.engines import batches
from recipe.backend.engines.graph import Forward
from recipe.backend.packed_rows import PackedRows
from recipe.backend.requests.payloads import BadRequest, Request, Text
from recipe.backend.rows import Coming, Reading, TokenRow, Values, of_padded, padded
from recipe.backend.static.programs import Programs
from recipe.tokenization.encoding import cutting, encode, encode_pairs

BATCH = 32
"""Texts that go through a model at once."""
_CALL_TOKENS = 16384
"""Tokens, padding included, that go through a model at once; of one text it may be more."""
_CALL_SCORES = 1 << 26
"""Numbers that a head over a vocabulary computes at once."""
CALLS_AHEAD: Mapping[str, int] = {"cuda": 1}
"""Calls that a device computes while another one is laid out; on others none."""
_STEP = 8
"""Lengths are multiples of it: each shape has kernels of its own to make (docs/LAB.md)."""
PARAMETERS = {"truncation", "truncation_direction", "max_length", "padding"}
"""What says how texts become tokens. `padding` changes no answer: rows are padded as it suits a
batch, and what is padded is masked."""
UNCUT = (False, "do_not_truncate")
"""Values of `truncation` that let no text be cut."""
PADDED, EQUAL, ALONE = "texts of any length", "texts of one length", "one text at a time"
"""What goes through a model together."""
INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and how many tokens it can read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    positions: int = 0
    """How many the model has, which may be more than its tokenizer says; 0: as many."""
    merging: str = PADDED
    """Which rows may go through the model together."""
    typed: bool = False
    """Whether texts without a pair need `token_type_ids` too, since they are not all 0."""
    inputs: frozenset[str] = INPUTS
    """What the model takes of `INPUTS`."""
    packed: PackedRows | None = None
    """How texts share a row end to end; None if they are padded."""
    engine: Forward | None = None
    """OpenVINO's graph, which replaces the model's forward; None: PyTorch computes it."""
    programs: Programs | None = None
    """What computes on a device that compiles a program for each shape; None on others."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of texts that the recipe trained the model on; empty if it does not say."""
        return tuple(getattr(self.model.config, "text_columns", None) or ())

    @property
    def width(self) -> int:
        """Numbers of a hidden state; 0 if the model's configuration does not name them."""
        return int(getattr(self.model.config.get_text_config(), "hidden_size", 0) or 0)

    def encode(self, request: Request) -> list[list[int]]:
        """Token ids of the request's texts and pairs, kept with it; what is cut is noted there too.

        Args:
            request: It is changed. Its parameters `truncation` and `max_length` are heeded.

        Raises:
            BadRequest: A text is too long, and is not to be cut.
        """
        if request.token_ids is None:
            texts: Sequence[Text] = request.texts
            read = 0
            limit, side = self.limit(request.parameters), side_of(request.parameters)
            bounds.hold(Bound.ROWS, len(texts))
            ids: list[list[int]] = []
            types: list[list[int] | None] = []
            is_plain = not self.typed and all(isinstance(text, str) for text in texts)
            for piece in bounds.pieces(texts):
                with cutting(self.tokenizer, side):
                    if is_plain:
                        some = cast("Sequence[str]", texts[piece.start : piece.stop])
                        heads = [bounds.beginning(self.tokenizer, text, limit) for text in some]
                        ids += encode(self.tokenizer, heads, limit)
                    else:
                        for place in piece:
                            row, row_types = self._encode_one(texts[place], limit)
                            ids.append(row)
                            types.append(row_types)
                read += sum(map(len, ids[piece.start :]))
                bounds.hold(Bound.READ, read)
            if not is_plain:
                request.type_ids = types
            request.keep_those_with_tokens(ids, *([request.type_ids] if request.type_ids else []))
            request.token_ids, texts = ids, request.texts
            request.truncated = [
                place
                for place, row in enumerate(ids)
                if len(row) == limit and self.is_longer(texts[place], limit)
            ]
            refuse_uncut(request, limit)
        return request.token_ids

    def _encode_one(self, text: Text, limit: int) -> tuple[list[int], list[int] | None]:
        """Token ids of a text or a pair, and their types."""
        if isinstance(text, str):
            head = bounds.beginning(self.tokenizer, text, limit)
            encoded = self.tokenizer(head, truncation=True, max_length=limit)
            return encoded["input_ids"], encoded.get("token_type_ids")
        # Which of two long texts keeps a token more is decided by all of both.
        bounds.hold_text(*text)
        (row,), types = encode_pairs(self.tokenizer, [text[0]], [text[1]], limit)
        return row, types[0] if types is not None else None

    def limit(self, parameters: Mapping[str, Any]) -> int:
        """Tokens that are read of each text of a request: where the tokenizer says less than the
        model has positions, the request may ask for more."""
        most = max(self.positions, self.max_length)
        if asked := parameters.get("max_length"):
            return min(most, int(asked))
        return most if parameters.get("truncation") in UNCUT else self.max_length

    def is_longer(self, text: Text, limit: int) -> bool:
        """Whether a text or a pair has more than `limit` tokens."""
        turns.pause()
        parts = [text] if isinstance(text, str) else text
        decisive = [bounds.beginning(self.tokenizer, part, limit) for part in parts]
        return len(self.tokenizer(*decisive, verbose=False)["input_ids"]) > limit

    def rows(self, requests: Sequence[Request], reading: Reading) -> list[list[torch.Tensor]]:
        """What is wanted of each text, in float32 on the CPU.

        All requests' texts go through the model together, by length, so that little is padded.

        Returns:
            For each request a tensor for each of its texts.
        """
        rows = [
            TokenRow(ids, request.type_ids[place] if request.type_ids else None)
            for request in requests
            for place, ids in enumerate(self.encode(request))
        ]
        results = iter(self.forward(rows, reading))
        return [[next(results) for _ in request.texts] for request in requests]

    def forward(self, rows: Sequence[TokenRow], reading: Reading) -> list[torch.Tensor]:
        """What is wanted of each row, in float32 on the CPU."""
        if self.programs is None:
            return self._forward(rows, reading)
        values = self.programs.values(rows)
        is_whole = reading is Reading.MEAN and self.programs.is_per_token
        return [own.mean(0) for own in values] if is_whole else values

    @torch.inference_mode()
    def _forward(self, rows: Sequence[TokenRow], reading: Reading) -> list[torch.Tensor]:
        results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        lengths = [len(row.ids) for row in rows]
        ahead = CALLS_AHEAD.get(self.model.device.type, 0)
        coming: deque[tuple[list[int], Coming]] = deque()

        def take_first() -> None:
            places, values = coming.popleft()
            for place, own in zip(places, values.wait(), strict=True):
                results[place] = own

        cuts = self._batches if self.packed is None else self.packed.cuts
        if self.engine is not None:
            cuts = batches.cuts
        kept = len(rows)
        if reading is Reading.TOKENS:
            kept = sum(len(row.ids if row.keep is None else row.keep) for row in rows)
        for places in cuts(lengths):
            values = self._values([rows[place] for place in places], reading)
            width = values.whole.shape[-1]
            bounds.hold(Bound.SCORES, kept * width, f"{kept:,} x {width:,}")
            coming.append((places, Coming(values)))
            # The device computes this call while the host lays out the next one.
            if len(coming) > ahead:
                take_first()
            turns.pause()
        while coming:
            take_first()
        return results

    def _values(self, rows: Sequence[TokenRow], reading: Reading) -> Values:
        """What is wanted of each of the rows, which go through the model together."""
        # Texts of one length have no padding between them.
        if self.packed is not None and len({len(row.ids) for row in rows}) > 1:
            return self.packed.values(self.model, rows, reading)
        longest = max(len(row.ids) for row in rows)
        if self.merging == PADDED:
            most = max(self.positions, self.max_length)
            longest = min(most, -(-longest // _STEP) * _STEP)
        batch = padded(rows, longest, self.tokenizer.pad_token_id or 0, self.model.device)
        taken = {name: tensor for name, tensor in batch.items() if name in self.inputs}
        return of_padded(reading, self.model(**taken), batch["attention_mask"], rows)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The places of the rows that go through the model together, shorter ones first."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        model: Any = self.model
        head = model.get_output_embeddings()
        tokens = _CALL_TOKENS
        if head is not None:
            tokens = min(tokens, _CALL_SCORES // head.weight.shape[0])
        start = 0
        for end in range(1, len(order) + 1):
            full = end - start == (1 if self.merging == ALONE else BATCH)
            last = end == len(order)
            if full or last or (end + 1 - start) * lengths[order[end]] > tokens or (
                self.merging == EQUAL and lengths[order[end]] != lengths[order[start]]
            ):  # fmt: skip
                yield order[start:end]
                start = end

    def probes(self) -> list[TokenRow]:
        """A short text and a longer one."""
        texts = ["a b c", "d " * 12]
        return [TokenRow(ids) for ids in encode(self.tokenizer, texts, self.max_length)]

    def longest(self) -> TokenRow:
        """A text of as many tokens as are read, or of 4,096."""
        limit = min(self.max_length, 4096)
        (ids,) = encode(self.tokenizer, ["d e f " * limit], limit)
        return TokenRow(ids)


def side_of(parameters: Mapping[str, Any]) -> str:
    """Where a request's texts are cut if they are too long: left or right."""
    return str(parameters.get("truncation_direction", "right")).lower()


def refuse_uncut(request: Request, limit: int) -> None:
    """Raises BadRequest if a text was cut at `limit` tokens, and the request forbids that."""
    if request.truncated and request.parameters.get("truncation") in UNCUT:
        raise BadRequest(
            f"Input {request.truncated[0] + 1} is longer than the {limit} tokens that are read. "
            "Shorten it, or leave truncation out: it is then cut."
        )
