"""The trainings that the campaign kill interrupts: their models, data and ways to share work."""

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

from ordeal.common import clean_environ, configure, free_port, reviews, start, tiny_model

SHARDED = {"mp_parameters": "partitions={processes}"}
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
    rows_of_each: int = 0
    """Processes of a host that has rows of its own; 0: all hosts have all rows."""
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
    Kind(name="sharded rows", processes=(2, 3, 4), rows_of_each=1),
    Kind(name="sharded rows, a host without", processes=(2, 3, 4), rows_of_each=1,
         without_rows=True),
    Kind(name="sharded rows, two processes a host", processes=(4,), rows_of_each=2),
    Kind(name="sharded rows, FSDP2", processes=(2, 3), rows_of_each=1, more=SHARDED),
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
    """A model and its channels."""

    model: Path
    channels: Mapping[str, Path]


def material(name: str, folder: Path) -> Material:
    """The model and the data of a kind, written below `folder` if they are not there."""
    location = folder / name.replace(" ", "-")
    channels = {"train": location / "train"}
    if not location.exists():
        for path in channels.values():
            path.mkdir(parents=True)
        still = name.startswith("still")
        tiny_model(location / "model", still=still, writes=name.endswith("summaries"))
        _write(name.removeprefix("still "), channels["train"])
    return Material(location / "model", channels)


def _write(name: str, folder: Path) -> None:
    if name == "reviews":
        reviews(folder / "train.csv", 180)
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
    """Starts of one and the same training on one tree."""

    def __init__(self, base: Path, kind: Kind, its: Material, processes: int) -> None:
        self.base, self.kind, self.its, self.processes = base, kind, its, processes
        self.log = base / "log.txt"
        base.mkdir(parents=True)
        self.hyperparameters: dict[str, Any] = {
            "model_name_or_path": str(its.model), "epochs": 2, "lr": 1e-3, "max_length": 32,
            "batch_size": 8 // processes, "logging_steps": 1, "save_steps": 2,
        }  # fmt: skip
        for name, value in kind.more.items():
            given = isinstance(value, str)
            self.hyperparameters[name] = value.format(processes=processes) if given else value

    def fork(self, processes: int | None = None) -> list[int]:
        """Its processes, as torchrun would start them, in as many as the job has, or in others."""
        count = processes or self.processes
        variables = {
            "SAGEMAKER_BASE_DIR": str(self.base),
            "PYTHONUNBUFFERED": "1",
            **{
                f"SM_CHANNEL_{channel.upper()}": str(path)
                for channel, path in self.its.channels.items()
            },
        }
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
            if self.kind.rows_of_each:
                variables |= self._own_rows(rank)
            environ = clean_environ(**variables)
            os.environ.clear()
            os.environ.update(environ)
            import datasets
            import tqdm

            import train

            # A job of its own begins without any other's tokens.
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

    def _own_rows(self, rank: int) -> dict[str, str]:
        """A process's variables, and its host's part of the rows; parts are not equal."""
        of_each = self.kind.rows_of_each
        host, hosts = rank // of_each, self.processes // of_each
        header, *rows = (self.its.channels["train"] / "train.csv").read_text().splitlines()
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
            "SM_HOSTS": json.dumps([f"algo-{channel + 1}" for channel in range(hosts)]),
            "SM_CURRENT_HOST": f"algo-{host + 1}",
            "LOCAL_RANK": str(rank % of_each), "LOCAL_WORLD_SIZE": str(of_each),
        }  # fmt: skip

    def whole(self) -> int:
        """`amphora train`, and what it starts."""
        configure(
            self.base,
            self.hyperparameters,
            inputdataconfig={channel: {} for channel in self.its.channels},
        )
        for name, path in self.its.channels.items():
            channel = self.base / "input" / "data" / name
            if not channel.exists():
                shutil.copytree(path, channel)
        environ = {"AMPHORA_NPROC_PER_NODE": str(self.processes)}
        environ |= {"HF_DATASETS_CACHE": str(self.base / "cache")}
        return start(self.base, "train", self.log, **environ).pid

    def weights(self) -> dict[str, bytes]:
        """Of the model it has written, by file."""
        files = (self.base / "model").rglob("*.safetensors")
        return {str(path.relative_to(self.base)): path.read_bytes() for path in files}

    def losses(self) -> dict[int, set[float]]:
        """Of each step, in whichever start it was made."""
        losses: dict[int, set[float]] = {}
        for path in (self.log, *self.base.glob("log-*.txt")):
            text = path.read_text(errors="replace") if path.exists() else ""
            for step, loss in re.findall(
                r"^metric step=(\d+) .*'loss': ([^,}]+)", text, re.MULTILINE
            ):
                losses.setdefault(int(step), set()).add(float(loss))
        return losses
