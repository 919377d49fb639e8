"""Text generation, whole or piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM

from recipe.compat import UNBOUNDED
from recipe.inference import loading, turns
from recipe.inference.generation import calls, groups, shapes
from recipe.inference.generation.continuous import Continuous, probe_tokens
from recipe.inference.generation.decoding import Completion
from recipe.inference.generation.engine import Row
from recipe.inference.generation.options import CUT, REFUSE
from recipe.inference.generation.prefill import prefill
from recipe.inference.generation.prompts import Prompt, Prompts
from recipe.inference.loaded_model import PADDED, LoadedModel
from recipe.inference.payloads import Answers, Request
from recipe.inference.saved.origin import Origin

Texts = list[Completion]
"""Those of one prompt."""


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A saved causal language model that continues texts."""

    loaded: LoadedModel
    prompts: Prompts
    continuous: Continuous | None
    """Writes texts that begin and end at any token; None if the model answers otherwise then."""

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> Generator:
        """The causal language model that `origin` names.

        Raises:
            ValueError: AMPHORA_LONG_PROMPTS is neither cut nor refuse, or a variable of
                `Continuous.of` has a wrong value.
        """
        long_prompts = environ.get("AMPHORA_LONG_PROMPTS", "")
        if long_prompts not in ("", CUT, REFUSE):
            raise ValueError(f"AMPHORA_LONG_PROMPTS is {long_prompts!r}. Give {CUT} or {REFUSE}.")
        loaded = loading.load(origin, AutoModelForCausalLM)
        if loaded.positions < UNBOUNDED:
            # What a tokenizer says beside is of the texts that it was made of.
            loaded = replace(loaded, max_length=loaded.positions)
        model: Any = loaded.model
        calls.settle(model, origin.place)
        # Its own criterion reads all of a vocabulary for each text.
        stop = tuple(model.generation_config.stop_strings or ())
        model.generation_config.stop_strings = None
        # What a long prompt says last is what is to be continued.
        loaded.tokenizer.truncation_side = "left"
        continuous = Continuous.of(loaded, environ)
        if continuous is None:
            merging = groups.merging_of(loaded, probe_tokens(model))
            if merging != PADDED:
                print(f"batches: {type(model).__name__} writes otherwise if prompts are padded: "
                      f"{merging}", flush=True)  # fmt: skip
            loaded = replace(loaded, merging=merging)
        else:
            loaded = continuous.loaded
        return cls(
            loaded=loaded, prompts=Prompts(loaded, long_prompts, stop), continuous=continuous
        )

    def example(self, text: str) -> Request:
        """A request that this task answers, at little cost."""
        return Request(texts=[text], parameters={"max_new_tokens": 2})

    @property
    def has_template(self) -> bool:
        """Whether conversations can be answered."""
        return self.prompts.has_template

    def measure(self, request: Request) -> list[int]:
        """Tokens of each prompt, and of what may be written after it.

        Raises:
            BadRequest: A parameter is not one of this task's, the model has no chat template for a
                conversation, prompt and text do not fit into the model's positions, or beams are
                asked for where there are none.
        """
        self._engine(request)
        return [len(prompt.ids) + prompt.new for prompt in self.prompts.of(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request its texts, in the form of pipelines and TGI (`shapes`), or, if it has a
        `form` of its own, as `Completion`; with `stream` an iterator over events. Where predictions
        take turns, texts are given later, by a function for each request."""
        rows: list[Row] = []
        texts = self._texts([request for request in requests if not request.streams], rows)
        answers: list[Any] = []
        try:
            for request in requests:
                if request.streams:
                    prompts, engine = self.prompts.of(request), self._engine(request)
                    events = (
                        groups.events(self.loaded, prompts)
                        if engine is None
                        else engine.events(prompts)
                    )
                    answers.append(_shaped(events, request))
                else:
                    later = partial(self._answered, texts[id(request)], request)
                    answers.append(later if turns.are_taken() else later())
        finally:
            if rows and self.continuous is not None:
                # If one has failed, nobody waits for the others.
                self.continuous.engine.leave(rows)
        return answers

    def _answered(self, texts: Callable[[], list[Texts]], request: Request) -> Any:
        if request.parameters.get("decoder_input_details") and request.settings is None:
            request.prefill = prefill(self.loaded, self.prompts.of(request))
        return _shaped(Answers(texts(), request.truncated, request.single), request)

    def _engine(self, request: Request) -> Continuous | None:
        """What writes the request's texts token by token beside others'; None if `generate` does,
        in a group. Raises BadRequest as `Continuous.takes`."""
        settings = self.prompts.of(request)[0].settings
        return self.continuous if self.continuous and self.continuous.takes(settings) else None

    def _texts(
        self, requests: Sequence[Request], added: list[Row]
    ) -> dict[int, Callable[[], list[Texts]]]:
        """For each request, by its `id`, what returns each prompt's texts when all are written.

        Args:
            requests: None of them streams.
            added: What the engine is told to write at once is appended: where none pauses, all is
                there before the first step is made.
        """
        texts: dict[int, Callable[[], list[Texts]]] = {}
        apart: list[Prompt] = []
        for request in requests:
            prompts = self.prompts.of(request)
            if (engine := self._engine(request)) is None:
                apart += prompts
            else:
                rows = None if turns.are_taken() else engine.add(prompts)
                added += rows or []
                texts[id(request)] = partial(engine.texts, prompts, rows)
        shared: dict[int, list[Callable[[], Texts]]] = {}
        for group in groups.alike(self.loaded, apart):
            together = turns.Shared(partial(groups.write, self.loaded, group))
            for place, prompt in enumerate(group):
                own = partial(self._of_group, together, len(group), place, prompt)
                shared.setdefault(id(prompt.owner), []).append(own)
        for name, parts in shared.items():
            texts[name] = partial(_each, parts)
        return texts

    def _of_group(
        self, together: turns.Shared[list[Texts]], count: int, place: int, prompt: Prompt
    ) -> Texts:
        """The texts of one of a group's `count` prompts; by itself, if the group has failed."""
        try:
            return together.result()[place]
        except Exception:
            if count == 1:
                raise
            return groups.write(self.loaded, [prompt])[0]


def _each(parts: Sequence[Callable[[], Texts]]) -> list[Texts]:
    return [part() for part in parts]


def _shaped(answer: Any, request: Request) -> Any:
    """Texts or events in the form of pipelines and TGI, unless the request has one of its own."""
    return shapes.shaped(answer, request) if request.form is None else answer
