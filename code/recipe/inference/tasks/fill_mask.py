"""Fill-mask: the likeliest tokens in the place of each mask of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from recipe.errors import ModelError
from recipe.inference import loaded_model
from recipe.inference.loaded_model import Encoder, Row
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.inference.tasks import pipelines

PARAMETERS = {"top_k", "targets", "tokenizer_kwargs"} | loaded_model.PARAMETERS
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class MaskFiller:
    """A saved masked language model that answers texts with a mask in them."""

    encoder: Encoder
    pipeline: Any
    """transformers' own, which knows how targets become tokens."""

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[f"{self.encoder.tokenizer.mask_token} {text}"])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text.

        Raises:
            BadRequest: a parameter is none of this task's, or a text has no mask.
        """
        if request.prepared is None:
            request.only(PARAMETERS, "fill-mask")
            nested = request.parameters.get("tokenizer_kwargs", {})
            request.parameters = {**nested, **request.parameters}
            request.only(PARAMETERS, "fill-mask")
            request.read(a_text)
            mask = self.encoder.tokenizer.mask_token_id
            request.prepared = [
                Row(ids, keep=[n for n, each in enumerate(ids) if each == mask])
                for ids in self.encoder.encode(request)
            ]
            for place, row in enumerate(request.prepared):
                if not row.keep:
                    raise BadRequest(
                        f"Input {place + 1} has no {self.encoder.tokenizer.mask_token} among its "
                        f"first {self.encoder.max_length} tokens. Write it where a word is missing."
                    )
        return [len(row.ids) for row in request.prepared]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request the best tokens for each text: `score` (a probability), `token`,
        `token_str` and the `sequence` with it; of several masks a list for each."""
        for request in requests:
            self.measure(request)
        rows = [row for request in requests for row in request.prepared]
        logits = iter(self.encoder.forward(rows, lambda output, mask: list(output.logits)))
        answers: list[Any] = []
        for request in requests:
            targets = self._targets(request)
            best = request.parameters.get("top_k", _TOP_K)
            entries = [self._fill(row, next(logits), targets, best) for row in request.prepared]
            # transformers' pipeline answers a list of one text as that text.
            single = len(entries) == 1 and not request.records
            answers.append(Answers(entries, request.truncated, single))
        return answers

    def _targets(self, request: Request) -> list[int] | None:
        if "targets" not in request.parameters:
            return None
        try:
            return [
                int(each) for each in self.pipeline.get_target_ids(request.parameters["targets"])
            ]
        except ValueError as error:
            raise BadRequest(f"targets: the model has no token for any of them: {error}") from error

    def _fill(self, row: Row, logits: torch.Tensor, targets: list[int] | None, best: int) -> Any:
        tokenizer: Any = self.encoder.tokenizer
        scores = logits.softmax(-1)
        if targets is not None:
            scores = scores[:, targets]
        top = scores.topk(min(best, scores.shape[-1]))
        alone = len(row.keep or ()) == 1
        filled = []
        for place, values, numbers in zip(
            row.keep or (), top.values.tolist(), top.indices.tolist(), strict=True
        ):
            entries = []
            for value, number in zip(values, numbers, strict=True):
                token = targets[number] if targets is not None else number
                ids = [*row.ids[:place], token, *row.ids[place + 1 :]]
                # Of several masks the others stay to be seen.
                sequence = tokenizer.decode(ids, skip_special_tokens=alone)
                text = {"token": token, "token_str": tokenizer.decode([token])}
                entries.append({"score": value, **text, "sequence": sequence})
            filled.append(entries)
        return filled[0] if alone else filled


def load(origin: Origin) -> MaskFiller:
    """The masked language model that `origin` names.

    Raises:
        ModelError: its tokenizer has no mask.
    """
    loaded = loaded_model.load(origin, AutoModelForMaskedLM)
    if loaded.tokenizer.mask_token_id is None:
        raise ModelError(
            f"The tokenizer of {origin.place} has no mask token.",
            "Name another task in HF_TASK, or save the tokenizer that the model was trained with.",
        )
    return MaskFiller(encoder=loaded, pipeline=pipelines.around("fill-mask", loaded))
