"""Text generation, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM

from recipe.compat import UNBOUNDED
from recipe.inference import loading, turns
from recipe.inference.generation import calls, groups, shapes
from recipe.inference.generation.decoding import Completion
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

    @classmethod
    def load(cls, origin: Origin) -> Generator:
        """The causal language model that `origin` names."""
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
        merging = groups.merging_of(loaded)
        if merging != PADDED:
            print(
                f"batches: {type(model).__name__} writes otherwise if prompts are padded: "
                f"{merging}",
                flush=True,
            )
        loaded = replace(loaded, merging=merging)
        return cls(loaded=loaded, prompts=Prompts(loaded, stop))

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
                conversation, or prompt and text do not fit into the model's positions.
        """
        return [len(prompt.ids) + prompt.new for prompt in self.prompts.of(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request its texts, in the form of pipelines and TGI (`shapes`), or, if it has a
        `form` of its own, as `Completion`; with `stream` an iterator over events. Prompts of equal
        settings share a batch. Where predictions take turns, texts are given later, by a function
        for each request."""
        texts = self._texts([request for request in requests if not request.streams])
        answers: list[Any] = []
        for request in requests:
            if request.streams:
                events = groups.events(self.loaded, self.prompts.of(request))
                answers.append(_shaped(events, request))
            else:
                later = partial(self._answered, texts[id(request)], request)
                answers.append(later if turns.are_taken() else later())
        return answers

    def _answered(self, parts: Sequence[Callable[[], Texts]], request: Request) -> Any:
        if request.parameters.get("decoder_input_details") and request.settings is None:
            request.prefill = prefill(self.loaded, self.prompts.of(request))
        texts = [part() for part in parts]
        return _shaped(Answers(texts, request.truncated, request.single), request)

    def _texts(self, requests: Sequence[Request]) -> dict[int, list[Callable[[], Texts]]]:
        """For each request, by its `id`, what returns each prompt's texts when they are written."""
        prompts = [prompt for request in requests for prompt in self.prompts.of(request)]
        parts: dict[tuple[int, int], Callable[[], Texts]] = {}
        for group in groups.alike(self.loaded, prompts):
            together = turns.Shared(partial(groups.write, self.loaded, group))
            for place, prompt in enumerate(group):
                part = partial(self._of_group, together, len(group), place, prompt)
                parts[id(prompt.owner), prompt.place] = part
        return {
            id(request): [parts[id(request), place] for place in range(len(request.texts))]
            for request in requests
        }

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


def _shaped(answer: Any, request: Request) -> Any:
    """Texts or events in the form of pipelines and TGI, unless the request has one of its own."""
    return shapes.shaped(answer, request) if request.form is None else answer
