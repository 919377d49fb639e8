"""Text generation, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from recipe import encoder
from recipe.encoder import Encoder, Origin
from recipe.wire import Answers, BadRequest, Request

PARAMETERS = {"max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "stream"}
_NEW_TOKENS = 64


class _Stopped(StoppingCriteria):
    def __init__(self) -> None:
        self.event = Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        done = self.event.is_set()
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A saved causal language model that goes on with texts."""

    encoder: Encoder
    warm_up: Mapping[str, Any] = field(default_factory=lambda: {"max_new_tokens": 2})

    def measure(self, request: Request) -> list[int]:
        """Tokens of each prompt, and of what may be written after it.

        Raises:
            BadRequest: a parameter is none of this task's, or several texts are to be streamed.
        """
        request.only(PARAMETERS, "text-generation")
        if request.parameters.get("stream") and len(request.texts) != 1:
            raise BadRequest(f"{len(request.texts)} texts cannot be streamed. Send one.")
        new = request.parameters.get("max_new_tokens", _NEW_TOKENS)
        if new >= self.encoder.max_length:
            raise BadRequest(
                f"max_new_tokens is {new}, and the model has {self.encoder.max_length} positions."
            )
        return [len(ids) + new for ids in self.encoder.encode(request, new)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request `{"generated_text": ...}` for each text, without the prompt; with
        `stream` an iterator over its pieces. Texts of different requests are not merged, since
        their parameters differ."""
        return [
            self._pieces(request)
            if request.parameters.get("stream")
            else Answers([self._whole(ids, request) for ids in self.encoder.encode(request)],
                         request.truncated)
            for request in requests
        ]  # fmt: skip

    def _options(self, request: Request) -> dict[str, Any]:
        options = {k: v for k, v in request.parameters.items() if k != "stream"}
        pad = self.encoder.tokenizer.pad_token_id
        if pad is None:
            pad = self.encoder.tokenizer.eos_token_id
        samples = bool({"temperature", "top_p", "top_k"} & set(options))
        return {
            "max_new_tokens": _NEW_TOKENS,
            "do_sample": samples,
            "pad_token_id": pad,
            **options,
        }

    def _inputs(self, ids: list[int]) -> dict[str, torch.Tensor]:
        prompt = torch.tensor([ids], device=self.encoder.model.device)
        return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}

    @torch.inference_mode()
    def _whole(self, ids: list[int], request: Request) -> dict[str, str]:
        model: Any = self.encoder.model
        output = model.generate(**self._inputs(ids), **self._options(request))
        text = self.encoder.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return {"generated_text": str(text)}

    def _pieces(self, request: Request) -> Iterator[str]:
        (ids,) = self.encoder.encode(request)
        streamer: Any = TextIteratorStreamer(
            self.encoder.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        stopped = _Stopped()
        failures: list[BaseException] = []

        def generate() -> None:
            model: Any = self.encoder.model
            try:
                with torch.inference_mode():
                    model.generate(
                        **self._inputs(ids),
                        **self._options(request),
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([stopped]),
                    )
            except BaseException as error:
                failures.append(error)
                streamer.end()

        thread = Thread(target=generate)
        thread.start()
        try:
            yield from (piece for piece in streamer if piece)
            if failures:
                raise failures[0]
        finally:
            # The reader may have left before the end.
            stopped.event.set()
            thread.join()


def load(origin: Origin) -> Generator:
    """The causal language model that `origin` names."""
    return Generator(encoder=encoder.load(origin, AutoModelForCausalLM))
