"""Serving, measured: `amphora serve` beside the servers of today, taking turns.

    .venv/bin/python benchmarks/bench_serve.py
        [--workload classification|embeddings|long]
        [--peers infinity,openvino] [--clients 32,8,1] [--rounds 1]
        [--engines torch,int8]
        [--seconds 4] [--texts FILE] [--model FOLDER] [--faults] [--figures FILE]

Without --model, MiniLM-L6 is saved first (`servers/workloads.py`); without --texts, sentences of 6
to 28 words are made, of 600 for `long`. Each peer is installed under build/peers the first time;
--peers '' measures amphora alone.
Text generation is measured by bench_generation.py.
What a server answers is held to transformers in float32 before it is measured. --faults adds bad
items, floods, SIGTERM and killed workers, for classification. With --figures the rounds are added
to those in FILE, so that several runs make one table. CPU-ms a request counts the server's whole
process tree, so that a busy machine changes it less than it changes requests a second. Every server
has 2 workers of 1 thread. Prints a Markdown table of medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
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

from servers.in_python import PEERS
from servers.peer import Launch, free_ports, run, written
from servers.workloads import WORKLOADS, Right, Workload, make_texts, save_embedder, save_model

ROOT = Path(__file__).resolve().parents[1]
LOAD = Path(__file__).with_name("load.py")
TICKS = os.sysconf("SC_CLK_TCK")
BAD = '{"inputs": 7}'
# Longer than this, and a server whose workers were killed counts as gone.
RECOVERY_SECONDS = 15
# Requests whose answers are held to the right ones.
CHECKED = 8


@dataclass
class Server:
    """A server to measure."""

    name: str
    launch: Launch
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def start(self, body: str) -> float:
        """Start it and ask until it answers. Returns the seconds until the first right answer."""
        await_port(self.launch.port)
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

    def ask(self, body: str) -> list[Any]:
        """Its values for one request. Raises OSError, HTTPException or ValueError."""
        address = f"http://127.0.0.1:{self.launch.port}{self.launch.path}"
        request = urllib.request.Request(
            address, body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return self.launch.values(json.load(answer))

    def answers(self, body: str) -> bool:
        """Whether one request is answered."""
        try:
            return bool(self.ask(body))
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False

    def tree(self) -> list[int]:
        """Its processes: those of its session, since some servers leave their processes to init,
        and all that descend of it, since some open sessions of their own."""
        assert self.process is not None
        stats = {
            int(entry.name): fields
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and (fields := stat(int(entry.name)))
        }
        tree = {pid for pid, fields in stats.items() if fields[3] == str(self.process.pid)}
        while more := {pid for pid, fields in stats.items() if int(fields[1]) in tree} - tree:
            tree |= more
        return sorted(tree)

    def workers(self) -> list[int]:
        """Those that predict: they have torch loaded, and no children."""
        assert self.process is not None
        tree = [pid for pid in self.tree() if pid != self.process.pid]
        parents = {int(fields[1]) for pid in tree if (fields := stat(pid))}
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
    stats = filter(None, map(stat, pids))
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / TICKS


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
    command = [sys.executable, str(LOAD), str(server.launch.port), server.launch.path, str(clients)]
    output = run([*command, str(seconds), str(bodies)], f"{server.name} cannot be loaded")
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    return results


def send_together(server: Server, bodies: list[str], then: Callable[[], None]) -> list[int]:
    """Send all requests before any answer is read, with `then` between. Statuses; 0 for none."""
    clients = [
        http.client.HTTPConnection("127.0.0.1", server.launch.port, timeout=60) for _ in bodies
    ]
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
    results = load(server, clients, seconds, bodies)
    spent = cpu_seconds(server.tree()) - before
    good = results["statuses"].get("200", 0)
    server.note(f"requests a second, {clients} clients", good / results["seconds"])
    server.note(f"p50 ms, {clients} clients", results["p50"])
    server.note(f"p99 ms, {clients} clients", results["p99"])
    server.note(f"CPU-ms a request, {clients} clients", spent * 1000 / max(1, good))
    return float(good / results["seconds"])


def faults(server: Server, seconds: float, bodies: Path, texts: list[str]) -> None:
    """Bad items among good ones, 256 clients that never back off, and the end by SIGTERM."""
    mixed = [BAD if index % 4 == 0 else text for index, text in enumerate(texts[:96])]
    answered = zip(mixed, send_together(server, mixed, lambda: None), strict=True)
    good = sum(status == 200 for body, status in answered if body != BAD)
    server.note("good neighbours of bad items answered, of 72", good)
    flood = load(server, 256, seconds, bodies)
    peaks = [
        values[-1]
        for name, values in server.figures.items()
        if name.startswith("requests a second")
    ]
    share = flood["statuses"].get("200", 0) / flood["seconds"] / max(peaks)
    server.note("256 clients without backoff: good answers, % of the peak", share * 100)
    server.note("256 clients: p50 ms of good answers", flood["p50"])

    def terminate() -> None:
        time.sleep(0.1)
        assert server.process is not None
        server.process.terminate()

    statuses = send_together(server, texts[:64], terminate)
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
    servers: list[Server], options: argparse.Namespace, in_process: float, keep: Callable[[], None]
) -> None:
    """One round: they take turns, so that what else the machine does meets all alike.

    Args:
        servers: With the bodies that each is asked in a file `bodies` of its folder.
        asked: The arguments.
        own: The bare model's median milliseconds for a request.
        keep: It is called after each server.
    """
    for server in servers:
        bodies = server.folder / "bodies"
        first = bodies.read_text().splitlines()[0]
        server.note("seconds from start to the first right answer", server.start(first))
        check(server, options.right, options.lists)
        for clients in options.clients:
            throughput(server, clients, options.seconds, bodies)
            if clients == 1:
                p50 = server.figures["p50 ms, 1 clients"][-1]
                server.note("p50 at 1 client, of the bare model's own time", p50 / in_process)
        server.note("MB of the whole tree (PSS)", pss_mb(server.tree()))
        if options.faults:
            faults(server, options.seconds, bodies, bodies.read_text().splitlines())
            server.note("seconds from start to the first right answer", server.start(first))
            server.note("all workers killed: seconds to serving again", killed(server, first))
        server.stop()
        keep()


def check(server: Server, right: Right, lists: list[list[str]]) -> None:
    """Hold its answers to the right ones. Raises SystemExit if one is wrong."""
    for texts in lists[:CHECKED]:
        values = server.ask(written(server.launch.body(texts)))
        if len(values) != len(texts):
            raise SystemExit(f"{server.name} has {len(values)} values for {len(texts)} texts.")
        for text, value in zip(texts, values, strict=True):
            if fault := right.fault(text, value):
                raise SystemExit(f"{server.name} is wrong: {fault}")


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
        "    if sum(took) > 5000: break\n"
        "print(statistics.median(took))\n"
    )
    command = [sys.executable, "-c", script, model, str(bodies)]
    environ = {"PYTHONPATH": str(ROOT / "code"), "OMP_NUM_THREADS": "1"}
    output = run(command, "The model cannot be measured by itself", environ)
    return float(output.splitlines()[-1])


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """The medians over the rounds, a column for each server."""
    names = list(dict.fromkeys(name for figure in figures.values() for name in figure))
    lines = ["| | " + " | ".join(figures) + " |", "|---|" + "---|" * len(figures)]
    for name in names:
        cells = [_cell(figure.get(name, [])) for figure in figures.values()]
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
    parser.add_argument("--workload", choices=[*WORKLOADS], default="classification")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=Path, help="one text a line")
    parser.add_argument("--clients", type=_numbers, default=[32, 8, 1])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}, or ''")
    parser.add_argument("--engines", default="torch", help="of torch, int8 (of --model)")
    parser.add_argument("--figures", type=Path, help="add the rounds to those in this file")
    options = parser.parse_args()
    work = WORKLOADS[options.workload]
    if options.faults and options.workload != "classification":
        parser.error("--faults is for --workload classification")
    try:
        options.lists = _requests(_texts(options.texts, work), work)
    except (OSError, ValueError) as error:
        parser.error(f"--texts: {error}")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        if options.model:
            (base / "model").symlink_to(options.model.resolve())
        else:
            {"classification": save_model, "embeddings": save_embedder}[work.task](base / "model")
        options.right = Right(base / "model", work.task)
        names = [name for name in options.peers.split(",") if name]
        engines = [_amphora(base, engine) for engine in options.engines.split(",")]
        servers = [*engines, *_peers(base, names, work)]
        for server in servers:
            bodies = [written(server.launch.body(texts)) for texts in options.lists]
            (server.folder / "bodies").write_text("".join(body + "\n" for body in bodies))
        if options.figures and options.figures.is_file():
            known = json.loads(options.figures.read_text())
            for server in servers:
                server.figures = known.get(server.name, {})
        figures = {server.name: server.figures for server in servers}

        def keep() -> None:
            if options.figures:
                options.figures.write_text(json.dumps(figures))

        # Ended from outside, it still ends the servers.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        for _ in range(options.rounds):
            in_process = bare(str(base / "model"), base / "bodies")
            try:
                measure(servers, options, in_process, keep)
            finally:
                for server in servers:
                    server.kill()
        busy = Path("/proc/loadavg").read_text().split()[0]
        print(f"load average at the end: {busy}\n\n{table(figures)}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _texts(file: Path | None, work: Workload) -> list[str]:
    """The lines of a file that are not blank; without one, texts that are made. Raises OSError."""
    if file is None:
        return make_texts(work.words)
    return [line for line in file.read_text().splitlines() if line.strip()]


def _requests(texts: list[str], work: Workload) -> list[list[str]]:
    """The texts of each request. Those of several texts begin at every eighth text.

    Raises ValueError if there are fewer than a request has.
    """
    if len(texts) < work.texts:
        raise ValueError(f"there are {len(texts)} texts, and a request has {work.texts}.")
    if work.texts == 1:
        return [[text] for text in texts]
    begins = range(0, len(texts) - work.texts + 1, 8)
    return [texts[begin : begin + work.texts] for begin in begins]


def _amphora(base: Path, engine: str) -> Server:
    (port,) = free_ports(1)
    usual = "bfloat16" if "bf16" in Path("/proc/cpuinfo").read_text() else "float32"
    settings = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
        "AMPHORA_CODE_DIR": str(ROOT / "code"),
        "OMP_NUM_THREADS": "1",
        "AMPHORA_DTYPE": usual if engine == "torch" else "",
    }
    command = [sys.executable, "-m", "amphora", "serve"]
    name = "amphora" if engine == "torch" else f"amphora, {engine}"
    return Server(name, Launch(command, settings, port, "/invocations"), base)


def _peers(base: Path, names: list[str], work: Workload) -> list[Server]:
    servers = []
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"{name} is no peer: there are {', '.join(PEERS)}.")
        peer = PEERS[name]
        tools = peer.install(ROOT / "build" / "peers")
        folder = base / name
        folder.mkdir()
        launch = peer.prepare(tools, folder, (base / "model").resolve(), work.task)
        servers.append(Server(peer.name, launch, folder))
    return servers


if __name__ == "__main__":
    main()
