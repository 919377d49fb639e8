"""Stage A on a GPU, 9 minutes: is what it computes right?

    make gpu-truth                     on a machine with a CUDA device
    python benchmarks/gpu/truth.py --smoke      the same checks, small, on a CPU

Every kernel is held to float64 on the same numbers, every layout to the model's answers to each
sample alone, every precision to its own rounding: an error may be a few times as large as that of
the plain model in the same precision, and not more.
"""

from __future__ import annotations

import copy
import csv
import functools
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stage import CODE, ROOT, Failed, Stage, Values, error_of, matrix_rate, minilm, timed

import numpy as np  # isort: skip
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe.batching import flat, packing
from recipe.batching.batches import Packed
from recipe.batching.document_batches import Documents, PackedDocuments
from recipe.batching.samples import Samples
from recipe.models import flat_attention, losses, packed_decoders, packed_encoders

SLACK = 2.0
"""How many times the plain model's own rounding an error may be."""


def versions(stage: Stage) -> Values:
    """What computes here."""
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if stage.device.type == "cuda":
        properties = torch.cuda.get_device_properties(stage.device)
        found |= {
            "device": properties.name,
            "capability": torch.cuda.get_device_capability(stage.device),
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def rates(stage: Stage) -> Values:
    """Matrix products and copies, by which speeds are judged."""
    size = 256 if stage.smoke else 8192
    found = {
        f"{name} TFLOP/s": round(matrix_rate(stage.device, size, dtype) / 1e12, 2)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    megabytes = 1 if stage.smoke else 256
    source = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=stage.device.type == "cuda")
    seconds = timed(stage.device, lambda: source.to(stage.device, non_blocking=True), 5)
    return found | {"to the device GB/s": round(megabytes / 1024 / seconds, 2)}


def attention_backends(stage: Stage) -> Values:
    """Each of PyTorch's attention kernels, with a mask and without, beside float64; lengths of 64
    more than a multiple of 128 have had gradients that are no number (pytorch#196678)."""
    lengths = (24, 64) if stage.smoke else (64, 192, 320, 512, 576)
    kernels = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
               SDPBackend.CUDNN_ATTENTION)  # fmt: skip
    dtype = torch.bfloat16
    found: dict[str, Any] = {}
    wrong = []
    for length, is_masked in itertools.product(lengths, (False, True)):
        torch.manual_seed(length)
        shape = (2, 4, length, 64)
        real = [torch.randn(shape, device=stage.device, dtype=dtype) for _ in range(4)]
        mask = None
        if is_masked:
            numbers = torch.arange(length, device=stage.device) // max(8, length // 5)
            mask = (numbers[:, None] == numbers[None, :])[None, None].expand(2, 1, -1, -1)
        wanted = _attention([each.double() for each in real], mask, SDPBackend.MATH)
        plain = _attention(real, mask, SDPBackend.MATH)
        own = max(error_of(one, other) for one, other in zip(plain, wanted, strict=True))
        for kernel in kernels:
            name = f"{kernel.name} {length} {'mask' if is_masked else 'no mask'}"
            try:
                got = _attention(real, mask, kernel)
            except RuntimeError:
                found[name] = "not available"
                continue
            error = max(error_of(one, other) for one, other in zip(got, wanted, strict=True))
            found[name] = round(error, 4)
            if error > SLACK * own:
                wrong.append(name)
    # What the product turns off (cuDNN with a mask) may be wrong; nothing else may.
    used = [name for name in wrong if not (name.startswith("CUDNN") and name.endswith(" mask"))]
    if used:
        raise Failed(f"wrong: {', '.join(used)}", **found)
    return found | {"wrong, and not used": wrong}


