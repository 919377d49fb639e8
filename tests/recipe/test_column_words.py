"""The nouns of the names of columns, in several languages."""

from __future__ import annotations

import pytest

from recipe import column_words
from recipe.column_words import words_of


@pytest.mark.parametrize(("name", "noun"), [
    ("clean_text", "text"),
    ("text_clean", "text"),
    ("review/score", "score"),
    ("Rating (1-5)", "rating"),
    ("category_name", "category"),
    ("Avis du client", "avi"),  # in the singular, as the system knows it
    ("Kundenkommentar", "kommentar"),
    ("用户评论内容", "内容"),
    ("Nội dung khiếu nại", "noi_dung"),
    ("Commentaire libre", "commentaire"),
    ("label.responses", "label"),
    ("", ""),
])  # fmt: skip
def test_a_noun_is_found(name: str, noun: str) -> None:
    assert words_of(name)[-1] == noun


def test_a_word_names_a_text_a_class_or_what_is_known_about_them() -> None:
    # `note` is a remark in English and a mark in French.
    assert {"note"} == column_words.TEXTS & column_words.LABELS
    assert not column_words.TEXTS & column_words.METADATA
    assert not column_words.OPINIONS & column_words.METADATA
