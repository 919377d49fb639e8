"""Question answering: the words of a context that answer a question, as in SQuAD."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.option_fields import NOT_BELOW_0, Effect, option
from recipe.spec import INT8_OPTIONS, CellKind, Column, Form, Served, TaskSpec

_ARTICLES = Column(
    role="articles", names=("paragraphs", "data"), kind=CellKind.ARTICLES, is_content=False
)
_QUESTION = Column(role="question", names=("question", "query"), kind=CellKind.TEXT)
_CONTEXT = Column(
    role="context", names=("context", "passage", "paragraph", "document"), kind=CellKind.TEXT
)
_ANSWER_NAMES = (
    *("answers.text", "answer.text", "answer_text", "answers", "answer", "answer_texts"),
    "text",  # beside `answer_start`, in tables made of SQuAD
)
_STARTS = Column(
    role="starts",
    names=(
        *("answers.answer_start", "answers.start", "answer.answer_start", "answer.start"),
        *("answer_start", "answer_starts", "start", "starts", "start_position", "start_char"),
    ),
    is_target=True,
)
_OTHERS = (
    Column(role="id", names=("id", "guid", "qid", "question_id"), is_optional=True,
           is_content=False),
    Column(role="is_impossible", names=("is_impossible", "is_unanswerable"), is_optional=True,
           is_target=True),
)  # fmt: skip

_EXTRAS = ("title", "summary", "end", "ends", "answer_end", "answer_ends", "end_position",
           "end_char", "answers.answer_end", "answers.end", "answer.end")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only this task takes."""

    doc_stride: int | None = option(
        None,
        "question-answering: tokens by which two windows of a context overlap. Default: 128, "
        "at most half of max_length.",
        valid=NOT_BELOW_0,
        effect=Effect.SAMPLES,
    )


SPECS = (
    TaskSpec(
        name="question-answering",
        folder="question_answering",
        forms=(
            Form((_ARTICLES,), extras=_EXTRAS),
            Form((
                _QUESTION, _CONTEXT,
                Column(role="answers", names=_ANSWER_NAMES, is_target=True), _STARTS, *_OTHERS,
            ), extras=_EXTRAS),
            # Records that were written as text.
            Form((
                _QUESTION, _CONTEXT,
                Column(role="answers", names=("answers",), names_of_task=_ANSWER_NAMES,
                       is_target=True),
                *_OTHERS,
            ), extras=_EXTRAS),
        ),
        options=Options,
        shared_options=("do_predict", *INT8_OPTIONS),
        learning_rates=(3e-5, 2e-4),
        served={
            "question-answering": Served(
                load="tasks.question_answering.serve:QuestionAnswerer.load",
                architectures=("AutoModelForQuestionAnswering",),
                adapters=("QUESTION_ANS",),
                inputs=(Form((_QUESTION, _CONTEXT)),),
                form="question",
            ),
        },
    ),
)  # fmt: skip
