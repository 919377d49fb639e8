"""Logging for the container's own lines, and the masking of secrets in everything it prints.

A secret is known in two ways: by name (a hyperparameter or variable such as HF_TOKEN or
db_password: its value is remembered, see `remember`) and by shape (an AWS key id, a Hugging Face
token, a bearer header, a password inside a URL).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast
from urllib.parse import quote

MASK = "******"
# Shorter values would mask ordinary words and numbers wherever they stand.
MIN_SECRET_CHARS = 6

_SECRET_WORDS = re.compile(
    r"(?:^|[_.-])(?:secret|passw(?:or)?d|passphrase|pwd|credentials?|authorization"
    r"|(?:api|access|secret|private|auth|account|signing|encryption)[_-]?key(?:_id)?|apikey|pat"
    r"|token|otlp(?:_[a-z]+)?_headers)(?:$|[_.-](?:id|value|key|v\d)$)",
    re.IGNORECASE,
)
# Tokens of a vocabulary, not of an account.
_VOCABULARY = re.compile(
    r"(?:^|[_.-])(?:pad|eos|bos|sep|cls|mask|unk|image|special|start|end|stop|decoder_start"
    r"|next|new|per|chat)[_.-]?token$",
    re.IGNORECASE,
)

_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"), MASK),
    (re.compile(r"\b(?:IQoJ|FwoG|FQoG)[A-Za-z0-9+/=]{60,}"), MASK),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b"), MASK),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_[A-Za-z0-9_]{30,}\b"), MASK),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{20,}\b"), MASK),
    (re.compile(r"\bwandb_v1_[A-Za-z0-9_]{20,}|\blocal-[0-9a-f]{40}\b"), MASK),
    # A bare W&B key is 40 hex digits, as a git commit is: only where the line speaks of wandb.
    (re.compile(r"(?i)(wandb.{0,80}?)\b[0-9a-f]{40}\b"), rf"\1{MASK}"),
    # With a digit in it, or it is a word: "basic tokenization".
    (re.compile(r"(?i)\b(bearer|basic)\s+(?=\S*\d)[A-Za-z0-9._~+/=-]{12,}"), rf"\1 {MASK}"),
    # Up to the last @ before the host's end: a password may hold one.
    (re.compile(r"(://[^\s/:@'\"]*):[^\s/'\"]+@"), rf"\1:{MASK}@"),
    (
        re.compile(r"(?i)\b(X-Amz-(?:Signature|Security-Token|Credential))=[^&\s'\"]+"),
        rf"\1={MASK}",
    ),
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|api[_-]?key|access[_-]?key|secret[_-]?key"
            r"|auth[_-]?token|access[_-]?token|session[_-]?token|hf[_-]?token)"
            r"['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&}]{4,}"
        ),
        rf"\1{MASK}",
    ),
)
# A line without any of these holds nothing that the expressions above would find.
_HINTS = (
    *("akia", "asia", "aroa", "aida", "iqoj", "fwog", "fqog", "hf_", "api_org_", "ghp_", "gho_"),
    *("ghu_", "ghs_", "ghr_", "github_pat", "sk-", "local-", "://", "wandb", "bearer", "basic"),
    *("x-amz-", "passw", "secret", "key", "token"),
)

_known: list[str] = []
"""Values to mask, longest first, so that a secret that contains another one is masked whole."""


def is_secret_name(name: str) -> bool:
    """Whether what goes by this name (`hf_token`, `DB_PASSWORD`) is a secret."""
    if name == "PWD":  # The shell's working directory.
        return False
    return bool(_SECRET_WORDS.search(name)) and not _VOCABULARY.search(name)


def secret_values(items: Mapping[str, object]) -> set[str]:
    """The values in `items`, at any depth, that stand under a secret's name."""
    values: set[str] = set()
    for name, value in items.items():
        if isinstance(value, Mapping):
            values |= secret_values(value)
        elif isinstance(value, str) and is_secret_name(name):
            values.add(value)
    return values


def remember(values: Iterable[str]) -> None:
    """Mask these values from now on, in the spellings a log may show them in."""
    spellings = {
        spelling
        for value in values
        for line in {value, *value.splitlines()}
        if len(line.strip()) >= MIN_SECRET_CHARS
        for spelling in (
            line,
            json.dumps(line)[1:-1],
            quote(line, safe="", errors="surrogateescape"),
            repr(line)[1:-1],
        )
    }
    _known[:] = sorted({*_known, *spellings}, key=len, reverse=True)


def mask(text: str) -> str:
    """`text` with every known or recognisable secret replaced by asterisks."""
    for value in _known:
        if value in text:
            text = text.replace(value, MASK)
    if not _may_hold_a_secret(text):
        return text
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if _may_hold_a_secret(line):
            for pattern, replacement in _SHAPES:
                lines[number] = pattern.sub(replacement, lines[number])
    return "".join(lines)


def unfinished(text: str) -> int:
    """How many of the last characters of `text` may be the beginning of a known secret."""
    longest = max((len(value) for value in _known), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(value.startswith(tail) for value in _known):
            return length
    return 0


def _may_hold_a_secret(text: str) -> bool:
    lower = text.lower()
    return any(hint in lower for hint in _HINTS)


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))


class Masking:
    """A text stream that masks what is written to it, and is the stream itself in all else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def configure(level: int | str = logging.INFO) -> None:
    """Send amphora's log lines to stderr, one format, secrets masked."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_MaskingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("amphora")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def mask_printing() -> None:
    """Mask what this process prints from now on, by Python's own streams."""
    sys.stdout = cast(TextIO, Masking(sys.stdout))
    sys.stderr = cast(TextIO, Masking(sys.stderr))
