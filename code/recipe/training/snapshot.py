"""Copy the state of a training as plain data, write it as a checkpoint, and load it.

Weights are always whole tensors, also if they are sharded in training, so any number of processes
can load them. Of a model with adapters, only the adapters are saved, as peft writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe.errors import CheckpointError
from recipe.runtime import sharded

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a training after a step."""

    weights: Mapping[str, Tensor]
    weights_file: str
    optimizer: Mapping[str, Any]
    """The optimizer's state_dict."""
    files: Mapping[str, bytes]
    """Small files, by name."""
    write_settings: Callable[[Path], None]
    """Writes what training does not change: configuration, tokenizer."""

    def write(self, folder: Path) -> None:
        """Write all files into an existing folder."""
        self.write_settings(folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        save_file(dict(self.weights), folder / self.weights_file, metadata={"format": "pt"})
        torch.save(self.optimizer, folder / OPTIMIZER)


def weights_of(model: Any) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a model to save, by name, and the name of their file. They are not
    copied; tied ones are returned once."""
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in first or name not in every
    }
    if not hasattr(model, "peft_config"):
        return state, WEIGHTS
    import peft  # takes a second

    adapter = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return adapter, ADAPTER


def load_weights(model: Any, folder: Path, reads: bool, shares: bool) -> None:
    """Load a checkpoint's weights into `model`: from its file if `reads`, from the first process if
    `shares`. A collective of all processes. Raise CheckpointError if the file is not on this host,
    or belongs to another model."""
    live, file = weights_of(model)
    try:
        stored = load_file(folder / file) if reads else None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"Checkpoint {folder} has no {file}: it is not on this host, or not from this recipe.",
            "Give all hosts the checkpoints folder, or set resume_from_checkpoint=False.",
        ) from error
    if stored is not None and (differing := sorted(stored.keys() ^ live.keys())):
        raise CheckpointError(
            f"Checkpoint {folder} belongs to another model: {len(differing)} names of weights "
            f"differ, the first is {differing[0]}."
        )
    sharded.fill(live, stored, shares)


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """Load a checkpoint's optimizer state, whatever the sharding of the weights is now. Raise
    CheckpointError if it trains other weights."""
    stored = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    both = stored["param_groups"], optimizer.param_groups
    was, now = ([len(group["params"]) for group in groups] for groups in both)
    if was != now:
        raise CheckpointError(
            f"Checkpoint {folder} cannot be resumed from: its optimizer updates {sum(was)} "
            f"weights, and this version of the recipe trains {sum(now)}.",
            "Set resume_from_checkpoint=False to train from the beginning, or another output_dir.",
        )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, moments in stored["state"].items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == weights[number].shape:
                moments[name] = sharded.shard_like(value, weights[number])
    optimizer.load_state_dict(stored)


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a tree of mappings and sequences."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(bytes_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    return 0
