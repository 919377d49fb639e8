"""Find the weights that a model's files lack, and check that only a head may be random."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.console import say_row
from recipe.errors import ModelError

_LAYER_WEIGHT = re.compile(r"\.\d+\.|embed(?!.*mask_token)")
"""Matches names of weights below the head, except those of a pooler and the token that replaced
masked parts of images in pretraining."""


def unread_weights(report: Mapping[str, Any]) -> list[str]:
    """Return the names of weights that the files lack or have in another shape, from
    from_pretrained's output_loading_info."""
    # transformers 4 reports names, transformers 5 names with both shapes.
    other = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])
    return sorted({*report["missing_keys"], *other})


def missing_weights(encoder: PreTrainedModel) -> list[str]:
    """Return the names of weights that the files of a sentence-transformers encoder lack.

    sentence-transformers does not report them, so the files are loaded again, on the meta device.
    The result is empty for a name on the hub.
    """
    folder = Path(encoder.name_or_path or os.devnull)
    if (modules := folder / "modules.json").is_file():
        folder /= json.loads(modules.read_text(encoding="utf-8"))[0].get("path", "")
    is_adapted = getattr(encoder, "_hf_peft_config_loaded", False)
    if is_adapted or encoder.config.model_type.startswith("t5gemma"):
        return []  # the files hold an adapter; or weights have other names in them
    if not (folder / "config.json").is_file():
        return []
    loader: Any = type(encoder)
    _, report = loader.from_pretrained(
        folder,
        config=copy.deepcopy(encoder.config),
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return unread_weights(report)


def log(new: Sequence[str]) -> None:
    """Log the weights that the model's files lack."""
    names = f"{', '.join(new[:4])}{', ...' if len(new) > 4 else ''}"
    say_row("new weights", f"{len(new)} start at random: {names}" if new else "none")


def check_layers(location: str, model: PreTrainedModel, new: Iterable[str]) -> None:
    """Raise ModelError if weights below the head, except a pooler's, are `new` and so random.
    `location` is the model's folder or name, for the message."""
    below = "" if model.base_model is model else f"{model.base_model_prefix}."
    parameters = {weight for weight, _ in model.named_parameters()}
    lost = [
        weight
        for weight in new
        if weight in parameters and weight.startswith(below) and _LAYER_WEIGHT.search(weight)
    ]
    if lost:
        raise ModelError(
            f"The model {location} lacks {len(lost)} weights of its own layers, or shapes "
            f"that do not match its config.json: {', '.join(lost[:3])} ... They would be random.",
            "Give complete weights that match its config.json. If they were saved with the head of "
            "another task, save them without it: AutoModel.from_pretrained(A).save_pretrained(B).",
        )


@contextlib.contextmanager
def marked_memory() -> Iterator[None]:
    """Let torch fill uninitialised memory with NaN inside the block, so that it can be found."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def write_biases(location: str, model: PreTrainedModel, new: Iterable[str]) -> None:
    """Set new biases to 0 that transformers does not initialise.

    The masked-LM heads of FNet, Longformer, ERNIE and others have such biases (losses of 1e33).
    Raise ModelError if another weight was not initialised.
    """
    weights = dict(model.named_parameters())
    for name in (name for name in new if name in weights and bool(weights[name].isnan().any())):
        if not name.endswith("bias"):
            raise ModelError(
                f"The model {location} lacks its weight {name}, and its code does not initialise "
                "it.",
                "Give a model that was saved with this weight.",
            )
        torch.nn.init.zeros_(weights[name])


def freeze_unsaved(model: PreTrainedModel) -> None:
    """Freeze the weights that saving leaves out, and loading computes. Otherwise transformers 5
    trains Marian's sinusoidal positions, and the saved model is not the trained one."""
    for name, weight in model.named_parameters():
        if name in (model._keys_to_ignore_on_save or ()):
            weight.requires_grad_(False)
