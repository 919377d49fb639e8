"""Known values are masked in every spelling; test_secret_rules.py has names and shapes."""

import pytest

from amphora.common import logs


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_known", [])


def test_a_known_value_is_masked_in_every_spelling() -> None:
    logs.remember(['p"ss/wörd\n-second-line-'])
    for text in ('p"ss/wörd', r"p\"ss/w\u00f6rd", "p%22ss%2Fw%C3%B6rd", "-second-line-"):
        assert logs.mask(f"x {text} y") == f"x {logs.MASK} y", text


def test_short_values_are_not_masked_everywhere() -> None:
    logs.remember(["1234"])
    assert logs.mask("step 1234") == "step 1234"


def test_what_may_become_a_secret_is_held_back() -> None:
    logs.remember(["s3cr3tvalue"])
    assert logs.unfinished("a line with s3cr3t") == len("s3cr3t")
    assert logs.unfinished("a line without") == 0


def test_bytes_that_are_no_text_are_no_error() -> None:
    logs.remember(["\udcff" * 8])


@pytest.mark.parametrize("text", ["token s3cr3tvalue", "-----BEGIN PRIVATE KEY-----"])
def test_a_mask_does_not_join_a_log_line_to_the_next(text: str) -> None:
    logs.remember(["s3cr3tvalue\n"])  # A variable that was set from a file.
    masked = logs.mask(f"{text}\n")
    assert masked.endswith(f"{logs.MASK}\n") and masked == logs.mask(text) + "\n"
