"""Reads the folder of a LoRA adapter, as peft writes it, for a base that many adapters share.

peft itself adds modules to a model for each adapter, and warns where weights are missing. Here what
an adapter changes are values, and what cannot be one is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recipe.errors import ModelError, join_names
from recipe.models.sources.origin import ADAPTER

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MERGE = "Merge it into its base (merge_and_unload, lora_save=merged), and serve it as a model."
_UNSHARED = ("use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens",
             "trainable_token_indices", "target_parameters", "fan_in_fan_out")  # fmt: skip
"""Settings of adapters that change a base by more than products of linear layers."""


@dataclass(frozen=True)
class LowRank:
    """What is added to the outputs of a linear layer: `scale * inputs @ down.T @ up.T`."""

    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[outputs, rank]."""
    scale: float

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add it to `outputs` [rows, outputs] in place, for `inputs` [rows, inputs]."""
        outputs.addmm_(inputs @ self.down.t(), self.up.t(), alpha=self.scale)


@dataclass(frozen=True, kw_only=True)
class LoraFiles:
    """An adapter: its products, and the weights that it trained in full."""

    location: str
    products: Mapping[str, LowRank]
    """By the names of layers in the adapted model."""
    full: Mapping[str, Tensor]
    """By the names of weights in it: those of a head."""
    targets: list[str]
    """The last parts of the names of all adapted layers; empty if the settings have a pattern."""

    @classmethod
    def read(cls, location: str, device: torch.device, dtype: torch.dtype) -> LoraFiles:
        """Read a folder: its head and the factors of products in `dtype`, but on a CPU the factors
        in float32, whose small products need no kernel of oneDNN for each shape. Float32 weights
        stay pages of the file, which all processes share. Raise ModelError if the folder is
        incomplete, or changes more than products of linear layers and a head."""
        config, tensors = _settings(Path(location)), _tensors(Path(location))
        full: dict[str, Tensor] = {}
        sides = {"lora_A": dict[str, Tensor](), "lora_B": dict[str, Tensor]()}
        for name, value in tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise ModelError(f"{name} of the adapter {location} contains NaN or infinity.")
            path, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
            side = f"lora_{rest}".removesuffix(".weight")
            if path and side not in sides:
                raise ModelError(f"The adapter {location} has {name}.", _MERGE)
            is_wide = path and device.type == "cpu"
            kept = value.to(device, torch.float32 if is_wide else dtype)
            (sides[side] if path else full)[path or name.removeprefix(_PREFIX)] = kept
        downs, ups = sides.values()
        if alone := sorted(downs.keys() ^ ups.keys()):
            raise ModelError(
                f"The adapter {location} has only lora_A or lora_B of {join_names(alone, 3)}.",
                "Give the whole file that peft wrote.",
            )
        products = {
            path: LowRank(down, ups[path], _scale(config, path, down, location))
            for path, down in downs.items()
        }
        for path, product in products.items():
            if product.up.shape[1:] != product.down.shape[:1]:
                shapes = f"{[*product.down.shape]} and {[*product.up.shape]}"
                raise ModelError(f"lora_A and lora_B of {path} in {location} have {shapes}.")
        targets = config.get("target_modules")
        is_listed = isinstance(targets, list) and not (
            config.get("layers_to_transform") or config.get("exclude_modules")
        )
        return cls(
            location=location, products=products, full=full,
            targets=list(targets or ()) if is_listed else [],
        )  # fmt: skip

    def layers(self, model: nn.Module, unread: str = "") -> dict[nn.Module, LowRank]:
        """Return the products by the linear layers of the adapted model, without those of its
        module `unread`. Raise ModelError if one does not fit, or a layer that the settings name has
        none."""
        modules = dict(model.named_modules())
        skipped = f"{unread}." if unread else ()
        layers: dict[nn.Module, LowRank] = {}
        for path, product in self.products.items():
            if path.startswith(skipped):
                continue
            layer = modules.get(path)
            shapes = [product.up.shape[0], product.down.shape[1]]
            if not isinstance(layer, nn.Linear) or [*layer.weight.shape] != shapes:
                shown = f"is {type(layer).__name__}" if layer is not None else "is missing"
                if isinstance(layer, nn.Linear):
                    shown = f"has {[*layer.weight.shape]}"
                raise self.misfit(f"it is for layers {path} of {shapes}, which {shown}")
            layers[layer] = product
        ends = tuple(f".{target}" for target in self.targets)
        lacking = [
            path
            for path, layer in modules.items()
            if isinstance(layer, nn.Linear)
            and layer not in layers
            and f".{path}".endswith(ends)
            and f"{path}.weight" not in self.full
            and not path.startswith(skipped)
        ]
        if ends and lacking:
            raise self.misfit(f"it lacks the weights of {join_names(lacking, 3)}")
        return layers

    def misfit(self, why: str) -> ModelError:
        """Return the error for an adapter that does not fit its base."""
        return ModelError(
            f"The adapter {self.location} does not fit the served model: {why}.",
            "Give the whole folder that peft wrote, of the base that is served; for other labels "
            "than the base's also the config.json of the trained model.",
        )


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / ADAPTER).read_text())
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / ADAPTER} cannot be read: {error}.") from error
    if kind != "LORA":
        raise ModelError(f"The adapter {folder} has peft_type {kind!r}, not LORA.", _MERGE)
    unshared = {name: config[name] for name in _UNSHARED if config.get(name)}
    if config.get("bias", "none") != "none":
        unshared["bias"] = config["bias"]
    if unshared:
        shown = ", ".join(f"{name} {str(value)[:40]!r}" for name, value in unshared.items())
        raise ModelError(f"The adapter {folder} has {shown}, not products alone.", _MERGE)
    settings: Mapping[str, Any] = config
    return settings


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("adapter_model*"))
        listed = f" It has {', '.join(others)}." if others else ""
        raise ModelError(
            f"{folder} has no {WEIGHTS}.{listed}",
            "Save it by save_pretrained of a current peft, which writes this file.",
        )
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "Copy it again.") from error


def _scale(config: Mapping[str, Any], path: str, down: Tensor, location: str) -> float:
    """Return the factor of a product, by the names of layers that peft compares with patterns."""

    def value(name: str, patterns: str) -> float:
        for key, number in (config.get(patterns) or {}).items():
            if re.fullmatch(rf"(.*\.)?({key})", path):
                return float(number)
        return float(config.get(name) or 0)

    rank, alpha = value("r", "rank_pattern"), value("lora_alpha", "alpha_pattern")
    if rank != len(down):
        raise ModelError(
            f"lora_A of {path} in {location} has rank {len(down)}, and {ADAPTER} says {rank:g}.",
            "Give the files that were written together.",
        )
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
