"""Question answering: the words of a context that answer a question, or that there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, EvalPrediction, PreTrainedModel

from recipe import metrics
from recipe.batching.batches import Layout
from recipe.batching.samples import Samples
from recipe.batching.window_batches import WindowLayout, Windows
from recipe.data.annotations import questions
from recipe.data.annotations.questions import ANSWERS, CONTEXT, ID, QUESTION
from recipe.data.column_names import TOKEN_IDS
from recipe.errors import HyperparameterError
from recipe.models import packed_encoders, pretrained, token_heads
from recipe.models.sources.origin import Origin
from recipe.reports.model_card import About
from recipe.tasks.base import (
    SHOWN_CHARS,
    Batches,
    EncoderObjective,
    Model,
    Task,
    Tokenizer,
    TokenLosses,
    longest_in,
    named_splits,
    text_layout,
)
from recipe.tasks.question_answering import report, tokens
from recipe.tasks.question_answering.report import FoundAnswers
from recipe.tasks.question_answering.spec import Options
from recipe.tokenization import windows

_LONGEST, _STRIDE = 384, 128


class Spans(EncoderObjective, TokenLosses):
    """Where answers start and end; the loss is the mean over windows."""

    def __init__(self, data: questions.Questions) -> None:
        self._data = data
        self.windows: dict[str, Windows] = {}
        """The windows of each split."""
        self.last: FoundAnswers | None = None
        """Those of the last evaluation."""

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        texts = text_layout(model, packed, size, pad_id, batches, in_blocks=True)
        is_judged = longest_in(batches, judged=True) > 0
        return WindowLayout(texts, longest_in(batches), is_judged)

    def prepare(self, model: PreTrainedModel, packed: bool) -> None:
        if not packed:
            packed_encoders.patch_forward_for_lengths(model)
        token_heads.patch_forward_for_spans(model)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        name, made = next(
            item for item in self.windows.items() if item[1].labels is prediction.label_ids
        )
        rows, may_be_none = list(named_splits(self._data)[name]), self._data.has_unanswerable
        answers = report.find(np.asarray(prediction.predictions), made, rows, may_be_none)
        ids, texts = ([row[column] for row in rows] for column in (ID, QUESTION))
        self.last = FoundAnswers(split=name, ids=ids, questions=texts, answers=answers)
        return report.scores(answers, may_be_none)


class QuestionAnswering(Task):
    """Finds the words of a context that answer a question."""

    options: Options
    objective: Spans
    data: questions.Questions

    def read(self, channels: Mapping[str, Path]) -> None:
        self.check_best(metrics.ANSWERS)
        self.data = questions.load(channels, self.data_settings)
        self.objective = Spans(self.data)

    def request_columns(self) -> dict[str, str | Sequence[str]]:
        columns = super().request_columns()
        return {role: columns[role] for role in (QUESTION, CONTEXT) if role in columns}

    def load(self, source: Origin) -> Model:
        architecture, what = AutoModelForQuestionAnswering, "a model that answers questions"
        return pretrained.load_head(architecture, source, self.model_settings, what, num_labels=2)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return the tokens of a window."""
        max_length = self.data_settings.max_length
        length = pretrained.longest_input(model, tokenizer, max_length, _LONGEST)
        stride = self._stride(length)
        needed = stride + tokenizer.num_special_tokens_to_add(pair=True) + 3
        if length < needed:
            raise HyperparameterError(
                f"Hyperparameter max_length has value {length}, and windows share {stride} tokens "
                f"(doc_stride): this leaves no room for questions.",
                f"Give a max_length of {needed} or more, or a smaller doc_stride.",
            )
        # Serving answers as in this evaluation, unless a request sets other parameters.
        config: Any = model.config
        config.question_answering = {
            "max_seq_len": length,
            "doc_stride": stride,
            "max_answer_len": report.LONGEST_ANSWER,
            "handle_impossible_answer": self.data.has_unanswerable,
            "align_to_words": False,
        }
        return length

    def _stride(self, length: int) -> int:
        doc_stride = self.options.doc_stride
        return min(_STRIDE, length // 2) if doc_stride is None else doc_stride

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        made = tokens.tokenize_split(name, split, tokenizer, max_length, self._stride(max_length))
        self.objective.windows[name] = made
        return made

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        split = self.train.select(rows)
        encoded: Any = tokenizer(split[QUESTION][:], split[CONTEXT][:], verbose=False)
        return [len(ids) for ids in encoded[TOKEN_IDS]]

    def pieces(self, length: int, longest: int) -> int:
        """Return about how many windows a question with its context becomes."""
        return windows.count_windows(length, longest, self._stride(longest))

    def about(self) -> About:
        none = ", or report that there is none" if self.data.has_unanswerable else ""
        return About(
            title="Question answering model",
            pipeline="question-answering",
            purpose=f"find the answer to a question in a context{none}",
            metrics="exact_match and f1 are in percent, as in SQuAD's official scripts.",
            headline=("f1", "exact_match", "no_answer", "loss"),
        )

    def shown(self, row: Mapping[str, Any]) -> str:
        answer = repr(row[ANSWERS][0]) if row[ANSWERS] else "(none)"
        return f"{row[QUESTION][:SHOWN_CHARS]!r} + {row[CONTEXT][:SHOWN_CHARS]!r}: {answer}"

    def answers(self) -> FoundAnswers | None:
        return self.objective.last


TASK = QuestionAnswering