def _attention(real: list[Tensor], mask: Tensor | None, kernel: SDPBackend) -> list[Tensor]:
    """The output and the three gradients."""
    *inputs, weights = (each.detach().clone() for each in real)
    leaves = [each.requires_grad_() for each in inputs]
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
    found: dict[str, Any] = {}
    for causal, window, heads in itertools.product((False, True), (None, 9), (4, 2)):
        torch.manual_seed(0)
        tensors = [
            torch.randn(1, count, row.length, 64, device=stage.device, dtype=torch.bfloat16)
            for count in (4, heads, heads, 4)
        ]
        got = _flat([each.clone() for each in tensors], starts, row.longest, causal, window)
        exact = [each.double().cpu() for each in tensors]
        wanted = _flat(exact, starts.cpu(), row.longest, causal, window)
        error = max(
            error_of(one.cpu()[:, :real] if at == 0 else one.cpu()[:, :, :real],
                     other[:, :real] if at == 0 else other[:, :, :real])
            for at, (one, other) in enumerate(zip(got, wanted, strict=True))
        )  # fmt: skip
        name = f"{'causal' if causal else 'both ways'}, window {window}, {heads} of 4 heads"
        found[name] = round(error, 4)
        if error > 0.02:
            raise Failed(f"wrong: {name}", **found)
    ones = [torch.ones(1, 4, row.length, 64, device=stage.device, dtype=torch.bfloat16)] * 3
    module: Any = type("Module", (), {"is_causal": False})()
    beside = flat_attention.inputs_of(starts, row.longest)
    output, _ = flat_attention.attend(module, *ones, dropout=0.25, **beside)
    kept = float(output[:, :real].float().mean())
    found["mean of ones after dropout of 0.25"] = round(kept, 3)
    if abs(kept - 1) > 0.05:
        raise Failed("dropout changes the mean", **found)
    return found


def _flat(
    tensors: list[Tensor], starts: Tensor, longest: int, causal: bool, window: int | None
) -> list[Tensor]:
    *inputs, weights = tensors
    leaves = [each.requires_grad_() for each in inputs]
    module: Any = type("Module", (), {"is_causal": causal})()
    beside = flat_attention.inputs_of(starts, longest)
    mask = beside.pop("attention_mask")
    output, _ = flat_attention.attend(module, *leaves, mask, sliding_window=window, **beside)
    weights = weights.transpose(1, 2).clone()
    weights[:, int(starts[-1]) :] = 0
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


ENCODERS = {
    "bert": ("BertConfig", {}),
    "modernbert": ("ModernBertConfig", {"local_attention": 32, "global_attn_every_n_layers": 3}),
}
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 1024, "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip


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
    return _held(stage, model, ways, lambda logits: losses.of_samples(logits, labels).mean())


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
        layout = PackedDocuments(shape, len(rows), 1, 0, documents.weight(rows))
        batch = layout.tensors(documents, rows)
        sums: Tensor = its(**_moved(batch, stage.device)).logits[:, 0]
        return sums / documents.weight(np.arange(len(lengths)))

    def alone(its: Any) -> Tensor:
        each = [(packing.shape([documents.lengths[[row]]]), rows[[row]]) for row in rows]
        return torch.cat([laid(its, shape, some) for shape, some in each])

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
        return [output.detach(), torch.cat([each.flatten() for each in gradients])]

    def prepared(is_flat: bool) -> Any:
        its = copy.deepcopy(model)
        take = (
            packed_decoders.take_documents
            if its.config.model_type in packed_decoders.DECODERS
            else packed_encoders.take_packed
        )
        take(its)
        if is_flat:
            flat_attention.use(its)
        return its

    truth = run(prepared(False), ways["alone"], False)
    found: dict[str, Any] = {}
    own = 0.0
    for name, way in ways.items():
        for is_bf16 in (
            (False, True) if name != "one row" or stage.device.type == "cpu" else (True,)
        ):
            got = run(prepared(name == "one row"), way, is_bf16)
            error = max(error_of(one, other) for one, other in zip(got, truth, strict=True))
            found[f"{name}, {'bfloat16' if is_bf16 else 'float32'}"] = round(error, 6)
            if name == "alone":
                own = max(own, error)
            limit = SLACK * own if is_bf16 else 1e-3
            if error > limit:
                raise Failed(f"{name} differs by {error:.4f}, more than {limit:.4f}", **found)
    return found


# What follows starts processes, as a user does.


def _write_job(folder: Path, stage: Stage, rows: int) -> dict[str, str]:
    channel = folder / "input" / "data" / "train"
    channel.mkdir(parents=True)
    draw = np.random.default_rng(0)
    words = [
        "film",
        "was",
        "the",
        "a",
        "good",
        "bad",
        "great",
        "awful",
        "plot",
        "cast",
        "music",
        "long",
        "short",
    ]
    with (channel / "train.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for _ in range(rows):
            text = " ".join(draw.choice(words, size=draw.integers(2, 8)))
            writer.writerow([text, "pos" if "good" in text or "great" in text else "neg"])
    return {
        **os.environ,
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_CHANNEL_TRAIN": str(channel),
        "HF_HUB_OFFLINE": "1",
        **({"OMP_NUM_THREADS": "1"} if stage.smoke else {}),
    }


def _train(environ: dict[str, str], *arguments: str, processes: int = 1) -> list[str]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*command, str(CODE / "train.py"), *arguments]


