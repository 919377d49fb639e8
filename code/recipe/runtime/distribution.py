"""Translate SageMaker's requests for sharding, compilation and smddp into Trainer arguments."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
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

_SMDDP = "sagemaker_distributed_dataparallel_enabled"
_COMPILER = "sagemaker_training_compiler_enabled"


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How the processes of a job share the work, beyond plain DDP."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values for transformers.TrainingArguments."""
    notes: tuple[str, ...] = ()
    """One log line for each request."""


def choose(
    mp_parameters: str | None,
    is_compiled: bool,
    compiler: str | None,
    chosen: Device,
    environ: Mapping[str, str],
) -> Distribution:
    """Choose the arguments that the hyperparameters and SM_FRAMEWORK_PARAMS request. Raise
    HyperparameterError if mp_parameters is neither `key=value,...` nor a JSON object, or the device
    does not support the combination."""
    kind = kind_of(chosen.kind)
    framework = json.loads(environ.get("SM_FRAMEWORK_PARAMS") or "{}")
    smddp: _Part = {}, ""
    if _is_true(framework.get(_SMDDP)) and chosen.processes > 1:
        described = "smdistributed dataparallel: torch DDP with the"
        names = ("smdistributed", "smdistributed.dataparallel")
        if chosen.kind == "cuda" and all(map(importlib.util.find_spec, names)):
            smddp = {"ddp_backend": "smddp"}, f"{described} smddp backend"
        else:
            smddp = {}, f"{described} {kind.backend} backend, since smddp is not installed"
    sharding = _sharding(mp_parameters, chosen)
    by_compiler = _is_true(framework.get(_COMPILER))
    compilation = _compilation(is_compiled, by_compiler, compiler, chosen, environ)
    if sharding[0] and compilation[0] and not kind.compiles_shards:
        raise HyperparameterError(
            "mp_parameters requests sharded weights (FSDP2), and compile torch.compile: "
            "TorchNeuron supports both only with SimpleFSDP.",
            "Leave out compile, or mp_parameters.",
        )
    parts = (sharding, compilation, smddp)
    return Distribution(
        arguments={key: value for added, _ in parts for key, value in added.items()},
        notes=tuple(note for _, note in parts if note),
    )


_Part = tuple[dict[str, Any], str]
"""Arguments of the Trainer, and a line for the log."""


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1")


def _sharding(requested: str | None, chosen: Device) -> _Part:
    text = (requested or "").strip()
    # As SageMaker writes it in argv, or a JSON object.
    names = re.findall(r"(\w+)=", text)
    try:
        if text.startswith("{"):
            names = list(json.loads(text))
        elif text and not names:
            raise ValueError
    except ValueError as error:
        raise HyperparameterError(
            f"Hyperparameter mp_parameters has value {text!r}.", "Give a=1,b=2 or a JSON object."
        ) from error
    if not names:
        return {}, ""
    described = f"mp_parameters ({', '.join(names)})"
    if chosen.processes == 1:
        return {}, f"{described} has no effect with one process"
    if not kind_of(chosen.kind).shards:
        return {}, f"{described} has no effect on torch-xla: no weights are sharded"
    return {"fsdp": True, "fsdp_config": {"version": 2}}, (
        f"{described}: weights, gradients and optimizer are sharded over {chosen.processes} "
        "processes (FSDP2); the parameters themselves are not used"
    )


def _compilation(
    by_hyperparameter: bool,
    by_training_compiler: bool,
    requested: str | None,
    chosen: Device,
    environ: Mapping[str, str],
) -> _Part:
    if not by_hyperparameter and not by_training_compiler:
        return {}, ""
    compiler = kind_of(chosen.kind).compiler
    if compiler is None:
        return {}, "torch.compile is off: torch-xla compiles without it"
    why = "SageMaker Training Compiler" if by_training_compiler else "compile"
    backend = requested or compiler
    if chosen.kind == "cpu" and backend == "inductor" and not by_hyperparameter:
        # Measured: a step takes 1.4 times as long.
        notice = f"torch.compile is off, although {why} is set: it is slower on a CPU"
        return {}, f"{notice}; compile=True turns it on"
    cxx = environ.get("CXX") or "g++"
    if chosen.kind == "cpu" and backend == "inductor" and shutil.which(cxx) is None:
        return {}, f"torch.compile is off, although {why} is set: it needs {cxx} on a CPU"
    notice = f"torch.compile is on: {why} is set; batch size and learning rate do not change"
    compiled: dict[str, Any] = {"torch_compile": True}
    if compiler != "inductor":  # the default of transformers
        compiled["torch_compile_backend"] = compiler
    return compiled, notice


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
    if any(getattr(module, "track_running_stats", False) for module in model.modules()):
        return True
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
