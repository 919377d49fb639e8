"""Requests whose texts an engine writes: each joins it as it comes, and leaves when it ends."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from recipe.inference import precision, turns
from recipe.inference.generation import calls
from recipe.inference.generation.batch import Batch, Rows
from recipe.inference.generation.decoding import Completion, Event, Notes, Penalties, Writer
from recipe.inference.generation.engine import Engine, Row
from recipe.inference.generation.fixed_shapes import FixedRows
from recipe.inference.generation.options import GenerationSettings
from recipe.inference.generation.prompts import Prompt
from recipe.inference.loaded_model import LoadedModel
from recipe.inference.payloads import BadRequest
from recipe.inference.saved.weights import embeddings_of
from recipe.inference.static import programs
from recipe.inference.static.buckets import NAME, Buckets
from recipe.runtime import memory

_MEMORY_SHARE = 0.4
"""Of the memory that is free when a model is loaded; the rest is for what its calls compute. The
workers of a device divide it."""
# What a model's own settings may ask `generate` for, and an engine does not do.
_OTHER_WAYS = (
    "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "guidance_scale",
    "cache_implementation", "constraints", "force_words_ids", "token_healing", "is_assistant",
    "assistant_early_exit", "max_time", "sequence_bias",
)  # fmt: skip
# Where `generate` forgets what is farther away than the window, and the model itself does not.
_FORGETFUL = ("moshi",)


@dataclass(frozen=True)
class Continuous:
    """A causal language model whose texts begin and end at any token."""

    loaded: LoadedModel
    engine: Engine

    @classmethod
    def of(cls, loaded: LoadedModel, environ: Mapping[str, str] = os.environ) -> Continuous | None:
        """The model with an engine; None if texts would then not be what each is alone, and where
        AMPHORA_CONTINUOUS=0.

        Raises:
            ValueError: AMPHORA_CONTINUOUS is neither 0 nor 1, AMPHORA_CACHE_TOKENS no number, or
                AMPHORA_BUCKETS no shape for texts.
            ModelError: The device compiles a program for each shape, and texts would not be what
                each is alone on the CPU.
        """
        if (wanted := environ.get("AMPHORA_CONTINUOUS", "1")) not in ("0", "1"):
            raise ValueError(f"AMPHORA_CONTINUOUS is {wanted!r}. Give 0 or 1.")
        most_tokens = environ.get("AMPHORA_CACHE_TOKENS", "")
        if most_tokens and not (most_tokens.isdecimal() and int(most_tokens) > 0):
            raise ValueError(f"AMPHORA_CACHE_TOKENS is {most_tokens!r}. Give a number above 0.")
        kind = precision.chosen(environ)[0]
        is_fixed = kind in programs.DEVICES
        if is_fixed and (wanted == "0" or most_tokens):
            name = "AMPHORA_CONTINUOUS is 0" if wanted == "0" else "AMPHORA_CACHE_TOKENS is set"
            raise ValueError(
                f"{name}, and on {kind} there is one way to write texts, with the room that "
                f"{NAME} says. Leave it out."
            )
        if wanted == "0":
            return None
        model: Any = loaded.model
        pad, tokens = calls.pad_token_id(loaded), probe_tokens(model)
        rows = Rows(model, pad)
        joins = loaded.max_length >= 16 and _writes_plainly(model) and rows.is_faithful(tokens)
        if joins and is_fixed:
            bucket = Buckets.of_writer(environ, loaded.max_length)
            fixed = FixedRows(model, pad, bucket)
            fixed.settle(kind, environ, probe_tokens(model, bucket.length))
            engine = Engine(fixed, bucket.rows * bucket.length, bucket.rows)
            return cls(replace(loaded, max_length=bucket.length), engine)
        if joins:
            _, batch = rows.extend(Batch(), [tokens])
            on_device = model.device.type == "cuda"
            free = torch.cuda.mem_get_info()[0] if on_device else memory.available()
            share = _MEMORY_SHARE / int(environ.get("AMPHORA_SHARERS", "1"))
            room = int((free or 1 << 30) * share) // max(1, batch.token_bytes)
            return cls(loaded, Engine(rows, int(most_tokens) if most_tokens else max(1, room)))
        why = (
            f"{type(model).__name__} answers otherwise if texts join others while these are written"
        )
        if is_fixed:
            raise programs.refused(kind, why)
        print(
            f"batches: {why}: texts of equal settings are written together, from first to last",
            flush=True,
        )
        return None

    def takes(self, settings: GenerationSettings) -> bool:
        """Whether the engine writes texts of these settings: not those of beams.

        Raises:
            BadRequest: It does not, and nothing else can on this device.
        """
        if settings.num_beams > 1 and (kind := self.loaded.model.device.type) in programs.DEVICES:
            raise BadRequest(
                f"num_beams is {settings.num_beams}, and on {kind} texts are written without beams."
                " Leave it out."
            )
        return settings.num_beams == 1

    def add(self, prompts: Sequence[Prompt], events: deque[Event] | None = None) -> list[Row]:
        """Texts to be written for all prompts of a request, in their order.

        Args:
            prompts: At least one.
            events: Where their tokens go as they are written.
        """
        rows = []
        for prompt in prompts:
            own = [self._row(prompt, place, events) for place in range(prompt.settings.sequences)]
            self.engine.add(own)
            rows += own
        return rows

    def texts(
        self, prompts: Sequence[Prompt], rows: Sequence[Row] | None = None
    ) -> list[list[Completion]]:
        """A request's texts, each prompt's in a list, when all are written. Raises what has ended
        one of them.

        Args:
            prompts: All of the request.
            rows: What `add` has made of them, if they were added already.
        """
        if rows is None:
            rows = []
            try:
                for prompt in prompts:
                    rows += self.add([prompt])
                    turns.pause()
                    self.engine.until(partial(self._leaves_room, rows))
            except BaseException:
                self.engine.leave(rows)
                raise
        self.engine.finish(rows)
        written = iter(row.writer.written for row in rows)
        return [[next(written) for _ in range(prompt.settings.sequences)] for prompt in prompts]

    def events(self, prompts: Sequence[Prompt]) -> Iterator[Event]:
        """The texts of a request, token by token as they are written."""
        queue: deque[Event] = deque()
        size = max(1, self._share // prompts[0].settings.sequences)
        for start in range(0, len(prompts), size):
            rows = self.add(prompts[start : start + size], queue)
            yield from self.engine.events(rows, queue)

    @property
    def _share(self) -> int:
        """Texts of one request that the engine has at once, so that others find room."""
        return max(1, self.engine.most_rows * 3 // 4)

    def _leaves_room(self, rows: Sequence[Row]) -> bool:
        """Whether a request's next prompt may be added."""
        return sum(not row.is_over for row in rows) < self._share

    def _row(self, prompt: Prompt, place: int, events: deque[Event] | None) -> Row:
        """A text that is to be written after a prompt, by what `generate` makes of its settings."""
        settings = prompt.settings
        notes = Notes() if settings.logprobs is not None else None
        penalties = Penalties(
            len(prompt.ids), settings.frequency_penalty, settings.presence_penalty,
            settings.logit_bias,
        )  # fmt: skip
        own = [*([penalties] if penalties.weigh else []), *([notes] if notes else [])]
        ends = calls.ends(self.loaded, prompt)
        processors, criteria, samples = _prepared(
            self.engine.rows.told,
            calls.inputs(self.loaded, [prompt.ids], self.engine.rows.device),
            **{**settings.options(), "num_return_sequences": 1},
            max_new_tokens=prompt.new,
            eos_token_id=sorted(ends.ids) or None,
            pad_token_id=calls.pad_token_id(self.loaded),
            logits_processor=LogitsProcessorList(own),
        )
        generator = None
        if samples:
            generator = torch.Generator(self.engine.rows.device)
            if settings.seed is None:
                generator.seed()
            else:
                # Another for each text; of the first the request's own.
                number = prompt.place * settings.sequences + place
                generator.manual_seed((settings.seed + number * 0x9E3779B97F4A7C15) % 2**64)
        follows = events is not None or settings.logprobs is not None
        return Row(
            ids=list(prompt.ids),
            longest=len(prompt.ids) + prompt.new,
            writer=Writer(
                Completion(prompt.place, place),
                self.loaded.tokenizer,
                ends,
                follows=follows,
                goes_on=prompt.goes_on,
            ),
            processors=processors,
            criteria=criteria,
            generator=generator,
            notes=notes,
            count=settings.logprobs or 0,
            events=events,
        )


