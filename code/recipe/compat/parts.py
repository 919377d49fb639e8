"""List the private parts of transformers, accelerate and torch that the recipe uses.

The recipe overrides methods of the Trainer and reads attributes whose names begin with an
underscore. Any release may drop one, and an override of a dropped method is never called. So
`check` looks for each part before training. A test compares this list with the code, and
`make test-versions` with each supported version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import transformers

from recipe.errors import LibraryError

TRAINER = "transformers.trainer:Trainer"
BOTH, OLDER, NEWER = (4, 5), (4,), (5,)


@dataclass(frozen=True)
class Seam:
    """A method, an attribute or a function of a library."""

    owner: str
    """`module`, or `module:Class`."""
    name: str
    why: str
    """What the recipe uses it for."""
    parameters: tuple[str, ...] | None = None
    """The first parameters of a function, in order; None for anything else."""
    majors: tuple[int, ...] = BOTH
    """Major versions of transformers that must have it."""
    inside: bool = False
    """Whether only instances have it: then the code of the class must mention it."""


PARTS = (
    # The Trainer's methods that are overridden or called.
    Seam(TRAINER, "_save_checkpoint", "writes whole checkpoints", ("self", "model", "trial")),
    Seam(TRAINER, "_save_rng_state", "one process writes all of them", ("self", "output_dir")),
    Seam(TRAINER, "_load_rng_state", "draws anew on other processes", ("self", "checkpoint")),
    Seam(
        TRAINER,
        "_load_from_checkpoint",
        "loads weights by their names",
        ("self", "resume_from_checkpoint", "model"),
    ),
    Seam(TRAINER, "_load_best_model", "the first process sends them", ("self",)),
    Seam(
        TRAINER,
        "_load_optimizer_and_scheduler",
        "loads moments for any number of processes",
        ("self", "checkpoint"),
    ),
    Seam(
        TRAINER,
        "_determine_best_metric",
        "counts an evaluation that a stop came before",
        ("self", "metrics", "trial"),
    ),
    Seam(
        TRAINER,
        "_evaluate",
        "the same, with schedules that follow evaluations",
        ("self", "trial", "ignore_keys_for_eval"),
    ),
    Seam(
        TRAINER, "_nested_gather", "torch-xla: means of losses", ("self", "tensors", "name"), OLDER
    ),
    Seam(
        TRAINER,
        "_wrap_model",
        "DDP without a copy of the gradients",
        ("self", "model", "training", "dataloader"),
    ),
    Seam(TRAINER, "_prepare_inputs", "brings a batch to the device, without waiting",
         ("self", "inputs")),
    Seam("datasets:Dataset", "_fingerprint", "names the file of its tokens", inside=True),
    Seam("datasets:Dataset", "_indices", "which rows of the table are there", inside=True),
    # What it sets or reads, and training relies on.
    Seam(TRAINER, "current_gradient_accumulation_steps", "scales the loss", inside=True),
    # Added in about 5.13. Older versions always divide the loss, which the trainer corrects.
    Seam(TRAINER, "loss_is_scaled_for_ga", "the loss is a mean over the step", majors=()),
    Seam(TRAINER, "model_accepts_loss_kwargs", "no count of labels on each step", inside=True),
    Seam(TRAINER, "is_fsdp_enabled", "sharding on a CPU", inside=True),
    Seam("transformers.trainer", "skip_first_batches", "torch-xla: the position in an epoch"),
    Seam("transformers.training_args:TrainingArguments", "fsdp_plugin_args", "sharding on a CPU",
         None, NEWER, inside=True),
    # transformers' models and pipelines.
    Seam("transformers:PreTrainedModel", "_no_split_modules", "the blocks to shard"),
    Seam("transformers:PreTrainedModel", "_keys_to_ignore_on_save", "weights that stay untrained"),
    Seam("transformers:PreTrainedConfig", "_attn_implementation", "the masks of packed batches",
         None, NEWER),
    Seam("transformers:PretrainedConfig", "_attn_implementation", "the masks of packed batches"),
    Seam("transformers:PreTrainedModel", "_can_set_attn_implementation",
         "padded rows on a CPU: whether attention is chosen by name", None, NEWER),
    Seam("transformers:AutoModel", "_model_mapping", "serving: the tasks that a model is made for"),
    Seam("transformers:Pipeline", "_sanitize_parameters", "serving: a request's parameters",
         ("self",)),
    Seam("transformers.masking_utils", "eager_mask", "masks of the attention for CPUs",
         ("batch_size",)),
    # accelerate and torch.
    Seam("accelerate.state:PartialState", "_shared_state", "sharding on a CPU"),
    Seam("accelerate.utils:FullyShardedDataParallelPlugin", "set_mixed_precision",
         "sharding on a CPU", ("self", "mixed_precision")),
    Seam("accelerate:Accelerator", "_models", "whether a model is prepared", inside=True),
    Seam("accelerate:Accelerator", "ddp_handler", "DDP without a copy of the gradients",
         inside=True),
    Seam("torch.distributed.distributed_c10d", "_get_default_store",
         "the wait for a host's first process", ()),
    Seam("torch.ops:aten", "_flash_attention_forward", "samples end to end on a GPU"),
    Seam("torch.ops:aten", "_scaled_dot_product_efficient_attention",
         "the memory of a step on a GPU, predicted without one"),
    *(
        Seam("torch.ops:mkldnn", name, "serving: weights in oneDNN's layout, if it exists",
             majors=())
        for name in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    ),
    *(
        Seam("torch", name, "weights in bfloat16 and CUDA graphs: all gradients by one call")
        for name in ("_foreach_copy_", "_foreach_zero_")
    ),
    Seam("torch", "_dynamo", "serving by torch.compile: as many graphs as there are shapes"),
    Seam("torch.nn:Module", "_parameters", "whole weights instead of shards", inside=True),
)  # fmt: skip
"""All of them."""


def check() -> None:
    """Raise LibraryError with the parts that the installed libraries lack, or that take other
    arguments."""
    if wrong := list(missing()):
        raise LibraryError(
            f"transformers {transformers.__version__} or its dependencies lack parts that "
            f"training relies on: {'; '.join(wrong)}.",
            "Install versions that this recipe is tested with (docs/IMAGES.md).",
        )


def missing() -> Iterator[str]:
    """Yield a description of each part that is missing or takes other arguments."""
    major = int(transformers.__version__.partition(".")[0])
    for part in (part for part in PARTS if major in part.majors):
        module, _, name = part.owner.partition(":")
        owner: Any = importlib.import_module(module)
        if name:
            owner = getattr(owner, name, None)
        shown = f"{part.owner.replace(':', '.')}.{part.name}"
        functions = [
            function
            for base in (owner.__mro__ if part.inside else ())
            for function in vars(base).values()
            if isinstance(function, FunctionType)
        ]
        # A class may have it from its metaclass, a module from __getattr__, or as an annotation.
        if (
            inspect.getattr_static(owner, part.name, None) is None
            and not hasattr(owner, part.name)
            and part.name not in getattr(owner, "__annotations__", {})
            and not any(part.name in function.__code__.co_names for function in functions)
        ):
            yield f"{shown} is missing ({part.why})"
        elif part.parameters is not None:
            takes = tuple(inspect.signature(getattr(owner, part.name)).parameters)
            if takes[: len(part.parameters)] != part.parameters:
                expected = ", ".join(part.parameters)
                yield f"{shown} takes ({', '.join(takes)}) instead of ({expected}) ({part.why})"
