"""Show text that a trained model generates for the evaluation data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipe.batching.document_batches import Documents
from recipe.compat import positions_of
from recipe.data.column_names import SOURCE, TARGET
from recipe.reports.last_answers import PredictedAnswers
from recipe.reports.section import Section, spread_rows

_SHOWN, _SHOWN_TEXTS = 4, 6
_PROMPT = 24
_NEW = 40


def section(model: Any, tokenizer: PreTrainedTokenizerBase, documents: Documents) -> Section:
    """Return some prompts, or beginnings of documents, with their continuations: the likeliest
    tokens by the model, and those of the data.

    Args:
        model: It is put into evaluation mode.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.eval()
    count = len(documents.starts) - 1  # of this host
    shown = []
    for row in (documents.first + number for number in spread_rows(count, _SHOWN)):
        ids = documents.tokens(row).astype(np.int64)
        first = int(documents.successors(row)[0][0]) + 1
        start = first if first > 1 else max(1, min(_PROMPT, len(ids) // 2))
        prompt = torch.from_numpy(ids[:start])[None].to(inner.device)
        with torch.inference_mode():
            output = inner.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max(1, min(_NEW, positions_of(inner) - start)),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        generated = output[0, start:].cpu().numpy()
        parts = (ids[:start], generated, ids[start : start + _NEW])
        shown.append([_readable(tokenizer, part.tolist()) for part in parts])
    return Section(
        title="Generated text, evaluation data",
        columns=("prompt", "the model", "the data"),
        rows=shown,
    )


def _readable(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of tokens, with a new line for special ones, such as a turn's marks."""
    special = set(tokenizer.all_special_ids)
    runs = itertools.groupby(ids, key=special.__contains__)
    texts = (str(tokenizer.decode(list(run))).strip() for is_special, run in runs if not is_special)
    return "\n".join(filter(None, texts))


@dataclass(frozen=True)
class GeneratedTexts(PredictedAnswers):
    """Text generated for some rows of a data set."""

    rows: Sequence[int]
    texts: Sequence[str]
    data: datasets.Dataset
    """All rows, with the columns `source` and `target`."""

    def __len__(self) -> int:
        return len(self.rows)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each row the line that do_predict writes."""
        for row, text, target in zip(self.rows, self.texts, self.targets(), strict=True):
            yield {"row": row, "text": text, "true": target}

    def targets(self) -> list[str]:
        """Return the targets of `rows`."""
        return list(self.data.select(self.rows)[TARGET])

    def sections(self) -> Sequence[Section]:
        """Return a table of some generated texts and their targets."""
        count = len(self.rows)
        chosen = spread_rows(count, _SHOWN_TEXTS)
        examples = self.data.select([self.rows[index] for index in chosen])
        texts = [self.texts[index] for index in chosen]
        return [
            Section(
                title=f"Generated text, {self.split} data",
                note=f"The scores are of {count} of {len(self.data)} rows.",
                columns=("source", "the model", "the data"),
                rows=[*zip(examples[SOURCE], texts, examples[TARGET], strict=True)],
            )
        ]
