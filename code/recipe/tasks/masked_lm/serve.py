"""Fill-mask: the likeliest tokens in the place of each mask of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from recipe.backend import bounds, loaded_model, loading, pipelines, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, BadRequest, Request, a_text
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError

PARAMETERS = {"top_k", "targets", "tokenizer_kwargs"} | loaded_model.PARAMETERS
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class MaskFiller(ServedTask):
    """A saved masked language model that answers texts with a mask in them."""

    loaded: LoadedModel
    pipeline: Any
    """transformers' own, which knows how targets become tokens."""

    @classmethod
    def load(cls, origin: Origin) -> MaskFiller:
        """Return the masked language model that `origin` names.

        Raises:
            ModelError: It cannot be loaded, or its tokenizer has no mask.
        """
        loaded = loading.load(origin, AutoModelForMaskedLM)
        if loaded.tokenizer.mask_token_id is None:
            raise ModelError(
                f"The tokenizer of {origin.place} has no mask token.",
                "Name another task in HF_TASK, or save the tokenizer that the model was trained "
                "with.",
            )
        return cls(loaded=loaded, pipeline=pipelines.around("fill-mask", loaded))

    def example(self, text: str) -> Request:
        return Request(texts=[f"{self.loaded.tokenizer.mask_token} {text}"])

    def measure(self, request: Request) -> list[int]:
        if request.prepared is None:
            request.check_parameters(PARAMETERS, "fill-mask")
            nested = request.parameters.get("tokenizer_kwargs", {})
            request.parameters = {**nested, **request.parameters}
            request.check_parameters(PARAMETERS, "fill-mask")
            request.read(a_text, self.loaded.columns)
            mask = self.loaded.tokenizer.mask_token_id
            every = self.loaded.encode(request)
            rows = [
                TokenRow(ids, types, [place for place, token in enumerate(ids) if token == mask])
                for ids, types in zip(every, request.type_ids or [None] * len(every), strict=True)
            ]
            for place, row in enumerate(rows):
                if not row.keep:
                    raise BadRequest(
                        f"Input {place + 1} has no {self.loaded.tokenizer.mask_token} among its "
                        f"first {self.loaded.max_length} tokens. Write it where a word is missing."
                    )
            targets = None
            if "targets" in request.parameters:
                targets = self._targets(request.parameters["targets"])
            choices = len(self.loaded.tokenizer) if targets is None else len(targets)
            count = min(request.parameters.get("top_k", _TOP_K), choices)
            # The text stands in each entry, and is made of its tokens for each.
            filled = [len(row.keep or ()) * count for row in rows]
            values = sum(n * (3 + len(row.ids)) for n, row in zip(filled, rows, strict=True))
            reason = f"{sum(filled):,} tokens for masks, each in its whole text"
            bounds.hold(Bound.ANSWER, values, reason)
            sizes = [len(row.ids) + n for n, row in zip(filled, rows, strict=True)]
            request.prepared = rows, targets, sizes
        return list(request.prepared[2])

    def _targets(self, named: str | list[str]) -> list[int]:
        """Return the tokens that a request's `targets` stand for.

        Raises:
            BadRequest: The model has none for any of them.
        """
        targets = [named] if isinstance(named, str) else named
        bounds.hold(Bound.ROWS, len(targets), f"{len(targets):,} targets")
        tokens: set[int] = set()
        for piece in bounds.pieces(targets):
            some = targets[piece.start : piece.stop]
            bounds.hold_text(*some)
            try:
                tokens.update(map(int, self.pipeline.get_target_ids(some)))
            except ValueError as error:
                if "At least one target" not in str(error):
                    raise
        if not tokens:
            raise BadRequest("targets: the model has no token for any of them.")
        return list(tokens)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request the best tokens for each text: `score` (a probability), `token`,
        `token_str` and the `sequence` with it; of several masks a list for each."""
        for request in requests:
            self.measure(request)
        rows = [row for request in requests for row in request.prepared[0]]
        logits = iter(self.loaded.forward(rows, Reading.TOKENS))
        answers: list[Any] = []
        for request in requests:
            rows, targets, _ = request.prepared
            count = request.parameters.get("top_k", _TOP_K)
            entries = [self._fill(row, next(logits), targets, count) for row in rows]
            # transformers' pipeline answers a list of one text as that text.
            single = len(entries) == 1 and not request.records
            answers.append(Answers(entries, request.truncated, single))
        return answers

    def _fill(
        self, row: TokenRow, logits: torch.Tensor, targets: list[int] | None, count: int
    ) -> Any:
        """Return the likeliest tokens for the masks of one text.

        Args:
            row: The text, whose kept places are its masks.
            logits: Shape (masks, vocabulary).
            targets: Token ids to choose from; None means all.
            count: How many tokens for each mask.
        """
        tokenizer: Any = self.loaded.tokenizer
        masks = row.keep or []
        scores = logits.softmax(-1)
        if targets is not None:
            scores = scores[:, targets]
        top = scores.topk(min(count, scores.shape[-1]))
        filled = []
        for place, values, numbers in zip(
            masks, top.values.tolist(), top.indices.tolist(), strict=True
        ):
            entries = []
            for value, number in zip(values, numbers, strict=True):
                turns.pause()
                token = targets[number] if targets is not None else number
                ids = [*row.ids[:place], token, *row.ids[place + 1 :]]
                # Of several masks the others stay to be seen.
                sequence = tokenizer.decode(ids, skip_special_tokens=len(masks) == 1)
                text = {"token": token, "token_str": tokenizer.decode([token])}
                entries.append({"score": value, **text, "sequence": sequence})
            filled.append(entries)
        return filled[0] if len(masks) == 1 else filled
