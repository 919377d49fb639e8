"""Token classification: the entities in each text, with their character offsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.pipelines import library
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.served_task import ServedTask
from recipe.models.sources.origin import Origin
from recipe.tasks.token_classification.spec import SPECS

PARAMETERS = {"aggregation_strategy", "ignore_labels", "stride"}


@dataclass(frozen=True, kw_only=True)
class Tagger(ServedTask):
    """A saved token classifier that answers texts."""

    served = SPECS[0].served["token-classification"]
    loaded: LoadedModel
    pipeline: Any
    """transformers' pipeline: it cuts texts into chunks, and aggregates entities. The scores are
    computed here for all requests together."""

    @classmethod
    def load(cls, origin: Origin) -> Tagger:
        """Return the token classifier that `origin` names."""
        loaded = loading.load(origin, AutoModelForTokenClassification)
        pipeline = library.wrap_pipeline("token-classification", loaded)
        gather = pipeline.gather_pre_entities

        def pause_and_gather(*values: Any, **options: Any) -> Any:
            turns.pause()
            return gather(*values, **options)

        # It is called for each window of a text.
        pipeline.gather_pre_entities = pause_and_gather
        return cls(loaded=loaded, pipeline=pipeline)

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS, "token-classification")
        limit, tokenizer = self.loaded.max_length, self.loaded.tokenizer
        shared = request.parameters.get("stride")
        if shared is not None:
            if request.parameters.get("aggregation_strategy", "none") == "none":
                raise BadRequest(
                    "stride requires an aggregation_strategy: simple, first, average or max."
                )
            if shared >= limit - 2:
                raise BadRequest(f"stride must be less than the {limit} tokens read.")
        texts = request.read(a_text)
        before, _, _ = self.pipeline._sanitize_parameters(**request.parameters)
        bounds.hold(Bound.ROWS, len(texts))
        specials = len(tokenizer("")["input_ids"])
        chunks: list[list[Any]] = []
        sizes: list[int] = []
        truncated: list[int] = []
        rows = read = 0
        for index, text in enumerate(texts):
            turns.pause()
            head = text
            if shared is None:
                head = bounds.beginning(tokenizer, text, limit)
            else:
                bounds.hold_text(text)
                bounds.hold_windows(tokenizer, text, limit - specials, shared)
            text_chunks = []
            for chunk in self.pipeline.preprocess(head, **before):
                kept = chunk["attention_mask"][0].bool()
                if not bool(kept.all()):  # padding is before or after a window
                    tensors = {n: v[:, kept] for n, v in chunk.items() if torch.is_tensor(v)}
                    chunk = {**chunk, **tensors}
                text_chunks.append(chunk)
                turns.pause()
            chunks.append(text_chunks)
            sizes.append(sum(chunk["input_ids"].shape[1] for chunk in text_chunks))
            rows, read = rows + len(text_chunks), read + sizes[-1]
            bounds.hold(Bound.ROWS, rows)
            bounds.hold(Bound.READ, read)
            if shared is None and sizes[-1] >= limit and self.loaded.is_longer(text, limit):
                truncated.append(index)
        return replace(request, values=texts, sizes=sizes, truncated=truncated, work=chunks)

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request a list of entities for each text, as transformers' pipeline makes
        them: `entity`, `score` (a probability), `index` (of the token), `word`, `start` and `end`
        (characters); with an aggregation_strategy `entity_group` instead of entity and index.
        Special tokens, and tokens labelled O (or by `ignore_labels`), are left out."""
        rows = []
        texts = itertools.chain.from_iterable(prepared.work for prepared in requests)
        for chunk in itertools.chain.from_iterable(texts):
            types = chunk["token_type_ids"][0].tolist() if "token_type_ids" in chunk else []
            is_typed = self.loaded.typed or any(types)
            rows.append(TokenRow(chunk["input_ids"][0].tolist(), types if is_typed else None))
        logits = iter(self.loaded.forward(rows, Reading.TOKENS))
        answers: list[Any] = []
        for prepared in requests:
            _, _, after = self.pipeline._sanitize_parameters(**prepared.parameters)
            if "ignore_labels" in after:
                after["ignore_labels"] = frozenset(after["ignore_labels"])
            scores = [[next(logits) for _ in chunks] for chunks in prepared.work]
            entities, count = [], 0
            try:
                for chunks, chunk_scores in zip(prepared.work, scores, strict=True):
                    scored = [
                        {**chunk, "logits": values.unsqueeze(0)}
                        for chunk, values in zip(chunks, chunk_scores, strict=True)
                    ]
                    entries = self.pipeline.postprocess(scored, **after)
                    # Scores are numbers of numpy.
                    plain = [
                        {k: getattr(v, "item", lambda v=v: v)() for k, v in e.items()}
                        for e in entries
                    ]
                    entities.append(plain)
                    count += len(entities[-1])
                    bounds.hold(Bound.ANSWER, 6 * count, f"{count:,} entities")
            except bounds.TooCostly as error:
                answers.append(error)
            else:
                answers.append(prepared.answer(entities, single=prepared.single))
        return answers
