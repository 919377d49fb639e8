"""The columns of queries and of their relevant texts, for sentence vectors and rerankers."""

from __future__ import annotations

import itertools
from dataclasses import replace

from recipe.spec import (
    LABEL_NAMES,
    PAIR_LABEL_NAMES,
    PAIRS,
    SCORE_NAMES,
    CellKind,
    Column,
    Form,
)

_QUERY = Column(
    role="query",
    names=("anchor", "query", "question", "sentence", "text", "sentence1", "query_text", "title"),
    kind=CellKind.TEXT,
    setting="text_column",
)
_POSITIVE = Column(
    role="text",
    names=(
        *("positive", "positives", "positive_passages", "positive_passage"),
        *("positive_text", "positive_document", "positive_documents", "positive_doc"),
        *(
            "positive_ctxs",
            "pos_passage",
            "pos_doc",
            "pos_text",
            "relevant_doc",
            "relevant_document",
            "relevant_passage",
        ),
    ),
    setting="text_pair_column",
)
_NEGATIVES = Column(
    role="negatives",
    names=(
        *(f"{hard}{name}{what}"
          for hard in ("", "hard_")
          for name in ("negative", "negatives", "neg", "negs")
          for what in ("", *(f"_{what}{s}"
                             for what in ("passage", "document", "doc", "text", "ctx", "sentence")
                             for s in ("", "s")))
          if hard or what or name not in ("neg", "negs")),
        "contradiction", "non_relevant_doc", "irrelevant_doc",
    ),
    setting="negative_columns",
    is_optional=True,
    is_repeated=True,
    is_list=True,
)  # fmt: skip
_SCORE = Column(
    role="score",
    names=(*SCORE_NAMES, "is_selected"),
    names_of_task=(*LABEL_NAMES, *PAIR_LABEL_NAMES),
    setting="label_column",
    is_target=True,
)
_TEXT = Column(role="text", names=("text",), setting="text_pair_column")
_POSITIVES = tuple(
    itertools.product(("query", "question", "anchor"), ("pos", "answer", "passage", "document"))
)
_PAIRS = (
    *PAIRS,
    ("anchor", "entailment"),
    *itertools.product(
        ("anchor", "query", "question", "sentence", "sentence1", "query_text"),
        (
            *("answer", "answers", "passage", "document", "doc", "response", "context"),
            *("paragraph", "target", "text", "title", "abstract", "summary", "code"),
        ),
    ),
)
"""The names of a query and of a relevant text, if there are no negatives."""
_TITLED = (("title", "text"), ("title", "abstract"))
"""The same, of which a score may be one of posts."""

LISTS = (
    Form((
        Column(role="query", names=_QUERY.names, kind=CellKind.TEXT, setting="text_column"),
        Column(
            role="text",
            names=(
                *("passages.passage_text", "documents", "docs", "passages", "texts", "candidates"),
                "paragraphs",
            ),
            names_of_task=("answers",),
            kind=CellKind.TEXTS,
            setting="text_pair_column",
        ),
        Column(
            role="score",
            names=("labels", "scores", "relevances", "is_selected", "passages.is_selected"),
            names_of_task=_SCORE.names,
            setting="label_column",
            is_target=True,
        ),
    ), extras=("answers", "wellFormedAnswers")),
)  # fmt: skip
"""A query, a list of texts, and a number for each of these."""
FORMS = (
    Form((_QUERY, _POSITIVE, _NEGATIVES), extras=("answers", "dataset")),  # DPR's
    # FlagEmbedding's lists.
    Form(
        (
            _QUERY,
            replace(_POSITIVE, names=("pos",), kind=CellKind.TEXTS),
            replace(_NEGATIVES, names=("neg",), kind=CellKind.TEXTS),
        ),
        extras=("prompt",),
    ),
    Form((_QUERY, _TEXT, _SCORE), pairs=_PAIRS),
    # Of strings, `pos` may be parts of speech.
    Form((_QUERY, _TEXT, replace(_NEGATIVES, names=(*_NEGATIVES.names, "neg"))), pairs=_POSITIVES),
    Form((_QUERY, _TEXT, _NEGATIVES), pairs=(*_PAIRS, *_TITLED), needs_task=True),
    Form((_QUERY, _TEXT, _SCORE), pairs=_TITLED, needs_task=True),
)
"""A query and a relevant text, maybe with irrelevant ones; two texts and a score."""
