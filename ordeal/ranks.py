"""One of 1 to 4 processes, or of 2 to 4 hosts, killed, stopped or made to raise, in every phase.

A script of a few lines trains by gloo, whose time-out is 25 s here, and writes a model at its end.
With shards it is the recipe that trains, each host on rows of its own (parts are not equal, and a
host may have none), with sharded weights, LoRA or neither, or all on files that are read meanwhile.
The hosts are network namespaces, as in tests/amphora/training/test_hosts.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ordeal.common import ROOT, Trial, failure, make_model, start
from tests.support.job_tree import Tree
from tests.support.processes import descendants, kill_tree, send
from tests.support.until import wait_until
from tests.support.words import write_reviews

ENDS = "every host ends within 90 s, none with exit code 0"
CAUSE = "the first line of the failure names the cause: the signal, the exception, or the lost host"
EMPTY = "no model is left behind that is empty or half a model"
PROMISES = (ENDS, CAUSE, EMPTY)

BOUND = 90.0
START = 240.0
"""Seconds until a rank is in its phase: four hosts import the recipe on one machine."""
PHASES = ("start", "training", "evaluation", "saving")
ACTS = ("KILL", "STOP", "raise")
_PHASE = """
import os, pathlib, sys, time
rank = int(os.environ.get("RANK", "0"))
def phase(name):
    folder = pathlib.Path(os.environ["ORDEAL_FOLDER"])
    if os.environ["ORDEAL_PHASE"] == name and str(rank) == os.environ["ORDEAL_RANK"]:
        (folder / "here").write_text(str(os.getpid()))
        if os.environ["ORDEAL_ACT"] == "raise":
            raise ValueError(f"rank {rank} gave up in {name}")
        time.sleep(300)
phase("start")
"""
SCRIPT = f"""{_PHASE}
import datetime
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
total = torch.ones(1)
for name in ("training", "evaluation", "saving"):
    for step in range(5):
        dist.all_reduce(total)
    phase(name)
dist.barrier()
if rank == 0:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.safetensors").write_bytes(b"whole")
"""
RECIPE = f"""{_PHASE}
sys.path.insert(0, {str(ROOT / "code")!r})
import train
from recipe.training.resuming import Resumable
def struck(name, method, least):
    def call(self, *arguments, **options):
        if self.state.global_step >= least:
            phase(name)
        return method(self, *arguments, **options)
    return call
Resumable.training_step = struck("training", Resumable.training_step, 2)
Resumable.evaluate = struck("evaluation", Resumable.evaluate, 1)
Resumable._save_checkpoint = struck("saving", Resumable._save_checkpoint, 1)
train.main(sys.argv[1:])
"""
"""The image's recipe, which comes past the phases that SCRIPT has."""
PARTS = (40, 12, 25, 7)
"""Rows of each host."""
WAYS: dict[str, dict[str, Any]] = {
    "sharded rows": {},
    "sharded rows, FSDP2": {"fsdp": True},
    "sharded rows, LoRA": {"lora_r": 4, "lora_alpha": 8},
}


def run(trial: Trial) -> None:
    """Try every phase with every act, on processes of one host and on several hosts."""
    cases = [(phase, act, number) for phase in PHASES for act in ACTS for number in (1, 2, 3, 4)]
    trial.random.shuffle(cases)
    if trial.short:
        # A stopped process takes the collective's whole time-out to be missed.
        cases = [case for case in cases if case[1] != "STOP"]
    model = make_model(trial.folder / "pretrained")
    with _network() as spaces:
        for number, (phase, act, processes) in enumerate(cases[: 1 if trial.short else None]):
            # Nobody waits for a single process that is stopped.
            if trial.has_time() and (act, processes) != ("STOP", 1):
                _processes(trial, number, phase, act, processes)
            if trial.has_time() and spaces:
                _hosts(trial, number, spaces, phase, act, 1 if trial.short else 1 + processes % 2)
            # The recipe's collectives time out after 1,800 s: only a whole host is stopped.
            if trial.has_time() and spaces and (act != "STOP" or processes > 1):
                _shards(trial, number, spaces, phase, act, processes, model)


