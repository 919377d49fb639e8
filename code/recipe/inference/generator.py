"""Text generation, whole or piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import Encoder
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text

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

    def example(self, text: str) -> Request:
        """A request that this task answers, at little cost."""
        return Request(texts=[text], parameters={"max_new_tokens": 2})

    def measure(self, request: Request) -> list[int]:
        """Tokens of each prompt, and of what may be written after it.

        Raises:
            BadRequest: a parameter is none of this task's, or several texts are to be streamed.
        """
        request.only(PARAMETERS, "text-generation")
        request.read(a_text)
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
        `stream` an iterator over its pieces. Texts of equal parameters are generated together."""
        whole = [request for request in requests if not request.parameters.get("stream")]
        texts = iter(self._texts(whole))
        return [
            self._pieces(request)
            if request.parameters.get("stream")
            else Answers([{"generated_text": next(texts)} for _ in request.texts],
                         request.truncated)
            for request in requests
        ]  # fmt: skip

    def _texts(self, requests: Sequence[Request]) -> list[str]:
        prompts = [(ids, request) for request in requests for ids in self.encoder.encode(request)]
        alike: dict[str, list[int]] = {}
        for place, (_, request) in enumerate(prompts):
            alike.setdefault(json.dumps(request.parameters, sort_keys=True), []).append(place)
        texts = [""] * len(prompts)
        for equal in alike.values():
            for start in range(0, len(equal), encoder.BATCH):
                places = equal[start : start + encoder.BATCH]
                ids, request = [prompts[place][0] for place in places], prompts[places[0]][1]
                for place, text in zip(places, self._whole(ids, request), strict=True):
                    texts[place] = text
        return texts

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

    def _inputs(self, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Padded on the left, so that what is written follows each prompt."""
        longest = max(map(len, prompts))
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
        where = self.encoder.model.device
        return {
            "input_ids": torch.tensor(padded, device=where),
            "attention_mask": torch.tensor(mask, device=where),
        }

    @torch.inference_mode()
    def _whole(self, prompts: Sequence[list[int]], request: Request) -> list[str]:
        model: Any = self.encoder.model
        inputs = self._inputs(prompts)
        output = model.generate(**inputs, **self._options(request))
        new = output[:, inputs["input_ids"].shape[1] :]
        return [str(self.encoder.tokenizer.decode(ids, skip_special_tokens=True)) for ids in new]

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
                        **self._inputs([ids]),
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
