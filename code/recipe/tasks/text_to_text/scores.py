"""Generate text for evaluation data with an encoder-decoder model, and score it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

from recipe.models import lora
from recipe.reports.section import TEXT, Section
from recipe.runtime.device import everyones
from recipe.tasks.text_to_text.data import SOURCE, TARGET
from recipe.tasks.text_to_text.tokens import Pairs

_SHOWN = 6
_SHOWN_CHARS = 600
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")
_OF_ROUGE = re.compile(r"[a-z0-9]")


@dataclass(frozen=True)
class Written:
    """Text generated for some rows of a data set."""

    rows: Sequence[int]
    texts: Sequence[str]
    lengths: Sequence[int]
    """Token ids of each text, without padding and start tokens."""
    pairs: Pairs
    split: str = "evaluation"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the entry of do_predict for each row."""
        for row, text, target in zip(self.rows, self.texts, self.targets(), strict=True):
            yield {"row": row, "text": text, "true": target}

    def scores(self, language: str | None) -> dict[str, float]:
        """Return `WRITING_SCORES` against the unchanged targets of the data: from 0 to 100, except
        the mean number of tokens."""
        targets = self.targets()
        kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        joined = "".join(targets).lower()
        letters = sum(character.isalnum() for character in joined)
        is_latin = len(_OF_ROUGE.findall(joined)) >= 0.8 * letters
        # As in run_summarization.py, if the library's tokenizer finds words.
        scorer = RougeScorer(kinds, use_stemmer=is_latin, tokenizer=None if is_latin else _Words())
        rouge = [scorer.score(true, text) for text, true in zip(self.texts, targets, strict=True)]
        # How sacrebleu splits words: by characters in languages without spaces.
        code = re.split("[_-]", language or "")[0].lower()
        words = "13a"
        if code in ("zh", "zho", "yue"):
            words = "zh"
        elif code in ("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my"):
            words = "char"
        return {
            **{kind: 100 * float(np.mean([one[kind].fmeasure for one in rouge])) for kind in kinds},
            "bleu": float(sacrebleu.corpus_bleu(self.texts, [targets], tokenize=words).score),
            "chrf": float(sacrebleu.corpus_chrf(self.texts, [targets]).score),
            "gen_len": float(np.mean(self.lengths)),
        }

    def targets(self) -> list[str]:
        """Return the targets of `rows`."""
        return list(self.pairs.texts.select(self.rows)[TARGET])

    def sections(self) -> Sequence[Section]:
        """Return a table of some generated texts and their targets."""
        count = len(self.rows)
        chosen = np.linspace(0, count - 1, min(_SHOWN, count)).astype(int).tolist()
        examples = self.pairs.texts.select([self.rows[index] for index in chosen])
        texts = [self.texts[index] for index in chosen]
        rows = zip(examples[SOURCE], texts, examples[TARGET], strict=True)
        section = Section(
            title="Generated text, evaluation data",
            note=f"The scores are of {count} of {len(self.pairs)} rows.",
            columns=[("source", TEXT), ("the model", TEXT), ("the data", TEXT)],
            rows=[
                [text[:_SHOWN_CHARS] + " ..." * (len(text) > _SHOWN_CHARS) for text in row]
                for row in rows
            ],
        )
        return [section]


def write(trainer: Any, pairs: Pairs, most: int | None, options: dict[str, Any]) -> Written:
    """Generate text for `most` rows (None: all), the same ones each time, on all processes
    together.

    Args:
        trainer: Its model and tokenizer are used; the weights are whole on each process.
        options: Arguments of `generate`.
    """
    count = len(pairs) if most is None else min(most, len(pairs))
    rows = np.unique(np.linspace(0, len(pairs) - 1, count).astype(int))
    by_length = rows[np.argsort(pairs.lengths[rows], kind="stable")]
    mine = by_length[trainer.args.process_index :: trainer.args.world_size]
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    inner = lora.bare(model)
    inner.eval()
    tokenizer = trainer.processing_class
    texts_by_row: list[tuple[int, str, int]] = []
    size = trainer.args.eval_batch_size
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for start in range(0, len(mine), size):
            batch = mine[start : start + size]
            sources = [pairs.tokens(row)[: pairs.sources[row]].tolist() for row in batch]
            inputs = tokenizer.pad(
                {"input_ids": sources}, padding_side="right", return_tensors="pt", verbose=False
            )
            output = inner.generate(**inputs.to(inner.device), do_sample=False, **options)
            texts = tokenizer.batch_decode(output, skip_special_tokens=True)
            lengths = (output[:, 1:] != tokenizer.pad_token_id).sum(-1).tolist()
            texts_by_row += zip(batch.tolist(), map(str.strip, texts), lengths, strict=True)
    every = sorted(row for part in everyones(texts_by_row) for row in part)
    numbers, texts, lengths = (list(part) for part in zip(*every, strict=True))
    return Written(numbers, texts, lengths, pairs)


class _Words:
    """Splits texts of any script into words for ROUGE, or into characters if words are not spaced.
    The library's own tokenizer knows a to z and 0 to 9 only."""

    def tokenize(self, text: str) -> list[str]:
        """Return words in lower case."""
        return _WORD.findall(text.lower())
