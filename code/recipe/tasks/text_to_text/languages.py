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


def mark(model: Any, tokenizer: Any, settings: DataSettings) -> None:
    """Set the languages of a multilingual tokenizer, and the first token that the model generates.

    Raises:
        HyperparameterError: a language is missing, or unknown to the tokenizer.
    """
    if not is_multilingual(tokenizer):
        return
    known = languages(tokenizer)
    chosen = {}
    for name in ("source_lang", "target_lang"):
        requested = getattr(settings, name)
        # `en` may stand for `en_XX`.
        longer = [code for code in known if code.startswith(f"{requested}_")]
        language = requested if requested in known or len(longer) != 1 else longer[0]
        if language not in known:
            first_languages = ", ".join(known[:60])
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
