"""`amphora serve` compared with other servers, which take turns.

    .venv/bin/python benchmarks/bench_serve.py
        [--workload classification|embeddings] [--peers infinity,hf-serve,openvino]
        [--clients 32,8,1] [--engines torch,int8] [--rounds 1] [--seconds 4] [--texts FILE]
        [--model FOLDER]

Without --model, MiniLM-L6 is served, with a new head of two labels for classification; without
--texts, sentences of 6 to 28 words. Each peer is installed below build/peers the first time;
--peers '' measures amphora alone. Every server has 2 workers of 1 thread. What a server answers is
compared with transformers in float32 before it is measured. CPU-ms a request count the server's
whole process tree, so that other work on the machine changes them less than requests a second.

Prints a Markdown table of medians over the rounds. bench_generation.py measures text generation.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    Server,
    amphora_server,
    cpu_seconds,
    memory,
    minilm,
    parser,
    table,
    take_turns,
)
from peers import PEERS, usual_precision

LABELS = ("calm", "alarm")
TEXTS = {"classification": 1, "embeddings": 64}
"""Texts of a request."""
CHECKED = 8
"""Requests whose answers are checked."""
SCORE, COSINE = 0.02, 0.002
"""How far a score may be from float32's, or the cosine of two vectors from 1, in bfloat16."""


def save_model(task: str, folder: Path) -> None:
    """Save MiniLM-L6: unchanged for embeddings, with a new head for classification."""
    if task == "embeddings":
        shutil.copytree(minilm(), folder)
        return
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        minilm(), id2label=dict(enumerate(LABELS)), label2id={n: i for i, n in enumerate(LABELS)}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)


def make_texts(count: int = 1000) -> list[str]:
    """Return sentences of 6 to 28 words."""
    words = "the a storm fire house people today after before water city help road car we they saw"
    draw = random.Random(0)
    return [" ".join(draw.choices(words.split(), k=draw.randint(6, 28))) for _ in range(count)]


class Reference:
    """What transformers answers in float32, text by text."""

    def __init__(self, folder: Path, task: str) -> None:
        import torch
        from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(1)
        self._task = task
        kind = AutoModelForSequenceClassification if task == "classification" else AutoModel
        self._model = kind.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def check(self, server: Server, requests: list[list[str]]) -> None:
        """Compare a server's answers. Raises SystemExit if one is wrong."""
        for texts in requests:
            values = server.values(server.request(server.body(texts)))
            if len(values) != len(texts):
                sys.exit(f"{server.name} returns {len(values)} values for {len(texts)} texts.")
            for text, value in zip(texts, values, strict=True):
                if not self._agrees(text, value, 0.15 if "int8" in server.name else SCORE):
                    sys.exit(f"{server.name} returns {value} for {text!r}, which is wrong.")

    def _agrees(self, text: str, value: Any, allowed: float) -> bool:
        import torch

        batch = self._tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            outputs = self._model(**batch)[0][0].float()
        if self._task == "classification":
            score = float(outputs.softmax(-1)[self._model.config.label2id[value["label"]]])
            return score > 0.5 - allowed and abs(score - value["score"]) <= allowed
        vectors = outputs.mean(0), torch.tensor(value)
        return float(torch.nn.functional.cosine_similarity(*vectors, dim=0)) > 1 - COSINE


def measure(
    server: Server, requests: list[list[str]], options: argparse.Namespace, reference: Reference
) -> dict[str, float]:
    """Start a server, check its answers, load it and stop it."""
    bodies = server.folder / f"{server.name.replace(' ', '-')}.jsonl"
    documents = [server.body(texts) for texts in requests]
    bodies.write_text("".join(json.dumps(document) + "\n" for document in documents))
    with server:
        results = {"seconds until the first answer": server.start(documents[0])}
        server.settle()
        reference.check(server, requests[:CHECKED])
        for clients in options.clients:
            server.load(clients, 1.0, bodies)
            before = cpu_seconds(server.tree())
            load = server.load(clients, options.seconds, bodies)
            spent = cpu_seconds(server.tree()) - before
            answered = load["statuses"].get("200", 0)
            results |= {
                f"requests a second, {clients} clients": answered / load["seconds"],
                f"p50 ms, {clients} clients": load["p50"],
                f"p99 ms, {clients} clients": load["p99"],
                f"CPU-ms a request, {clients} clients": spent * 1000 / max(1, answered),
            }
        results["MB of all processes (PSS)"] = memory(server.tree())
    return results


def read_requests(options: argparse.Namespace) -> list[list[str]]:
    """Return the texts of each request; several texts begin at every eighth of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has fewer texts than a request.
    """
    texts = make_texts()
    if options.texts is not None:
        texts = [line for line in options.texts.read_text().splitlines() if line.strip()]
    count = TEXTS[options.workload]
    if len(texts) < count:
        raise ValueError(f"{len(texts)} texts are fewer than the {count} of a request.")
    starts = range(0, len(texts) - count + 1, 1 if count == 1 else 8)
    return [texts[start : start + count] for start in starts]


def make_servers(base: Path, options: argparse.Namespace) -> list[Server]:
    """Return servers of the model in base/model, not started."""
    servers = []
    for engine in options.engines.split(","):
        name = "amphora" if engine == "torch" else f"amphora, {engine}"
        dtype = usual_precision() if engine == "torch" else ""
        variables = {"OMP_NUM_THREADS": "1", "AMPHORA_DTYPE": dtype}
        servers.append(amphora_server(base, 2, name=name, **variables))
    model = (base / "model").resolve()
    return servers + [
        PEERS[name].server(ROOT / "build" / "peers", base / name, model, options.workload)
        for name in options.peers
    ]


def main() -> None:
    """Read the arguments, measure, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--workload", choices=list(TEXTS), default="classification")
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--texts", type=Path, help="one text a line")
    arguments.add_argument("--clients", default="32,8,1")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=4)
    arguments.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}, or ''")
    arguments.add_argument("--engines", default="torch", help="of torch, int8 (of --model)")
    options = arguments.parse_args()
    try:
        options.clients = [int(count) for count in options.clients.split(",")]
        options.peers = [name for name in options.peers.split(",") if name]
        if unknown := set(options.peers) - set(PEERS):
            raise ValueError(f"unknown peers {unknown}: use {', '.join(PEERS)}")
        requests = read_requests(options)
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        if options.model:
            (base / "model").symlink_to(options.model.resolve())
        else:
            save_model(options.workload, base / "model")
        reference = Reference(base / "model", options.workload)
        try:
            servers = make_servers(base, options)
        except FileNotFoundError as error:
            arguments.error(str(error))
        ways = {
            server.name: partial(measure, server, requests, options, reference)
            for server in servers
        }
        figures = take_turns(ways, options.rounds)
    rows = []
    for figure in next(iter(figures.values()))[0]:
        medians = {
            name: f"{statistics.median(result[figure] for result in results):.3g}"
            for name, results in figures.items()
        }
        rows.append({"": figure, **medians})
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"load average at the end: {load}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
