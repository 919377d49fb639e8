"""Load encoder-decoder models, and patch them for batches of `batching.text_pairs`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from recipe.console import say
from recipe.errors import ModelError
from recipe.models import lora, packed_decoders, pretrained
from recipe.models.packed_decoders import States
from recipe.models.sources.origin import Origin
from recipe.settings import ModelSettings

_HEADS = {
    "t5", "mt5", "umt5", "longt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "pegasus_x",
    "blenderbot", "blenderbot-small", "led",
}  # fmt: skip
"""Types of models whose logits are the output embeddings applied to the decoder's states, plus an
optional bias. Their head is computed for learned tokens only."""
_OTHER_LOSSES = {
    "prophetnet": "several tokens at once",
    "xlm-prophetnet": "several tokens at once",
    "switch_transformers": "how its experts are used",
    "nllb-moe": "how its experts are used",
}
"""Types of models whose loss has a further term, and its subject."""


def load(
    source: Origin, settings: ModelSettings, prefix: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in float32, set to the job's prefix, and its tokenizer.

    Raises:
        ModelError: it cannot be reached or loaded, lacks weights, or has no start token for its
            decoder.
    """
    model, tokenizer, new = pretrained.read(AutoModelForSeq2SeqLM, source, settings)
    config: Any = model.config
    if config.model_type in _OTHER_LOSSES:
        raise ModelError(
            f"The model {source.location} is of type {config.model_type}, whose loss also covers "
            f"{_OTHER_LOSSES[config.model_type]}, which is not trained here.",
            "Give a T5, BART, Pegasus, Marian, M2M100, NLLB or mBART.",
        )
    pretrained.check_head(source, new, "an encoder with a decoder")
    if config.decoder_start_token_id is None and config.model_type != "mbart":
        raise ModelError(
            f"The model {source.location} has no start token for its decoder.",
            "Set decoder_start_token_id in its config.json.",
        )
    known = getattr(config, "task_specific_params", None) or {}
    if prefix is None and config.model_type == "t5" and known:
        shown = next((options["prefix"] for options in known.values() if options.get("prefix")), "")
        say(f"no source_prefix is given; the model was trained with prefixes such as {shown!r}")
    # Serving puts the prefix before each text; settings of other tasks are removed.
    config.prefix = prefix
    if known:
        config.task_specific_params = None
    model = lora.wrap(model, settings, "SEQ_2_SEQ_LM", tokenizer=tokenizer)
    return model, tokenizer


def shift_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the model's function from labels [rows, length], with -100 for none, to the inputs of
    its decoder."""
    inner = lora.bare(model)
    if hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        return inner.prepare_decoder_input_ids_from_labels  # type: ignore[no-any-return]
    shift = inspect.getmodule(type(inner)).shift_tokens_right  # type: ignore[union-attr]
    config = inner.config
    return functools.partial(
        shift,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def patch_forward_for_pairs(model: Any, smoothing: float) -> None:
    """Let `model` also take batches of pairs, with the results of `patch_forward_for_tokens`."""
    packed_decoders.patch_forward_for_tokens(model, _states, smoothing)


def _states(model: Any, usual: Callable[..., Any], inputs: dict[str, Any]) -> States:
    if model.config.model_type not in _HEADS or torch.compiler.is_compiling():
        logits = usual(**inputs, use_cache=False).logits
        return States(logits, packed_decoders.identity_head, logits.shape[-1])
    output = model.get_output_embeddings()
    captured: list[Tensor] = []

    def keep(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        captured.append(inputs[0])
        return (inputs[0][:, :1],)  # the model's own logits are not used

    handle = output.register_forward_pre_hook(keep)
    try:
        usual(**inputs, use_cache=False)
    finally:
        handle.remove()
    bias = getattr(model, "final_logits_bias", None)

    def head(states: Tensor) -> Tensor:
        logits: Tensor = output(states)
        return logits if bias is None else logits + bias

    return States(captured[0], head, int(output.weight.shape[0]))
