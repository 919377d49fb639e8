"""Many models on one server with memory for a third of them: they load, answer and leave at once.

As root the server runs in a control group with a limit of memory; else its estimates alone bound
it.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from ordeal.common import Trial, background_threads, descriptors
from tests.support.processes import memory
from tests.support.servers import SERVE, Running, write_model
from tests.support.until import until

RIGHT = "a model that is loaded gives the answer of that model, and each answer arrives"
FAST = "what loads nothing is answered within 2 s (10 s in short) while others load"
KNOWN = "a load ends with 200, 409 or 507, an unload with 200 or 404"
NAMED = "a 507 names models to unload, if any is loaded"
FLAT = "memory and descriptors are as before when all models are unloaded"
PROMISES = (RIGHT, FAST, KNOWN, NAMED, FLAT)

CLIENTS, MODELS, ROOM = 16, 30, 10
MIB = 1 << 20
_WEIGHTS = 100 * MIB
_CODE = """
import json, random, time
from pathlib import Path
def model_fn(model_dir):
    time.sleep(random.uniform(0, 3))
    weights = (Path(model_dir) / "weights").read_bytes()
    return model_dir.rsplit("/", 1)[1], weights
def transform_fn(model, body, content_type, accept):
    return json.dumps([model[0], json.loads(body)])
"""


def run(trial: Trial) -> None:
    """Load, ask and unload random models for ten minutes."""
    urls = {f"m{number}": trial.folder / "models" / f"m{number}" for number in range(MODELS)}
    for folder in urls.values():
        write_model(folder, _CODE)
        with (folder / "weights").open("wb") as sparse:
            sparse.truncate(_WEIGHTS)
    # What ten take when they are loaded, and what one is expected to need while it loads.
    limit = ROOM * (_WEIGHTS + 45 * MIB) + 500 * MIB
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_PROGRAM": "inference.py"}
    with (
        _limited(trial, limit) as command,
        Running(trial.folder, environ, command, keep_alive=0) as server,
    ):
        server.ready(120)
        # What the first load imports stays.
        _load_and_unload(server, "m0", urls["m0"])
        before = _weight(server)
        end = time.monotonic() + (20 if trial.short else 600)
        stop, seeds = threading.Event(), [trial.random.random() for _ in range(CLIENTS)]
        clients = [
            partial(_ask, trial, server, urls, random.Random(seed), end, stop) for seed in seeds
        ]
        with background_threads(*clients, stop=stop):
            while time.monotonic() < end and trial.has_time():
                time.sleep(0.1)
                trial.longest("models at once", len(server.http.get("/models").json()["models"]))
        for model in server.http.get("/models").json()["models"]:
            server.http.delete(f"/models/{model['modelName']}").raise_for_status()
        until(lambda: len(server.pids()) == 1, 60, server.pids)
        after = _weight(server)
        trial.figure("MB, descriptors before", f"{before[0]:.0f}, {before[1]}")
        trial.figure("MB, descriptors after", f"{after[0]:.0f}, {after[1]}")
        trial.check(FLAT, after[0] - before[0] < 40 and after[1] <= before[1] + 2, (before, after))


def _ask(
    trial: Trial, server: Running, urls: dict[str, Path], draw: random.Random, end: float,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Ask random models; load one that is not there, and unload another if memory is short."""
    limit = 10 if trial.short else 2

    def send(method: str, path: str, loads: bool = False, **options: Any) -> httpx.Response | None:
        began = time.monotonic()
        try:
            answer = server.http.request(method, path, **options)
        except httpx.TransportError as error:
            trial.check(RIGHT, False, f"{method} {path}: {error!r}")
            return None
        seconds = time.monotonic() - began
        trial.count(f"{method} {path.split('/')[-1] if 'invoke' in path else 'models'} "
                    f"{answer.status_code}")  # fmt: skip
        if not (loads and answer.status_code == 200):
            kind = f"{method} {answer.status_code}"
            trial.check(FAST, seconds < limit, f"{kind} {path} took {seconds:.2f} s")
            trial.longest("longest that loads nothing, s", seconds)
        return answer

    while not stop.is_set() and time.monotonic() < end:
        name, value = f"m{min(int(draw.expovariate(0.15)), MODELS - 1)}", draw.random()
        answer = send("POST", f"/models/{name}/invoke", json=value)
        if answer is None or answer.status_code != 404:
            fine = answer is not None and answer.status_code == 200
            trial.check(
                RIGHT, fine and answer.json() == [name, value], answer and answer.text[:300]
            )
            stop.wait(0.02)
            continue
        order = {"model_name": name, "url": str(urls[name])}
        loaded = send("POST", "/models", loads=True, json=order)
        if loaded is None:
            continue
        status = loaded.status_code
        trial.check(KNOWN, status in (200, 409, 507), (status, loaded.text[:300]))
        if status == 507:
            listed = re.findall(r"(m\d+) \((\d+) s ago\)", loaded.text)
            some = send("GET", "/models")
            is_empty = some is None or not some.json()["models"] or "being loaded" in loaded.text
            trial.check(NAMED, bool(listed) or is_empty, loaded.text[:300])
            # Where others hold the memory while they load, there may be room for this one, too.
            if listed and int(listed[0][1]) >= 1 and "being loaded" not in loaded.text:
                gone = send("DELETE", f"/models/{listed[0][0]}")
                fine = gone is not None and gone.status_code in (200, 404)
                trial.check(KNOWN, fine, gone and (gone.status_code, gone.text[:300]))
        stop.wait(draw.uniform(0, 0.5))


def _load_and_unload(server: Running, name: str, url: Path) -> None:
    order = {"model_name": name, "url": str(url)}
    server.http.post("/models", json=order).raise_for_status()
    server.http.delete(f"/models/{name}").raise_for_status()
    until(lambda: len(server.pids()) == 1, 60, server.pids)


def _weight(server: Running) -> tuple[float, int]:
    return memory(server.pids(), ("Pss_Anon:", "Pss_Shmem:")), descriptors(server.pids())


@contextlib.contextmanager
def _limited(trial: Trial, limit: int) -> Iterator[tuple[str, ...]]:
    """Yield a command that serves in a control group with so many bytes of memory, if one can be
    made, and sees it as a container does."""
    groups = Path("/sys/fs/cgroup")
    is_old = (groups / "memory" / "memory.limit_in_bytes").exists()
    parent = groups / "memory" if is_old else groups
    group = parent / f"ordeal-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit))
    except OSError as error:
        trial.figure("limit of memory", f"none: {error}")
        yield SERVE
        return
    trial.figure("limit of memory, MiB", limit // MIB)
    script = f'echo $$ >{group}/cgroup.procs; mount --bind {group} {parent}; exec "$@"'
    try:
        yield ("unshare", "--mount", "sh", "-c", script, "sh", *SERVE)
    finally:
        with contextlib.suppress(OSError):
            until(lambda: not (group / "cgroup.procs").read_text(), 30)
            group.rmdir()
