"""Implements `amphora doctor`: checks a training job without running it.

The recipe's own checks (formats, labels, token lengths, memory) run in code/check.py, a separate
process that prints JSON lines.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from amphora.common import devices, logs, packages, secret_references, transformers4
from amphora.common.errors import AmphoraError, CodeError
from amphora.common.sizes import format_bytes
from amphora.contract.job import Job, read_job
from amphora.instances.instance_report import InstanceQuestion, answer_question
from amphora.training import entry_point, launch, terminal
from amphora.training.job_runner import read_limits

OK, WARNING, ERROR = "ok", "warning", "error"
_MARKS = {OK: "ok", WARNING: "warn", ERROR: "ERROR"}
_WIDTH = 18
"""Of the column of subjects: findings are printed as they arrive."""
LEAST_FREE_BYTES = 2 * 1024**3
_RECIPE_SECONDS = 300
_REPORT_PREFIX, _WARNING_PREFIX = "amphora-check ", "warning: "
_NEEDS_PREFIX = "amphora-needs "


@dataclass(frozen=True)
class DoctorFinding:
    level: str
    """'ok', 'warning' or 'error'."""
    what: str
    detail: str
    reason: str = ""
    """Why the recipe decided so, if it is a decision of its plan."""
    example: str = ""
    """Rows of the data."""

    def __str__(self) -> str:
        text = f"{self.detail} ({self.reason})" if self.reason else self.detail
        return f"{text}, {self.example}" if self.example else text


def doctor(
    environ: Mapping[str, str],
    as_json: bool,
    steps: int = 0,
    question: InstanceQuestion | None = None,
    unnamed: str = "",
) -> int:
    """Check the job under SAGEMAKER_BASE_DIR, train a number of steps (0: none) that leave nothing
    behind, and print the findings, then the instance types of a question. Returns 1 if there is an
    error, else 0.

    Args:
        unnamed: The beginning of paths that the output leaves out.
    """
    findings = []
    needs: list[str] = []
    keep = None if question is None else needs.append
    below = "\n" + " " * (_WIDTH + 9)
    with tempfile.TemporaryDirectory(prefix="amphora-") as scratch:
        for finding in examine(environ, Path(scratch), steps, keep):
            findings.append(finding)
            if not as_json:
                lines = below.join(str(finding).splitlines())
                text = f"{_MARKS[finding.level]:5}  {finding.what:{_WIDTH}}  {lines}"
                text = logs.mask(text.replace(unnamed, ""))
                print(terminal.colored(text) if sys.stdout.isatty() else text, flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in (ERROR, WARNING)}
    report = answer_question(question, needs[0]) if question is not None and needs else None
    if as_json:
        summary: dict[str, Any] = {"errors": counts[ERROR], "warnings": counts[WARNING]}
        if report is not None:
            summary["instances"] = report.as_dict()
        text = json.dumps({**summary, "findings": list(map(asdict, findings))}, indent=1)
        print(logs.mask(text.replace(unnamed, "")))
    else:
        for line in ("", *report.lines()) if report is not None else ():
            print(line)
        counted = (f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())
        print(f"\n{', '.join(counted)}")
    return int(counts[ERROR] > 0)


def examine(
    environ: Mapping[str, str],
    scratch: Path,
    steps: int = 0,
    keep_needs: Callable[[str], None] | None = None,
) -> Iterator[DoctorFinding]:
    """Yield the findings on a job. `keep_needs`, if given, receives what it needs of an instance,
    as JSON."""
    try:
        environ = {**environ, **secret_references.read_references(environ)}
    except AmphoraError as error:
        yield DoctorFinding(ERROR, "environment", str(error))
    try:
        job = read_job(environ)
    except AmphoraError as error:
        yield DoctorFinding(ERROR, "configuration", str(error))
        return
    logs.remember(logs.secret_values(job.hyperparameters))
    file = job.paths.config / "hyperparameters.json"
    names = ", ".join(sorted(job.hyperparameters)) or f"none in {file}"
    level = OK if file.exists() else WARNING
    yield DoctorFinding(level, "configuration", f"hyperparameters: {names}")
    if not job.channels:
        yield DoctorFinding(WARNING, "channels", "there are no channels")
    for name, path in job.channels.items():
        what = f"channel {name}"
        if not path.is_dir():
            yield DoctorFinding(OK, what, "Pipe mode: not checked")
            continue
        files = [file for file in path.rglob("*") if file.is_file()]
        counted = f"{len(files)} file{'s' * (len(files) != 1)}"
        if size := sum(file.stat().st_size for file in files):
            yield DoctorFinding(OK, what, f"{counted}, {format_bytes(size)} ({path})")
        else:
            yield DoctorFinding(ERROR, what, f"it is empty ({path})")
    for name in ("model", "output", "checkpoints"):
        folder: Path = getattr(job.paths, name)
        present = next(existing for existing in (folder, *folder.parents) if existing.exists())
        free = shutil.disk_usage(present).free
        what = f"folder {name}"
        if not os.access(present, os.W_OK):
            yield DoctorFinding(ERROR, what, f"{present} is read-only")
        else:
            level = OK if free >= LEAST_FREE_BYTES else WARNING
            yield DoctorFinding(level, what, f"{format_bytes(free)} free: {folder}")
    yield from _start(job, environ, scratch, steps, keep_needs)


def _start(
    job: Job,
    environ: Mapping[str, str],
    scratch: Path,
    steps: int,
    keep_needs: Callable[[str], None] | None,
) -> Iterator[DoctorFinding]:
    try:
        host = devices.detect(environ)
        yield DoctorFinding(OK, "device", f"{host.kind}: {host.reason}")
        code = entry_point.locate(job, environ, scratch, scratch / "code")
        plan = launch.plan(job, host, code, scratch, environ)
        read_limits(environ)
    except AmphoraError as error:
        yield DoctorFinding(ERROR, "start", str(error))
        return
    for note in plan.notes:
        yield DoctorFinding(OK, "start", note)
    for install in plan.installs:
        try:
            yield DoctorFinding(OK, "packages", f"{install} from {packages.described(environ)}")
        except AmphoraError as error:
            yield DoctorFinding(ERROR, "packages", str(error))
    if job.entry_point is not None:
        if steps:
            yield DoctorFinding(WARNING, "trial", "--steps tries the recipe's jobs, not scripts")
        if keep_needs is not None:
            detail = "--instances knows what the recipe's jobs need, not what scripts do"
            yield DoctorFinding(ERROR, "instances", detail)
        yield from _script(code, plan)
        return
    yield from _recipe(job, code, plan, str(steps) if keep_needs is None else "needs", keep_needs)


def _recipe(
    job: Job,
    code: entry_point.Program,
    plan: launch.Launch,
    tried: str,
    keep_needs: Callable[[str], None] | None,
) -> Iterator[DoctorFinding]:
    """Yield the findings of code/check.py, whose second argument is `tried`."""
    argv = [sys.executable, str(code.root / "check.py"), str(plan.world_size), tried]
    is_timed = tried in ("0", "needs")
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*argv, *launch.arguments(job)], cwd=plan.cwd, stdout=subprocess.PIPE, stderr=errors,
            env={**plan.environ, "AMPHORA_LAUNCHER": ""}, text=True,
        ) as recipe,
    ):  # fmt: skip
        timer = threading.Timer(_RECIPE_SECONDS, recipe.kill)
        timer.daemon = True
        if is_timed:
            timer.start()
        assert recipe.stdout is not None
        for line in recipe.stdout:
            if line.startswith(_REPORT_PREFIX):
                yield DoctorFinding(**json.loads(line.removeprefix(_REPORT_PREFIX)))
            elif keep_needs is not None and line.startswith(_NEEDS_PREFIX):
                keep_needs(line.removeprefix(_NEEDS_PREFIX))
            elif line.startswith(_WARNING_PREFIX):  # Printed before a kill for memory.
                yield DoctorFinding(WARNING, "recipe", line.removeprefix(_WARNING_PREFIX).rstrip())
            elif terminal.is_progress(line):
                print(line, end="", file=sys.stderr, flush=True)
        exit_code, has_ended = recipe.wait(), timer.is_alive() or not is_timed
        timer.cancel()
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()] or ["no output"]
    if not has_ended:
        detail = f"no answer within {_RECIPE_SECONDS} s: the data may be too large to check"
        yield DoctorFinding(WARNING, "recipe", detail)
    elif exit_code != 0:
        yield DoctorFinding(ERROR, "recipe", lines[-1])


def _script(code: entry_point.Program, plan: launch.Launch) -> Iterator[DoctorFinding]:
    """Check that a user's script compiles and that its imports are installed."""
    file = code.script
    if file is None:
        yield DoctorFinding(OK, "code", f"{code.path} is run by {code.command[0]}")
        return
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        yield DoctorFinding(ERROR, "code", f"{file}:{error.lineno} cannot be compiled: {error.msg}")
        return
    # Others, below an `if` or `try`, may be optional.
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.partition(".")[0] for name, _ in transformers4.imports(tree)}
    path = [str(file.parent), str(code.root), *sys.path]
    missing = [
        name
        for name in sorted(names - {"", *sys.builtin_module_names})
        if PathFinder.find_spec(name, path) is None
    ]
    level, remedy = ERROR, "list them in requirements.txt"
    if plan.installs:
        level, remedy = WARNING, "requirements.txt may install them"
    if missing:
        detail = f"imports that are not installed: {', '.join(missing)}; {remedy}"
        yield DoctorFinding(level, "code", detail)
    else:
        yield DoctorFinding(OK, "code", f"{code.name} compiles, and its imports are installed")
    try:
        transformers4.check(file, code.root)
    except CodeError as error:  # requirements.txt may install transformers 4.
        yield DoctorFinding(level, "code", str(error))
