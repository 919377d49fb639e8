"""Language codes of multilingual models, with which their tokenizers mark texts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from recipe.errors import HyperparameterError

if TYPE_CHECKING:  # servers use this module and start without the Trainer
    from recipe.settings import DataSettings


def is_multilingual(tokenizer: Any) -> bool:
    """Return whether texts are marked with their languages, as those of M2M100, mBART and NLLB."""
    return hasattr(tokenizer, "_build_translation_inputs")


def languages(tokenizer: Any) -> list[str]:
    """Return the language codes of a multilingual tokenizer."""
    named = getattr(tokenizer, "lang_code_to_id", None) or getattr(
        tokenizer, "lang_code_to_token", None
    )
    if named:
        return list(named)
    return [
        token for token in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_\w+", token)
    ]


def token_of(tokenizer: Any, language: str) -> int:
    """Return the token that stands for one of `languages`."""
    if hasattr(tokenizer, "get_lang_id"):
        return int(tokenizer.get_lang_id(language))
    return int(tokenizer.convert_tokens_to_ids(language))


def named(tokenizer: Any, requested: str) -> str | None:
    """Return the code of a language in `languages`, such as `en_XX` for `en`, or None."""
    known = languages(tokenizer)
    if requested in known:
        return requested
    begins = [name for name in known if name.startswith(f"{requested}_")]
    return begins[0] if len(begins) == 1 else None


def mark(model: Any, tokenizer: Any, settings: DataSettings) -> None:
    """Set the languages of a multilingual tokenizer, and the first token that the model generates.

    Raises:
        HyperparameterError: a language is missing, or unknown to the tokenizer.
    """
    if not is_multilingual(tokenizer):
        return
    chosen = {}
    for name in ("source_lang", "target_lang"):
        requested = getattr(settings, name)
        language = None if requested is None else named(tokenizer, requested)
        if language is None:
            first_languages = ", ".join(languages(tokenizer)[:60])
            shown = "is not given" if requested is None else f"has value {requested!r}"
            raise HyperparameterError(
                f"Hyperparameter {name} {shown}, and the model marks texts with their languages.",
                f"Give one of {first_languages}.",
            )
        chosen[name] = language
    for attribute, name in (("src_lang", "source_lang"), ("tgt_lang", "target_lang")):
        setattr(tokenizer, attribute, chosen[name])
        tokenizer.init_kwargs[attribute] = chosen[name]  # since this is saved
    first = token_of(tokenizer, chosen["target_lang"])
    model.generation_config.forced_bos_token_id = first
    if model.config.model_type == "mbart" and model.config.decoder_start_token_id is None:
        model.config.decoder_start_token_id = first
        model.generation_config.decoder_start_token_id = first
