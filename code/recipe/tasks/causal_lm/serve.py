"""Text generation by decoders: whole answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoModelForCausalLM

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.generation import decoding, options, prompt_groups, token_scores
from recipe.backend.generation.decoding import LENGTH, Completion
from recipe.backend.generation.gathering import GenerationGroups, GroupMembers
from recipe.backend.generation.prompts import Prompt, Prompts
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Request
from recipe.backend.requests.probes import NEW_TOKENS, PROMPTS
from recipe.backend.saved.weights import embeddings_of
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED
from recipe.console import log
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.tasks.causal_lm.spec import CHAT, SPECS


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
    gathering: GenerationGroups = field(default_factory=GenerationGroups)

    @classmethod
    def load(cls, origin: Origin) -> Generator:
        """Load the causal language model that `origin` names."""
        loaded = loading.load(origin, AutoModelForCausalLM)
        check_template(loaded.tokenizer, origin.location)
        return cls.wrap(loaded)

    @classmethod
    def wrap(cls, loaded: LoadedModel) -> Generator:
        """Return the generator of a loaded model, whose generation_config it replaces."""
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
        return Request(
            inputs=[text[: self.max_length // 2]], parameters={"max_tokens": 2, "temperature": 0}
        )

    def probes(self) -> Sequence[Request]:
        prompts: list[Any] = [text[: self.max_length // 2] for text in PROMPTS]
        template = str(self.loaded.tokenizer.chat_template or "")
        # Some templates write the date.
        if template and "strftime_now" not in template:
            prompts.append([{"role": "user", "content": prompts[-1]}])
        parameters = {"max_tokens": NEW_TOKENS, "temperature": 0}
        return [Request(inputs=[prompt], parameters=parameters) for prompt in prompts]

    def prompt_ids(self, prepared: Request) -> Sequence[int]:
        return list(prepared.work[0].ids)

    def continue_prompt(self, prepared: Request) -> list[int]:
        ((text,),) = prompt_groups.write(self.loaded, prepared.work, lambda: None)
        return [token.id for token in text.tokens]

    @property
    def lacking(self) -> Set[str]:
        """Return the route of chats, if there is no chat template."""
        return frozenset() if self.loaded.tokenizer.chat_template else {CHAT}

    @property
    def form(self) -> str:
        return "text" if self.lacking else "chat"

    def describe(self) -> dict[str, Any]:
        limit = self.max_length
        limits = {"max_input_tokens": limit - 1, "max_total_tokens": limit}
        described = super().describe() | (limits if limit < UNBOUNDED else {})
        described["bodies"]["settings"] = [*options.PARAMETERS]
        return described

    def prepare(self, request: Request) -> Request:
        prepared = self.prompts.prepare(request)
        if not self.merges and prepared.work[0].settings.logprobs is not None:
            longest, size = max(prepared.sizes), embeddings_of(self.loaded.model)
            bounds.hold(Bound.SCORES, longest * size, f"{longest:,} tokens x {size:,} scores")
        return prepared

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request a list of texts for each prompt, `{"text", "finish", "tokens"}`;
        with `stream` an iterator over the only text, each time with the token that was added, what
        it `added`, and the numbers of `prompt_tokens` and `generated` ones. If predictions take
        turns, an answer that is not a stream is a function that returns it.
        """
        answers: list[Any] = []
        for prepared in requests:
            if prepared.streams:
                answers.append(self._stream(prepared))
                continue
            prompts, parts = prepared.work, []
            if prompts[0].new:  # otherwise they are scored alone
                parts = prompt_groups.gather(self.gathering, self.loaded, prompts, self.merges)
            answers.append(partial(self._answer, prepared, parts))
        if turns.are_taken():
            return answers
        return [one() if isinstance(one, partial) else one for one in answers]

    @cached_property
    def _names(self) -> Mapping[int, str]:
        tokenizer = self.loaded.tokenizer
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

    def _stream(self, prepared: Request) -> Iterator[dict[str, Any]]:
        for text in prompt_groups.events(self.loaded, *prepared.work):
            last = replace(text, tokens=text.tokens[-1:])
            counts = {"prompt_tokens": prepared.tokens, "generated": len(text.tokens)}
            yield {**_plain_text(last, self._names), "added": last.tokens[0].text, **counts}

    def _answer(self, prepared: Request, parts: Sequence[GroupMembers]) -> Any:
        prompts: Sequence[Prompt] = prepared.work
        settings = prompts[0].settings
        texts = self.gathering.results(parts)
        if not parts:
            count = settings.sequences
            texts = [[Completion(one.index, finish=LENGTH)] * count for one in prompts]
        plain = [[_plain_text(text, self._names) for text in some] for some in texts]
        if settings.echo:
            for prompt, source, some in zip(prompts, prepared.values, plain, strict=True):
                is_text = isinstance(source, str)
                echoed = source if is_text else self.loaded.tokenizer.decode(prompt.ids)
                for text in some:
                    text["echoed"] = echoed
        if settings.logprobs is not None:
            token_scores.score_tokens(self.loaded, prompts, plain, self.merges)
        return prepared.answer(plain, single=prepared.single)


def _plain_text(text: Completion, names: Mapping[int, str]) -> dict[str, Any]:
    """Return a text as the server's API layer takes it, with the names of special tokens, which
    add nothing to it."""
    tokens = [
        {"id": token.id, "text": token.text or names.get(token.id, ""), "special": token.special,
         "logprob": None}
        for token in text.tokens
    ]  # fmt: skip
    return {"text": text.text, "finish": text.finish, "tokens": tokens}
