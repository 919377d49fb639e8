"""Trainings by several processes, run one after the other, which share one import of the recipe.

    python worlds.py TRAININGS      a JSON list of `Training`, as mappings

The processes of a training are forks of a process that has imported the recipe, so that eight
processes cost the imports of one. None writes the report, which takes ten times as long. Each is what
torchrun would start: an environment, and the call of code/train.py.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "code"


@dataclass(frozen=True, kw_only=True)
class Training:
    base: str
    """SAGEMAKER_BASE_DIR. The output of rank 0 is in its file `log`, of others in log-1, ..."""
    data: str
    argv: list[str]
    processes: int = 1
    checkpoint: str | None = None
    """A checkpoint to start with, copied to the checkpoints of the job."""
    environment: dict[str, str] = field(default_factory=dict)

    def log(self, rank: int = 0) -> str:
        name = f"log-{rank}" if rank else "log"
        return (Path(self.base) / name).read_text()

    def weights(self) -> bytes:
        return (Path(self.base) / "model" / "model.safetensors").read_bytes()

    def path(self, step: int) -> str:
        return str(Path(self.base) / "checkpoints" / f"checkpoint-{step}")


def run(*trainings: Training, timeout: float = 540) -> list[list[int]]:
    """Run the trainings; return the exit codes of the processes of each."""
    given = json.dumps([asdict(training) for training in trainings])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    codes: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return codes


def _process(training: Training, rank: int, port: int) -> None:
    from recipe import arguments, paths
    from recipe.reports import report
    from recipe.training import run as training_run

    report.of_run = lambda *given: None

    os.environ |= {
        "SAGEMAKER_BASE_DIR": training.base,
        "SM_CHANNEL_TRAIN": training.data,
        **training.environment,
    }
    if training.processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(training.processes),
            "LOCAL_WORLD_SIZE": str(training.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    places = paths.from_environment(os.environ)
    training_run.run(arguments.parse(training.argv, places), places, os.environ)


def _fork(training: Training, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    name = f"log-{rank}" if rank else "log"
    log = os.open(Path(training.base) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        _process(training, rank, port)
        code = 0
    except SystemExit as error:
        code = int(str(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(training: Training) -> list[int]:
    from tests.support.ports import free_port

    base = Path(training.base)
    base.mkdir(parents=True, exist_ok=True)
    if training.checkpoint is not None:
        source = Path(training.checkpoint)
        shutil.copytree(source, base / "checkpoints" / source.name)
    port = free_port()
    running = {_fork(training, rank, port): rank for rank in range(training.processes)}
    codes = [0] * training.processes
    end = time.monotonic() + 480
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        failed = any(code != 0 for code in codes)
        if failed or time.monotonic() > end:
            time.sleep(0.2 if failed else 0)  # the others log their errors
            for other in running:
                os.kill(other, 9)
        time.sleep(0.01)
    return codes


if __name__ == "__main__":
    sys.path[:0] = [str(CODE), str(ROOT)]
    # Import before the forks what each of them needs.
    for name in ("recipe.training.run", "recipe.tasks.text_classification.task", "recipe.tasks.causal_lm.task",
                 "transformers.models.bert.modeling_bert", "peft",
                 "torch.distributed.fsdp", "torch.distributed.tensor"):  # fmt: skip
        importlib.import_module(name)
    print(json.dumps([_run(Training(**values)) for values in json.loads(sys.argv[1])]))
