"""Find the model to start from, and load it with a head for the labels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from recipe.compat import attend_fully, new_weights, positions_of
from recipe.console import say
from recipe.data.labels import Labels
from recipe.data.layout.model_channel import MODEL_CHANNELS, model_folder
from recipe.errors import HyperparameterError, ModelError, did_you_mean
from recipe.models import lora, quantized
from recipe.models.changes import adapters, rope
from recipe.models.sources.hub_files import find_file
from recipe.models.sources.origin import ADAPTER, HUB_NAME, MARKS, Origin, base_of, refuse_pointers
from recipe.settings import ModelSettings
from recipe.storage import checksums

_LONGEST = 512
_WHOLE = frozenset({"deberta", "xmod"})
"""Types of models whose code mixes float32 and half precision under autocast: DeBERTa v1 masks by
float32's lowest number, X-MOD writes half precision into a float32 tensor."""
_ADAPTERS = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
"""peft's task type of models with these heads; it has none for other ones."""
PAIR_OF_TEXTS = "a pair of texts"


def find(model_id: str | None, channels: Mapping[str, Path], token: str | None = None) -> Origin:
    """Return the source of the model, or of the adapter and its base, named by model_name_or_path.

    Args:
        token: Access token of the hub.

    Raises:
        HyperparameterError: It is not given, and no channel holds a model.
        ModelError: It names a path or a channel without a model, or the adapter has no base.
    """
    options = {"token": token} if token else {}
    if model_id is None:
        folder = model_folder(channels)
        if folder is None:
            raise HyperparameterError(
                "Hyperparameter model_name_or_path is not given, and no channel called "
                f"{' or '.join(MODEL_CHANNELS[:2])} holds a model.",
                "Give a folder, a channel's name, or a name on the Hugging Face hub.",
            )
        return _local(folder, channels, options)
    if model_id in channels:
        folder = model_folder(channels, model_id)
        if folder is None:
            raise ModelError(
                f"Channel {model_id} ({channels[model_id]}) holds no model: there is no "
                "config.json in it.",
                "Put the model's files, or model.tar.gz, there.",
            )
        return _local(folder, channels, options)
    path = Path(model_id).expanduser()
    if path.is_dir():
        source = _local(path, channels, options)
        if not any((path / name).is_file() for name in (*MARKS, ADAPTER)):
            raise ModelError(
                f"model_name_or_path has value {str(path)!r}, a folder without config.json.",
                "Give the folder that holds config.json, the weights and the tokenizer.",
            )
        return source
    if not HUB_NAME.fullmatch(model_id):
        raise ModelError(
            f"model_name_or_path has value {model_id!r}: there is no such folder.",
            did_you_mean(model_id, channels)
            or "Give a folder, a channel's name, or a name on the hub.",
        )
    if adapter := find_file(model_id, ADAPTER, options):
        return Origin(model_id, base=_base(adapter.parent, channels, options))
    return Origin(model_id)


def _local(folder: Path, channels: Mapping[str, Path], options: Mapping[str, Any]) -> Origin:
    """Return the model, or the adapter and its base, in a folder."""
    refuse_pointers(folder)
    if not (folder / ADAPTER).is_file():
        return Origin(str(folder))
    return Origin(str(folder), base=_base(folder, channels, options))


def _base(adapter: Path, channels: Mapping[str, Path], options: Mapping[str, Any]) -> str:
    """Return the base of an adapter: the model in another channel for models, else by its name."""
    folders = (model_folder(channels, name) for name in MODEL_CHANNELS)
    bases = [folder for folder in folders if folder and not (folder / ADAPTER).is_file()]
    named = str(bases[0]) if bases else ""
    return base_of(adapter, named, options, "Give the base as the channel base_model.")


