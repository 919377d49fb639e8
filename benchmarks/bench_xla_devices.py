"""torch-xla with several CPU devices: SPMD in one process beside a process for each device.

    PJRT_DEVICE=CPU .venv-xla/bin/python benchmarks/bench_xla_devices.py

Each variant trains the same encoder on the same batches, in turns; losses after the last step must
agree. Seconds and CPU-seconds are of the steps after the first two, in which programs are compiled.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

STEPS, ROWS, LENGTH, ROUNDS = 12, 16, 64, 3
VARIANTS = {"one device": (1, 1), "SPMD, 2 devices": (1, 2), "2 processes, gloo": (2, 1)}


def worker(processes: int, devices: int) -> None:
    """Train, and print what it took, from the first process."""
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from transformers import BertConfig, BertForSequenceClassification

    rank = int(os.environ.get("RANK", "0"))
    if processes > 1:
        dist.init_process_group("gloo")
    mesh = None
    if devices > 1:
        xr.use_spmd()
        assert xr.global_runtime_device_count() == devices
        mesh = xs.Mesh(list(range(devices)), (devices,), ("data",))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    model: Any = BertForSequenceClassification(config).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    share = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    losses: list[float] = []
    began = (0.0, 0.0)
    for step in range(STEPS + 2):
        if step == 2:
            began = time.monotonic(), cpu_seconds()
        ids = torch.randint(5, 2000, (ROWS, LENGTH), generator=generator)
        labels = (ids[:, 0] > 1000).long()
        batch = {"input_ids": ids[share], "labels": labels[share]}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch = {name: tensor.to("xla") for name, tensor in batch.items()}
        if mesh is not None:
            for tensor in batch.values():
                xs.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.dim() - 1)))
        loss = model(**batch).loss
        loss.backward()
        torch_xla.sync()
        if processes > 1:
            mean_gradients(model, processes)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        value = loss.detach().cpu()
        if processes > 1:
            dist.all_reduce(value)
        losses.append(float(value) / processes)
    used = time.monotonic() - began[0], cpu_seconds() - began[1]
    total = torch.tensor([used[1]])
    if processes > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"seconds": used[0], "cpu": float(total), "loss": losses[-1]}))


def mean_gradients(model: Any, processes: int) -> None:
    """The mean over all processes of each gradient, through the hosts' memory in one tensor."""
    import torch
    import torch.distributed as dist

    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
    dist.all_reduce(flat)
    flat = (flat / processes).to("xla")
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def cpu_seconds() -> float:
    """Of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Each variant in turn, and a table of the medians."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, (processes, devices) in VARIANTS.items():
            command = [sys.executable]
            if processes > 1:
                command += [
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc-per-node={processes}",
                ]
            done = subprocess.run(
                [*command, __file__, str(processes), str(devices)],
                env={**os.environ, "CPU_NUM_DEVICES": str(devices), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            taken[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, taken[name][-1], flush=True)
    for name, rows in taken.items():
        middle = {key: sorted(row[key] for row in rows)[len(rows) // 2] for key in rows[0]}
        seconds, cpu = middle["seconds"] / STEPS, middle["cpu"] / STEPS
        print(f"| {name} | {seconds:.3f} | {cpu:.3f} | {middle['loss']:.6f} |")


if __name__ == "__main__":
    worker(*map(int, sys.argv[1:])) if sys.argv[1:] else main()