def kill_and_resume(stage: Stage) -> Values:
    """A training that is killed and goes on has the weights of one that was not, bit by bit."""
    sums = []
    with tempfile.TemporaryDirectory() as folder:
        for is_killed in (False, True):
            base = Path(folder) / str(is_killed)
            environ = _write_job(base, stage, 96)
            arguments = ["--model_name_or_path", str(minilm(stage.options)), "--batch_size", "8"]
            arguments += ["--epochs", "1", "--max_steps", "8", "--save_steps", "2"]
            arguments += ["--eval_strategy", "no", "--seed", "3"]
            command = _train(environ, *arguments)
            if is_killed:
                with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL) as process:  # fmt: skip
                    end = time.monotonic() + 240
                    while not list((base / "checkpoints").glob("checkpoint-4")):
                        if process.poll() is not None or time.monotonic() > end:
                            break
                        time.sleep(0.01)
                    process.send_signal(signal.SIGKILL)
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
            weights = (base / "model" / "model.safetensors").read_bytes()
            sums.append(hashlib.sha256(weights).hexdigest()[:16])
            said = next((li for li in done.stdout.splitlines() if li.startswith("device:")), "")
    if sums[0] != sums[1]:
        raise Failed("the weights differ", sums=sums, device=said)
    return {"sha256": sums[0], "device": said}


