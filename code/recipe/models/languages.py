"""The languages that a multilingual model's tokenizer marks texts with."""

from __future__ import annotations

import re
from typing import Any


def is_multilingual(tokenizer: Any) -> bool:
    """Whether texts are marked with their languages, as those of M2M100, mBART and NLLB."""
    return hasattr(tokenizer, "_build_translation_inputs")


def languages(tokenizer: Any) -> list[str]:
    """The languages that a multilingual tokenizer marks texts with."""
    named = getattr(tokenizer, "lang_code_to_id", None) or getattr(
        tokenizer, "lang_code_to_token", None
    )
    if named:
        return list(named)
    return [
        token for token in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_\w+", token)
    ]


def token_of(tokenizer: Any, language: str) -> int:
    """The token that stands for one of `languages`."""
    if hasattr(tokenizer, "get_lang_id"):
        return int(tokenizer.get_lang_id(language))
    return int(tokenizer.convert_tokens_to_ids(language))


def named(tokenizer: Any, asked: str) -> str | None:
    """The one of `languages` that `asked` names, as `en` names `en_XX`; None where none is."""
    known = languages(tokenizer)
    if asked in known:
        return asked
    begins = [each for each in known if each.startswith(f"{asked}_")]
    return begins[0] if len(begins) == 1 else None
