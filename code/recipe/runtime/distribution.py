"""Decide whether weights are sharded over the processes (FSDP2), and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from transformers import Trainer

from recipe.errors import HyperparameterError
from recipe.runtime import sharded
from recipe.runtime.device import Device, kind_of


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How the processes of a job share the work, beyond plain DDP."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values for transformers.TrainingArguments, in place of the user's."""
    notes: tuple[str, ...] = ()
    """One log line for each request."""


def choose(passed: Mapping[str, Any], is_compiled: bool, chosen: Device) -> Distribution:
    """Choose the arguments for the user's `fsdp`, among those `passed` to the Trainer, and
    `compile`. Raise HyperparameterError if the device does not support both together, or if another
    version of FSDP is requested."""
    kind = kind_of(chosen.kind)
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    if passed.get("fsdp") and chosen.processes == 1:
        arguments["fsdp"] = False  # the Trainer would refuse it
        notes.append("fsdp has no effect with one process")
    elif passed.get("fsdp") and not kind.shards:
        arguments["fsdp"] = False
        notes.append("fsdp has no effect on torch-xla: no weights are sharded")
    elif passed.get("fsdp"):
        config = passed.get("fsdp_config") or {}
        if isinstance(config, Mapping):  # else a file
            if config.get("version", 2) != 2:
                raise HyperparameterError(
                    f"Hyperparameter fsdp_config has version {config['version']!r}, but weights "
                    "are sharded by FSDP2.",
                    "Leave version out.",
                )
            arguments["fsdp_config"] = {**config, "version": 2}
        notes.append(
            f"weights, gradients and optimizer are sharded over {chosen.processes} processes "
            "(FSDP2)"
        )
        if is_compiled and not kind.compiles_shards:
            raise HyperparameterError(
                "fsdp requests sharded weights (FSDP2), and compile torch.compile: TorchNeuron "
                "supports both only with SimpleFSDP.",
                "Leave out one of them.",
            )
    if is_compiled and kind.compiler is None:
        notes.append("torch.compile is off: torch-xla compiles without it")
    elif is_compiled:
        arguments["torch_compile"] = True
        if kind.compiler != "inductor":  # the default of transformers
            arguments["torch_compile_backend"] = passed.get("torch_compile_backend", kind.compiler)
        notes.append("torch.compile is on; batch size and learning rate do not change")
    return Distribution(arguments=arguments, notes=tuple(notes))


def shard(trainer: Trainer) -> None:
    """Make a Trainer whose arguments request FSDP2 use it, for every kind of model and on a CPU.

    On a CPU accelerate 1.15 silently drops the plugin and uses DDP; and it shards the token
    embedding twice if a model names a block around it as indivisible (BERT).
    """
    if not trainer.args.fsdp:
        return
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        if trainer.accelerator.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(trainer.accelerator.mixed_precision)
        state.distributed_type = DistributedType.FSDP
        # Every AcceleratorState that is made later copies this into the one that all share.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    plugin = state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        # accelerate would use bfloat16 for the outputs of blocks and models, the loss among them,
        # and for the sums of gradients, which DDP computes in float32.
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not _sharing(model) <= {model.get_input_embeddings(), model.get_output_embeddings()}:
        # accelerate shards the embeddings in a separate group, and torch refuses a weight in two
        # groups: the embedding of both halves of a T5, the bias of BERT's head for masked tokens.
        accelerator: Any = trainer.accelerator
        original = accelerator.prepare

        def prepare(*args: Any, **options: Any) -> Any:
            model.get_input_embeddings = model.get_output_embeddings = lambda: None
            try:
                return original(*args, **options)
            finally:
                del model.get_input_embeddings, model.get_output_embeddings

        accelerator.prepare = prepare
    if not plugin.transformer_cls_names_to_wrap:
        # Shard the indivisible classes, without the embedding and without weights that another
        # module shares, such as the bias of a head for masked tokens.
        shared = {model.get_input_embeddings(), *_sharing(model)}
        around = {type(part).__name__ for part in model.modules() if shared & set(part.modules())}
        plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - around)


def _sharing(model: torch.nn.Module) -> set[torch.nn.Module]:
    holders: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                holders.setdefault(id(weight), []).append(module)
    return {module for several in holders.values() if len(several) > 1 for module in several}


def has_changing_buffers(model: torch.nn.Module) -> bool:
    """Return whether a forward pass may change a buffer, as a batch normalisation does.

    The constants of transformers' models (positions, frequencies) are integers, or not saved.
    """
    saved = model.state_dict()
    return any(
        name in saved and buffer.is_floating_point() for name, buffer in model.named_buffers()
    )


def whole_weights(trainer: Trainer) -> dict[str, Any] | None:
    """Gather the weights of a sharded model on rank 0. Return None if the model is not sharded.

    Every process must call it.
    """
    if not trainer.is_fsdp_enabled:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    weights: dict[str, Any] = sharded.copy_to_host(
        model.state_dict(), trainer.is_world_process_zero()
    )
    return weights
