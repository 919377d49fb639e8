"""Weights that a model's files did not hold: which they are, and that nothing else is random."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.errors import ModelError

_OF_A_LAYER = re.compile(r"\.\d+\.|embed(?!.*mask_token)")
"""In the name of a weight of the model below its head, if it is more than a pooler's, or what
stands in the place of parts of pictures that pretraining hid."""


def unread(report: Mapping[str, Any]) -> list[str]:
    """Names of the weights that from_pretrained did not read from files: those that were not there,
    or of another shape.

    Args:
        report: Its output_loading_info.
    """
    # Of transformers 4 a name alone, of 5 with both shapes.
    other = (each if isinstance(each, str) else each[0] for each in report["mismatched_keys"])
    return sorted({*report["missing_keys"], *other})


def of_encoder(encoder: PreTrainedModel) -> list[str]:
    """Those of an encoder that sentence-transformers has loaded, which does not tell: by another
    look at its files, which takes no memory. None are known of a name on the hub."""
    folder = Path(encoder.name_or_path or os.devnull)
    if (modules := folder / "modules.json").is_file():
        folder /= json.loads(modules.read_text(encoding="utf-8"))[0].get("path", "")
    is_adapted = getattr(encoder, "_hf_peft_config_loaded", False)
    if is_adapted or encoder.config.model_type.startswith("t5gemma"):
        return []  # whose files are an adapter's; whose weights are of other names there
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
    return unread(report)


def check_layers(place: str, model: PreTrainedModel, new: Iterable[str]) -> None:
    """That nothing below the head but a pooler is new: layers drawn at random are no model.

    Args:
        place: Where the model is, for the message.
        new: Names of the weights that its files did not hold.

    Raises:
        ModelError: layers or embeddings are new.
    """
    below = "" if model.base_model is model else f"{model.base_model_prefix}."
    parameters = {weight for weight, _ in model.named_parameters()}
    lost = [
        weight
        for weight in new
        if weight in parameters and weight.startswith(below) and _OF_A_LAYER.search(weight)
    ]
    if lost:
        raise ModelError(
            f"The model {place} lacks {len(lost)} weights of its own layers, or has them in other "
            f"shapes than its config.json says: {', '.join(lost[:3])} ... They would be random.",
            "Give whole weights that belong to its config.json. If they were saved with the head "
            "of another task, save them without it: AutoModel.from_pretrained(A)"
            ".save_pretrained(B).",
        )


@contextlib.contextmanager
def marked_memory() -> Iterator[None]:
    """Within, torch fills memory that nothing is written to with NaN, so that it is known."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def write_biases(place: str, model: PreTrainedModel, new: Iterable[str]) -> None:
    """Set to 0 the new biases that transformers leaves as memory was: those of the heads of FNet,
    Longformer, ERNIE and others for masked tokens (losses of 1e33).

    Raises:
        ModelError: something else was left so.
    """
    weights = dict(model.named_parameters())
    for name in (name for name in new if name in weights and bool(weights[name].isnan().any())):
        if not name.endswith("bias"):
            raise ModelError(
                f"The model {place} lacks its weight {name}, and its own code does not say "
                "what a new one is.",
                "Give a model that was saved with it.",
            )
        torch.nn.init.zeros_(weights[name])
