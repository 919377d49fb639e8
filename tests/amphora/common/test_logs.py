"""Secrets by name and by shape."""

from __future__ import annotations

import time

import pytest

from amphora.common import logs


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_known", [])


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "db_password", "api-key",
     "WANDB_API_KEY", "token", "client.secret", "DB_PWD", "GITHUB_PAT",
     "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert logs.is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_name", "max_tokens", "pad_token", "eos_token", "PWD", "keyboard", "label_column",
     "max_new_tokens", "num_train_epochs", "path", "mask_token"],
)  # fmt: skip
def test_names_of_ordinary_things(name: str) -> None:
    assert not logs.is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    ["AKIAIOSFODNN7EXAMPLE", "hf_abcdefghijklmnopqrstuv", "Bearer abc.def-123456",
     "https://user:s3cr3tpass@host/x", "wandb: key 0123456789abcdef0123456789abcdef01234567",
     "password=hunter2!", '{"api_key": "abcd1234"}', "&X-Amz-Signature=deadbeef",
     "{'SecretAccessKey': 'wJalrXUtnFEMI'}", "ghp_0123456789abcdefghijABCDEFGHIJ012345", "IQoJ" + "a" * 80],
)  # fmt: skip
def test_shapes_are_masked(text: str) -> None:
    assert logs.MASK in logs.mask(f"before {text} after")


@pytest.mark.parametrize(
    "text",
    ["commit 0123456789abcdef0123456789abcdef01234567", "loss=0.5 tokens=1234", "user@host",
     "https://host:8080/x", "pad_token: [PAD]", "key error: 'x'"],
)  # fmt: skip
def test_ordinary_text_stays(text: str) -> None:
    assert logs.mask(text) == text


def test_a_known_value_is_masked_in_every_spelling() -> None:
    logs.remember(['p"ss/wörd\n-second-line-'])
    for text in ('p"ss/wörd', r"p\"ss/w\u00f6rd", "p%22ss%2Fw%C3%B6rd", "-second-line-"):
        assert logs.mask(f"x {text} y") == f"x {logs.MASK} y", text


def test_short_values_are_not_masked_everywhere() -> None:
    logs.remember(["1234"])
    assert logs.mask("step 1234") == "step 1234"


def test_a_password_may_hold_an_at_sign() -> None:
    assert logs.mask("https://bob:p@ssw0rd@host/x") == f"https://bob:{logs.MASK}@host/x"


def test_words_after_basic_are_no_secret() -> None:
    assert logs.mask("using basic tokenization") == "using basic tokenization"


def test_a_long_line_is_masked_in_no_time() -> None:
    started = time.monotonic()
    logs.mask("token " + "a-" * 30_000)
    assert time.monotonic() - started < 5


def test_what_may_become_a_secret_is_held_back() -> None:
    logs.remember(["s3cr3tvalue"])
    assert logs.unfinished("a line with s3cr3t") == len("s3cr3t")
    assert logs.unfinished("a line without") == 0


def test_bytes_that_are_no_text_are_no_error() -> None:
    logs.remember(["\udcff" * 8])
