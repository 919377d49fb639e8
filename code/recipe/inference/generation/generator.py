"""Text generation, whole or piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from threading import Semaphore, Thread
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteriaList

from recipe.inference import loaded_model
from recipe.inference.generation import options, shapes
from recipe.inference.generation.decoding import (
    Completion,
    Ends,
    Event,
    Notes,
    Penalties,
    Watch,
    Writer,
)
from recipe.inference.generation.options import CUT, REFUSE, GenerationSettings
from recipe.inference.loaded_model import LoadedModel
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text, is_conversation
from recipe.tokenization.encoding import ending


class TooLong(BadRequest):
    """A prompt and what is to be generated after it have more tokens than the model has positions;
    or the prompt has by itself."""

    code = "context_length_exceeded"


class NoTemplate(BadRequest):
    """The model's tokenizer knows no form for a conversation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a request, ready for the model to continue."""

    owner: Request
    place: int
    ids: list[int]
    settings: GenerationSettings
    new: int
    """The most tokens to generate."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return not isinstance(self.owner.texts[self.place], str)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A saved causal language model that continues texts."""

    loaded: LoadedModel
    long_prompts: str = ""
    """`CUT` or `REFUSE` for every prompt; empty: `CUT`, but as an API documents it on its route."""

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> Generator:
        """The causal language model that `origin` names.

        Raises:
            ValueError: AMPHORA_LONG_PROMPTS is neither cut nor refuse.
        """
        long_prompts = environ.get("AMPHORA_LONG_PROMPTS", "")
        if long_prompts not in ("", CUT, REFUSE):
            raise ValueError(f"AMPHORA_LONG_PROMPTS is {long_prompts!r}. Give {CUT} or {REFUSE}.")
        loaded = LoadedModel.load(origin, AutoModelForCausalLM)
        # What a long prompt says last is what is to be continued.
        loaded.tokenizer.truncation_side = "left"
        return cls(loaded=loaded, long_prompts=long_prompts)

    def example(self, text: str) -> Request:
        """A request that this task answers, at little cost."""
        return Request(texts=[text], parameters={"max_new_tokens": 2})

    @property
    def has_template(self) -> bool:
        """Whether conversations can be answered."""
        return bool(self.loaded.tokenizer.chat_template)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each prompt, and of what may be written after it.

        Raises:
            BadRequest: A parameter is not one of this task's, the model has no chat template for a
                conversation, or prompt and text do not fit into the model's positions.
        """
        return [len(prompt.ids) + prompt.new for prompt in self._prompts(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request its texts, in the form of pipelines and TGI (`shapes`), or, if it has a
        `form` of its own, as `Completion`; with `stream` an iterator over events. Texts of equal
        settings are generated together."""
        prompts = [
            prompt
            for request in requests
            if not request.streams
            for prompt in self._prompts(request)
        ]
        written: dict[tuple[int, int], list[Completion]] = {}
        for group in _groups(prompts):
            for prompt, texts in zip(group, self._generate(group, follows=False), strict=True):
                written[id(prompt.owner), prompt.place] = texts
        answers = []
        for request in requests:
            answer: Any
            if request.streams:
                answer = self._events(request)
            else:
                own = [written[id(request), place] for place in range(len(request.texts))]
                answer = Answers(own, request.truncated, request.single)
            answers.append(shapes.shaped(answer, request) if request.form is None else answer)
        return answers

    def _prompts(self, request: Request) -> list[Prompt]:
        """The request's prompts, which are made once and kept with it."""
        if request.prepared is None:
            settings = request.settings
            if settings is None:
                settings = options.settings_of(request.parameters, self.long_prompts or CUT)
            elif self.long_prompts:
                settings = replace(settings, long_prompts=self.long_prompts)
            if request.streams and request.settings is None:
                if len(request.texts) != 1:
                    raise BadRequest(f"{len(request.texts)} texts cannot be streamed. Send one.")
                if settings.sequences > 1:
                    raise BadRequest(
                        "Only one text can be streamed, and num_return_sequences is more."
                    )
            if settings.num_beams > 1 and request.streams:
                raise BadRequest(
                    "Beams are known when all is written: num_beams cannot be streamed."
                )
            size = self.loaded.model.get_input_embeddings().num_embeddings
            if unknown := [token for token, _ in settings.logit_bias if token >= size]:
                raise BadRequest(f"logit_bias names {unknown}, and the model has {size} tokens.")
            request.read(a_prompt, self.loaded.columns)
            cut: list[int] = []
            request.prepared = [
                self._prompt(request, place, settings, cut) for place in range(len(request.texts))
            ]
            request.token_ids = [prompt.ids for prompt in request.prepared]
            request.truncated = cut
        prompts: list[Prompt] = request.prepared
        return prompts

    def _prompt(
        self, request: Request, place: int, settings: GenerationSettings, cut: list[int]
    ) -> Prompt:
        """A request's prompt in tokens, the text of a conversation made by the chat template; its
        place is added to `cut` if it is too long as a whole.

        Raises:
            BadRequest: It cannot be made, or does not fit.
        """
        tokenizer: Any = self.loaded.tokenizer
        source = request.texts[place]
        specials = isinstance(source, str)
        if not specials:
            if not self.has_template:
                raise NoTemplate(
                    "The model's tokenizer has no chat template, so that it cannot be told who says"
                    " what. Send a prompt, or save a chat template with the model."
                )
            # As pipelines do, and OpenAI's API does not: what the assistant has begun is continued.
            continues = request.form is None and source[-1]["role"] == "assistant"
            try:
                source = str(
                    tokenizer.apply_chat_template(
                        [dict(message) for message in source], tokenize=False,
                        add_generation_prompt=not continues, continue_final_message=continues,
                    )
                )  # fmt: skip
            except (TemplateError, TypeError, ValueError) as error:
                raise BadRequest(
                    f"The model's chat template refuses the messages: {error}"
                ) from error
        # Of megabytes only the end can count.
        tail = ending(tokenizer, source, self.loaded.max_length)
        ids = tokenizer(tail, add_special_tokens=specials, verbose=False)["input_ids"]
        if not ids:
            if tokenizer.bos_token_id is None:
                raise BadRequest("A prompt is empty, and the model has no token to begin with.")
            ids = [tokenizer.bos_token_id]
        kept, new = self._fit(len(ids), settings, is_whole=tail is source)
        if kept < len(ids):
            cut.append(place)
            limits = {"truncation": True, "max_length": kept, "add_special_tokens": specials}
            ids = tokenizer(tail, verbose=False, **limits)["input_ids"]
        return Prompt(request, place, ids, settings, new)

    def _fit(self, length: int, settings: GenerationSettings, *, is_whole: bool) -> tuple[int, int]:
        """How many tokens of a prompt are kept, counted from its end, and how many may follow.

        What is to follow never takes more than half of the positions from a prompt.
        """
        limit = self.loaded.max_length
        if settings.truncate is not None:
            length, is_whole = min(length, settings.truncate), True
        new_tokens = settings.max_new_tokens
        if new_tokens is None and settings.max_length is not None:
            new_tokens = settings.max_length - length
            if new_tokens < 1 and length < limit:
                raise TooLong(
                    f"max_length is {settings.max_length}, and the prompt has {length} tokens"
                    " already. Give max_new_tokens instead."
                )
        cuts = settings.long_prompts == CUT
        least = min(options.DEFAULT_NEW_TOKENS, limit // 2) if cuts else 1
        new = new_tokens
        if new is None:
            new = min(settings.default_new_tokens, max(limit - length, least))
        if length + new <= limit:
            return length, max(new, 1)
        if not cuts or new > limit // 2:
            more = "" if is_whole else "more than "
            room = f"at most {limit - length} can follow" if length < limit else "none can follow"
            advice = ""
            if not cuts and new <= limit // 2:
                advice = ", or let AMPHORA_LONG_PROMPTS=cut cut prompts on the left"
            wish = "" if new_tokens is None else f" {new} are to follow,"
            raise TooLong(
                f"The prompt has {more}{length} tokens,{wish} and the model has"
                f" {limit} positions: {room}. Shorten the prompt or ask for less{advice}."
            )
        return limit - max(new, 1), max(new, 1)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        *,
        follows: bool,
        tell: Callable[[Completion, str], None] | None = None,
        start: Callable[[Watch], None] | None = None,
    ) -> list[list[Completion]]:
        """The texts of prompts with equal settings and lengths, each prompt's in a list.

        Args:
            prompts: They are continued together.
            follows: Whether the tokens' own texts are wanted.
            tell: Called for each token with its text so far, and what the token adds.
            start: Called once with what ends the generation early.
        """
        settings = prompts[0].settings
        model: Any = self.loaded.model
        ends = self._ends(prompts[0])
        texts = [
            [Completion(prompt.place, place) for place in range(settings.sequences)]
            for prompt in prompts
        ]
        follows = follows or settings.logprobs is not None
        writers = [
            Writer(text, self.loaded.tokenizer, ends, follows) for own in texts for text in own
        ]
        inputs = self._inputs([prompt.ids for prompt in prompts])
        length = inputs["input_ids"].shape[1]
        notes = Notes() if settings.logprobs is not None else None
        penalties = Penalties(
            length, settings.frequency_penalty, settings.presence_penalty, settings.logit_bias
        )
        watch = Watch(writers, notes, settings.logprobs or 0, tell)
        if start is not None:
            start(watch)
        if settings.do_sample:
            # Forks of one process would otherwise all draw the same.
            torch.seed() if settings.seed is None else torch.manual_seed(settings.seed)
        has_beams = settings.num_beams > 1
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                **settings.options(),
                max_new_tokens=prompts[0].new,
                eos_token_id=sorted(ends.ids) or None,
                pad_token_id=self.pad_token_id,
                logits_processor=LogitsProcessorList([penalties, *([notes] if notes else [])]),
                # Beams change their places with every token: they are read in the end.
                stopping_criteria=StoppingCriteriaList([] if has_beams else [watch]),
            )
        if has_beams:
            for writer, ids in zip(writers, output[:, length:].tolist(), strict=True):
                for number in ids:
                    if not writer.written.finish:
                        writer.take(number)
        for writer in writers:
            writer.end()
        return texts

    def _ends(self, prompt: Prompt) -> Ends:
        """What ends the texts of a prompt."""
        model: Any = self.loaded.model
        configured = model.generation_config.eos_token_id
        tokens = [self.loaded.tokenizer.eos_token_id]
        if configured is not None:
            listed = configured if isinstance(configured, list) else [configured]
            # Chat models often end their turns with a token that only their tokenizer names.
            tokens = [*listed, *(tokens if prompt.is_chat else [])]
        return Ends(
            ids=frozenset(number for number in tokens if number is not None),
            stop=prompt.settings.stop,
            most=prompt.new,
        )

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's; if it has none, a token that the mask hides."""
        tokenizer = self.loaded.tokenizer
        known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return int(next(number for number in known if number is not None))

    def _inputs(self, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Padded on the left, so that what is written follows each prompt."""
        longest = max(map(len, prompts))
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        padded = [[self.pad_token_id] * (longest - len(ids)) + ids for ids in prompts]
        target = self.loaded.model.device
        return {
            "input_ids": torch.tensor(padded, device=target),
            "attention_mask": torch.tensor(mask, device=target),
        }

    def _events(self, request: Request) -> Iterator[Event]:
        """The request's texts, token by token as they are generated.

        Its thread computes while the next token is waited for, and not otherwise: what is drawn
        does not depend on other requests at work, and nothing is computed ahead of a slow reader.
        """
        prompts = self._prompts(request)
        queue: Queue[Event | BaseException | None] = Queue()
        is_asked, is_left = Semaphore(0), False
        watches: list[Watch] = []
        devices = [self.loaded.model.device] if self.loaded.model.device.type == "cuda" else []

        def tell(written: Completion, text: str) -> None:
            if is_left:
                return
            finished = written if written.finish else None
            event = Event(written.prompt, written.place, written.tokens[-1], text, finished)
            queue.put(event)
            with torch.random.fork_rng(devices):
                is_asked.acquire()

        def generate() -> None:
            try:
                for group in _groups(prompts):
                    if not is_left:
                        self._generate(group, follows=True, tell=tell, start=watches.append)
            except BaseException as error:
                queue.put(error)
            else:
                queue.put(None)

        thread = Thread(target=generate, daemon=True)  # a reader may never come back
        thread.start()
        try:
            while (event := queue.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
                is_asked.release()
        finally:
            # The reader may have left before the end.
            is_left = True
            for watch in watches:
                watch.is_left.set()
            is_asked.release()
            thread.join()


def a_prompt(value: Any) -> Any:
    """A text, or a conversation: a list of `{"role", "content"}`, its contents made texts.

    Raises:
        BadRequest: It is neither.
    """
    if not is_conversation(value):
        return a_text(value)
    messages = []
    for message in value:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [
            part.get("text")
            for part in parts
            if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise BadRequest(
                "The content of a message must be a text, or a list of"
                ' {"type": "text", "text": "..."}: this model reads neither images nor sounds.'
            )
        messages.append({**message, "content": "\n".join(map(str, texts))})
    return messages


def _groups(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts that can be continued together, in their order."""
    alike: dict[Any, list[Prompt]] = {}
    for prompt in prompts:
        settings = prompt.settings
        key: list[Any] = [settings, prompt.new, prompt.is_chat]
        if settings.looks_back:
            key.append(len(prompt.ids))
        if settings.seed is not None:
            # What is drawn for one depends on what is drawn beside it.
            key.append(id(prompt.owner))
        alike.setdefault(tuple(key), []).append(prompt)
    for group in alike.values():
        rows = max(group[0].settings.sequences, group[0].settings.num_beams)
        size = max(1, loaded_model.BATCH // rows)
        for start in range(0, len(group), size):
            yield group[start : start + size]
