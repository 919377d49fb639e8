"""Score and report a tagger's last answers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from seqeval.metrics import (  # type: ignore[import-untyped]
    classification_report,
    f1_score,
    precision_score,
    recall_score,
)
from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]
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
    """Return the predictions for whole sentences, combined from those for their windows.

    Args:
        outputs: [windows, 1 + 3 * words], as `recipe.models.token_heads.patch_forward_for_tags`
            has them.
        labels: [windows, 2]: learned tokens, and the number of the sentence.
    """
    words = (outputs.shape[1] - 1) // 3
    predicted, sure, true = (outputs[:, 1 + n * words : 1 + (n + 1) * words] for n in range(3))
    sentences: list[Sentence] = []
    for row, number in enumerate(labels[:, 1].tolist()):
        judged = true[row] >= 0
        one = Sentence(
            number=number,
            predicted=[names[int(label)] for label in predicted[row][judged]],
            sure=sure[row][judged].tolist(),
            true=[names[int(label)] for label in true[row][judged]],
        )
        if sentences and sentences[-1].number == number:
            for kept, more in (
                (sentences[-1].predicted, one.predicted),
                (sentences[-1].true, one.true),
            ):
                kept.extend(more)
            sentences[-1].sure.extend(one.sure)
        else:
            sentences.append(one)
    return sentences


def scores(sentences: Sequence[Sentence], are_entities: bool) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities, as in seqeval and conlleval, and the
    accuracy of words; for other tags the accuracy, and means of F1 over tags."""
    true, predicted = (
        [sentence.true for sentence in sentences],
        [sentence.predicted for sentence in sentences],
    )
    flat = [tag for row in true for tag in row], [tag for row in predicted for tag in row]
    right = sum(one == other for one, other in zip(*flat, strict=True))
    accuracy = right / max(1, len(flat[0]))
    if are_entities:
        options = {"zero_division": 0}
        values = {
            "precision": precision_score(true, predicted, **options),
            "recall": recall_score(true, predicted, **options),
            "f1": f1_score(true, predicted, **options),
            "accuracy": accuracy,
        }
        return {name: float(value) for name, value in values.items()}
    means = {
        average: precision_recall_fscore_support(*flat, average=average, zero_division=0)[2]
        for average in ("macro", "weighted")
    }
    return {"accuracy": accuracy, **{f"f1_{name}": float(mean) for name, mean in means.items()}}


def entities_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Yield (kind, first word, last word) of each entity."""
    untyped: Any = get_entities
    entities: list[tuple[str, int, int]] = untyped(list(tags))
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
        tags = {tag for sentence in self.sentences for tag in (*sentence.true, *sentence.predicted)}
        kinds = sorted({self._kind(tag) for tag in tags}, key=lambda kind: (kind == OUTSIDE, kind))
        sections_shown = [self._scores()]
        if len(kinds) <= _MOST_IN_MATRIX:
            numbers = {kind: number for number, kind in enumerate(kinds)}
            true = [
                numbers[self._kind(tag)] for sentence in self.sentences for tag in sentence.true
            ]
            predicted = [
                numbers[self._kind(tag)]
                for sentence in self.sentences
                for tag in sentence.predicted
            ]
            counts = confusion(np.array(true), np.array(predicted), len(kinds))
            draw = functools.partial(figures.confusion, counts, kinds)
            title = f"Confusion matrix of words, {self.split} data"
            sections_shown.append(Section(title=title, figure=("confusion", draw)))
        return [*sections_shown, self._mistakes()]

    def _kind(self, tag: str) -> str:
        return tag[2:] if self.are_entities and tag != OUTSIDE else tag

    def _scores(self) -> Section:
        true, predicted = (
            [sentence.true for sentence in self.sentences],
            [sentence.predicted for sentence in self.sentences],
        )
        if self.are_entities:
            report: Any = classification_report
            table: Any = report(true, predicted, output_dict=True, zero_division=0)
            rows = [
                [name, *(f"{table[name][score]:.3f}" for score in ("precision", "recall")),
                 f"{table[name]['f1-score']:.3f}", f"{table[name]['support']}"]
                for name in table
            ]  # fmt: skip
        else:
            flat = [tag for row in true for tag in row], [tag for row in predicted for tag in row]
            names = sorted({*flat[0], *flat[1]})
            by_tag = precision_recall_fscore_support(*flat, labels=names, zero_division=0)
            rows = [
                [name, *(f"{scores[index]:.3f}" for scores in by_tag[:3]), f"{by_tag[3][index]}"]
                for index, name in enumerate(names)
            ]
        what = "Entities" if self.are_entities else "Tags"
        return Section(
            title=f"{what}, {self.split} data",
            columns=section.texts("entity" if self.are_entities else "tag")
            + section.numbers("precision", "recall", "F1")
            + section.numbers("entities" if self.are_entities else "words"),
            rows=rows[:_MOST_ROWS],
        )

    def _mistakes(self) -> Section:
        """Return the sentences with the most confident wrong tags, worst first."""
        ranked = sorted(
            (
                -max(sure for sure, is_wrong in zip(one.sure, one.wrong, strict=True) if is_wrong),
                position,
            )
            for position, one in enumerate(self.sentences)
            if any(one.wrong)
        )
        rows = []
        for badness, index in ranked[:_MISTAKES]:
            sentence = self.sentences[index]
            start = max(0, sentence.wrong.index(True) - _SHOWN_WORDS // 2)
            shown = slice(start, start + _SHOWN_WORDS)
            words = [f"word {n}" for n in range(len(sentence.true))]
            if self.words is not None:
                words = list(self.words[sentence.number])
            text = " ".join(words[shown]) if self.words is not None else f"row {sentence.number}"
            rows.append(
                [
                    text,
                    *(
                        self._tagged_text(tags, words, shown)
                        for tags in (sentence.true, sentence.predicted)
                    ),
                    f"{-badness:.0%}",
                ]
            )
        total = sum(len(sentence.true) for sentence in self.sentences)
        counts = Counter(sentence.predicted == sentence.true for sentence in self.sentences)
        return Section(
            title=f"Worst mistakes, {self.split} data",
            note=f"{counts[False]} of {len(self.sentences)} sentences ({total} words) have one.",
            columns=section.texts("sentence", "true", "predicted") + section.numbers("score"),
            rows=rows,
        )

    def _tagged_text(self, tags: Sequence[str], words: Sequence[str], shown: slice) -> str:
        if not self.are_entities:
            pairs = list(zip(words, tags, strict=True))[shown]
            return " ".join(f"{word}/{tag}" for word, tag in pairs)
        return "; ".join(
            f"{kind}: {' '.join(words[first : last + 1])}"
            for kind, first, last in entities_of(tags)
            if last >= shown.start and first < shown.stop
        )