def probe_tokens(model: Any, count: int = 14) -> list[int]:
    """Tokens of all kinds, none of them special as a rule, to look at what a model makes."""
    vocabulary = embeddings_of(model)
    return [(7 + 31 * place) % vocabulary for place in range(count)]


def _prepared(
    model: Any, inputs: Mapping[str, torch.Tensor], **options: Any
) -> tuple[LogitsProcessorList, StoppingCriteriaList, bool]:
    """What `generate` would weigh scores by, what would end its texts beside end tokens and length,
    and whether it would draw tokens. It stops before the first of them.

    Raises:
        TypeError: This version of transformers takes no function for `custom_generate`.
    """
    seen: list[tuple[Any, Any, Any]] = []

    def see(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> torch.Tensor:
        seen.append((logits_processor, stopping_criteria, generation_config))
        return input_ids

    model.generate(**inputs, **options, custom_generate=see)
    if not seen:
        raise TypeError("generate takes no function")
    ((processors, criteria, config),) = seen
    others = [
        each for each in criteria if not isinstance(each, (MaxLengthCriteria, EosTokenCriteria))
    ]
    return processors, StoppingCriteriaList(others), bool(config.do_sample)


def _writes_plainly(model: Any) -> bool:
    """Whether the model's own settings ask for nothing but one token after the other, and
    transformers tells how."""
    config = model.generation_config
    if model.config.get_text_config().model_type in _FORGETFUL:
        return False
    asked = [name for name in _OTHER_WAYS if getattr(config, name, None)]
    if (config.num_beams or 1) > 1 or config.use_cache is False or asked:
        return False
    try:
        ids = torch.tensor([[1]], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        _prepared(model, inputs, max_new_tokens=1, do_sample=False)
    except Exception as error:
        print(f"batches: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return False
    return True
