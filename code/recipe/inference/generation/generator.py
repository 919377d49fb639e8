"""Text generation, whole or piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from threading import Thread
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteriaList

from recipe.inference import loaded_model
from recipe.inference.generation import options, shapes
from recipe.inference.generation.decoding import (
    Ends,
    Event,
    Notes,
    Penalties,
    Watch,
    Writer,
    Written,
)
from recipe.inference.generation.options import CUT, REFUSE, Settings
from recipe.inference.loaded_model import Encoder
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
class _Prompt:
    """A prompt of a request, ready to be gone on with."""

    owner: Request
    place: int
    ids: list[int]
    settings: Settings
    new: int
    """The most tokens to generate."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return not isinstance(self.owner.texts[self.place], str)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A saved causal language model that goes on with texts."""

    encoder: Encoder
    long_prompts: str = ""
    """`CUT` or `REFUSE` for every prompt; empty: `CUT`, but as an API documents it on its route."""

    def example(self, text: str) -> Request:
        """A request that this task answers, at little cost."""
        return Request(texts=[text], parameters={"max_new_tokens": 2})

    @property
    def has_template(self) -> bool:
        """Whether conversations can be answered."""
        return bool(self.encoder.tokenizer.chat_template)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each prompt, and of what may be written after it.

        Raises:
            BadRequest: a parameter is none of this task's, the model has no chat template for a
                conversation, or prompt and text do not fit into the model's positions.
        """
        return [len(prompt.ids) + prompt.new for prompt in self._prompts(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request its texts, in the form of pipelines and TGI (`shapes`), or, where
        it has a `form` of its own, as `Written`; with `stream` an iterator over events. Texts of
        equal settings are generated together."""
        whole = [request for request in requests if not _streams(request)]
        written = self._whole([each for request in whole for each in self._prompts(request)])
        answers = []
        for request in requests:
            answer: Any = self._events(request) if _streams(request) else written[id(request)]
            if request.form is None:
                answer = shapes.shaped(answer, request)
            answers.append(answer)
        return answers

    def _prompts(self, request: Request) -> list[_Prompt]:
        """The request's prompts, which are made once and kept with it."""
        if request.prepared is None:
            settings = request.settings
            if settings is None:
                settings = options.read(request.parameters, self.long_prompts or CUT)
            elif self.long_prompts:
                settings = replace(settings, long_prompts=self.long_prompts)
            if _streams(request) and len(request.texts) != 1 and request.settings is None:
                raise BadRequest(f"{len(request.texts)} texts cannot be streamed. Send one.")
            if settings.sequences > 1 and _streams(request) and request.settings is None:
                raise BadRequest("Only one text can be streamed, and num_return_sequences is more.")
            if settings.num_beams > 1 and _streams(request):
                raise BadRequest(
                    "Beams are known when all is written: num_beams cannot be streamed."
                )
            size = self.encoder.model.get_input_embeddings().num_embeddings
            if lost := [number for number, _ in settings.logit_bias if number >= size]:
                raise BadRequest(f"logit_bias names {lost}, and the model has {size} tokens.")
            request.read(a_prompt)
            cut: list[int] = []
            request.prepared = [
                self._prompt(request, place, text, settings, cut)
                for place, text in enumerate(request.texts)
            ]
            request.token_ids = [prompt.ids for prompt in request.prepared]
            request.truncated = cut
        prompts: list[_Prompt] = request.prepared
        return prompts

    def _prompt(
        self, request: Request, place: int, text: Any, settings: Settings, cut: list[int]
    ) -> _Prompt:
        tokenizer: Any = self.encoder.tokenizer
        specials = isinstance(text, str)
        # As pipelines do, and OpenAI's API does not: what the assistant has begun is gone on with.
        begun = not specials and request.form is None and text[-1]["role"] == "assistant"
        source = text if specials else self._conversation(text, begun)
        # Of megabytes only the end can count.
        tail = ending(tokenizer, source, self.encoder.max_length)
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
        return _Prompt(request, place, ids, settings, new)

    def _conversation(self, messages: Sequence[Mapping[str, Any]], begun: bool) -> str:
        tokenizer: Any = self.encoder.tokenizer
        if not self.has_template:
            raise NoTemplate(
                "The model's tokenizer has no chat template, so that it cannot be told who says"
                " what. Send a prompt, or save a chat template with the model."
            )
        try:
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False,
                    add_generation_prompt=not begun, continue_final_message=begun,
                )
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"The model's chat template refuses the messages: {error}") from error

    def _fit(self, length: int, settings: Settings, *, is_whole: bool) -> tuple[int, int]:
        """How many tokens of a prompt are kept, counted from its end, and how many may follow.

        What is to follow never takes more than half of the positions from a prompt.
        """
        limit = self.encoder.max_length
        if settings.truncate is not None:
            length, is_whole = min(length, settings.truncate), True
        asked = settings.max_new_tokens
        if asked is None and settings.max_length is not None:
            asked = settings.max_length - length
            if asked < 1 and length < limit:
                raise TooLong(
                    f"max_length is {settings.max_length}, and the prompt has {length} tokens"
                    " already. Give max_new_tokens instead."
                )
        cuts = settings.long_prompts == CUT
        least = min(options.DEFAULT_NEW_TOKENS, limit // 2) if cuts else 1
        new = (
            min(settings.default_new_tokens, max(limit - length, least)) if asked is None else asked
        )
        if length + new <= limit:
            return length, max(new, 1)
        if not cuts or new > limit // 2:
            more = "" if is_whole else "more than "
            room = f"at most {limit - length} can follow" if length < limit else "none can follow"
            would_help = not cuts and new <= limit // 2
            advice = (
                ", or let AMPHORA_LONG_PROMPTS=cut cut prompts on the left" if would_help else ""
            )
            wish = "" if asked is None else f" {new} are to follow,"
            raise TooLong(
                f"The prompt has {more}{length} tokens,{wish} and the model has"
                f" {limit} positions: {room}. Shorten the prompt or ask for less{advice}."
            )
        return limit - max(new, 1), max(new, 1)

    def _whole(self, prompts: Sequence[_Prompt]) -> dict[int, Answers]:
        """By request, for each prompt its texts."""
        answers: dict[int, list[list[Written]]] = {}
        for prompt in prompts:
            answers.setdefault(id(prompt.owner), []).append([])
        for group in _groups(prompts):
            for prompt, texts in zip(group, self._generate(group, follows=False), strict=True):
                answers[id(prompt.owner)][prompt.place] = texts
        owners = {id(prompt.owner): prompt.owner for prompt in prompts}
        return {
            key: Answers(texts, owners[key].truncated, owners[key].single)
            for key, texts in answers.items()
        }

    def _generate(
        self,
        prompts: Sequence[_Prompt],
        *,
        follows: bool,
        tell: Callable[[Written, str], None] | None = None,
        start: Callable[[Watch], None] | None = None,
    ) -> list[list[Written]]:
        """The texts of prompts with equal settings and lengths, each prompt's in a list.

        Args:
            prompts: They are gone on with together.
            follows: Whether the tokens' own texts are wanted.
            tell: Called for each token with its text so far, and what the token adds.
            start: Called once with what ends the generation early.
        """
        settings, model = prompts[0].settings, self.encoder.model
        inputs = self._inputs([prompt.ids for prompt in prompts])
        length = inputs["input_ids"].shape[1]
        generator: Any = model
        configured = generator.generation_config.eos_token_id
        # Chat models often end their turns with a token that only their tokenizer names.
        own = [self.encoder.tokenizer.eos_token_id]
        if configured is not None:
            chats = prompts[0].is_chat
            listed = configured if isinstance(configured, list) else [configured]
            own = [*listed, *(own if chats else [])]
        ends = Ends(
            ids=frozenset(number for number in own if number is not None),
            stop=settings.stop,
            most=prompts[0].new,
        )
        texts = [
            [Written(prompt.place, place) for place in range(settings.sequences)]
            for prompt in prompts
        ]
        follows = follows or settings.logprobs is not None
        writers = [
            Writer(text, self.encoder.tokenizer, ends, follows) for each in texts for text in each
        ]
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
        is_beams = settings.num_beams > 1
        with torch.inference_mode():
            output = generator.generate(
                **inputs,
                **settings.options(),
                max_new_tokens=prompts[0].new,
                eos_token_id=sorted(ends.ids) or None,
                pad_token_id=self._pad,
                logits_processor=LogitsProcessorList([penalties, *([notes] if notes else [])]),
                # Beams change their places with every token: they are read in the end.
                stopping_criteria=StoppingCriteriaList([] if is_beams else [watch]),
            )
        if is_beams:
            for writer, ids in zip(writers, output[:, length:].tolist(), strict=True):
                for number in ids:
                    if not writer.written.finish:
                        writer.take(number)
        for writer in writers:
            writer.end()
        return texts

    @property
    def _pad(self) -> int:
        tokenizer = self.encoder.tokenizer
        known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return int(next(number for number in known if number is not None))

    def _inputs(self, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Padded on the left, so that what is written follows each prompt."""
        longest = max(map(len, prompts))
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        padded = [[self._pad] * (longest - len(ids)) + ids for ids in prompts]
        where = self.encoder.model.device
        return {
            "input_ids": torch.tensor(padded, device=where),
            "attention_mask": torch.tensor(mask, device=where),
        }

    def _events(self, request: Request) -> Iterator[Event]:
        """The request's texts, token by token as they are generated."""
        prompts = self._prompts(request)
        queue: Queue[Event | BaseException | None] = Queue()
        watches: list[Watch] = []

        def tell(written: Written, text: str) -> None:
            finished = written if written.finish else None
            event = Event(written.prompt, written.place, written.tokens[-1], text, finished)
            queue.put(event)

        def generate() -> None:
            try:
                for group in _groups(prompts):
                    if not any(watch.is_left.is_set() for watch in watches):
                        self._generate(group, follows=True, tell=tell, start=watches.append)
            except BaseException as error:
                queue.put(error)
            else:
                queue.put(None)

        thread = Thread(target=generate)
        thread.start()
        try:
            while (event := queue.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            # The reader may have left before the end.
            for watch in watches:
                watch.is_left.set()
            thread.join()


def _streams(request: Request) -> bool:
    return bool(request.parameters.get("stream"))


def a_prompt(value: Any) -> Any:
    """A text, or a conversation: a list of `{"role", "content"}`, its contents made texts.

    Raises:
        BadRequest: it is neither.
    """
    if not is_conversation(value):
        return a_text(value)
    return [{**message, "content": _content(message["content"])} for message in value]


def _content(value: Any) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and _is_text(part)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(
            "The content of a message must be a text, or a list of"
            ' {"type": "text", "text": "..."}: this model reads neither images nor sounds.'
        )
    return "\n".join(map(str, texts))


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text"


def _groups(prompts: Sequence[_Prompt]) -> Iterator[list[_Prompt]]:
    """Prompts that can be gone on with together, in their order."""
    alike: dict[Any, list[_Prompt]] = {}
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


def load(origin: Origin, environ: Mapping[str, str] = os.environ) -> Generator:
    """The causal language model that `origin` names.

    Raises:
        ValueError: AMPHORA_LONG_PROMPTS is neither cut nor refuse.
    """
    long_prompts = environ.get("AMPHORA_LONG_PROMPTS", "")
    if long_prompts not in ("", CUT, REFUSE):
        raise ValueError(f"AMPHORA_LONG_PROMPTS is {long_prompts!r}. Give {CUT} or {REFUSE}.")
    loaded = loaded_model.load(origin, AutoModelForCausalLM)
    # What a long prompt says last is what is to be gone on with.
    loaded.tokenizer.truncation_side = "left"
    return Generator(encoder=loaded, long_prompts=long_prompts)
