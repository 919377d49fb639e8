"""What a checkpoint holds, taken as plain data while a step waits, to be written beside training.

The weights are whole, on whatever number of processes and sharded or not they were trained, so that
they can be read for any other. A model with adapters has only these, as peft writes them.
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
    optimizer: Mapping[str, Any] | None
    """As torch's optimizers give it; None where only the model is saved."""
    files: Mapping[str, bytes]
    """The small ones."""
    also: Callable[[Path], None]
    """Writes what no step changes: the configuration, the tokenizer."""

    def write(self, folder: Path) -> None:
        """Write all of it into a folder that is there."""
        self.also(folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        save_file(dict(self.weights), folder / self.weights_file, metadata={"format": "pt"})
        if self.optimizer is not None:
            torch.save(self.optimizer, folder / OPTIMIZER)


def weights_of(model: Any) -> tuple[dict[str, Tensor], str]:
    """What is saved of a model, by name, and the name of its file.

    The tensors are the model's own. One that has two names, as tied embeddings do, is given once.
    """
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in first or name not in every
    }
    if not hasattr(model, "peft_config"):
        return state, WEIGHTS
    import peft  # takes a second, and older images are without it

    adapter = peft.get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return adapter, ADAPTER


def load_weights(model: Any, folder: Path, reads: bool, shares: bool) -> None:
    """Put a checkpoint's weights into `model`; every process must call it.

    Args:
        reads: Whether this process reads the file.
        shares: Whether the first process sends the weights to the others.

    Raises:
        CheckpointError: the checkpoint has no weights here, or weights by other names.
    """
    live, file = weights_of(model)
    try:
        stored = load_file(folder / file) if reads else None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"Checkpoint {folder} has no {file}: it is not on this host, or not of this recipe.",
            "Give every host the folder of checkpoints, or resume_from_checkpoint=False.",
        ) from error
    if stored is not None and (differing := sorted(stored.keys() ^ live.keys())):
        raise CheckpointError(
            f"Checkpoint {folder} is of another model: {len(differing)} names of weights differ, "
            f"the first is {differing[0]}."
        )
    sharded.fill(live, stored, shares)


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """Put a checkpoint's moments into `optimizer`, whose weights may be sharded otherwise."""
    stored = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    places = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, moments in stored["state"].items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == places[number].shape:
                moments[name] = sharded.like(value, places[number])
    optimizer.load_state_dict(stored)


def bytes_of(value: Any) -> int:
    """Of all tensors in a tree of mappings and sequences, whole."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(bytes_of(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(each) for each in value)
    return 0