def _variables(folder: Path, phase: str, act: str, rank: int) -> dict[str, str]:
    return {
        "ORDEAL_FOLDER": str(folder), "ORDEAL_PHASE": phase, "ORDEAL_ACT": act,
        "ORDEAL_RANK": str(rank),
    }  # fmt: skip


def _prepared(base: Path, script: str = SCRIPT, more: dict[str, Any] | None = None,
              **files: object) -> Path:  # fmt: skip
    hyperparameters: dict[str, Any] = {"sagemaker_program": "script.py", **(more or {})}
    hyperparameters["sagemaker_torch_distributed_enabled"] = "true"
    Tree(base).configure(hyperparameters, **files)
    (base / "code").mkdir()
    (base / "code" / "script.py").write_text(script)
    return base


def _processes(trial: Trial, number: int, phase: str, act: str, processes: int) -> None:
    rank = trial.random.randrange(processes)
    base = _prepared(trial.folder / f"processes-{number}")
    environ = {**_variables(base, phase, act, rank), "AMPHORA_NPROC_PER_NODE": str(processes)}
    job = start(base, "train", base / "log.txt", **environ)
    wait_until((base / "here").exists, START)
    _strike(base, act)
    name = f"processes: {phase} {act} rank {rank} of {processes}"
    _judge(trial, name, {"": (job, base)}, act)


def _strike(folder: Path, act: str, victims: list[int] | None = None) -> None:
    """Kill or stop a rank that is in its phase, or all of its host."""
    time.sleep(0.3)
    number = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}.get(act)
    if number is not None:
        for pid in victims or [int((folder / "here").read_text())]:
            send(pid, number)


