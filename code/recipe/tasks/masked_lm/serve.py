"""Fill-mask: the likeliest tokens in the place of each mask of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from recipe.backend import bounds, loaded_model, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.rows import Reading
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.models.sources.origin import Origin
from recipe.tasks.masked_lm.spec import SPECS

PARAMETERS = {"top_k", "targets"} | loaded_model.PARAMETERS
_TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class MaskFiller(ServedTask):
    """A saved masked language model that answers texts with a mask in them."""

    served = SPECS[0].served["fill-mask"]
    loaded: LoadedModel

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
        return cls(loaded=loaded)

    def example(self, text: str) -> Request:
        return Request(inputs=[f"{self.loaded.tokenizer.mask_token} {text}"])

    def describe(self) -> dict[str, Any]:
        example = f"Paris is the {self.loaded.tokenizer.mask_token} of France."
        return super().describe() | {"example_text": example}

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS, "fill-mask")
        mask = self.loaded.tokenizer.mask_token_id
        prepared = self.loaded.encode(request, request.read(a_text), needed=mask)
        rows = [
            replace(row, keep=[index for index, token in enumerate(row.ids) if token == mask])
            for row in prepared.work
        ]
        targets = self._targets(request.parameters)
        most = len(self.loaded.tokenizer) if targets is None else len(targets)
        count = min(request.parameters.get("top_k", _TOP_K), most)
        # Each entry repeats the whole text, which is decoded anew for it.
        filled = [len(row.keep) * count for row in rows]
        values = sum(n * (3 + len(row.ids)) for n, row in zip(filled, rows, strict=True))
        reason = f"{sum(filled):,} tokens for masks, each in its whole text"
        bounds.hold(Bound.ANSWER, values, reason)
        sizes = [len(row.ids) + n for n, row in zip(filled, rows, strict=True)]
        return replace(prepared, sizes=sizes, work=rows)

    def _targets(self, parameters: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens that a request compares; None for all. Raise BadRequest for a target
        that is not one token: transformers' pipeline would answer its first token."""
        named = parameters.get("targets")
        if named is None:
            return None
        tokenizer: Any = self.loaded.tokenizer
        ids: dict[int, None] = {}
        for target in [named] if isinstance(named, str) else named:
            token = tokenizer.convert_tokens_to_ids(target)
            if token is None or (token == tokenizer.unk_token_id and target != tokenizer.unk_token):
                pieces = tokenizer(target, add_special_tokens=False)["input_ids"]
                if len(pieces) != 1 or pieces[0] == tokenizer.unk_token_id:
                    shown = ", ".join(tokenizer.convert_ids_to_tokens(pieces)) or "none"
                    raise BadRequest(
                        f"The target {target[:60]!r} is not one token of the model, but {shown}. "
                        "Give targets of one token.",
                        "targets",
                    )
                token = pieces[0]
            ids[token] = None
        return list(ids)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request the best tokens for each text: `score` (a probability), `token`,
        `token_str` and the `sequence` with it; of several masks a list for each."""
        tokenizer: Any = self.loaded.tokenizer
        answers: list[Any] = []
        logits_of_requests = self.loaded.rows(requests, Reading.TOKENS)
        for prepared, rows in zip(requests, logits_of_requests, strict=True):
            entries: list[Any] = []
            targets = self._targets(prepared.parameters)
            for row, logits in zip(prepared.work, rows, strict=True):
                scores = logits.softmax(-1)  # [masks, vocabulary]
                if targets is not None:
                    scores = scores[:, targets]
                best = scores.topk(min(prepared.parameters.get("top_k", _TOP_K), scores.shape[-1]))
                filled: list[list[dict[str, Any]]] = []
                for position, values, tokens in zip(
                    row.keep, *map(torch.Tensor.tolist, best), strict=True
                ):
                    filled.append([])
                    for score, token in zip(values, tokens, strict=True):
                        turns.pause()
                        token = token if targets is None else targets[token]
                        ids = [*row.ids[:position], token, *row.ids[position + 1 :]]
                        # If there are several masks, the others stay visible.
                        sequence = tokenizer.decode(ids, skip_special_tokens=len(row.keep) == 1)
                        text = {"token": token, "token_str": tokenizer.decode([token])}
                        filled[-1].append({"score": score, **text, "sequence": sequence})
                entries.append(filled[0] if len(filled) == 1 else filled)
            # transformers' pipeline answers a list of one text as that text.
            answers.append(prepared.answer(entries, single=len(entries) == 1))
        return answers
