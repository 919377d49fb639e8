"""Stage A on a GPU, 9 minutes: is what it computes right?

    make gpu-truth                     on a machine with a CUDA device
    python benchmarks/gpu/truth.py --smoke      the same checks, small, on a CPU

Every kernel is held to float64 on the same numbers, every layout to the model's answers to each
sample alone, every precision to its own rounding: an error may be a few times as large as that of
the plain model in the same precision, and not more.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import jobs
from jobs import SMALL
from stage import Failed, Stage, Values, error_of, matrix_rate, timed

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
from recipe.models import flat_attention, losses, packed_decoders, packed_encoders

SLACK = 2.0
"""How many times the plain model's own rounding an error may be."""


def versions(stage: Stage) -> Values:
    """What computes here."""
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


def rates(stage: Stage) -> Values:
    """Matrix products and copies, by which speeds are judged."""
    size = 256 if stage.smoke else 8192
    results = {
        f"{name} TFLOP/s": round(matrix_rate(stage.device, size, dtype) / 1e12, 2)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    megabytes = 1 if stage.smoke else 256
    source = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=stage.device.type == "cuda")
    seconds = timed(stage.device, lambda: source.to(stage.device, non_blocking=True), 5)
    return results | {"to the device GB/s": round(megabytes / 1024 / seconds, 2)}


def attention_backends(stage: Stage) -> Values:
    """Each of PyTorch's attention kernels, with a mask and without, beside float64; lengths of 64
    more than a multiple of 128 have had gradients that are no number (pytorch#196678)."""
    lengths = (24, 64) if stage.smoke else (64, 192, 320, 512, 576)
    kernels = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
               SDPBackend.CUDNN_ATTENTION)  # fmt: skip
    dtype = torch.bfloat16
    results: dict[str, Any] = {}
    wrong = []
    for length, is_masked in itertools.product(lengths, (False, True)):
        torch.manual_seed(length)
        shape = (2, 4, length, 64)
        real = [torch.randn(shape, device=stage.device, dtype=dtype) for _ in range(4)]
        mask = None
        if is_masked:
            numbers = torch.arange(length, device=stage.device) // max(8, length // 5)
            mask = (numbers[:, None] == numbers[None, :])[None, None].expand(2, 1, -1, -1)
        wanted = _attention([tensor.double() for tensor in real], mask, SDPBackend.MATH)
        plain = _attention(real, mask, SDPBackend.MATH)
        plain_error = max(error_of(one, other) for one, other in zip(plain, wanted, strict=True))
        for kernel in kernels:
            name = f"{kernel.name} {length} {'mask' if is_masked else 'no mask'}"
            try:
                got = _attention(real, mask, kernel)
            except RuntimeError:
                results[name] = "not available"
                continue
            error = max(error_of(one, other) for one, other in zip(got, wanted, strict=True))
            results[name] = round(error, 4)
            if error > SLACK * plain_error:
                wrong.append(name)
    # What the product turns off (cuDNN with a mask) may be wrong; nothing else may.
    used = [name for name in wrong if not (name.startswith("CUDNN") and name.endswith(" mask"))]
    if used:
        raise Failed(f"wrong: {', '.join(used)}", **results)
    return results | {"wrong, and not used": wrong}


def _attention(real: list[Tensor], mask: Tensor | None, kernel: SDPBackend) -> list[Tensor]:
    """The output and the three gradients."""
    *inputs, weights = (tensor.detach().clone() for tensor in real)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with sdpa_kernel(kernel):
        output = functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def flat_kernel(stage: Stage) -> Values:
    """Attention of varying lengths: causal or not, with windows and grouped queries, beside the
    definition in float64; and that dropout drops as much as it says."""
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
        got = _flat([tensor.clone() for tensor in tensors], starts, row.longest, causal, window)
        exact = [tensor.double().cpu() for tensor in tensors]
        wanted = _flat(exact, starts.cpu(), row.longest, causal, window)
        error = max(
            error_of(one.cpu()[:, :real] if index == 0 else one.cpu()[:, :, :real],
                     other[:, :real] if index == 0 else other[:, :, :real])
            for index, (one, other) in enumerate(zip(got, wanted, strict=True))
        )  # fmt: skip
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
    """Logits and gradients of samples in blocks and in one row, beside float32 of each alone."""
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

    def alone(its: Any) -> Tensor:
        return torch.cat([
            its(input_ids=torch.from_numpy(samples.tokens(row).astype(np.int64))[None]
                .to(stage.device)).logits
            for row in rows
        ])  # fmt: skip

    def packed(its: Any, layout: Packed) -> Tensor:
        batch = layout.tensors(samples, rows)
        logits: Tensor = its(**_moved(batch, stage.device)).logits[: len(rows)]
        return logits

    labels = torch.from_numpy(samples.labels).to(stage.device)
    ways = {"alone": alone}
    for way, layout in (("blocks", blocks), ("one row", one_row)):
        ways[way] = functools.partial(packed, layout=layout)
    return _held(stage, model, ways, lambda logits: losses.sample_losses(logits, labels).mean())


