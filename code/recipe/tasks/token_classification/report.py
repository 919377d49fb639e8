"""Score and report a tagger's last answers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from seqeval.metrics import sequence_labeling as seqeval  # type: ignore[import-untyped]
from sklearn.metrics import precision_recall_fscore_support

from recipe.reports import figures, section
from recipe.reports.predictions import confusion
from recipe.reports.section import Section
from recipe.tasks.token_classification.data import OUTSIDE

ENTITY_SCORES = ("f1", "precision", "recall", "accuracy")
TAG_SCORES = ("accuracy", "f1_macro", "f1_weighted")
_MOST_IN_MATRIX, _MOST_ROWS, _MISTAKES, _SHOWN_WORDS = 40, 60, 12, 40
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """The evaluated words of a sentence, in order."""

    number: int
    """The number of its row in the data."""
    predicted: list[str]
    """The predicted tag of each word."""
    sure: list[float]
    """The probability of each predicted tag."""
    true: list[str]

    @property
    def wrong(self) -> list[bool]:
        """Return whether the tag of each word is not the true one."""
        return [
            predicted != true for predicted, true in zip(self.predicted, self.true, strict=True)
        ]


def sentences_of(outputs: Array, labels: Array, names: Sequence[str]) -> list[Sentence]:
    """Join the predictions for the windows of each sentence, which are in order.

    Args:
        outputs: [windows, 1 + 3 * words], as `recipe.models.token_heads.patch_forward_for_tags`
            has them.
        labels: [windows, 2]: learned tokens, and the number of the sentence.
    """
    words = (outputs.shape[1] - 1) // 3
    predicted, sure, true = (outputs[:, 1 + n * words : 1 + (n + 1) * words] for n in range(3))
    sentences = []
    for number, windows in itertools.groupby(range(len(labels)), lambda row: int(labels[row, 1])):
        rows = list(windows)
        judged = true[rows] >= 0
        sentences.append(
            Sentence(
                number=number,
                predicted=[names[int(tag)] for tag in predicted[rows][judged]],
                sure=sure[rows][judged].tolist(),
                true=[names[int(tag)] for tag in true[rows][judged]],
            )
        )
    return sentences


def _flat_tags(sentences: Sequence[Sentence]) -> tuple[list[str], list[str]]:
    """Return the true tags and the predicted ones of all words."""
    return (
        [tag for sentence in sentences for tag in sentence.true],
        [tag for sentence in sentences for tag in sentence.predicted],
    )


def scores(sentences: Sequence[Sentence], are_entities: bool) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities, as in seqeval and conlleval, and the
    accuracy of words; for other tags the accuracy, and means of F1 over tags."""
    true, predicted = _flat_tags(sentences)
    right = sum(one == other for one, other in zip(true, predicted, strict=True))
    accuracy = right / max(1, len(true))
    if are_entities:
        by_sentence = [one.true for one in sentences], [one.predicted for one in sentences]
        values = seqeval.precision_recall_fscore_support(
            *by_sentence, average="micro", zero_division=0
        )
        named = zip(("precision", "recall", "f1"), map(float, values[:3]), strict=True)
        return {**dict(named), "accuracy": accuracy}
    means = {
        f"f1_{mean}": float(
            precision_recall_fscore_support(true, predicted, average=mean, zero_division=0)[2]
        )
        for mean in ("macro", "weighted")
    }
    return {"accuracy": accuracy, **means}


