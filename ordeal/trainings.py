"""The trainings that the campaign `kill` interrupts: their models, data and processes."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ordeal.common import start, tiny_model
from tests.support.job_tree import Tree, clean_environ
from tests.support.ports import free_port
from tests.support.words import write_reviews

SHARDED = {"fsdp": True}
LORA = {"lora_r": 4, "lora_alpha": 8}
SUMMARIES = {"task": "summarization", "max_target_length": 6}
EMBEDDINGS = {"task": "sentence-embedding"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is trained, and by how many processes."""

    name: str = ""
    processes: tuple[int, ...]
    more: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters."""
    material: str = "reviews"
    """Model and data, one of MATERIALS."""
    host_processes: int = 0
    """Processes of a host, which has its own rows; 0: all hosts have all rows."""
    without_rows: bool = False
    """Whether the last host has none."""
    changes: bool = False
    """Whether a job goes on by other numbers of processes."""


KINDS = (
    Kind(processes=(1, 2, 3, 4)),
    Kind(name="FSDP2", processes=(2, 3, 4), more=SHARDED),
    Kind(name="LoRA", processes=(1, 3), more=LORA),
    Kind(name="FSDP2, LoRA", processes=(2, 3), more={**SHARDED, **LORA}),
    Kind(name="two batches a step", processes=(1, 3), more={"gradient_accumulation_steps": 2}),
    Kind(name="FSDP2, two batches a step", processes=(3,),
         more={**SHARDED, "gradient_accumulation_steps": 2}),
    Kind(name="sharded rows", processes=(2, 3, 4), host_processes=1),
    Kind(name="sharded rows, a host without", processes=(2, 3, 4), host_processes=1,
         without_rows=True),
    Kind(name="sharded rows, two processes a host", processes=(4,), host_processes=2),
    Kind(name="sharded rows, FSDP2", processes=(2, 3), host_processes=1, more=SHARDED),
    Kind(name="summaries", processes=(1, 2, 3), more=SUMMARIES, material="summaries"),
    Kind(name="summaries, FSDP2", processes=(3,), more={**SUMMARIES, **SHARDED},
         material="summaries"),
    Kind(name="embeddings", processes=(1, 2, 3), more=EMBEDDINGS, material="pairs"),
    Kind(name="other worlds", processes=(1, 2, 3, 4), material="still reviews", changes=True,
         more={"bf16": False}),
    Kind(name="other worlds, FSDP2", processes=(2, 3), material="still reviews", changes=True,
         more={"bf16": False, **SHARDED}),
    Kind(name="other worlds, summaries", processes=(1, 3), material="still summaries",
         changes=True, more={"bf16": False, **SUMMARIES}),
)  # fmt: skip


@dataclass(frozen=True)
class Material:
    """A model and its channel."""

    model: Path
    train: Path


def make_material(name: str, folder: Path) -> Material:
    """Return the model and the data of a kind; write them below `folder` the first time."""
    folder = folder / name.replace(" ", "-")
    if not folder.exists():
        (folder / "train").mkdir(parents=True)
        still = name.startswith("still")
        tiny_model(folder / "model", still=still, generates=name.endswith("summaries"))
        _write(name.removeprefix("still "), folder / "train")
    return Material(folder / "model", folder / "train")


def _write(name: str, folder: Path) -> None:
    if name == "reviews":
        write_reviews(folder / "train.csv", 180)
    else:
        pairs = {
            "summaries": ("document", "summary", "the film number {0} was good", "number {0}"),
            "pairs": ("anchor", "positive", "film number {0}", "the great film was number {0}"),
        }
        first, second, one, other = pairs[name]
        with (folder / "train.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows(
                [(first, second), *((one.format(n), other.format(n)) for n in range(150))]
            )


class Job:
    """A training in one folder, which can be started again."""

    def __init__(self, base: Path, kind: Kind, material: Material, processes: int) -> None:
        self.base, self.kind, self.material, self.processes = base, kind, material, processes
        self.log = base / "log.txt"
        base.mkdir(parents=True)
        self.hyperparameters: dict[str, Any] = {
            "model_name_or_path": str(material.model), "epochs": 2, "lr": 1e-3, "max_length": 32,
            "batch_size": 8 // processes, "logging_steps": 1, "save_steps": 2,
        }  # fmt: skip
        for name, value in kind.more.items():
            given = isinstance(value, str)
            self.hyperparameters[name] = value.format(processes=processes) if given else value

    def start_processes(self, processes: int | None = None) -> list[int]:
        """Start it as torchrun would, in its number of processes or another; return their ids."""
        count = processes or self.processes
        variables = {"SAGEMAKER_BASE_DIR": str(self.base), "PYTHONUNBUFFERED": "1"}
        variables["SM_CHANNEL_TRAIN"] = str(self.material.train)
        if count > 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                          "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}  # fmt: skip
        return [self._fork(variables, rank) for rank in range(count)]

    def _fork(self, variables: dict[str, str], rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if "WORLD_SIZE" in variables:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if self.kind.host_processes:
                variables |= self._host_rows(rank)
            environ = clean_environ(**variables)
            os.environ.clear()
            os.environ.update(environ)
            import datasets
            import tqdm

            import train

            # A new job begins without the tokens of others.
            datasets.config.HF_DATASETS_CACHE = str(self.base / "cache")
            # Its lock is one semaphore for all forks: a killed one would hold it for ever.
            tqdm.tqdm.set_lock(threading.RLock())
            train.main(
                [word for k, v in self.hyperparameters.items() for word in (f"--{k}", f"{v}")]
            )
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _host_rows(self, rank: int) -> dict[str, str]:
        """Write the rows of a process's host, in unequal parts, and return its variables."""
        local_world = self.kind.host_processes
        host, hosts = rank // local_world, self.processes // local_world
        header, *rows = (self.material.train / "train.csv").read_text().splitlines()
        with_rows = hosts - self.kind.without_rows
        shares = [max(0, number % (with_rows + 1) - 1) for number in range(len(rows))]
        local_rows = [row for row, share in zip(rows, shares, strict=True) if share == host]
        part = self.base / f"part-{host}"
        part.mkdir(exist_ok=True)
        if local_rows:
            whole = self.base / f"part-{host}.of-{rank}"
            whole.write_text("\n".join([header, *local_rows, ""]))
            whole.replace(part / "train.csv")  # the host's other process may read it
        channels = {"train": {"S3DistributionType": "ShardedByS3Key"}}
        return {
            "SM_CHANNEL_TRAIN": str(part), "SM_INPUT_DATA_CONFIG": json.dumps(channels),
            "SM_HOSTS": json.dumps([f"algo-{number + 1}" for number in range(hosts)]),
            "SM_CURRENT_HOST": f"algo-{host + 1}",
            "LOCAL_RANK": str(rank % local_world), "LOCAL_WORLD_SIZE": str(local_world),
        }  # fmt: skip

    def start_container(self) -> int:
        """Start `amphora train`; return its process id."""
        Tree(self.base).configure(self.hyperparameters, inputdataconfig={"train": {}})
        channel = self.base / "input" / "data" / "train"
        if not channel.exists():
            shutil.copytree(self.material.train, channel)
        environ = {"AMPHORA_NPROC_PER_NODE": str(self.processes)}
        environ |= {"HF_DATASETS_CACHE": str(self.base / "cache")}
        return start(self.base, "train", self.log, **environ).pid

    def weights(self) -> dict[str, bytes]:
        """Return the weights of the model that it has written, by file."""
        files = (self.base / "model").rglob("*.safetensors")
        return {str(path.relative_to(self.base)): path.read_bytes() for path in files}

    def losses(self) -> dict[int, set[float]]:
        """Return the losses of each step, from all starts."""
        losses: dict[int, set[float]] = {}
        for path in (self.log, *self.base.glob("log-*.txt")):
            text = path.read_text(errors="replace") if path.exists() else ""
            for step, loss in re.findall(
                r"^metric step=(\d+) .*'loss': ([^,}]+)", text, re.MULTILINE
            ):
                losses.setdefault(int(step), set()).add(float(loss))
        return losses
