"""Random channels and configurations, read in this process and by real jobs.

A call must return a result or raise an error that names the file and a remedy. Well-formed rows
must be read unchanged.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from ordeal.channels import CHANNEL, CONFIG, ROWS
from ordeal.common import Trial, failure, make_model, start
from tests.support.job_tree import Tree

ERRORS = "a channel is read, or refused by an error that names a file, a channel or a key"
RIGHT = "well-formed rows are read unchanged"
CONFIGS = "a configuration is read, or refused by a ConfigError that names the file or the key"
HANGS = "no call takes longer than 10 s"
PROCESS = "a real job ends by itself, and its failure text says what is wrong without a traceback"
PROMISES = (ERRORS, RIGHT, CONFIGS, HANGS, PROCESS)
ONLY_LONG = (PROCESS,)


def run(trial: Trial) -> None:
    """Read data in this process first, then some by real jobs."""
    import recipe.data.classification  # noqa: F401  # its seconds are not those of a call

    count = 40 if trial.short else 6000
    kept: list[dict[str, bytes]] = []
    _generate(trial, count, CONFIG, lambda value: _config(trial, value))
    _generate(trial, count // 3, ROWS, lambda value: _rows(trial, value))
    _generate(trial, count, CHANNEL, lambda value: _channel(trial, value, kept))
    if trial.short:
        return
    model = make_model(trial.folder / "pretrained")
    for number in range(30):
        if kept and trial.has_time():
            _process(trial, number, kept[trial.random.randrange(len(kept))], model)


class TimeIsUp(BaseException):
    """Ends hypothesis, which would take an Exception for a failed example."""


def _generate(trial: Trial, count: int, what: Any, judge: Callable[[Any], None]) -> None:
    @seed(trial.random.randrange(2**32))
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(what)
    def one(value: Any) -> None:
        if not trial.has_time():
            raise TimeIsUp
        began = time.monotonic()
        judge(value)
        took = time.monotonic() - began
        trial.check(HANGS, took < 10, f"{took:.1f} s: {value!r}")

    with contextlib.suppress(TimeIsUp):
        one()


def _written(trial: Trial, files: dict[str, bytes]) -> Path:
    folder = trial.folder / "channel"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    choice = trial.random.randrange(20)
    if choice < 3:
        target = ("loop", "/nowhere", ".")[choice]
        (folder / "loop").symlink_to(target)
    return folder


def _channel(trial: Trial, files: dict[str, bytes], kept: list[dict[str, bytes]]) -> None:
    from recipe.data import classification
    from recipe.errors import RecipeError
    from recipe.hyperparameters import Hyperparameters

    folder = _written(trial, files)
    try:
        classification.load({"train": folder}, Hyperparameters())
        trial.count("channels read")
        trial.check(ERRORS, True)
    except RecipeError as error:
        trial.count("channels refused")
        kept.append(files)
        trial.check(ERRORS, str(folder) in str(error) or "rows" in str(error), error)
    except Exception:
        trial.check(ERRORS, False, f"{_failure_text()} {files!r}")


def _config(trial: Trial, files: dict[str, bytes]) -> None:
    from amphora.common import errors

    base = trial.folder / "config"
    shutil.rmtree(base, ignore_errors=True)
    folder = base / "input" / "config"
    folder.mkdir(parents=True)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_bytes(content)
    try:
        read_configuration(base)
        trial.count("configurations read")
        trial.check(CONFIGS, True)
    except errors.AmphoraError as error:
        trial.count("configurations refused")
        trial.check(CONFIGS, ".json" in str(error) or "'" in str(error), error)
    except Exception:
        trial.check(CONFIGS, False, f"{_failure_text()} {files!r}")


def read_configuration(base: Path) -> None:
    """Do all that is done with input/config before a job starts a process."""
    from amphora.common import devices
    from amphora.contract import job as contract
    from amphora.contract import sm_variables
    from amphora.training import launch

    job = contract.read_job({"SAGEMAKER_BASE_DIR": str(base)})
    _ = (job.channels, job.instance_groups)
    host = devices.Devices(cpus=2, efa=False, reason="ordeal")
    sm_variables.sm_variables(job, host, {})
    launch.arguments(job)


def _failure_text() -> str:
    lines = traceback.format_exc().splitlines()
    ours = [line.strip() for line in lines if "recipe" in line or "amphora" in line]
    return f"{lines[-1][:200]} {' '.join(ours[-1:])}"


def _rows(trial: Trial, rows: list[tuple[str, str]]) -> None:
    from recipe.data.files import formats

    folder = trial.folder / "rows"
    folder.mkdir(exist_ok=True)
    expected = [(text, label) for text, label in rows if text or label]
    delimiter = trial.random.choice(",;\t|")
    path = folder / "train.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "label"), *expected])
    lines = folder / "train.jsonl"
    lines.write_text("".join(json.dumps({"text": t, "label": b}) + "\n" for t, b in expected))
    for content in (path, lines):
        try:
            table = formats.read(content).table
            read = list(zip(*(table[name].to_pylist() for name in ("text", "label")), strict=True))
            trial.check(RIGHT, read == expected, (delimiter, expected, read))
        except Exception:
            trial.check(RIGHT, False, f"{_failure_text()} {rows!r}")


def _process(trial: Trial, number: int, files: dict[str, bytes], model: Path) -> None:
    base = trial.folder / f"job-{number}"
    shutil.copytree(_written(trial, files), base / "input" / "data" / "train", symlinks=True)
    Tree(base).configure(
        {"model_name_or_path": str(model), "max_steps": 1}, inputdataconfig={"train": {}}
    )
    code = start(base, "train", trial.folder / f"job-{number}.log").wait(120)
    message = failure(base).partition("\n\n")[0]
    is_clear = "Traceback" not in message and "Error: " in message.partition("\n")[0]
    trial.check(PROCESS, code != 0 and is_clear, (code, message))
    trial.check(PROCESS, not list((base / "model").glob("*")), "a model was written")