def packed_decoder(stage: Stage) -> Values:
    """The losses of documents, and gradients, of a decoder with grouped queries."""
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

    def laid(its: Any, shape: Any, rows: Any) -> Tensor:
        layout = DocumentLayout(Packed(shape, len(rows), 1, 0), documents.weight(rows))
        batch = layout.tensors(documents, rows)
        sums: Tensor = its(**_moved(batch, stage.device)).logits[:, 0]
        return sums / documents.weight(np.arange(len(lengths)))

    def alone(its: Any) -> Tensor:
        tensor = [(packing.shape([documents.lengths[[row]]]), rows[[row]]) for row in rows]
        return torch.cat([laid(its, shape, some) for shape, some in tensor])

    ways = {
        "alone": alone,
        "blocks": lambda its: laid(its, packing.shape([documents.lengths]), rows),
        "one row": lambda its: laid(its, flat.row([documents.lengths]), rows),
    }
    return _held(stage, model, ways, torch.sum)


def _moved(batch: Values, device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _held(stage: Stage, model: Any, ways: dict[str, Any], loss_of: Any) -> Values:
    """Each way's error in bfloat16 beside that of samples alone, in its output and gradients."""

    def run(its: Any, way: Any, is_bf16: bool) -> list[Tensor]:
        its.zero_grad()
        with torch.autocast(stage.device.type, torch.bfloat16, enabled=is_bf16):
            output = way(its)
        loss_of(output.float()).backward()
        gradients = [weight.grad.clone() for weight in its.parameters() if weight.grad is not None]
        return [output.detach(), torch.cat([tensor.flatten() for tensor in gradients])]

    def prepared(is_flat: bool) -> Any:
        its = copy.deepcopy(model)
        take = (
            packed_decoders.patch_forward_for_documents
            if its.config.model_type in packed_decoders.DECODERS
            else packed_encoders.patch_forward_for_packing
        )
        take(its)
        if is_flat:
            flat_attention.use(its)
        return its

    truth = run(prepared(False), ways["alone"], False)
    results: dict[str, Any] = {}
    plain_error = 0.0
    for name, way in ways.items():
        for is_bf16 in (
            (False, True) if name != "one row" or stage.device.type == "cpu" else (True,)
        ):
            got = run(prepared(name == "one row"), way, is_bf16)
            error = max(error_of(one, other) for one, other in zip(got, truth, strict=True))
            results[f"{name}, {'bfloat16' if is_bf16 else 'float32'}"] = round(error, 6)
            if name == "alone":
                plain_error = max(plain_error, error)
            limit = SLACK * plain_error if is_bf16 else 1e-3
            if error > limit:
                raise Failed(f"{name} differs by {error:.4f}, more than {limit:.4f}", **results)
    return results


def main() -> None:
    """All checks; exit code 1 if one failed."""
    stage = Stage("truth", __doc__, seconds=540)
    stage.check("versions", 1, lambda: versions(stage))
    stage.check("rates", 5, lambda: rates(stage))
    stage.check("attention backends", 30, lambda: attention_backends(stage))
    stage.check("flat attention", 15, lambda: flat_kernel(stage))
    for kind in ENCODERS:
        stage.check(f"packed {kind}", 20, functools.partial(packed_encoder, stage, kind))
    stage.check("packed qwen3", 20, lambda: packed_decoder(stage))
    stage.check("gloo, two processes", 20, lambda: jobs.several_processes(stage, "gloo", 2))
    stage.check("nccl, one process", 20, lambda: jobs.several_processes(stage, "nccl", 1))
    stage.check("two ranks on one GPU", 40, lambda: jobs.two_on_one(stage))
    for size in (8,) if stage.smoke else (32, 512):
        stage.check(f"memory, batch {size}", 40, functools.partial(jobs.estimate, stage, size))
    stage.check("doctor, train, serve", 90, lambda: jobs.the_whole_way(stage))
    stage.check("kill and resume", 90, lambda: jobs.kill_and_resume(stage))
    stage.check("fsdp2, causal-lm", 60, lambda: jobs.sharded_decoder(stage))
    stage.check("4 bits under adapters", 60, lambda: jobs.four_bits(stage))
    stage.end()


if __name__ == "__main__":
    main()
