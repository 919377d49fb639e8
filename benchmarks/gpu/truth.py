"""Stage A on a GPU, 9 minutes: correctness.

    make gpu-truth                     on a machine with a CUDA device
    python benchmarks/gpu/truth.py --smoke      the same checks, small, on a CPU

Kernels are compared with float64 on the same numbers, and layouts with each sample alone. The error
in a precision may be at most SLACK times that of the plain model in the same precision.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jobs
import memory
from jobs import SMALL
from stage import Failed, Stage, Values, relative_error

import numpy as np  # isort: skip
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe.batching import flat, packing
from recipe.batching.batches import Packed
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.batching.samples import Samples
from recipe.models import flat_attention, packed_decoders, packed_encoders
from recipe.tasks import classifiers

SLACK = 2.0
"""How many times the plain model's own rounding an error may be."""


def versions(stage: Stage) -> Values:
    """Return what computes here."""
    results: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if stage.device.type == "cuda":
        properties = torch.cuda.get_device_properties(stage.device)
        results |= {
            "device": properties.name,
            "capability": torch.cuda.get_device_capability(stage.device),
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return results


def attention_backends(stage: Stage) -> Values:
    """Compare PyTorch's attention kernels, with and without a mask, with float64; gradients were
    NaN at lengths of 64 more than a multiple of 128 (pytorch#196678)."""
    lengths = (24, 64) if stage.smoke else (64, 192, 320, 512, 576)
    kernels = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
               SDPBackend.CUDNN_ATTENTION)  # fmt: skip
    dtype = torch.bfloat16
    results: dict[str, Any] = {}
    wrong = []
    for length, is_masked in itertools.product(lengths, (False, True)):
        torch.manual_seed(length)
        shape = (2, 4, length, 64)
        inputs = [torch.randn(shape, device=stage.device, dtype=dtype) for _ in range(4)]
        mask = None
        if is_masked:
            numbers = torch.arange(length, device=stage.device) // max(8, length // 5)
            mask = (numbers[:, None] == numbers[None, :])[None, None].expand(2, 1, -1, -1)
        exact = _attention([tensor.double() for tensor in inputs], mask, SDPBackend.MATH)
        plain_error = worst_error(_attention(inputs, mask, SDPBackend.MATH), exact)
        for kernel in kernels:
            name = f"{kernel.name} {length} {'mask' if is_masked else 'no mask'}"
            try:
                error = worst_error(_attention(inputs, mask, kernel), exact)
            except RuntimeError:
                results[name] = "not available"
                continue
            results[name] = round(error, 4)
            if error > SLACK * plain_error:
                wrong.append(name)
    # What the product turns off (cuDNN with a mask) may be wrong; nothing else may.
    used = [name for name in wrong if not (name.startswith("CUDNN") and name.endswith(" mask"))]
    if used:
        raise Failed(f"wrong: {', '.join(used)}", **results)
    return results | {"wrong, and not used": wrong}


