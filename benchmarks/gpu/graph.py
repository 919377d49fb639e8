"""Whether a step could be one graph: counted on a CPU, with the operators and rows of a GPU.

    python benchmarks/gpu/graph.py

Prints a line of JSON for BERT, ModernBERT and a Llama with LoRA.

`graph breaks` and `recompilations` are those of torch.compile over an epoch, beyond one graph for
each distinct shape; `waits` are operations of a step for whose result a process would wait for its
GPU. `casts` are conversions of floating-point numbers in a step with bf16_weights=True, besides the
copies of weights and gradients, and `casts by autocast` those of a step without it; the loss has
two. Exits with 1 if a step breaks, recompiles or waits, or has more than five casts besides these
two, or if there are more than eight shapes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from stage import training_arguments

import numpy as np  # isort: skip
import peft
import torch
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

from recipe.batching.document_batches import Documents
from recipe.batching.samples import Samples
from recipe.models import cpu_kernels, flat_attention
from recipe.models.bf16_weights import Bf16Weights
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine
from recipe.training.preparation import PreparedTraining, lay_out

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 500,
         "intermediate_size": 128, "max_position_embeddings": 128, "pad_token_id": 0}  # fmt: skip
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
"""The sizes of BERT-base."""
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
SIZE, COUNT = 16, 200
usual_norm = functional.rms_norm


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that wait for the device, and conversions of numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation."""
        result, name = func(*args, **(kwargs or {})), func.name().partition("::")[2]
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        self.waits += name.startswith(WAITS) or by_mask
        if name.startswith("_to_copy") and args[0].is_floating_point():
            self.casts += result.is_floating_point() and result.dtype != args[0].dtype
        return result


class Norm(torch.autograd.Function):
    """Computes functional.rms_norm, which on a GPU is one operator: nothing in it is counted."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
        """Compute the norm."""
        ctx.save_for_backward(states, weight)
        ctx.epsilon = epsilon
        with _disable_current_modes():
            return usual_norm(states, weight.shape, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Compute the gradients."""
        with _disable_current_modes(), torch.enable_grad():
            parts = [part.detach().requires_grad_() for part in ctx.saved_tensors]
            result = usual_norm(parts[0], parts[1].shape, parts[1], ctx.epsilon)
            return *torch.autograd.grad(result, parts, gradient), None


def prepare(
    kind: str, folder: str, sizes: Mapping[str, Any] = SIZES, size: int = SIZE, steps: int = 3,
    bf16_weights: bool = False, cuda_graphs: bool = False, **changes: Any,
) -> PreparedTraining:  # fmt: skip
    """Lay out rows of tweets for a random model; `changes` are of TrainingArguments."""
    torch.manual_seed(0)
    count = max(COUNT, 8 * size)
    lengths = np.clip(np.random.default_rng(1).normal(28, 12, count), 4, 100).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(0).integers(4, 500, starts[-1]).astype(np.int32)
    model: Any
    if kind == "Llama, LoRA":
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        learned = np.ones(len(ids), dtype=bool)
        learned[starts[:-1]] = False
        samples: Any = Documents(ids, starts, lengths - 1, learned)
    else:
        config, model_class = {
            "BERT": (BertConfig, BertForSequenceClassification),
            "ModernBERT": (ModernBertConfig, ModernBertForSequenceClassification),
        }[kind]
        special = dict.fromkeys(("bos_token_id", "cls_token_id"), 1)
        special |= dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
        model = model_class(config(**sizes, **special))
        samples = Samples(ids, starts, np.random.default_rng(2).integers(0, 2, count))
    tokenizer: Any = SimpleNamespace(pad_token_id=0)
    loaded = TrainableModel(
        model=model, tokenizer=tokenizer,
        arguments=training_arguments(folder, size, steps, **changes),
        objective=NEXT_TOKENS if kind == "Llama, LoRA" else CLASSES, bf16_weights=bf16_weights,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return lay_out(loaded, {"train": samples, "evaluation": samples}, Table())


def count_step(step: Callable[[], Any]) -> Operations:
    """Count the operations of a forward and a backward pass."""
    with Operations() as seen:
        step().backward()
    return seen


def count(kind: str) -> dict[str, Any]:
    """Return the numbers of one model."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = engine.build(prepare(kind, folder))
        model = trainer.model.train()
        epoch = [trainer._prepare_inputs(batch) for batch in trainer.get_train_dataloader()]

        def losses(called: Any, batch: Any) -> torch.Tensor:
            _, of_samples, real = trainer._losses(called, batch)
            return (of_samples * real).sum() / batch["total"][0]

        with torch.autocast("cpu", torch.bfloat16):
            by_autocast = count_step(lambda: losses(model, epoch[0]))
        counters.clear()
        compiled = torch.compile(model, backend="aot_eager", dynamic=False)
        for batch in epoch:
            losses(compiled, batch).backward()
        shapes = {
            tuple((name, getattr(value, "shape", value)) for name, value in batch.items())
            for batch in epoch
        }
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        copies = Bf16Weights(model)
        for _ in range(2):  # the first makes what stays
            with copies.used(0):
                seen = count_step(lambda: losses(model, epoch[0]))
    return {
        "model": kind, "graph breaks": breaks, "recompilations": graphs - len(shapes),
        "waits": seen.waits, "casts": seen.casts, "casts by autocast": by_autocast.casts,
        "shapes": len(shapes), "batches": len(epoch),
    }  # fmt: skip


def main() -> None:
    """Print a line for each model."""
    vars(functional)["rms_norm"] = lambda states, shape, *others: Norm.apply(states, *others)
    # Rows as on a GPU, by the CPU's operator, and PyTorch's dropout.
    flat_attention.why_not = lambda *arguments: None
    cpu_kernels.lighten = lambda *arguments, **options: None
    results = [count(kind) for kind in ("BERT", "ModernBERT", "Llama, LoRA")]
    for result in results:
        print(json.dumps(result), flush=True)
    most = {"graph breaks": 0, "recompilations": 0, "waits": 0, "casts": 7, "shapes": 8}
    sys.exit(any(result[name] > bound for result in results for name, bound in most.items()))


if __name__ == "__main__":
    main()
