"""Score and report a tagger's last answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from datasets import Dataset
from seqeval.metrics import sequence_labeling as seqeval  # type: ignore[import-untyped]
from sklearn.metrics import accuracy_score, classification_report, f1_score

from recipe.data.column_names import TAGS, TOKENS
from recipe.reports.last_answers import Mistake, PredictedAnswers
from recipe.reports.section import Section

ENTITY_SCORES = ("f1", "precision", "recall", "accuracy")
TAG_SCORES = ("accuracy", "f1_macro", "f1_weighted")
_MOST_ROWS = 60
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


def scores(sentences: Sequence[Sentence], are_entities: bool) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities, as in seqeval and conlleval, and the
    accuracy of words; for other tags the accuracy, and means of F1 over tags."""
    true, predicted = _tags(sentences, are_entities)
    if are_entities:
        values = seqeval.precision_recall_fscore_support(
            true, predicted, average="micro", zero_division=0
        )
        named = dict(zip(("precision", "recall", "f1"), map(float, values[:3]), strict=True))
        return {**named, "accuracy": float(seqeval.accuracy_score(true, predicted))}
    means = {
        f"f1_{mean}": float(f1_score(true, predicted, average=mean, zero_division=0))
        for mean in ("macro", "weighted")
    }
    return {"accuracy": float(accuracy_score(true, predicted)), **means}


def _tags(sentences: Sequence[Sentence], are_entities: bool) -> tuple[list[Any], list[Any]]:
    """Return the true and the predicted tags: of each sentence, or of all words in one list."""
    both = [one.true for one in sentences], [one.predicted for one in sentences]
    if are_entities:
        return both
    true, predicted = ([*itertools.chain.from_iterable(tags)] for tags in both)
    return true, predicted


@dataclass(frozen=True, kw_only=True)
class TaggedAnswers(PredictedAnswers):
    """The model's last answers on the split that it is evaluated on."""

    sentences: Sequence[Sentence]
    rows: Dataset
    """The data of the split, with the columns `tokens` and `tags`."""
    are_entities: bool

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each sentence its number, the words, the predicted tags with their
        probabilities, and the true tags."""
        for sentence in self.sentences:
            row = self.rows[sentence.number]
            pairs = zip(row[TOKENS], row[TAGS], strict=True)
            words = [word for word, tag in pairs if tag is not None]
            # Words that were cut, or have no tokens, are not evaluated.
            is_whole = len(words) == len(sentence.true)
            yield {
                "row": sentence.number,
                **({"tokens": words} if is_whole else {}),
                "tags": sentence.predicted,
                "scores": [round(sure, 6) for sure in sentence.sure],
                "true": sentence.true,
            }

    def __len__(self) -> int:
        return len(self.sentences)

    def mistakes(self, most: int) -> tuple[int, list[Mistake]]:
        """Return the sentences with a wrong tag, with these words, the surest first."""
        ranked = []
        for sentence in self.sentences:
            pairs = enumerate(zip(sentence.true, sentence.predicted, strict=True))
            wrong = [index for index, (true, predicted) in pairs if true != predicted]
            if wrong:
                ranked.append((max(sentence.sure[index] for index in wrong), wrong, sentence))
        ranked.sort(key=lambda item: -item[0])
        mistakes = []
        for measure, wrong, sentence in ranked[:most]:
            row = self.rows[sentence.number]
            pairs_of_row = zip(row[TOKENS], row[TAGS], strict=True)
            words = [word for word, tag in pairs_of_row if tag is not None]
            is_whole = len(words) == len(sentence.true)  # as in `lines`
            names = words if is_whole else [f"word {index}" for index in range(len(sentence.true))]
            true, predicted = (
                ", ".join(f"{names[index]}: {tags[index]}" for index in wrong)
                for tags in (sentence.true, sentence.predicted)
            )
            text = " ".join(words)
            mistakes.append(
                Mistake(
                    row=sentence.number, text=text, true=true, predicted=predicted, measure=measure
                )
            )
        return len(ranked), mistakes

    def never_predicted(self) -> list[str]:
        """Return the kinds of entities, or tags, that are never predicted."""
        true, predicted = (
            {tag[2:] if self.are_entities else tag for tag in itertools.chain(*tags)} - {""}
            for tags in ([s.true for s in self.sentences], [s.predicted for s in self.sentences])
        )
        return sorted(true - predicted)

    def class_count(self) -> int:
        tags = {tag for sentence in self.sentences for tag in sentence.true}
        return len({tag[2:] if self.are_entities else tag for tag in tags} - {""})

    def sections(self) -> list[Section]:
        """Return the scores of each kind of entity, or of each tag."""
        report: Any = seqeval.classification_report if self.are_entities else classification_report
        tags = _tags(self.sentences, self.are_entities)
        table = report(*tags, output_dict=True, zero_division=0)
        rows = []
        for name, scores in table.items():
            if isinstance(scores, dict):  # not the accuracy
                *values, count = scores.values()
                rows.append([name, *map(float, values), int(count)])
        return [
            Section(
                title=f"{'Entities' if self.are_entities else 'Tags'}, {self.split} data",
                columns=("kind", "precision", "recall", "F1", "count"),
                rows=rows[:_MOST_ROWS],
            )
        ]
