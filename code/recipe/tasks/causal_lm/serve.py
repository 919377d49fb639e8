"""Text generation by decoders: whole answers and streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM

from recipe.backend import loading, turns
from recipe.backend.generation import calls, prompt_groups, shapes
from recipe.backend.generation.gathering import Gathering, Piece
from recipe.backend.generation.prompts import Prompt, Prompts
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, Request
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED


@dataclass(frozen=True, kw_only=True)
class Generator(ServedTask):
    """A saved causal language model that continues texts."""

    loaded: LoadedModel
    prompts: Prompts
    merges: bool = False
    """Whether prompts of several lengths may share a call of `generate`."""
    gathering: Gathering = field(default_factory=Gathering)

    @classmethod
    def load(cls, origin: Origin) -> Generator:
        """Load the causal language model that `origin` names."""
        loaded = loading.load(origin, AutoModelForCausalLM)
        if loaded.positions < UNBOUNDED:
            # The tokenizer's limit is that of its training texts.
            loaded = replace(loaded, max_length=loaded.positions)
        model: Any = loaded.model
        calls.settle(model)
        # transformers' own criterion scans the whole vocabulary for each text.
        stop = tuple(model.generation_config.stop_strings or ())
        model.generation_config.stop_strings = None
        # The end of a long prompt is what is to be continued.
        loaded.tokenizer.truncation_side = "left"
        if not (merges := prompt_groups.may_merge(loaded)):
            name = type(model).__name__
            print(f"batches: {name} continues one text at a time, since padding may change answers")
        return cls(loaded=loaded, prompts=Prompts(loaded, stop), merges=merges)

    def example(self, text: str) -> Request:
        return Request(texts=[text], parameters={"max_new_tokens": 2})

    @property
    def has_template(self) -> bool:
        """Return whether conversations can be answered."""
        return bool(self.loaded.tokenizer.chat_template)

    def measure(self, request: Request) -> list[int]:
        """Return the most tokens of each prompt and its text together."""
        return [len(prompt.ids) + prompt.new for prompt in self.prompts.of(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return an answer for each request.

        An answer is a list of texts in the form of pipelines and TGI (`shapes`), or of `Completion`
        if the request has a `form` of its own; with `stream`, an iterator over events. If
        predictions take turns, an answer that is not a stream is a function that returns it.
        """
        answers: list[Any] = []
        for request in requests:
            prompts = self.prompts.of(request)
            if request.streams:
                events = prompt_groups.events(self.loaded, prompts, self.merges)
                answers.append(shapes.shaped(events, request, self.loaded.tokenizer))
                continue
            pieces = [*prompt_groups.pieces(self.loaded, prompts, self.merges)]
            for piece in pieces:
                self.gathering.add(piece)
            answers.append(partial(self._answer, request, pieces))
        if turns.are_taken():
            return answers
        return [one() if isinstance(one, partial) else one for one in answers]

    def _answer(self, request: Request, pieces: Sequence[Piece[Prompt]]) -> Any:
        texts = self.gathering.results(pieces, partial(prompt_groups.write, self.loaded))
        answers = Answers(texts, request.truncated, request.single)
        return shapes.shaped(answers, request, self.loaded.tokenizer)
