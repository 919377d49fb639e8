"""Fill-mask: the likeliest tokens in the place of each mask of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForMaskedLM

from recipe.backend import bounds, loaded_model, loading, pipelines, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, BadRequest, Prepared, Request, a_text
from recipe.backend.rows import Reading
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.tasks.masked_lm.spec import SPECS

PARAMETERS = {"top_k", "targets"} | loaded_model.PARAMETERS
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class MaskFiller(ServedTask):
    """A saved masked language model that answers texts with a mask in them."""

    served = SPECS[0].served["fill-mask"]
    loaded: LoadedModel
    pipeline: Any
    """transformers' pipeline, which converts targets to tokens."""

    @classmethod
    def load(cls, origin: Origin) -> MaskFiller:
        """Return the masked language model that `origin` names.

        Raises:
            ModelError: It cannot be loaded, or its tokenizer has no mask.
        """
        loaded = loading.load(origin, AutoModelForMaskedLM)
        if loaded.tokenizer.mask_token_id is None:
            raise ModelError(
                f"The tokenizer of {origin.location} has no mask token.",
                "Name another task in HF_TASK, or save the tokenizer that the model was trained "
                "with.",
            )
        return cls(loaded=loaded, pipeline=pipelines.wrap_pipeline("fill-mask", loaded))

    def example(self, text: str) -> Request:
        return Request(inputs=[f"{self.loaded.tokenizer.mask_token} {text}"])

    def describe(self) -> dict[str, Any]:
        example = f"Paris is the {self.loaded.tokenizer.mask_token} of France."
        return super().describe() | {"example_text": example}

    def prepare(self, request: Request) -> Prepared:
        request = request.checked(PARAMETERS, "fill-mask")
        mask = self.loaded.tokenizer.mask_token_id
        prepared = self.loaded.encode(request, request.read(a_text, self.loaded.columns))
        rows = [
            replace(row, keep=[index for index, token in enumerate(row.ids) if token == mask])
            for row in prepared.work
        ]
        for position, row in enumerate(rows):
            if not row.keep:
                raise BadRequest(
                    f"Input {position + 1} has no {self.loaded.tokenizer.mask_token} among its "
                    f"first {self.loaded.max_length} tokens. Write it where a word is missing."
                )
        targets = None
        if "targets" in request.parameters:
            named = request.parameters["targets"]
            named = [named] if isinstance(named, str) else named
            bounds.hold(Bound.ROWS, len(named), f"{len(named):,} targets")
            tokens: set[int] = set()
            for piece in bounds.pieces(named):
                some = named[piece.start : piece.stop]
                bounds.hold_text(*some)
                try:
                    tokens.update(map(int, self.pipeline.get_target_ids(some)))
                except ValueError as error:
                    if "At least one target" not in str(error):
                        raise
            if not tokens:
                raise BadRequest("targets: the model has no token for any of them.")
            targets = list(tokens)
        choices = len(self.loaded.tokenizer) if targets is None else len(targets)
        count = min(request.parameters.get("top_k", _TOP_K), choices)
        # Each entry repeats the whole text, which is decoded anew for it.
        filled = [len(row.keep) * count for row in rows]
        values = sum(n * (3 + len(row.ids)) for n, row in zip(filled, rows, strict=True))
        reason = f"{sum(filled):,} tokens for masks, each in its whole text"
        bounds.hold(Bound.ANSWER, values, reason)
        sizes = [len(row.ids) + n for n, row in zip(filled, rows, strict=True)]
        return replace(prepared, sizes=sizes, work=(rows, targets))

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return for each request the best tokens for each text: `score` (a probability), `token`,
        `token_str` and the `sequence` with it; of several masks a list for each."""
        rows = [row for prepared in requests for row in prepared.work[0]]
        logits = iter(self.loaded.forward(rows, Reading.TOKENS))
        tokenizer: Any = self.loaded.tokenizer
        answers: list[Any] = []
        for prepared in requests:
            rows, targets = prepared.work
            entries: list[Any] = []
            for row in rows:
                scores = next(logits).softmax(-1)  # [masks, vocabulary]
                if targets is not None:
                    scores = scores[:, targets]
                count = min(prepared.parameters.get("top_k", _TOP_K), scores.shape[-1])
                best = [part.tolist() for part in scores.topk(count)]
                filled: list[list[dict[str, Any]]] = []
                for position, values, numbers in zip(row.keep, *best, strict=True):
                    filled.append([])
                    for score, number in zip(values, numbers, strict=True):
                        turns.pause()
                        token = targets[number] if targets is not None else number
                        ids = [*row.ids[:position], token, *row.ids[position + 1 :]]
                        # If there are several masks, the others stay visible.
                        sequence = tokenizer.decode(ids, skip_special_tokens=len(row.keep) == 1)
                        text = {"token": token, "token_str": tokenizer.decode([token])}
                        filled[-1].append({"score": score, **text, "sequence": sequence})
                entries.append(filled[0] if len(filled) == 1 else filled)
            # transformers' pipeline answers a list of one text as that text.
            single = len(entries) == 1 and not prepared.request.records
            answers.append(Answers(entries, prepared.truncated, single))
        return answers
