"""`amphora train`: from the job's configuration to the script's exit code and failure file."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from amphora import devices, failure, launch, logs, supervise
from amphora.contract import Job, Paths, read_job
from amphora.errors import AmphoraError, CodeError, ConfigError

log = logging.getLogger("amphora")

CONFIG_EXIT_CODE = 2


def train(environ: Mapping[str, str]) -> int:
    """Run the job under SAGEMAKER_BASE_DIR to its end.

    Returns:
        The script's exit code, 128 + n where signal n ended it, 2 where the configuration is wrong.
    """
    paths = Paths.of(environ)
    logs.remember(logs.secret_values(environ))
    with supervise.Signals.caught() as signals, _error_dir() as error_dir:
        try:
            _clear_failure(paths)
            job = read_job(environ)
            started = _plan(job, environ, error_dir)
            ended = supervise.run(
                started.argv,
                started.environ,
                started.cwd,
                signals,
                is_launcher=started.is_launcher,
                budget=_budget(environ),
            )
        except AmphoraError as error:
            log.error("%s", error)
            _write_failure(paths, f"{type(error).__name__}: {error}\n")
            return CONFIG_EXIT_CODE
        return _report(paths, ended, failure.read_records(error_dir))


def _plan(job: Job, environ: Mapping[str, str], error_dir: Path) -> launch.Launch:
    logs.configure(job.log_level)
    logs.remember(logs.secret_values(job.hyperparameters))
    found = devices.detect(environ, job.instance_type)
    script = entry_script(job, environ)
    for folder in (job.paths.model, job.paths.output_data):
        folder.mkdir(parents=True, exist_ok=True)
    plan = launch.plan(job, found, script, error_dir, environ)
    for note in (*job.notes, f"device: {found.kind}, {found.reason}", *plan.notes):
        log.info("%s", note)
    log.info("hyperparameters: %s", ", ".join(sorted(job.hyperparameters)) or "none")
    log.info("starting %s", script)
    return plan


def entry_script(job: Job, environ: Mapping[str, str]) -> Path:
    """The script that this job runs. Raises CodeError where it is not there."""
    if job.entry_point is None:
        return recipe_dir(environ) / "train.py"
    script = Path(job.submit_directory) / job.entry_point
    if not script.is_file():
        present = sorted(path.name for path in script.parent.glob("*.py"))
        raise CodeError(
            f"sagemaker_program is {job.entry_point!r}, but {script} is not there"
            f" (scripts there: {', '.join(present) or 'none'}).",
            "Name a file of the code folder, or mount the code there.",
        )
    return script


def recipe_dir(environ: Mapping[str, str]) -> Path:
    """The folder of the image's recipe: AMPHORA_CODE_DIR, or code/ of a source checkout."""
    named = environ.get("AMPHORA_CODE_DIR")
    folder = Path(named) if named else Path(__file__).parents[2] / "code"
    if not (folder / "train.py").is_file():
        raise CodeError(
            f"The image's recipe is not at {folder / 'train.py'}.",
            "Set AMPHORA_CODE_DIR to the folder that holds it, or sagemaker_program to a script.",
        )
    return folder.absolute()


def _budget(environ: Mapping[str, str]) -> float:
    name = "AMPHORA_STOP_SECONDS"
    value = environ.get(name)
    try:
        budget = float(value) if value else supervise.STOP_BUDGET_SECONDS
    except ValueError:
        budget = -1.0
    if not 0 <= budget < float("inf"):
        raise ConfigError(f"{name} is {value!r}.", "Give the seconds a stopped script may take.")
    return budget


@contextmanager
def _error_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="amphora-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_failure(paths: Paths) -> None:
    """An earlier run's failure must not stand for this one."""
    paths.failure.unlink(missing_ok=True)


def _report(paths: Paths, ended: failure.Ended, records: list[failure.Record]) -> int:
    code = failure.exit_code(ended, records)
    if code == 0:
        log.info("training ended with exit code 0")
        return 0
    text = failure.describe(ended, records)
    log.error("training failed with exit code %d: %s", code, text.split("\n\n")[0])
    _write_failure(paths, text)
    return code


def _write_failure(paths: Paths, text: str) -> None:
    """Write the failure file, unless the script wrote its own."""
    if paths.failure.exists():
        return
    try:
        paths.failure.parent.mkdir(parents=True, exist_ok=True)
        paths.failure.write_text(logs.mask(text), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        log.error(
            "%s cannot be written (%s): the reason stands in this log only", paths.failure, error
        )
