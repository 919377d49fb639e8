"""Scores of generated texts against those of the data: ROUGE, BLEU and chrF."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")
_OF_ROUGE = re.compile(r"[a-z0-9]")
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_SPLITTERS = {
    **dict.fromkeys(("zh", "zho", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my"), "char"),
}
"""How sacrebleu splits texts of languages without spaces, by their codes."""


class _Words:
    """Splits texts of any script into words for ROUGE, or into characters if words are not spaced.
    The library's own tokenizer knows a to z and 0 to 9 only."""

    def tokenize(self, text: str) -> list[str]:
        """Return words in lower case."""
        return _WORD.findall(text.lower())


def score_texts(
    texts: Sequence[str], targets: Sequence[str], language: str | None
) -> dict[str, float]:
    """Return ROUGE, BLEU and chrF of `metrics.WRITING_SCORES`, from 0 to 100.

    Args:
        language: The code of the texts' language, such as `zh` or `zho_Hans`, if it is known.
    """
    import sacrebleu  # takes half a second, as does ROUGE's stemmer

    words = _SPLITTERS.get(re.split("[_-]", language or "")[0].lower(), "13a")
    return {
        **score_rouge(texts, targets),
        "bleu": float(sacrebleu.corpus_bleu(texts, [targets], tokenize=words).score),
        "chrf": float(sacrebleu.corpus_chrf(texts, [targets]).score),
    }


def score_rouge(texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return the mean F-measures of `ROUGE`, from 0 to 100."""
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    joined = "".join(targets).lower()
    letters = sum(character.isalnum() for character in joined)
    is_latin = len(_OF_ROUGE.findall(joined)) >= 0.8 * letters
    # As in run_summarization.py, if the library's tokenizer finds words.
    scorer = RougeScorer([*ROUGE], use_stemmer=is_latin, tokenizer=None if is_latin else _Words())
    rouge = [scorer.score(true, text) for text, true in zip(texts, targets, strict=True)]
    return {kind: 100 * float(np.mean([one[kind].fmeasure for one in rouge])) for kind in ROUGE}
