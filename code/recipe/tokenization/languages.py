"""Language codes of multilingual models, with which their tokenizers mark texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recipe.errors import HyperparameterError


def language_tokens(tokenizer: Any) -> Mapping[str, int]:
    """Return the token of each language code of a multilingual tokenizer (M2M100, mBART, NLLB);
    empty for others."""
    if not hasattr(tokenizer, "_build_translation_inputs"):
        return {}
    known: Mapping[str, int] | None = getattr(tokenizer, "lang_code_to_id", None)
    special = (t for t in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_\w+", t))
    return known or {code: int(tokenizer.convert_tokens_to_ids(code)) for code in special}


def mark(model: Any, tokenizer: Any, source_lang: str | None, target_lang: str | None) -> None:
    """Set the languages of a multilingual tokenizer, and the first token that the model generates.

    Raises:
        HyperparameterError: a language is missing, or unknown to the tokenizer.
    """
    if not (known := language_tokens(tokenizer)):
        return
    for name, requested in (("source_lang", source_lang), ("target_lang", target_lang)):
        # `en` may stand for `en_XX`.
        longer = [code for code in known if code.startswith(f"{requested}_")]
        language = requested if requested in known or len(longer) != 1 else longer[0]
        if language not in known:
            shown = "is not given" if requested is None else f"has value {requested!r}"
            raise HyperparameterError(
                f"Hyperparameter {name} {shown}, and the model marks texts with their languages.",
                f"Give one of {', '.join([*known][:60])}.",
            )
        attribute = "src_lang" if name == "source_lang" else "tgt_lang"
        setattr(tokenizer, attribute, language)
        tokenizer.init_kwargs[attribute] = language  # since this is saved
    first = known[tokenizer.tgt_lang]
    model.generation_config.forced_bos_token_id = first
    if model.config.model_type == "mbart" and model.config.decoder_start_token_id is None:
        model.config.decoder_start_token_id = first
        model.generation_config.decoder_start_token_id = first
