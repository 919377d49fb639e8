"""Multiple choice: which of several texts is right for a question."""

from __future__ import annotations

from dataclasses import replace

from recipe.spec import INT8_OPTIONS, CellKind, Column, Form, Model, Served, TaskSpec

_CONTEXT = Column(
    role="context",
    names=(
        "context",
        "sent1",
        "article",
        "passage",
        "paragraph",
        "support",
        "premise",
        "flores_passage",
    ),
    names_of_task=("text",),
    kind=CellKind.TEXT,
    is_optional=True,
)
_QUESTION = Column(
    role="question",
    names=("question", "questions", "sent2", "question.stem", "question_stem", "query", "ctx"),
    names_of_task=("sentence", "goal", "prompt", "context", "premise", "passage", "qtext"),
    kind=CellKind.TEXT,
    setting="text_column",
)
_ANSWER = Column(
    role="answer",
    names=(
        *("answer", "label", "answer_key", "answer_idx", "answer_index", "gold", "cop"),
        *("correct", "correct_option", "correct_answer", "correct_answer_num", "correct_index"),
        *("correct_answer_index", "correct_idx", "correct_choice", "correct_option_index"),
    ),
    names_of_task=("ra",),
    setting="label_column",
    is_target=True,
)
_CHOICES = Column(
    role="choices",
    names=("choices", "choices.text", "question.choices", "options", "endings", "candidates"),
    names_of_task=("answers",),
)
_TEXTS = replace(_CHOICES, kind=CellKind.TEXTS)
_LETTERS = Column(role="choices.label", names=("choices.label",), is_optional=True)
_ENDINGS = Column(
    role="endings",
    names=(
        *("ending", "choice", "option", "answer", "ans", "alternative", "sol", "solution"),
        "mc_answer",  # Belebele's
    ),
    kind=CellKind.TEXT,
    is_repeated=True,
    is_numbered=True,
)
_LETTERED = Column(
    role="endings",
    names=(
        *("a", "b", "c", "d", "e", "opa", "opb", "opc", "opd"),
        *(f"{name}.{letter}" for name in ("options", "choices") for letter in "abcdefghij"),
    ),
    kind=CellKind.TEXT,
    is_repeated=True,
)
_TOPICS = ("category", "topic", "subject", "difficulty", "level", "rationale", "explanation")
"""Names of columns that describe a question, or say why its answer is right."""

SPECS = (
    TaskSpec(
        name="multiple-choice",
        folder="multiple_choice",
        forms=(
            Form((_CONTEXT, _QUESTION, _ENDINGS, _ANSWER), extras=("startphrase", *_TOPICS)),
            Form((replace(_QUESTION, names=("startphrase",)), _ENDINGS, _ANSWER)),
            Form(
                (
                    _CONTEXT,
                    replace(_QUESTION, names=(*_QUESTION.names, "prompt")),
                    _LETTERED,
                    _ANSWER,
                ),
                extras=_TOPICS,
            ),
            Form(
                (_CONTEXT, _QUESTION, _CHOICES, _LETTERS, _ANSWER),
                extras=("ctx_a", "ctx_b", "activity_label", *_TOPICS),  # HellaSwag's, MMLU's
            ),
        ),
        models=frozenset(Model) - {Model.DECODER, Model.SEQ2SEQ},
        shared_options=("do_predict", *INT8_OPTIONS),
        served={
            "multiple-choice": Served(
                load="tasks.multiple_choice.serve:Chooser.load",
                architectures=("AutoModelForMultipleChoice",),
                inputs=(Form((_QUESTION, _TEXTS)), Form((_CONTEXT, _QUESTION, _TEXTS))),
                form="choice",
            )
        },
    ),
)
