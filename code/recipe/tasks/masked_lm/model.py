"""Load masked language models, and patch them for batches of `masked_lm.batches`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from recipe.compat import new_weights
from recipe.errors import ModelError
from recipe.models import lora, packed_decoders, packed_encoders, pretrained
from recipe.models.packed_encoders import Family
from recipe.models.pretrained import Source
from recipe.settings import ModelSettings


def load(
    source: Source, settings: ModelSettings
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the masked language model in float32, and its tokenizer.

    Raises:
        ModelError: it cannot be reached or loaded, is no such model, has no mask, knows fewer
            tokens than its tokenizer, or lacks the head that LoRA needs.
    """
    model, tokenizer, new = pretrained.read(AutoModelForMaskedLM, source, settings)
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ModelError(
            f"The model {source.name} is of type {config.model_type}, an encoder with a decoder, "
            "which generates text and does not fill masks.",
            "Give an encoder such as a BERT, or another task.",
        )
    if tokenizer.mask_token_id is None:
        raise ModelError(
            f"The tokenizer of {source.name} has no mask token.",
            "Give a model that was pretrained by masking, or set mask_token in its "
            "tokenizer_config.json.",
        )
    if new:
        new_weights.log(new)
        lacks = f"The model {source.name} lacks {len(new)} weights of a masked language model"
        if not settings.trains:
            raise ModelError(
                f"{lacks} ({new[0]} ...), which only training would create: do_train=False has "
                "nothing to evaluate.",
                "Give a model that was saved with its head, or leave do_train out.",
            )
        if settings.lora_r is not None:
            raise ModelError(
                f"{lacks} ({new[0]} ...), whose head would stay random with LoRA.",
                "Give a model that was saved with its head, or leave lora_r out.",
            )
    return lora.wrap(model, settings, (), None, trains_head=False), tokenizer


def patch_forward_for_masking(model: Any) -> None:
    """Let `model` also take batches of masked texts.

    Instead of logits, it then returns [samples, 2] in float32: the sum of the losses of a sample's
    masked tokens, and how many of these it predicts.
    """
    inner = lora.bare(model)
    family = packed_encoders.family_of(inner.config)
    usual = inner.forward
    forward = functools.partial(_forward, inner, family, usual)
    inner.forward = functools.update_wrapper(forward, usual)


def _forward(
    model: Any, family: Family | None, usual: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    positions = inputs.pop("places", None)
    if positions is None:
        return usual(*args, **inputs)
    targets, owners, answers = (inputs.pop(name) for name in ("targets", "owners", "answers"))
    segments = inputs.get("segments")
    head: Callable[[Tensor], Tensor] = packed_decoders.identity_head
    if family is None:
        hidden = usual(**inputs).logits
    else:
        head = functools.partial(family.masked, model)
        if segments is None:
            hidden = model.base_model(**inputs).last_hidden_state
        else:
            hidden = packed_encoders.states(model, family, inputs, segments)
    chosen = hidden.flatten(0, 1)[positions]
    tokens = packed_decoders.token_losses(chosen, head, targets, model.config.vocab_size)
    return MaskedLMOutput(logits=packed_decoders.sums_of(tokens, owners, answers))
