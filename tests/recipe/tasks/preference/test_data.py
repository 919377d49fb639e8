"""Preferences as public data sets have them, and what is left out or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.preference import data as preferences
from recipe.tasks.preference.data import EMPTY, NO_PROMPT, OTHER_PROMPTS, SAME


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation; a turn is `u:...`, `a:...` or `s:...`."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def load(folder: Path, rows: Sequence[Any], **options: Any) -> preferences.Preferences:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return preferences.load({"train": folder}, Hyperparameters(task="preference", **options))


def first(found: preferences.Preferences) -> tuple[Any, ...]:
    row = found.train[0]
    cells = [row[name] for name in ("prompt", "chosen", "rejected")]
    return tuple(map(json.loads, cells) if found.are_talks else cells)


HH = "\n\nHuman: What is it?\n\nAssistant:"
ASKED = said("s:be kind", "u:hi", "a:hello", "u:why")
GOOD, BAD = said("a:so"), said("a:no idea")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # orca_dpo_pairs, truthy-dpo
        ({"question": "Q?", "chosen": "yes", "rejected": "no"}, ("Q?", "yes", "no")),
        ({"prompt": "Q?", "chosen": " yes", "rejected": "no\n"}, ("Q?", " yes", "no\n")),
        # hh-rlhf
        (
            {"chosen": f"{HH} I think so.", "rejected": f"{HH} I do not."},
            (HH, " I think so.", " I do not."),
        ),
        (
            {"chosen": f"{HH} So.\n\nHuman: Why?\n\nAssistant: A", "rejected": f"{HH} So.\n\nHuman: Why?\n\nAssistant: B"},
            (f"{HH} So.\n\nHuman: Why?\n\nAssistant:", " A", " B"),
        ),
        # rm-static: a prompt that the answers do not repeat
        ({"prompt": HH, "chosen": " A", "rejected": " B"}, (HH, " A", " B")),
        # texts with one beginning: a word is not cut in two, and a space goes with the answer
        ({"chosen": "Is it? It can.", "rejected": "Is it? It cannot."}, ("Is it? It", " can.", " cannot.")),
        ({"chosen": "Q:\nyes", "rejected": "Q:\nno"}, ("Q:\n", "yes", "no")),
        # trl-lib/ultrafeedback_binarized; HuggingFaceH4's with the prompt as a text beside
        ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, (ASKED, GOOD, BAD)),
        ({"prompt": "hi", "chosen": said("u:hi") + GOOD, "rejected": said("u:hi") + BAD}, (said("u:hi"), GOOD, BAD)),
        # TRL's own: all three are conversations
        ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD}, (ASKED, GOOD, BAD)),
        ({"prompt": ASKED, "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, (ASKED, GOOD, BAD)),
        # the question as a text, the answers as messages; the other way round
        ({"prompt": "hi", "chosen": GOOD, "rejected": BAD}, (said("u:hi"), GOOD, BAD)),
        ({"prompt": ASKED, "chosen": "so", "rejected": "no idea"}, (ASKED, GOOD, BAD)),
        (
            {"prompt": "hi", "chosen": said("s:x") + GOOD, "rejected": said("s:x") + BAD},
            (said("s:x", "u:hi"), GOOD, BAD),
        ),
        # JSON in strings, as CSV has it
        (
            {"chosen": json.dumps(ASKED + GOOD), "rejected": json.dumps(ASKED + BAD)},
            (ASKED, GOOD, BAD),
        ),
        ({"instruction": "Q?", "chosen_response": "yes", "rejected_response": "no"}, ("Q?", "yes", "no")),
    ],
)  # fmt: skip
def test_known_layouts(tmp_path: Path, row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = load(tmp_path, [row, row])
    assert first(found) == expected
    assert found.are_talks == isinstance(expected[0], list)


def test_parquet_and_columns_by_their_names(tmp_path: Path) -> None:
    rows = [{"ask": f"q{n}", "good": "yes", "bad": "no", "id": n} for n in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    names = {"prompt_column": "ask", "chosen_column": "good", "rejected_column": "bad"}
    asked = Hyperparameters(task="preference", **names)
    found = preferences.load({"train": tmp_path}, asked)
    assert first(found)[1:] == ("yes", "no")
    assert "not read: id" in "\n".join(found.found)
    assert "2 prompts held out of the training data" in "\n".join(found.found)
    talks = [{"chosen": said(f"u:{n}", "a:b"), "rejected": said(f"u:{n}", "a:c")} for n in range(9)]
    (tmp_path / "talks").mkdir()
    datasets.Dataset.from_list(talks).to_parquet(tmp_path / "talks" / "a.parquet")
    found = preferences.load({"train": tmp_path / "talks"}, Hyperparameters(task="preference"))
    assert first(found) == (said("u:0"), said("a:b"), said("a:c"))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, SAME),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, EMPTY),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, EMPTY),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, NO_PROMPT),
    ],
)
def test_rows_that_say_nothing_are_counted_and_named(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    good = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    found = load(tmp_path, [good, row, good])
    assert len(found.train) == 2
    lines = [line for line in found.found if "not used" in line]
    assert len(lines) == 2, "of both files"
    assert lines[0].startswith(f"1 of 3 pairs are not used: {why} (the first: ")
    assert "train.jsonl line 2" in lines[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((None, ASKED + GOOD, ASKED + GOOD), SAME),
        ((None, ASKED + GOOD, ASKED), EMPTY),
        ((None, ASKED + said("a: "), ASKED + GOOD), EMPTY),
        ((None, said("u:one", "a:x"), said("u:two", "a:y")), OTHER_PROMPTS),
        ((None, said("s:x", "a:x"), said("s:x", "a:y")), NO_PROMPT),
        ((None, GOOD, BAD), NO_PROMPT),
        ((ASKED, None, BAD), EMPTY),
        ((ASKED, said("u:other", "a:x"), BAD), OTHER_PROMPTS),
        (("another", ASKED + GOOD, ASKED + BAD), OTHER_PROMPTS),
    ],
)
def test_conversations_that_are_no_preference(given: tuple[Any, Any, Any], why: str) -> None:
    assert preferences.of_talks(*given) == why


def test_a_prompt_that_the_conversations_repeat_is_read_once() -> None:
    found = preferences.of_talks(" why", ASKED + GOOD, ASKED + BAD)
    assert found == (ASKED, GOOD, BAD)


def test_ties_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}", "chosen": "a", "rejected": "b", "status": status}
            for n, status in enumerate(["swapped", "tie", "unchanged", "tie"])]  # fmt: skip
    found = load(tmp_path, rows)
    assert sorted(found.train["prompt"]) == ["q 0", "q 2"]
    assert "2 of 4 pairs are not used: column 'status' says tie" in "\n".join(found.found)


def test_preferences_of_sharegpt_are_messages(tmp_path: Path) -> None:
    asked, one, two = ({"from": who, "value": said} for who, said in
                       (("human", "q"), ("gpt", "a"), ("gpt", "b")))  # fmt: skip
    found = load(tmp_path, [{"chosen": [asked, one], "rejected": [asked, two]}] * 2)
    assert json.loads(found.train["prompt"][0]) == [{"role": "user", "content": "q"}]
    assert json.loads(found.train["chosen"][0]) == [{"role": "assistant", "content": "a"}]


def test_texts_and_conversations_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    row: dict[str, Any] = {"prompt": "q", "chosen": "a", "rejected": "b"}
    (tmp_path / "train" / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    row = {"prompt": "q", "chosen": GOOD, "rejected": BAD}
    (tmp_path / "train" / "b.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(DataError, match=r"b.jsonl has conversations, and .*a.jsonl has texts"):
        preferences.load({"train": tmp_path / "train"}, Hyperparameters(task="preference"))
