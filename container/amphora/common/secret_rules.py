"""Recognises secrets by the name of a setting and by the shape of a value.

`container/amphora/common` and `code/recipe` have a copy each, because neither package may import
the other. A test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "******"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Words after the name of a secret; the word before them decides.
_QUALIFIERS = re.compile(
    r"ids?|val(?:ue)?|pem|b|base|json|text|raw|v|new|old|current|backup|prod(?:uction)?"
    r"|dev|staging"
)
_ALWAYS = re.compile(
    r"secrets?|passwords?|passwd|passphrase|pwd|credentials?|authorization|apikeys?|apitoken"
    r"|authtoken|accesstoken|accesskey|secretkey|privatekey|pat|jwt"
)
# A name that ends in "key" is a secret only after one of these words: most keys are columns.
_OF_KEYS = re.compile(
    r"api|access|secret|private|auth|account|signing|encryption|decryption|licen[cs]e|ssh"
    r"|storage|subscription|service|shared|master|deploy|admin|hmac|openai|anthropic|azure|aws"
    r"|gcp|google|cohere|mistral|groq|gemini|stripe|sendgrid|datadog|wandb|comet|neptune"
)
# A name that ends in "token" is a secret unless the token is part of a vocabulary.
_VOCABULARY = re.compile(
    r"pad|eos|bos|sep|cls|mask|unk|image|video|audio|special|start|end|stop|next|new|per|chat"
    r"|first|last|prefix|suffix|middle|fim|blank|separator|boi|eoi|vision|speech|query|passage"
    r"|thinking|tool"
)
# A name that ends in "tokens" is a secret only after these words: most are counts.
_OF_TOKENS = re.compile(
    r"api|access|auth|refresh|bearer|session|secret|gh|github|gitlab|hf|huggingface|hub|slack"
    r"|bot|oauth|npm|pypi|wandb|aws|azure|gcp|google|user|personal|deploy|app"
)
_OF_PASS = re.compile(r"db|database|smtp|ftp|mail|email|mysql|postgres|redis|proxy|admin")


def is_secret_name(name: str) -> bool:
    """Return whether a name (`hf_token`, `dbPassword`, `GH_TOKENS`) is that of a secret."""
    if name == "PWD":  # The shell's working directory.
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if words[-1:] == ["headers"] and "otlp" in words:
        return True
    while len(words) > 1 and (_QUALIFIERS.fullmatch(words[-1]) or words[-1].isdigit()):
        words.pop()
    *before, last = words or [""]
    previous = before[-1] if before else ""
    if last == "token":
        return not _VOCABULARY.fullmatch(previous)
    owners = {"key": _OF_KEYS, "keys": _OF_KEYS, "tokens": _OF_TOKENS, "pass": _OF_PASS}
    if last in owners:
        return bool(owners[last].fullmatch(previous))
    return bool(_ALWAYS.fullmatch(last)) or [previous, last] == ["connection", "string"]


# Values that are secrets in any place.
_VALUES = re.compile(
    "|".join(
        (
            # AWS: ids of keys, session tokens.
            r"\b(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}\b",
            r"\b(?:IQoJ|FwoG|FQoG)[A-Za-z0-9+/=]{60,}",
            # Hugging Face, GitHub, GitLab, Slack.
            r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b",
            r"\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_[A-Za-z0-9_]{30,}\b",
            r"\bgl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[A-Za-z0-9_.-]{20,}",
            r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{10,}",
            # Google: API keys, access tokens, client secrets.
            r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}|\bGOCSPX-[A-Za-z0-9_-]{20,}",
            # OpenAI and Anthropic, Stripe, Groq, Replicate, Databricks, SendGrid.
            r"\bsk-[A-Za-z0-9_-]{20,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}",
            r"\bgsk_[A-Za-z0-9]{40,}|\br8_[A-Za-z0-9]{30,}|\bdapi[0-9a-f]{32}\b",
            r"\bSG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{16,64}",
            # npm, PyPI, Docker, Weights & Biases.
            r"\bnpm_[A-Za-z0-9]{36}\b|\bpypi-AgE[A-Za-z0-9_-]{20,}|\bdckr_pat_[A-Za-z0-9_-]{20,}",
            r"\bwandb_v1_[A-Za-z0-9_]{20,}|\blocal-[0-9a-f]{40}\b",
            # A JSON Web Token.
            r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",
        )
    )
)
# A line without any of these (in lower case) contains no match of `_VALUES`.
_VALUE_HINTS = (
    *("akia", "asia", "aroa", "aida", "abia", "acca", "iqoj", "fwog", "fqog", "hf_", "api_org_"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat", "-", "aiza", "ya29.", "k_live_"),
    *("k_test_", "gsk_", "r8_", "dapi", "sg.", "npm_", "dckr_", "eyj", "wandb"),
)
# Secrets that a prefix (the first group, which is kept) identifies, with hints as above.
_PATTERNS = tuple(
    (hints.split(), re.compile(pattern))
    for hints, pattern in (
        ("hooks.slack", r"(hooks\.slack\.com/(?:services|workflows)/)[A-Za-z0-9/_-]{8,}"),
        # A W&B key is 40 hex digits, like a git commit: only near its name.
        ("wandb", r"(?i)(wandb.{0,80}?)\b[0-9a-f]{40}\b"),
        # With a digit, unlike "basic tokenization".
        ("bearer basic", r"(?i)(\b(?:bearer|basic)[ \t]+)(?=\S*\d)[A-Za-z0-9._~+/=-]{12,}"),
        # Up to the last @ before the host's end: a password may hold one.
        ("://", r"(://[^\s/:@'\"]*:)[^\s/'\"]+(?=@)"),
        ("://", r"(?i)(https?://)(?!git@)[^\s/:@'\"<>]+(?=@)"),
        # Signed addresses of S3 and Azure.
        ("x-amz-", r"(?i)(\bX-Amz-(?:Signature|Security-Token|Credential)=)[^&\s'\"]+"),
        ("sig=", r"(?i)([?&]sig=)[^&\s'\"]{8,}"),
        (
            "passw secret key token",
            # Not /etc/passwd.
            r"(?i)((?<!/)(?:password|passwd|secret|api[_-]?key|access[_-]?key|secret[_-]?key"
            r"|auth[_-]?token|access[_-]?token|session[_-]?token|hf[_-]?token)"
            r"['\"]?[ \t]*[=:][ \t]*['\"]?)(?!(?:None|null|true|false)\b)[^\s'\",;&}]{4,}",
        ),
    )
)
# A setting, or an option of a command line, and its value.
_SETTING = re.compile(
    r"(?i)(?<![\w.-])(?P<head>--(?P<option>[a-z][\w.-]{0,80})(?:=|[ ]{1,3})['\"]?"
    r"|(?P<name>[a-z][\w.-]{0,80})['\"]?[ ]{0,3}[=:][ ]{0,3}['\"]?)"
    r"(?!(?:None|null|true|false)\b)[^\s'\",;&}\[<(]{4,}"
)
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL)
_SETTING_HINTS = (
    *("passw", "passphrase", "pwd", "_pass", "secret", "key", "token", "credential"),
    *("authorization", "pat", "jwt", "connection"),
)


def is_secret_value(text: str) -> bool:
    """Return whether a value has the shape of a secret or is a URL with credentials."""
    lower = text.lower()
    if (_holds(lower, _VALUE_HINTS) and _VALUES.search(text)) or _PEM.search(text):
        return True
    patterns = _PATTERNS[:-1]  # Without the one that follows a name, which may be prose.
    return any(_holds(lower, hints) and pattern.search(text) for hints, pattern in patterns)


def mask_shapes(text: str) -> str:
    """Mask everything in `text` that has the shape of a secret or follows its name."""
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(rf"\1{MASK}\2", text)
    lower = text.lower()
    if _holds(lower, _VALUE_HINTS):
        text = _VALUES.sub(MASK, text)
    for hints, pattern in _PATTERNS:
        if _holds(lower, hints):
            text = pattern.sub(rf"\1{MASK}", text)

    def masked(match: re.Match[str]) -> str:
        option, name = match["option"], match["name"]
        # "token: x" may be about a vocabulary; "HF_TOKEN_1: x" is not.
        is_secret = is_secret_name(option or name) and (option or len(_WORD.findall(name)) > 1)
        return match["head"] + MASK if is_secret else match[0]

    return _SETTING.sub(masked, text) if _holds(lower, _SETTING_HINTS) else text


def _holds(lower: str, hints: Iterable[str]) -> bool:
    return any(hint in lower for hint in hints)