def load(
    origin: Origin, labels: Labels, settings: ModelSettings
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in float32 with a head for `labels`, which replaces a head for another
    number of labels, and its tokenizer. Raise ModelError as `load_head`."""
    architecture, what = AutoModelForSequenceClassification, "a classifier of these labels"
    return load_head(
        architecture, origin, settings, what, labels.names, problem_type=labels.problem
    )


def known_labels(origin: Origin, settings: ModelSettings) -> tuple[str, ...]:
    """Return the model's labels by their ids; none if its configuration cannot be read."""
    try:
        config = origin.with_access(settings).config()
    except ModelError:
        return ()  # loading the model gives a better error
    return tuple(str(name) for _, name in sorted((config.id2label or {}).items()))


def load_head(
    architecture: Any,
    origin: Origin,
    settings: ModelSettings,
    what: str,
    labels: Sequence[str] = (),
    **options: Any,
) -> tuple[PreTrainedModel, Any]:
    """Return the model in float32 with a head that may be new, and its tokenizer. Raise ModelError
    if it cannot be reached or loaded, or is evaluated without such a head.

    Args:
        architecture: The Auto class of transformers for models with this head.
        what: Describes a model with this head, for messages.
        labels: The labels by their ids, if its outputs have names.
        options: Of its configuration; also of `read`.
    """
    if labels:
        ids = {name: number for number, name in enumerate(labels)}
        options |= {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": ids}
    options["ignore_mismatched_sizes"] = True
    model, tokenizer, new = read(architecture, origin, settings, **options)
    note_new_head(origin, new, settings, what)
    kind = _ADAPTERS.get(architecture.__name__)
    model = lora.wrap(model, settings, kind, new=new, tokenizer=tokenizer)
    return model, tokenizer


def note_new_head(origin: Origin, new: Sequence[str], settings: ModelSettings, what: str) -> None:
    """Log the weights that the model's files lack. Raise ModelError if there are any, and the job
    does not train."""
    new_weights.log(new)
    if new and not settings.trains:
        raise ModelError(
            f"The model {origin.location} lacks {len(new)} weights of {what} ({new[0]} ...), which "
            "only training would create: do_train=False has nothing to evaluate.",
            "Give a trained model, or leave do_train out.",
        )


def check_precision(model: PreTrainedModel, bf16: bool, fp16: bool) -> None:
    """Raise HyperparameterError if half precision is on and this type of model cannot be trained in
    it."""
    kind = model.config.model_type
    if (bf16 or fp16) and kind in _WHOLE:
        name = "bf16" if bf16 else "fp16"
        raise HyperparameterError(
            f"A model of type {kind} is not computed in {'bfloat16' if bf16 else 'float16'}, and "
            f"{name} is on, which is the default if the device computes in bfloat16.",
            f"Give {name}=False.",
        )


def load_causal(
    origin: Origin, settings: ModelSettings
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the causal language model in float32, and its tokenizer. Raise ModelError if it cannot
    be reached or loaded, or is another kind of model."""
    model, tokenizer, new = read(AutoModelForCausalLM, origin, settings)
    config: Any = model.config
    reads_ahead = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if reads_ahead and not getattr(config, "is_decoder", False):
        raise ModelError(
            f"The model {origin.location} is of type {config.model_type}, an encoder, whose tokens "
            "see those that follow them: it cannot learn to continue a text.",
            "Give a decoder, such as a Llama, Qwen or GPT-2.",
        )
    check_head(origin, new, "a causal language model")
    model = lora.wrap(model, settings, "CAUSAL_LM", tokenizer=tokenizer)
    return model, tokenizer


def check_head(origin: Origin, new: Sequence[str], what: str) -> None:
    """Raise ModelError if weights are missing: `new` has their names, from `read`. `what` is the
    architecture, for the message."""
    if new:
        raise ModelError(
            f"The model {origin.location} lacks {len(new)} weights of {what}: "
            f"{', '.join(new[:4])}.",
            "Give a model that was saved with its language modelling head.",
        )


def check_vocabulary(origin: Origin, model: Any, tokenizer: Any) -> None:
    """Raise ModelError if the model has no embedding for some tokens."""
    bare = lora.bare(model)
    if getattr(bare.config, "vocab_size", None) is None:  # of images, or of hashed characters
        return
    count = getattr(bare.get_input_embeddings(), "num_embeddings", None)
    if count is not None and len(tokenizer) > count:
        raise ModelError(
            f"The tokenizer of {origin.location} has {len(tokenizer)} tokens, and the model has "
            f"{count}.",
            "Resize the model's embeddings, or give its own tokenizer.",
        )


def read(
    architecture: Any,
    origin: Origin,
    settings: ModelSettings,
    reader: Any = None,
    **more: Any,
) -> tuple[PreTrainedModel, Any, list[str]]:
    """Return a model in float32, its tokenizer (or what the Auto class `reader` loads, such as an
    image processor), and the names of the weights that its files lack. Raise ModelError if it
    cannot be reached or loaded, or lacks weights below its head."""
    origin = origin.with_access(settings)
    in_4_bits, trains = settings.load_in_4bit, settings.trains
    if in_4_bits:
        fp16 = bool(settings.passed.get("fp16"))
        more |= quantized.options(bool(settings.bf16), fp16)
    base = Origin(origin.base or origin.location, origin.options)
    if origin.base or settings.rope_scaling:
        config, unused = origin.config(return_unused_kwargs=True, **more)
        for name, value in rope.changes(config, settings.rope_scaling).items():
            setattr(config.get_text_config(), name, value)
        more = {"config": config, **{name: more[name] for name in more if name in unused}}
    with checksums.verified(origin.location):
        if trains:
            quantized.check_base(base.location, base.read_settings(), None, in_4_bits)
        if reader is None:
            tokenizer = origin.tokenizer()
        else:
            with origin.explained():
                location = origin.holder("preprocessor_config.json")
                tokenizer = reader.from_pretrained(location, **origin.options)
        load_model = functools.partial(adapters.read_base, origin) if origin.base else base.read
        with new_weights.marked_memory():
            model, report = load_model(architecture, torch.float32, **more)
    if trains:
        quantized.check_base(base.location, base.read_settings(), model, in_4_bits)
    new = new_weights.unread_weights(report)
    new_weights.check_layers(base.location, model, new)
    new_weights.write_biases(base.location, model, new)
    if attend_fully(model):
        say("attention: original_full instead of block_sparse, which a short text would turn off")
    if origin.base:
        model, new = adapters.start(origin, model, new, settings)
    new_weights.freeze_unsaved(lora.bare(model))
    if reader is None and settings.rope_scaling:
        tokenizer.model_max_length = max(tokenizer.model_max_length, positions_of(model))
    if reader is None:
        _set_padding_token(origin, model, tokenizer)
    return model, tokenizer, new


def _set_padding_token(
    origin: Origin, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Set the model's padding token to the tokenizer's, or to the end token if it has none: the
    head of a decoder finds the last real token by it. RoBERTa keeps the padding token from which
    it counts positions."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"The tokenizer of {origin.location} has neither a padding nor an end token.",
                "Set pad_token in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
        say(f"padding token: {tokenizer.eos_token}, the end token, as the tokenizer has none")
    counts_from_padding = any(
        "position" in path.rpartition(".")[2] and getattr(module, "padding_idx", None) is not None
        for path, module in model.named_modules()
    )
    if model.config.pad_token_id is None or not counts_from_padding:
        model.config.pad_token_id = tokenizer.pad_token_id


def longest_input(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    usual: int = _LONGEST,
) -> int:
    """Return the number of tokens at which texts are cut: `max_length`, else the model's limit, at
    most `usual`. Raise HyperparameterError if `max_length` exceeds the model's limit."""
    limit = min(tokenizer.model_max_length, positions_of(model))
    if max_length is not None and max_length > limit:
        raise HyperparameterError(
            f"Hyperparameter max_length has value {max_length}, but the model takes {limit} "
            "tokens.",
            f"Give {limit} or less.",
        )
    return max_length or min(limit, usual)


def longest_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    what: str = "a text",
) -> int:
    """Return `longest_input`. Raise HyperparameterError as it does, or if the length leaves no room
    for two tokens in addition to the special ones of `what`; PAIR_OF_TEXTS has more of these."""
    length = longest_input(model, tokenizer, max_length)
    special = tokenizer.num_special_tokens_to_add(pair=what == PAIR_OF_TEXTS)
    if length < special + 2:
        raise HyperparameterError(
            f"Hyperparameter max_length has value {length}, of which the special tokens of {what} "
            f"take {special}.",
            f"Give {special + 2} or more.",
        )
    return length
