"""Preferences as public data sets have them, and what is left out or refused."""

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


def turns_of(*turns: str) -> list[dict[str, str]]:
    """A conversation; a turn is `u:...`, `a:...` or `s:...`."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def load(folder: Path, rows: Sequence[Any], **options: Any) -> preferences.Preferences:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return preferences.load({"train": folder}, Hyperparameters(task="preference", **options))


def first(actual: preferences.Preferences) -> tuple[Any, ...]:
    row = actual.train[0]
    cells = [row[name] for name in ("prompt", "chosen", "rejected")]
    return tuple(map(json.loads, cells) if actual.are_talks else cells)


HH = "\n\nHuman: What is it?\n\nAssistant:"
PROMPT = turns_of("s:be kind", "u:hi", "a:hello", "u:why")
GOOD, BAD = turns_of("a:so"), turns_of("a:no idea")


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
        ({"chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}, (PROMPT, GOOD, BAD)),
        ({"prompt": "hi", "chosen": turns_of("u:hi") + GOOD, "rejected": turns_of("u:hi") + BAD}, (turns_of("u:hi"), GOOD, BAD)),
        # TRL's own: all three are conversations
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}, (PROMPT, GOOD, BAD)),
        ({"prompt": PROMPT, "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}, (PROMPT, GOOD, BAD)),
        # the question as a text, the answers as messages; the other way round
        ({"prompt": "hi", "chosen": GOOD, "rejected": BAD}, (turns_of("u:hi"), GOOD, BAD)),
        ({"prompt": PROMPT, "chosen": "so", "rejected": "no idea"}, (PROMPT, GOOD, BAD)),
        (
            {"prompt": "hi", "chosen": turns_of("s:x") + GOOD, "rejected": turns_of("s:x") + BAD},
            (turns_of("s:x", "u:hi"), GOOD, BAD),
        ),
        # JSON in strings, as CSV has it
        (
            {"chosen": json.dumps(PROMPT + GOOD), "rejected": json.dumps(PROMPT + BAD)},
            (PROMPT, GOOD, BAD),
        ),
        ({"instruction": "Q?", "chosen_response": "yes", "rejected_response": "no"}, ("Q?", "yes", "no")),
    ],
)  # fmt: skip
def test_known_layouts(tmp_path: Path, row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    loaded = load(tmp_path, [row, row])
    assert first(loaded) == expected
    assert loaded.are_talks == isinstance(expected[0], list)
    is_shared = "the prompt is what both answers begin with" in "\n".join(loaded.notes)
    assert is_shared == (set(row) <= {"chosen", "rejected"})


def test_parquet_and_columns_by_their_names(tmp_path: Path) -> None:
    rows = [{"ask": f"q{n}", "good": "yes", "bad": "no", "id": n} for n in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    names = {"prompt_column": "ask", "chosen_column": "good", "rejected_column": "bad"}
    hyperparameters = Hyperparameters(task="preference", **names)
    loaded = preferences.load({"train": tmp_path}, hyperparameters)
    assert first(loaded)[1:] == ("yes", "no")
    assert "not read: id" in "\n".join(loaded.notes)
    assert "2 prompts held out of the training data" in "\n".join(loaded.notes)
    talks = [
        {"chosen": turns_of(f"u:{n}", "a:b"), "rejected": turns_of(f"u:{n}", "a:c")}
        for n in range(9)
    ]
    (tmp_path / "talks").mkdir()
    datasets.Dataset.from_list(talks).to_parquet(tmp_path / "talks" / "a.parquet")
    loaded = preferences.load({"train": tmp_path / "talks"}, Hyperparameters(task="preference"))
    assert first(loaded) == (turns_of("u:0"), turns_of("a:b"), turns_of("a:c"))


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
    loaded = load(tmp_path, [good, row, good])
    assert len(loaded.train) == 2
    lines = [line for line in loaded.notes if "not used" in line]
    assert len(lines) == 2, "of both files"
    assert lines[0].startswith(f"1 of 3 pairs are not used: {why} (the first: ")
    assert "train.jsonl line 2" in lines[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((None, PROMPT + GOOD, PROMPT + GOOD), SAME),
        ((None, PROMPT + GOOD, PROMPT), EMPTY),
        ((None, PROMPT + turns_of("a: "), PROMPT + GOOD), EMPTY),
        ((None, turns_of("u:one", "a:x"), turns_of("u:two", "a:y")), OTHER_PROMPTS),
        ((None, turns_of("s:x", "a:x"), turns_of("s:x", "a:y")), NO_PROMPT),
        ((None, GOOD, BAD), NO_PROMPT),
        ((PROMPT, None, BAD), EMPTY),
        ((PROMPT, turns_of("u:other", "a:x"), BAD), OTHER_PROMPTS),
        (("another", PROMPT + GOOD, PROMPT + BAD), OTHER_PROMPTS),
    ],
)
def test_conversations_that_are_no_preference(given: tuple[Any, Any, Any], why: str) -> None:
    assert preferences.conversation_triple(*given) == why


def test_a_prompt_that_the_conversations_repeat_is_read_once() -> None:
    actual = preferences.conversation_triple(" why", PROMPT + GOOD, PROMPT + BAD)
    assert actual == (PROMPT, GOOD, BAD)


def test_ties_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}", "chosen": "a", "rejected": "b", "status": status}
            for n, status in enumerate(["swapped", "tie", "unchanged", "tie"])]  # fmt: skip
    loaded = load(tmp_path, rows)
    assert sorted(loaded.train["prompt"]) == ["q 0", "q 2"]
    assert "2 of 4 pairs are not used: column 'status' says tie" in "\n".join(loaded.notes)


def test_preferences_of_sharegpt_are_messages(tmp_path: Path) -> None:
    hyperparameters, one, two = ({"from": who, "value": text} for who, text in
                       (("human", "q"), ("gpt", "a"), ("gpt", "b")))  # fmt: skip
    loaded = load(
        tmp_path, [{"chosen": [hyperparameters, one], "rejected": [hyperparameters, two]}] * 2
    )
    assert json.loads(loaded.train["prompt"][0]) == [{"role": "user", "content": "q"}]
    assert json.loads(loaded.train["chosen"][0]) == [{"role": "assistant", "content": "a"}]


def test_texts_and_conversations_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    row: dict[str, Any] = {"prompt": "q", "chosen": "a", "rejected": "b"}
    (tmp_path / "train" / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    row = {"prompt": "q", "chosen": GOOD, "rejected": BAD}
    (tmp_path / "train" / "b.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(DataError, match=r"b.jsonl has conversations, and .*a.jsonl has texts"):
        preferences.load({"train": tmp_path / "train"}, Hyperparameters(task="preference"))
