"""Texts that the tokenizer does not know are reported, with their script."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from recipe.plan.data_report import find_unknown_tokens
from recipe.tasks.base import OK, WARNING
from tests.support.causal_kit import make_tokenizer
from tests.support.words import WORDS

KNOWN = " ".join(WORDS[:20])


@pytest.mark.parametrize(
    ("texts", "level", "words"),
    [
        (["\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440"], WARNING, "100.0% of the tokens of 1 rows are [UNK], most of them Cyrillic"),
        ([KNOWN, "\u4f60\u597d"], WARNING, ", most of them Chinese"),
        ([KNOWN] * 9 + [f"{KNOWN} \U0001f600"], OK, "1.0% of the tokens of 10 rows are [UNK]"),
        ([KNOWN, ""], None, ""),
        ([], None, ""),
    ],
)  # fmt: skip
def test_unknown_tokens_are_counted(
    texts: list[str], level: str | None, words: str, tiny_model: Path
) -> None:
    rows = Dataset.from_dict({"text": texts, "label": ["\u043a"] * len(texts)})
    task: Any = SimpleNamespace(train=rows)
    numbers = range(len(texts))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    findings = list(find_unknown_tokens(task, tokenizer, numbers, ["label"]))
    assert [finding.level for finding in findings] == [level] * (level is not None)
    assert words in " ".join(map(str, findings))
    assert not list(find_unknown_tokens(task, make_tokenizer(), numbers, ["label"])), "of bytes"