def worst_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of tensors."""
    return max(relative_error(one, other) for one, other in zip(results, expected, strict=True))


def _attention(inputs: list[Tensor], mask: Tensor | None, kernel: SDPBackend) -> list[Tensor]:
    """Return the output and the three gradients."""
    *leaves, weights = (tensor.detach().clone() for tensor in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    with sdpa_kernel(kernel):
        output = functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def flat_kernel(stage: Stage) -> Values:
    """Compare attention of varying lengths, causal or not, with windows and grouped queries, with
    the definition in float64; check the share that dropout keeps."""
    lengths = np.asarray([30, 5, 17, 2, 41] if stage.smoke else [130, 5, 17, 2, 641, 64, 192, 128])
    row = flat.row([lengths])
    starts = torch.from_numpy(row.starts(lengths, len(lengths) + 3)).to(stage.device)
    real = int(lengths.sum())
    results: dict[str, Any] = {}
    for causal, window, heads in itertools.product((False, True), (None, 9), (4, 2)):
        torch.manual_seed(0)
        tensors = [
            torch.randn(1, count, row.length, 64, device=stage.device, dtype=torch.bfloat16)
            for count in (4, heads, heads, 4)
        ]
        exact = [tensor.double().cpu() for tensor in tensors]
        parts = _flat(tensors, starts, row.longest, causal, window)
        expected = _flat(exact, starts.cpu(), row.longest, causal, window)
        # Tokens are the second dimension of the output, and the third of the gradients.
        error = worst_error(
            [part.cpu().narrow(1 + (index > 0), 0, real) for index, part in enumerate(parts)],
            [part.narrow(1 + (index > 0), 0, real) for index, part in enumerate(expected)],
        )
        name = f"{'causal' if causal else 'both ways'}, window {window}, {heads} of 4 heads"
        results[name] = round(error, 4)
        if error > 0.02:
            raise Failed(f"wrong: {name}", **results)
    ones = [torch.ones(1, 4, row.length, 64, device=stage.device, dtype=torch.bfloat16)] * 3
    module: Any = type("Module", (), {"is_causal": False})()
    inputs = flat_attention.inputs_of(starts, row.longest)
    output, _ = flat_attention.attend(module, *ones, dropout=0.25, **inputs)
    kept = float(output[:, :real].float().mean())
    results["mean of ones after dropout of 0.25"] = round(kept, 3)
    if abs(kept - 1) > 0.05:
        raise Failed("dropout changes the mean", **results)
    return results


def _flat(
    tensors: list[Tensor], starts: Tensor, longest: int, causal: bool, window: int | None
) -> list[Tensor]:
    *inputs, weights = tensors
    leaves = [tensor.requires_grad_() for tensor in inputs]
    module: Any = type("Module", (), {"is_causal": causal})()
    options = flat_attention.inputs_of(starts, longest)
    mask = options.pop("attention_mask")
    output, _ = flat_attention.attend(module, *leaves, mask, sliding_window=window, **options)
    weights = weights.transpose(1, 2).clone()
    weights[:, int(starts[-1]) :] = 0
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


ENCODERS = {
    "bert": ("BertConfig", {}),
    "modernbert": ("ModernBertConfig", {"local_attention": 32, "global_attn_every_n_layers": 3}),
}


def packed_encoder(stage: Stage, kind: str) -> Values:
    """Compare logits and gradients of samples in blocks and in one row with each sample alone."""
    name, changes = ENCODERS[kind]
    config = getattr(transformers, name)(**SMALL, **changes, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model = model.to(stage.device).eval()
    lengths = [130, 5, 17, 2, 64, 192]
    random = np.random.default_rng(0)
    ids = random.integers(4, 500, sum(lengths)).astype(np.int32)
    samples = Samples(ids, np.cumsum([0, *lengths]), random.integers(0, 3, len(lengths)))
    rows = np.arange(len(lengths))
    family = packed_encoders.family_of(model.config)
    assert family is not None
    position = family.first_position(config)
    blocks = Packed(packing.shape([samples.lengths]), 8, 1, position)
    one_row = Packed(flat.row([samples.lengths]), 8, 1, position)

    def run_alone(network: Any) -> Tensor:
        ids = [torch.from_numpy(samples.tokens(row).astype(np.int64))[None] for row in rows]
        return torch.cat([network(input_ids=row.to(stage.device)).logits for row in ids])

    def run_packed(network: Any, layout: Packed) -> Tensor:
        batch = layout.tensors(samples, rows)
        logits: Tensor = network(**_moved(batch, stage.device)).logits[: len(rows)]
        return logits

    labels = torch.from_numpy(samples.labels).to(stage.device)
    layouts = {
        "alone": run_alone,
        "blocks": functools.partial(run_packed, layout=blocks),
        "one row": functools.partial(run_packed, layout=one_row),
    }
    return compare_layouts(
        stage, model, layouts, lambda logits: classifiers.sample_losses(logits, labels).mean()
    )


def packed_decoder(stage: Stage) -> Values:
    """Compare losses of documents and gradients of a decoder with grouped queries."""
    config = transformers.Qwen3Config(
        **SMALL, num_key_value_heads=1, head_dim=64, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(stage.device).eval()
    lengths = [130, 5, 17, 3, 64, 192]
    random = np.random.default_rng(0)
    starts = np.cumsum([0, *lengths])
    learned = random.random(starts[-1]) < 0.6
    learned[starts[1:] - 1], learned[starts[:-1]] = True, False
    counts = np.add.reduceat(learned, starts[:-1], dtype=np.int64)
    ids = random.integers(4, 500, starts[-1]).astype(np.int32)
    documents = Documents(ids, starts, counts, learned)
    rows = np.arange(len(lengths))

    def run_packed(network: Any, shape: Any, rows: Any = rows) -> Tensor:
        layout = DocumentLayout(Packed(shape, len(rows), 1, 0), documents.weight(rows))
        batch = layout.tensors(documents, rows)
        sums: Tensor = network(**_moved(batch, stage.device)).logits[:, 0]
        return sums / documents.weight(np.arange(len(lengths)))

    def run_alone(network: Any) -> Tensor:
        shapes = [packing.shape([documents.lengths[[row]]]) for row in rows]
        return torch.cat([run_packed(network, shapes[row], rows[[row]]) for row in rows])

    layouts = {
        "alone": run_alone,
        "blocks": functools.partial(run_packed, shape=packing.shape([documents.lengths])),
        "one row": functools.partial(run_packed, shape=flat.row([documents.lengths])),
    }
    return compare_layouts(stage, model, layouts, torch.sum)


def _moved(batch: Values, device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def compare_layouts(stage: Stage, model: Any, layouts: dict[str, Any], loss: Any) -> Values:
    """Compare the output and the gradients of each layout with samples alone in float32.

    Args:
        layouts: Functions from the model to its output; the first is of samples alone.
        loss: A function from an output to the loss.
    """

    def run(layout: str, is_bf16: bool) -> list[Tensor]:
        network = copy.deepcopy(model)
        if network.config.model_type in packed_decoders.DECODERS:
            packed_decoders.patch_forward_for_documents(network)
        else:
            packed_encoders.patch_forward_for_packing(network)
        if layout == "one row":
            flat_attention.use(network)
        with torch.autocast(stage.device.type, torch.bfloat16, enabled=is_bf16):
            output = layouts[layout](network)
        loss(output.float()).backward()
        gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
        return [output.detach(), torch.cat([gradient.flatten() for gradient in gradients])]

    expected = run("alone", False)
    results: dict[str, Any] = {}
    plain_error = 0.0
    for layout, is_bf16 in itertools.product(layouts, (False, True)):
        if layout == "one row" and stage.device.type == "cuda" and not is_bf16:
            continue  # flash attention has no float32
        error = worst_error(run(layout, is_bf16), expected)
        results[f"{layout}, {'bfloat16' if is_bf16 else 'float32'}"] = round(error, 6)
        if layout == "alone":
            plain_error = max(plain_error, error)
        limit = SLACK * plain_error if is_bf16 else 1e-3
        if error > limit:
            raise Failed(f"{layout} differs by {error:.4f}, more than {limit:.4f}", **results)
    return results


def main() -> None:
    """Run all checks; the exit code is 1 if one failed."""
    stage = Stage("truth", __doc__, seconds=540)
    stage.check("versions", 1, lambda: versions(stage))
    stage.check("attention backends", 30, lambda: attention_backends(stage))
    stage.check("flat attention", 15, lambda: flat_kernel(stage))
    for kind in ENCODERS:
        stage.check(f"packed {kind}", 20, functools.partial(packed_encoder, stage, kind))
    stage.check("packed qwen3", 20, lambda: packed_decoder(stage))
    for kind in ("BERT", "ModernBERT", "Llama, LoRA"):
        run = functools.partial(memory.compare_peaks, stage, kind)
        stage.check(f"memory of {kind}", 20, run)
    stage.check("gloo, two processes", 20, lambda: jobs.several_processes(stage, "gloo", 2))
    stage.check("nccl, one process", 20, lambda: jobs.several_processes(stage, "nccl", 1))
    stage.check("two ranks on one GPU", 40, lambda: jobs.two_on_one(stage))
    stage.check("doctor, train, serve", 90, lambda: jobs.end_to_end(stage))
    stage.check("kill and resume", 90, lambda: jobs.kill_and_resume(stage))
    stage.check("fsdp2, causal-lm", 60, lambda: jobs.sharded_decoder(stage))
    stage.check("4 bits under adapters", 60, lambda: jobs.four_bits(stage))
    stage.end()


if __name__ == "__main__":
    main()
