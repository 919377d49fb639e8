"""Text generation by decoders: whole answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from recipe.backend import loading, turns
from recipe.backend.generation import decoding, prompt_groups
from recipe.backend.generation.decoding import LENGTH, Completion
from recipe.backend.generation.gathering import Gathering, Part
from recipe.backend.generation.prompts import Prompts
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests import routes
from recipe.backend.requests.payloads import Answers, Prepared, Request
from recipe.backend.requests.probes import NEW_TOKENS, PROMPTS
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED
from recipe.console import log
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.tasks.causal_lm.spec import SPECS


def check_template(tokenizer: Any, location: str) -> None:
    """Raise ModelError if a tokenizer's chat template cannot be read: no chat could be answered."""
    try:
        if tokenizer.chat_template:
            message = {"role": "user", "content": "Hello"}
            tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"The chat template of {location} cannot be read (line {error.lineno}): {error}.",
            "Correct it in chat_template.jinja or tokenizer_config.json, or leave it out.",
        ) from error
    except (TemplateError, TypeError, ValueError) as error:
        log(f"chat template: it refuses a message of a user alone: {error}")


@dataclass(frozen=True, kw_only=True)
class Generator(ServedTask):
    """A saved causal language model that continues texts."""

    served = SPECS[0].served["text-generation"]
    generates = True
    loaded: LoadedModel
    prompts: Prompts
    merges: bool = False
    """Whether prompts of several lengths may share a call of `generate`."""
    gathering: Gathering = field(default_factory=Gathering)

    @classmethod
    def load(cls, origin: Origin) -> Generator:
        """Load the causal language model that `origin` names."""
        loaded = loading.load(origin, AutoModelForCausalLM)
        check_template(loaded.tokenizer, origin.location)
        if loaded.positions < UNBOUNDED:
            # The tokenizer's limit is that of its training texts.
            loaded = replace(loaded, max_length=loaded.positions)
        model: Any = loaded.model
        decoding.settle(model)
        # transformers' own criterion scans the whole vocabulary for each text.
        stop = tuple(model.generation_config.stop_strings or ())
        model.generation_config.stop_strings = None
        if not (merges := prompt_groups.may_merge(model.config.get_text_config())):
            name = type(model).__name__
            print(f"batches: {name} continues one text at a time, since padding may change answers")
        return cls(loaded=loaded, prompts=Prompts(loaded, stop), merges=merges)

    def example(self, text: str) -> Request:
        # Of a model of a few positions, characters may be tokens.
        return Request(inputs=[text[: self.max_length // 2]], parameters={"max_new_tokens": 2})

    def probes(self) -> Sequence[Request]:
        prompts: list[Any] = [text[: self.max_length // 2] for text in PROMPTS]
        if self.loaded.tokenizer.chat_template:
            prompts.append([{"role": "user", "content": prompts[-1]}])
        parameters = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        return [Request(inputs=[prompt], parameters=parameters) for prompt in prompts]

    def prompt_ids(self, prepared: Prepared) -> Sequence[int]:
        return list(prepared.work[0].ids)

    def continue_prompt(self, prepared: Prepared) -> list[int]:
        ((text,),) = prompt_groups.write(self.loaded, prepared.work, lambda: None)
        return [token.id for token in text.tokens]

    @property
    def lacking(self) -> Set[str]:
        """Return the route of chats, if there is no chat template."""
        return frozenset() if self.loaded.tokenizer.chat_template else {routes.CHAT}

    @property
    def form(self) -> str:
        return "text" if self.lacking else "chat"

    def describe(self) -> dict[str, Any]:
        limit = self.max_length
        limits = {"max_input_tokens": limit - 1, "max_total_tokens": limit}
        return super().describe() | (limits if limit < UNBOUNDED else {})

    def refuse_other_apis(self, request: Request) -> None:
        if request.route != routes.CHAT:  # without a chat template, `prepare` raises the error
            super().refuse_other_apis(request)

    def prepare(self, request: Request) -> Prepared:
        return self.prompts.prepare(request)

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return an answer for each request.

        An answer is a list of texts in the form of pipelines and TGI (`shaped`), or of `Completion`
        if the request has a `form` of its own; with `stream`, an iterator over events. If
        predictions take turns, an answer that is not a stream is a function that returns it.
        """
        answers: list[Any] = []
        for prepared in requests:
            if prepared.request.streams:
                events = prompt_groups.events(self.loaded, *prepared.work)
                answers.append(shaped(events, prepared, self.loaded.tokenizer))
                continue
            parts = prompt_groups.gather(self.gathering, self.loaded, prepared.work, self.merges)
            answers.append(partial(self._answer, prepared, parts))
        if turns.are_taken():
            return answers
        return [one() if isinstance(one, partial) else one for one in answers]

    def _answer(self, prepared: Prepared, parts: Sequence[Part]) -> Any:
        texts = self.gathering.results(parts)
        answers = Answers(texts, single=prepared.request.single)
        return shaped(answers, prepared, self.loaded.tokenizer)


def shaped(answer: Any, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return texts, or an iterator over TGI's events, as JSON values, unless the request's own
    `form` formats its answer.

    By default a text includes its prompt, as in pipelines, but not in a stream, as in TGI;
    `return_full_text` overrides that.

    Args:
        answer: `Answers` with a list of `Completion` for each prompt, or an iterator that yields
            that of a stream after each token.
        prepared: The request.
        tokenizer: Names the special tokens, which add nothing to a text.
    """
    if prepared.request.form is not None:
        return answer
    full = prepared.parameters.get("return_full_text")
    if full is None:
        full = not isinstance(answer, Iterator)

    def whole(text: Completion) -> Any:
        prompt: Any = prepared.inputs.values[text.prompt] if full else ""
        if isinstance(prompt, str):
            return prompt + text.text
        *earlier, last = prompt
        if last["role"] != "assistant":
            return [*prompt, {"role": "assistant", "content": text.text}]
        return [*earlier, {**last, "content": last["content"] + text.text}]

    def events() -> Iterator[dict[str, Any]]:
        names = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        for number, text in enumerate(answer, 1):
            token = text.tokens[-1]
            details = {
                "finish_reason": text.finish,
                "generated_tokens": number,
                "seed": prepared.parameters.get("seed"),
                "input_length": prepared.tokens,
            }
            shown = token.text or names.get(token.id, "")
            yield {
                "index": number,
                "token": {**vars(token), "text": shown, "logprob": None},
                "generated_text": whole(text) if text.finish else None,
                "details": details if text.finish else None,
            }

    if isinstance(answer, Iterator):
        return events()
    entries = [[{"generated_text": whole(text)} for text in texts] for texts in answer]
    shown = Answers(entries, single=answer.single)
    shown.unfinished = [
        index for index, texts in enumerate(answer) if any(text.finish == LENGTH for text in texts)
    ]
    return shown