def several_processes(stage: Stage, backend: str, processes: int) -> Values:
    """A sum over processes: NCCL needs a GPU for each, gloo takes two on one."""
    program = (
        "import os, torch, torch.distributed as dist\n"
        f"device = 'cuda' if {backend == 'nccl'} else 'cpu'\n"
        f"dist.init_process_group('{backend}')\n"
        "total = torch.ones(4, device=device); dist.all_reduce(total)\n"
        "assert total.tolist() == [float(dist.get_world_size())] * 4\n"
        "dist.destroy_process_group()\n"
    )
    if backend == "nccl" and stage.device.type != "cuda":
        return {"not here": "NCCL needs a CUDA device"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sum.py"
        path.write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
    return {"processes": processes}


def two_on_one(stage: Stage) -> Values:
    """Two ranks on one GPU: refused by NCCL's rule, trained by gloo."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, more in (("nccl", []), ("gloo", ["--ddp_backend", "gloo"])):
            environ = _write_job(Path(folder) / way, stage, 64)
            arguments = ["--model_name_or_path", str(minilm(stage.options)), "--max_steps", "2"]
            arguments += ["--batch_size", "8", "--save_strategy", "no", *more]
            one = {**environ, "CUDA_VISIBLE_DEVICES": "0"} if stage.device.type == "cuda" else {}
            done = subprocess.run(
                _train(environ, *arguments, processes=2), env={**environ, **one},
                capture_output=True, text=True, check=False, timeout=200,
            )  # fmt: skip
            is_refused = "share one GPU" in done.stderr
            found[way] = "refused" if is_refused else f"exit code {done.returncode}"
            wanted = stage.device.type == "cuda" and way == "nccl"
            if is_refused != wanted or (done.returncode != 0) != wanted:
                raise Failed(f"{way}: {found[way]}", **found, stderr=done.stderr[-1500:])
    return found


def graphs(stage: Stage) -> Values:
    """Losses under reduce-overhead, two batches a step, with an evaluation: those without."""
    losses_of = {}
    with tempfile.TemporaryDirectory() as folder:
        compiled = ["--torch_compile", "True", "--torch_compile_mode", "reduce-overhead"]
        for way, more in (("plain", []), ("graphs", [] if stage.smoke else compiled)):
            environ = _write_job(Path(folder) / way, stage, 96)
            arguments = ["--model_name_or_path", str(minilm(stage.options)), "--max_steps", "6"]
            arguments += ["--batch_size", "8", "--gradient_accumulation_steps", "2", "--bf16"]
            arguments += ["False", "--save_strategy", "no", "--lr", "1e-4", *more]
            command = _train(environ, *arguments)
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"{way}: exit code {done.returncode}", stderr=done.stderr[-1500:])
            output = Path(folder) / way / "output" / "data" / "metrics.json"
            losses_of[way] = json.loads(output.read_text())["eval_loss"]
    # Dropout is drawn otherwise in a compiled model; a wrong sum of gradients does not learn.
    if abs(losses_of["graphs"] - losses_of["plain"]) > 0.1:
        raise Failed("the losses differ", **losses_of)
    return losses_of


def estimate(stage: Stage, size: int) -> Values:
    """doctor's estimate of memory beside what torch has allocated at a training's peak."""
    with tempfile.TemporaryDirectory() as folder:
        environ = _write_job(Path(folder), stage, max(96, 4 * size))
        arguments = ["--model_name_or_path", str(minilm(stage.options)), "--max_steps", "3"]
        arguments += ["--batch_size", str(size), "--eval_strategy", "no", "--save_strategy", "no"]
        check = [sys.executable, str(CODE / "check.py"), "1", *arguments]
        told = subprocess.run(check, env=environ, capture_output=True, text=True, check=False)
        said = next(li for li in told.stdout.splitlines() if '"memory"' in li)
        detail = json.loads(said.partition(" ")[2])["detail"]
        done = subprocess.run(
            _train(environ, *arguments), env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
    found = {"said": detail}
    if stage.device.type != "cuda":
        return found
    peak = next(li for li in done.stdout.splitlines() if li.startswith("device memory:"))
    told_gb, real_gb = (float(text.split(" GB")[0].split()[-1]) for text in (detail, peak))
    if abs(told_gb / real_gb - 1) > 0.15:
        raise Failed("more than 15 % from what torch reports", **found, peak=peak)
    return found | {"peak": peak}


def sharded_decoder(stage: Stage) -> Values:
    """FSDP2 in the device's default precision with task=causal-lm: its losses must fall."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        environ = _write_job(base, stage, 96)
        model = base / "decoder"
        _save_decoder(model)
        arguments = ["--task", "causal-lm", "--model_name_or_path", str(model)]
        arguments += ["--text_column", "text", "--batch_size", "8", "--epochs", "2"]
        arguments += ["--lr", "5e-3", "--fsdp", "full_shard", "--logging_steps", "4"]
        processes = 2 if stage.device.type == "cpu" else torch.cuda.device_count()
        command = _train(environ, *arguments, processes=processes)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
        metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
    if not metrics["eval_loss"] < 5.0:
        raise Failed("it has not learned", **metrics)
    return {"processes": processes, **{k: metrics[k] for k in ("eval_loss", "train_loss")}}


def _save_decoder(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="</s>", model_max_length=256
    )
    sizes = {**SMALL, "vocab_size": len(pieces), "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=64)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def the_whole_way(stage: Stage) -> Values:
    """`amphora doctor`, `train` and `serve`, and a request, as an image does it."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        environ = _write_job(base, stage, 160)
        environ |= {"PYTHONPATH": str(ROOT / "container"), "AMPHORA_CODE_DIR": str(CODE)}
        config = base / "input" / "config"
        config.mkdir(parents=True)
        values = {"model_name_or_path": str(minilm(stage.options)), "epochs": "5", "lr": "2e-4"}
        values["batch_size"] = "8"
        (config / "hyperparameters.json").write_text(json.dumps(values))
        said = {}
        for command in ("doctor", "train"):
            done = subprocess.run(
                [sys.executable, "-m", "amphora", command],
                env=environ, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                failure = base / "output" / "failure"
                reason = failure.read_text() if failure.exists() else done.stderr[-1500:]
                raise Failed(f"amphora {command}: exit code {done.returncode}", reason_=reason)
            said[command] = [line for line in done.stdout.splitlines() if "device" in line][:3]
        with _served(environ) as address:
            request = urllib.request.Request(
                f"{address}/invocations",
                json.dumps({"inputs": ["a good film", "a long plot"]}).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
    labels = [each["label"] for each in answer]
    if labels != ["pos", "neg"]:
        raise Failed("a wrong answer", answer=answer)
    return {**said, "answer": answer}


@contextmanager
def _served(environ: dict[str, str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-m", "amphora", "serve"],
        env={**environ, "SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_MODEL_SERVER_WORKERS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/ping", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        try:
            yield address
        finally:
            server.terminate()


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
    stage.check("gloo, two processes", 20, lambda: several_processes(stage, "gloo", 2))
    stage.check("nccl, one process", 20, lambda: several_processes(stage, "nccl", 1))
    stage.check("two ranks on one GPU", 40, lambda: two_on_one(stage))
    stage.check("graphs keep no answer", 60, lambda: graphs(stage))
    for size in (8,) if stage.smoke else (32, 512):
        stage.check(f"memory, batch {size}", 40, functools.partial(estimate, stage, size))
    stage.check("doctor, train, serve", 90, lambda: the_whole_way(stage))
    stage.check("kill and resume", 90, lambda: kill_and_resume(stage))
    stage.check("fsdp2, causal-lm", 60, lambda: sharded_decoder(stage))
    stage.end()


if __name__ == "__main__":
    main()