def entities_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (kind, first word, last word) of each entity."""
    entities: list[tuple[str, int, int]] = seqeval.get_entities(list(tags))
    return entities


@dataclass(frozen=True, kw_only=True)
class TaggedAnswers:
    """The model's last answers on the split that it is evaluated on."""

    split: str
    sentences: Sequence[Sentence]
    words: Mapping[int, Sequence[str]] | None
    """The evaluated words of each sentence, by its number; None if they are on other hosts."""
    are_entities: bool

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each sentence its number, the predicted tags with their probabilities, and the
        true tags; with entities also these, as ranges of words (end excluded)."""
        for sentence in self.sentences:
            row: dict[str, Any] = {"row": sentence.number}
            if self.words is not None:
                row["tokens"] = list(self.words[sentence.number])
            row |= {
                "tags": sentence.predicted,
                "scores": [round(sure, 6) for sure in sentence.sure],
            }
            if self.are_entities:
                row["entities"] = [
                    {"label": kind, "start": first, "end": last + 1}
                    for kind, first, last in entities_of(sentence.predicted)
                ]
            yield {**row, "true": sentence.true}

    def sections(self) -> list[Section]:
        """Return the scores of each kind, the confusion matrix of words, and the worst mistakes."""
        if not self.sentences:
            return []
        tags = _flat_tags(self.sentences)
        if self.are_entities:
            table: Any = seqeval.classification_report(
                [one.true for one in self.sentences], [one.predicted for one in self.sentences],
                output_dict=True, zero_division=0,
            )  # fmt: skip
            scored = [(name, *row.values()) for name, row in table.items()]
        else:
            names = sorted({*tags[0], *tags[1]})
            scores = precision_recall_fscore_support(*tags, labels=names, zero_division=0)
            scored = list(zip(names, *scores, strict=True))
        first, last = ("entity", "entities") if self.are_entities else ("tag", "words")
        rows = [
            [name, *(f"{value:.3f}" for value in values), f"{count}"]
            for name, *values, count in scored
        ]
        sections = [
            Section(
                title=f"{'Entities' if self.are_entities else 'Tags'}, {self.split} data",
                columns=section.texts(first) + section.numbers("precision", "recall", "F1", last),
                rows=rows[:_MOST_ROWS],
            )
        ]
        true, predicted = (
            [tag[2:] if self.are_entities and tag != OUTSIDE else tag for tag in of_all]
            for of_all in tags
        )
        kinds = sorted({*true, *predicted}, key=lambda kind: (kind == OUTSIDE, kind))
        if len(kinds) <= _MOST_IN_MATRIX:
            true_ids, predicted_ids = (
                np.array(list(map(kinds.index, of_words))) for of_words in (true, predicted)
            )
            counts = confusion(true_ids, predicted_ids, len(kinds))
            draw = functools.partial(figures.confusion, counts, kinds)
            title = f"Confusion matrix of words, {self.split} data"
            sections.append(Section(title=title, figure=("confusion", draw)))
        return [*sections, self._mistakes()]

    def _mistakes(self) -> Section:
        """Return the sentences with the most confident wrong tags, worst first."""
        wrong = [sentence for sentence in self.sentences if any(sentence.wrong)]
        badness = [max(itertools.compress(sentence.sure, sentence.wrong)) for sentence in wrong]
        rows = []
        for index in np.argsort(-np.array(badness), kind="stable")[:_MISTAKES].tolist():
            sentence = wrong[index]
            start = max(0, sentence.wrong.index(True) - _SHOWN_WORDS // 2)
            shown = slice(start, start + _SHOWN_WORDS)
            words = [f"word {n}" for n in range(len(sentence.true))]
            text = f"row {sentence.number}"
            if self.words is not None:
                words = list(self.words[sentence.number])
                text = " ".join(words[shown])
            tagged = []
            for tags in (sentence.true, sentence.predicted):
                if self.are_entities:
                    entities = [
                        f"{kind}: {' '.join(words[first : last + 1])}"
                        for kind, first, last in entities_of(tags)
                        if last >= shown.start and first < shown.stop
                    ]
                    tagged.append("; ".join(entities))
                else:
                    pairs = list(zip(words, tags, strict=True))[shown]
                    tagged.append(" ".join(f"{word}/{tag}" for word, tag in pairs))
            rows.append([text, *tagged, f"{badness[index]:.0%}"])
        total = sum(len(sentence.true) for sentence in self.sentences)
        return Section(
            title=f"Worst mistakes, {self.split} data",
            note=f"{len(wrong)} of {len(self.sentences)} sentences ({total} words) have one.",
            columns=section.texts("sentence", "true", "predicted") + section.numbers("score"),
            rows=rows,
        )