def _judge(
    trial: Trial, name: str, jobs: dict[str, tuple[subprocess.Popen[bytes], Path]], act: str
) -> None:
    began = time.monotonic()
    for job, _ in jobs.values():
        try:
            job.wait(max(0.1, BOUND + began - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_tree(job.pid)
            job.wait()
            trial.check(ENDS, False, f"{name}: not within {BOUND} s")
    took = time.monotonic() - began
    codes = [job.returncode for job, _ in jobs.values()]
    trial.check(ENDS, 0 not in codes, f"{name}: {codes}")
    trial.longest("longest end, s", took)
    trial.count(f"cases of {name.partition(':')[0]}")
    for host, (_, base) in jobs.items():
        message = failure(base)
        first = message.splitlines()[0] if message else ""
        words = {"raise": "gave up", "KILL": "SIGKILL", "STOP": "communication"}[act]
        lost = "failed first" in first and not name.startswith("processes")
        about = words in first or lost or "communication" in message[:1024]
        trial.check(CAUSE, bool(first) and about, f"{name} {host}: {message[:500]}")
        left = list((base / "model").glob("*"))
        trial.check(EMPTY, not left, f"{name} {host}: {left}")


def _hosts(
    trial: Trial, number: int, spaces: dict[str, str], phase: str, act: str, processes: int
) -> None:
    """Run the script on two hosts, and strike one of them."""
    hosts = list(spaces)[:2]
    victim = trial.random.choice(hosts)
    rank = hosts.index(victim) * processes + trial.random.randrange(processes)
    folder = trial.folder / f"hosts-{number}"
    variables = {**_variables(folder, phase, act, rank), "AMPHORA_NPROC_PER_NODE": str(processes)}
    bases = {
        host: _prepared(folder / host, resourceconfig=_resources(host, hosts)) for host in hosts
    }
    # A host that is gone leaves nothing to read; the one that is left must say so.
    name = f"hosts: {phase} {act} {victim}"
    _strike_host(trial, name, act, spaces, bases, variables, victim, act != "raise")


def _shards(
    trial: Trial, number: int, spaces: dict[str, str], phase: str, act: str, world: int, model: Path
) -> None:
    """Run the recipe on hosts with rows of their own; of several hosts the last may have none."""
    processes = 2 if world == 4 and number % 2 else 1
    hosts = list(spaces)[: world // processes]
    way = trial.random.choice(list(WAYS))
    rows = list(PARTS[: len(hosts)])
    if len(hosts) > 1 and trial.random.random() < 0.5:
        rows[-1] = 0
    rank = trial.random.randrange(world)
    victim = hosts[rank // processes]
    folder = trial.folder / f"shards-{number}"
    more = {"model_name_or_path": str(model), "epochs": 2, "batch_size": 4, "logging_steps": 1}
    bases = {}
    for host, count in zip(hosts, rows, strict=True):
        bases[host] = _prepared(
            folder / host, RECIPE, {**more, **WAYS[way]}, resourceconfig=_resources(host, hosts),
            inputdataconfig={"train": {"S3DistributionType": "ShardedByS3Key"}},
        )  # fmt: skip
        channel = bases[host] / "input" / "data" / "train"
        channel.mkdir(parents=True)
        if count:
            write_reviews(channel / "part-0.csv", count)
    is_whole_host = act == "STOP" or (
        act == "KILL" and len(hosts) > 1 and trial.random.random() < 0.5
    )
    what = f"host {victim}" if is_whole_host else f"rank {rank}"
    name = f"shards: {way}, {rows} rows, {world} processes, {phase} {act} {what}"
    variables = {**_variables(folder, phase, act, rank), "AMPHORA_NPROC_PER_NODE": str(processes)}
    _strike_host(trial, name, act, spaces, bases, variables, victim, is_whole_host)
    trial.count(f"with {way} by {world} processes{', a host without rows' * (not rows[-1])}")


def _resources(host: str, hosts: Sequence[str]) -> dict[str, Any]:
    return {"current_host": host, "hosts": list(hosts), "network_interface_name": "eth0"}


def _strike_host(
    trial: Trial, name: str, act: str, spaces: dict[str, str], bases: dict[str, Path],
    variables: dict[str, str], victim: str, is_whole_host: bool,
) -> None:  # fmt: skip
    """Start a job on each host, strike a rank or all of the victim, and judge the other jobs."""
    jobs = {}
    for host, base in bases.items():
        launcher = ["ip", "netns", "exec", spaces[host]]
        jobs[host] = (start(base, "train", base / "log.txt", launcher, **variables), base)
    lost, _ = jobs[victim]
    folder = Path(variables["ORDEAL_FOLDER"])
    wait_until((folder / "here").exists, START)
    _strike(folder, act, [lost.pid, *descendants(lost.pid)] if is_whole_host else None)
    others = {host: job for host, job in jobs.items() if not is_whole_host or host != victim}
    _judge(trial, name, others, act)
    kill_tree(lost.pid)
    lost.wait()


HOSTS = {f"algo-{number}": f"10.213.78.{number}" for number in (1, 2, 3, 4)}


def _ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode


@contextmanager
def _network() -> Iterator[dict[str, str]]:
    """Yield network namespaces by host name; none without the right to make them."""
    spaces = {host: f"ordeal-{os.getpid()}-{host}" for host in HOSTS}
    # All wires end in one more namespace, whose packets the machine's own rules do not see.
    switch = f"ordeal-{os.getpid()}-switch"
    if shutil.which("ip") is None or _ip("netns", "add", switch, check=False):
        yield {}
        return
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, (host, address) in enumerate(HOSTS.items()):
            space, plug = spaces[host], f"or{os.getpid() % 100000}-{number}"
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", plug, "type", "veth",
                "peer", "name", "eth0", "netns", space)  # fmt: skip
            _ip("-n", switch, "link", "set", plug, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            names = Path("/etc/netns") / space / "hosts"
            names.parent.mkdir(parents=True)
            # A container's own name is known in it, too: torchrun asks for it on one host.
            lines = {"localhost": "127.0.0.1", **HOSTS, socket.gethostname(): address}
            names.write_text("".join(f"{address} {host}\n" for host, address in lines.items()))
        yield spaces
    finally:
        for space in (*spaces.values(), switch):
            _ip("netns", "delete", space, check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
