"""Measure many LoRA adapters of MiniLM on one endpoint, beside one adapter and the base alone.

    python benchmarks/bench_adapters.py [--adapters 100] [--rank 8] [--clients 32] [--seconds 5]

The adapters classify texts: random products of all linear layers of the encoder, and a head of
five labels each. The servers have one worker, and measure in turns. Memory is the PSS of all
processes of a server after the load.
"""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import common


def write_adapters(base: Path, folder: Path, count: int, rank: int) -> None:
    """Write adapters of a base: `folder/adapters/0`, `1` ..."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=5)
    config = model.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = get_peft_model(
            model, LoraConfig(task_type="SEQ_CLS", r=rank, target_modules="all-linear")
        )
    for number in range(count):
        torch.manual_seed(number)
        for weight in adapted.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.05)
        adapted.save_pretrained(folder / "adapters" / str(number))
        config.save_pretrained(folder / "adapters" / str(number))


def make_server(base: Path, name: str, adapters: Path, count: int) -> common.Server:
    """Return a server of MiniLM with `count` adapters."""
    model = base / name / "model"
    model.mkdir(parents=True)
    for path in common.minilm().iterdir():
        (model / path.name).symlink_to(path)
    for number in range(count):
        (model / "adapters").mkdir(exist_ok=True)
        (model / "adapters" / str(number)).symlink_to(adapters / "adapters" / str(number))
    environ = {"AMPHORA_ADAPTERS": str(max(1, count)), "OMP_NUM_THREADS": "1"}
    return common.amphora_server(base / name, 1, name=name, **environ)


def bodies(path: Path, count: int) -> Path:
    """Write requests that name each of `count` adapters in turn; without one, the base."""
    draw = random.Random(0)
    lines = []
    for number in range(2000):
        text = " ".join(f"word{draw.randrange(500)}" for _ in range(draw.randint(4, 16)))
        head = f"X-Amzn-SageMaker-Adapter-Identifier: {number % count}\t" if count else ""
        lines.append(head + json.dumps({"inputs": text}))
    path.write_text("\n".join(lines))
    return path


def main() -> None:
    arguments = common.parser(__doc__)
    for name, usual in (("adapters", 100), ("rank", 8), ("clients", 32), ("rounds", 3)):
        arguments.add_argument(f"--{name}", type=int, default=usual)
    arguments.add_argument("--seconds", type=float, default=5)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_adapters(common.minilm(), base, options.adapters, options.rank)
        rows = {}
        variants: dict[str, Any] = {}
        for name, count in (("base", 0), ("1 adapter", 1), ("all adapters", options.adapters)):
            server = make_server(base, name.replace(" ", "-"), base, count)
            requests = bodies(base / f"{count}.txt", count)
            server.__enter__()
            seconds = server.start({"inputs": "a text"})
            server.settle()

            def measure(server: Any = server, requests: Path = requests) -> tuple[float, float]:
                """Return requests a second, and CPU-ms of the server a request."""
                spent = common.cpu_seconds(server.tree())
                seen = server.load(options.clients, options.seconds, requests)
                assert set(seen["statuses"]) == {"200"}, seen
                spent, count = common.cpu_seconds(server.tree()) - spent, seen["statuses"]["200"]
                return count / seen["seconds"], 1000 * spent / count

            measure()
            variants[name] = measure
            rows[name] = {"": name, "start, s": round(seconds, 1), "server": server}
        try:
            for name, rates in common.take_turns(variants, options.rounds).items():
                row = rows[name]
                row["requests/s"] = round(max(rate for rate, _ in rates))
                row["CPU-ms a request"] = round(min(cpu for _, cpu in rates), 2)
                row["MB (PSS)"] = round(common.memory(row["server"].tree()))
        finally:
            for row in rows.values():
                row.pop("server").__exit__()
        print(common.table(list(rows.values())))


if __name__ == "__main__":
    main()
