"""A saved model that runs over batches of texts, in the precision that this host computes fastest.

`AMPHORA_DTYPE` (float32, bfloat16, float16 or int8) overrides the choice; `AMPHORA_COMPILE=1`
compiles the model with torch.compile.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from recipe.compat import positions_of
from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.inference import precision, turns, weights
from recipe.inference.engines import batches
from recipe.inference.engines import choice as engines
from recipe.inference.origin import Origin
from recipe.inference.packed import choice as packing_choice
from recipe.inference.packed import rows as packed_rows
from recipe.inference.packed.rows import PackedRows
from recipe.inference.payloads import BadRequest, Request, Text
from recipe.inference.rows import (
    Coming,
    Reading,
    TokenRow,
    Values,
    are_close,
    lay_out,
    of_padded,
    padded,
    tolerance_of,
)
from recipe.inference.static import programs as static
from recipe.inference.static.buckets import Buckets
from recipe.inference.static.programs import DEVICES, Layout, Programs
from recipe.models import packed_encoders
from recipe.tokenization.encoding import beginning, encode, encode_pairs

BATCH = 32
"""Texts that go through a model at once."""
ENCODED_AT_ONCE = 512
"""Texts that are made tokens between two turns of others."""
CALLS_AHEAD: Mapping[str, int] = {"cuda": 1}
"""Calls that a device computes while another one is laid out; on others none."""
_STEP = 8
"""Lengths are multiples of it: each shape has kernels of its own to make (docs/LAB.md)."""
PARAMETERS = {"truncation", "max_length", "padding"}
"""What says how texts become tokens. `padding` changes no answer: rows are padded as it suits a
batch, and what is padded is masked."""
WRITERS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
PADDED, EQUAL, ALONE = "texts of any length", "texts of one length", "one text at a time"
"""What goes through a model together."""
_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and how many tokens it can read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    merging: str = PADDED
    """Which rows may go through the model together."""
    typed: bool = False
    """Whether texts without a pair need `token_type_ids` too, since they are not all 0."""
    inputs: frozenset[str] = _INPUTS
    """What the model takes of `_INPUTS`."""
    packed: PackedRows | None = None
    """How texts share a row end to end; None if they are padded."""
    cuts: Callable[[Sequence[int]], Iterator[list[int]]] | None = None
    """By their lengths, the places of the texts that are padded together; None: `BATCH` of them."""
    programs: Programs | None = None
    """What computes on a device that compiles a program for each shape; None on others."""

    @classmethod
    def load(
        cls,
        origin: Origin,
        architecture: Any,
        environ: Mapping[str, str] = os.environ,
        means: bool = False,
    ) -> LoadedModel:
        """The model by one of transformers' Auto classes, ready to answer, on an accelerator if
        there is one.

        Args:
            origin: Where it is.
            architecture: The Auto class.
            environ: AMPHORA_DTYPE and the other variables of this package.
            means: Whether nothing but means of hidden states will be asked for.

        Raises:
            ModelError: It cannot be read, or the device is one that cannot compute it.
            ValueError: AMPHORA_DTYPE is not the name of a precision.
        """
        kind, name, dtype = precision.chosen(environ)
        gives_way = precision.may_replace(kind, name, environ)
        if gives_way and architecture is AutoModelForCausalLM and precision.is_published_in(origin):
            name, dtype = "float16", torch.float16
        if kind in DEVICES and architecture is AutoModelForSeq2SeqLM:
            raise static.refused(kind, "texts of encoder-decoders are written in growing shapes")
        host = "cpu" if kind in DEVICES else kind
        model = weights.read(static.origin_for(kind, origin), architecture, dtype).eval().to(host)
        weights.refuse_broken(model, origin)
        if kind not in DEVICES and packed_encoders.least_of(model.config) > 1:
            packed_encoders.take_lengths(model)
        tokenizer = origin.tokenizer()
        if origin.tokenizer_place and len(tokenizer) > (known := weights.embeddings_of(model)):
            raise ModelError(
                f"its tokenizer has {len(tokenizer)} tokens, and the model {known}.",
                "Train it without new tokens, or merge it into a base that has them.",
            )
        arguments = inspect.signature(model.forward).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in arguments.values())
        has_types = "token_type_ids" in tokenizer.model_input_names
        loaded = cls(
            model=model,
            tokenizer=tokenizer,
            # Tokenizers without a limit of their own say 1e30.
            max_length=int(min(tokenizer.model_max_length, positions_of(model))),
            inputs=_INPUTS if takes_all else _INPUTS & set(arguments),
            typed=has_types and any(_encode_one(tokenizer, "a b", 8)[1] or []),
        )
        is_compiled = environ.get("AMPHORA_COMPILE", "") in ("1", "true")
        if architecture in WRITERS:
            packed_rows.tell_padded("the model writes texts", environ)
            adapts = origin.weights is not None
            if kind == "cpu" and not (is_compiled or adapts or name == "int8"):
                lay_out(model, environ, loaded._written)
        elif kind in DEVICES:
            reading = Reading.MEAN if means else reading_of(architecture)
            loaded = loaded.on_device(kind, architecture, reading, environ)
        else:
            reading = reading_of(architecture)
            model, name = precision.settled(
                model,
                origin,
                architecture,
                name,
                environ,
                functools.partial(loaded._tried, reading),
            )
            loaded = replace(loaded, model=model)
            loaded = loaded.with_safe_merging(reading)
            why_not = loaded.why_unusual(name, origin.weights is not None, environ)
            loaded = loaded.by_engine(architecture, means, why_not, environ)
        if name == "int8":
            model = precision.in_int8(model)
        if is_compiled and kind not in DEVICES:
            model.forward = torch.compile(model.forward, dynamic=True)
        print(f"model: {type(model).__name__} on {kind} in {name}", flush=True)
        return replace(loaded, model=model)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of texts that the recipe trained the model on; empty if it does not say."""
        return tuple(getattr(self.model.config, "text_columns", None) or ())

    def encode(self, request: Request) -> list[list[int]]:
        """Token ids of the request's texts and pairs, kept with it; what is cut is noted there too.

        Args:
            request: It is changed. Its parameters `truncation` and `max_length` are heeded.

        Raises:
            BadRequest: A text is too long, and is not to be cut.
        """
        if request.token_ids is None:
            texts: Sequence[Text] = request.texts
            limit = min(self.max_length, request.parameters.get("max_length") or self.max_length)
            if not self.typed and all(isinstance(text, str) for text in texts):
                ids = []
                for start in range(0, len(texts), ENCODED_AT_ONCE):
                    some = cast("Sequence[str]", texts[start : start + ENCODED_AT_ONCE])
                    ids += encode(self.tokenizer, some, limit)
                    turns.pause()
            else:
                ids, types = [], []
                for text in texts:
                    if isinstance(text, str):
                        row, row_types = _encode_one(self.tokenizer, text, limit)
                    else:
                        (row,), both = encode_pairs(self.tokenizer, [text[0]], [text[1]], limit)
                        row_types = both[0] if both is not None else None
                    ids.append(row)
                    types.append(row_types)
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

    def is_longer(self, text: Text, limit: int) -> bool:
        """Whether a text or a pair has more than `limit` tokens."""
        parts = [text] if isinstance(text, str) else text
        decisive = [beginning(self.tokenizer, part, limit) for part in parts]
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
        for places in (self.cuts or cuts)(lengths):
            together = [rows[place] for place in places]
            coming.append((places, Coming(self._values(together, reading))))
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
        if self.packed is not None and (
            self.packed.graphs is not None or len({len(row.ids) for row in rows}) > 1
        ):
            return self.packed.values(self.model, rows, reading)
        longest = max(len(row.ids) for row in rows)
        if self.merging == PADDED:
            longest = min(self.max_length, -(-longest // _STEP) * _STEP)
        batch = padded(rows, longest, self.tokenizer.pad_token_id or 0, self.model.device)
        taken = {name: tensor for name, tensor in batch.items() if name in self.inputs}
        return of_padded(reading, self.model(**taken), batch["attention_mask"], rows)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The places of the rows that go through the model together, shorter ones first."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        start = 0
        for end in range(1, len(order) + 1):
            full = end - start == (1 if self.merging == ALONE else BATCH)
            last = end == len(order)
            if full or last or (
                self.merging == EQUAL and lengths[order[end]] != lengths[order[start]]
            ):  # fmt: skip
                yield order[start:end]
                start = end

    def with_safe_merging(self, reading: Reading) -> LoadedModel:
        """The same with the widest merging whose answers are those of each row alone.

        Some models heed no mask (FNet), or find the end of a text by its padding, and have none
        (GPT-2 with a head): with these, what a request's neighbours are would change its answer.
        """
        first, second = self._probes()
        alone = replace(self, merging=ALONE)
        expected = alone.forward([first, second], reading)
        tolerance = tolerance_of(expected, self.model.dtype)
        typed = self.typed
        if "token_type_ids" in self.inputs and "token_type_ids" in self.tokenizer.model_input_names:
            # Types that are all 0 are what most models assume; some add something for them.
            (with_types,) = alone.forward([_typed(first)], reading)
            typed |= not torch.allclose(with_types, expected[0], atol=tolerance, rtol=0)
        for merging, rows in ((PADDED, [first, second]), (EQUAL, [first, first])):
            try:
                merged = replace(self, merging=merging).forward(rows, reading)
            except (RuntimeError, ValueError, IndexError):
                continue
            allowed = expected if merging == PADDED else [expected[0], expected[0]]
            if are_close(merged, allowed, tolerance):
                break
        else:
            merging = ALONE
        if merging != PADDED:
            print(f"batches: {type(self.model).__name__} answers otherwise if texts are padded: "
                  f"{merging}", flush=True)  # fmt: skip
        return replace(self, merging=merging, typed=typed)

    def by_engine(
        self, architecture: Any, means: bool, why_not: Sequence[str], environ: Mapping[str, str]
    ) -> LoadedModel:
        """The same, to be computed by OpenVINO if that is chosen (`engines.choice`), else as fast
        as PyTorch computes it.

        Args:
            architecture: The Auto class that loaded the model.
            means: Whether nothing but means of hidden states will be asked for.
            why_not: Why it is computed as it is (`why_unusual`).
            environ: AMPHORA_PACKING and AMPHORA_GRAPHS.

        Raises:
            ModelError: OpenVINO was asked for, and cannot compute it.
            ValueError: One of the variables is neither 0 nor 1.
        """
        reading, head = reading_of(architecture), architecture.__name__
        usual = functools.partial(self.laid_out, head, reading, why_not, environ)
        if architecture is AutoModelForMaskedLM:
            why_not = [*why_not, "of masked texts few tokens are asked"]
        asked = Reading.MEAN if means else reading
        if engines.Candidate.of(self, asked, usual, " and ".join(why_not)).takes_openvino():
            return replace(self, cuts=batches.cuts)
        return usual()

    def why_unusual(self, name: str, adapts: bool, environ: Mapping[str, str]) -> list[str]:
        """Why texts do not go through the model end to end, nor through another engine.

        Args:
            name: What AMPHORA_DTYPE calls its precision.
            adapts: Whether it takes adapters.
            environ: AMPHORA_COMPILE.
        """
        # int8 has one scale for a call's activations, and what torch.compile made is padded.
        reasons = {
            f"the model takes {self.merging}": self.merging != PADDED,
            "AMPHORA_DTYPE is int8": name == "int8",
            "AMPHORA_COMPILE is set": environ.get("AMPHORA_COMPILE", "") in ("1", "true"),
            "the model takes adapters": adapts,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def laid_out(
        self,
        architecture: str,
        reading: Reading,
        why_not: Sequence[str],
        environ: Mapping[str, str],
    ) -> LoadedModel:
        """The same with texts end to end and weights as kernels read them, where answers stay;
        else a line says why not.

        Args:
            architecture: The name of the Auto class that loaded the model.
            reading: What its answers are made of.
            why_not: Why it is not to be (`why_unusual`).
            environ: AMPHORA_PACKING and AMPHORA_GRAPHS.

        Raises:
            ValueError: One of them is neither 0 nor 1.
        """
        if why_not:
            packed_rows.tell_padded(" and ".join(why_not), environ)
            return self
        loaded = self.with_packing(architecture, reading, environ)
        # Of other kinds it is not known that nothing else computes with a layer's weights.
        if loaded.packed is not None:
            alone = replace(loaded, packed=None, merging=ALONE)
            lay_out(self.model, environ, lambda: alone.forward(alone._probes(), reading))
        return loaded

    def with_packing(
        self, architecture: str, reading: Reading, environ: Mapping[str, str]
    ) -> LoadedModel:
        """The same with texts end to end, if that gives the answers of each text alone.

        Args:
            architecture: The name of the Auto class that loaded the model.
            reading: What its answers are made of.
            environ: AMPHORA_PACKING and AMPHORA_GRAPHS.

        Raises:
            ValueError: One of them is neither 0 nor 1.
        """
        first, second = self._probes()
        rows = [second, first, first, TokenRow(second.ids[:-1]), second]
        packed = packed_rows.checked(
            self.model,
            PackedRows.of(self.model, architecture, self.inputs, environ),
            lambda packed: replace(self, merging=ALONE, packed=packed).forward(rows, reading),
        )
        packed = packing_choice.settled(self.model, packed, self.max_length, environ)
        return replace(self, packed=packed)

    def on_device(
        self, kind: str, architecture: Any, reading: Reading, environ: Mapping[str, str]
    ) -> LoadedModel:
        """The same on a device that compiles a program for each shape: all are compiled.

        Args:
            kind: Of the device. The model is on the CPU yet.
            architecture: The Auto class that loaded it.
            reading: What its answers are made of.
            environ: AMPHORA_BUCKETS and AMPHORA_COMPILE.

        Raises:
            ModelError: Its answers would be others.
            ValueError: AMPHORA_BUCKETS has no such shapes.
        """
        of_texts = Reading.TOKENS if reading is Reading.MEAN else reading
        merging = self.with_safe_merging(of_texts)
        if merging.merging != PADDED:
            raise static.refused(kind, f"it takes {merging.merging}, and texts are padded there")
        packed_rows.tell_padded(f"the device is {kind}", environ)
        alone = replace(merging, merging=ALONE)
        layout = Layout(
            pad=self.tokenizer.pad_token_id or 0,
            has_types=TYPE_IDS in self.inputs and TYPE_IDS in self.tokenizer.model_input_names,
            per_token=reading is Reading.TOKENS,
            picks=architecture is AutoModelForMaskedLM,
        )
        buckets = Buckets.read(environ, self.max_length)
        call = static.call_of(self.model, self.inputs, reading)
        call = static.compiled(call, kind, environ, len(buckets.shapes))
        programs = Programs(call, layout, buckets, kind)
        prove = programs.prepare(
            self._longest(),
            self._probes()[0],
            # Some models add something for types that are all 0, which a program is always given.
            lambda row: alone.forward([_typed(row) if layout.has_types else row], reading)[0],
            self.model.dtype,
        )
        static.move(self.model, kind)
        prove()
        return replace(merging, programs=programs)

    def _tried(self, reading: Reading, with_longest: bool) -> list[torch.Tensor]:
        """Answers to a short text, a longer one, and maybe the longest one, each by itself."""
        rows = [*self._probes(), *([self._longest()] if with_longest else [])]
        return replace(self, merging=ALONE).forward(rows, reading)

    @torch.inference_mode()
    def _written(self) -> list[torch.Tensor]:
        """Scores of a model that writes texts: of a prompt, and of a token after it."""
        model: Any = self.model
        ids = torch.tensor([self._probes()[1].ids], device=model.device)
        read: dict[str, Any] = {"input_ids": ids}
        more: dict[str, Any] = {"input_ids": ids[:, :1]}
        if model.config.is_encoder_decoder:
            read["decoder_input_ids"] = ids
            more = {"decoder_input_ids": ids[:, :1]}
        first = model(**read, use_cache=True)
        if (cache := getattr(first, "past_key_values", None)) is None:
            return [first.logits[0].float()]
        if model.config.is_encoder_decoder:
            more["encoder_outputs"] = (first.encoder_last_hidden_state,)
        then = model(**more, past_key_values=cache, use_cache=True)
        return [first.logits[0].float(), then.logits[0].float()]

    def _probes(self) -> list[TokenRow]:
        """A short text and a longer one."""
        texts = ["a b c", "d " * 12]
        return [TokenRow(ids) for ids in encode(self.tokenizer, texts, self.max_length)]

    def _longest(self) -> TokenRow:
        """A text of as many tokens as are read, or of 4,096."""
        limit = min(self.max_length, 4096)
        (ids,) = encode(self.tokenizer, ["d e f " * limit], limit)
        return TokenRow(ids)


def reading_of(architecture: Any) -> Reading:
    """What the answers of a model of an Auto class are made of."""
    is_labelled = architecture is AutoModelForSequenceClassification
    return Reading.LABELS if is_labelled else Reading.TOKENS


def refuse_uncut(request: Request, limit: int) -> None:
    """Raises BadRequest if a text was cut at `limit` tokens, and the request forbids that."""
    if request.truncated and request.parameters.get("truncation") in (False, "do_not_truncate"):
        raise BadRequest(
            f"Input {request.truncated[0] + 1} is longer than the {limit} tokens that are read. "
            "Shorten it, or leave truncation out: it is then cut."
        )


def _typed(row: TokenRow) -> TokenRow:
    """The row, each of its tokens of the first part of a pair."""
    return replace(row, types=[0] * len(row.ids))


def _encode_one(
    tokenizer: PreTrainedTokenizerBase, text: str, limit: int
) -> tuple[list[int], list[int] | None]:
    encoded = tokenizer(beginning(tokenizer, text, limit), truncation=True, max_length=limit)
    return encoded["input_ids"], encoded.get("token_type_ids")
