"""Implements `amphora train`: runs a job and writes its exit code and failure file."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from amphora import __version__
from amphora.common import devices, logs, packages, secret_references, transformers4
from amphora.common.errors import AmphoraError, ConfigError
from amphora.common.variables import Variables
from amphora.contract.job import Job, Paths, read_job
from amphora.training import cluster, entry_point, failure, launch, mpi, process_tree, sdk_v3

log = logging.getLogger("amphora")

CONFIG_EXIT_CODE = 2
PEER_EXIT_CODE = 1


def read_limits(environ: Mapping[str, str]) -> tuple[float, float]:
    """Read how many seconds a stopped script may take to end, and another host to appear.

    Raises ConfigError that names each wrong variable.
    """
    variables = Variables(environ)
    # SageMaker sends SIGKILL 120 s after SIGTERM; some are left for what follows.
    stop = variables.number("AMPHORA_STOP_SECONDS", 100.0, least=0.001)
    # Instances of one job start at different times.
    host_wait = variables.number("AMPHORA_HOST_WAIT_SECONDS", 300.0, least=0.001)
    variables.check()
    return stop, host_wait


def train(environ: Mapping[str, str], sdk_command: str | None = None) -> int:
    """Run the job under SAGEMAKER_BASE_DIR, or the command that SDK v3's ModelTrainer sent, to its
    end.

    Returns the script's exit code; 128 + n if signal n ended it, 2 if the configuration is wrong, 1
    if another host of the job failed.
    """
    paths = Paths.from_environment(environ)
    with (
        process_tree.Signals.caught() as signals,
        tempfile.TemporaryDirectory(prefix="amphora-", ignore_cleanup_errors=True) as folder,
    ):
        scratch = Path(folder)
        try:
            signals.interrupts = True
            if signals.stop is not None:  # It has arrived already.
                raise process_tree.Interrupted
            for earlier in (paths.failure, paths.success):
                with suppress(OSError):  # The outcome of an earlier run.
                    earlier.unlink()
            job = read_job(environ)
            logs.configure(job.log_level)
            logs.remember(logs.secret_values(job.hyperparameters))
            environ = {**environ, **secret_references.read_references(environ)}
            signals.budget, host_wait = read_limits(environ)
            with cluster.linked(
                job.hosts, job.current_host, lambda: signals.stop is not None, host_wait
            ) as link:
                return _run(job, environ, scratch, signals, link, sdk_command)
        except process_tree.Interrupted:
            number = signals.stop or signal.SIGTERM
            text = f"Stopped by {signal.Signals(number).name} before the script had started."
            log.error("%s", text)
            _write_failure(paths, f"{text}\n")
            return 128 + number
        except AmphoraError as error:
            log.error("%s", error)
            _write_failure(paths, f"{type(error).__name__}: {error}\n")
        except Exception as error:  # Users see the failure file only.
            log.exception("amphora itself failed")
            _write_failure(paths, f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        return CONFIG_EXIT_CODE


def _run(
    job: Job,
    environ: Mapping[str, str],
    scratch: Path,
    signals: process_tree.Signals,
    link: cluster.Link,
    sdk_command: str | None,
) -> int:
    error_dir = scratch / "errors"
    error_dir.mkdir()
    try:
        plan = _prepared(job, environ, scratch, signals, sdk_command)
        if plan.agent_dir is not None:
            mpi.create_agent(plan.agent_dir)
            link.outbox = plan.agent_dir / mpi.COMMANDS
        argv = ("/bin/sh", "-c", link.await_command()) if plan.lends else plan.argv
        signals.interrupts = False
        ended = process_tree.run(argv, plan.environ, plan.cwd, signals, link)
        # A model that was killed half written would be uploaded (recipe.storage.atomic).
        for unfinished in job.paths.model.glob(".arriving-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if sdk_command is not None:
            sdk_v3.forget_generic_failure(job.paths)
        if argv[0] == "mpirun" and (ended.exit_code, ended.stop_signal) == (0, None):
            mpi.check_started(error_dir)
        failed = failure.diagnose(ended, error_dir)
        code = failed.exit_code
        if code == 0 and failed.last_exception:
            # A shell pipe has the exit code of its last command: `python a.py | tee log`.
            log.warning(
                "exit code 0, but an exception ended a process or thread: %s", failed.last_exception
            )
        state = "stopped" if ended.stop_signal is not None else "failed" if code else "done"
        # mpirun of the first host knows why its daemon on this one failed.
        is_consequence = state == "failed" and (plan.lends or failed.is_consequence)
        link.finish(state, failed.head if code else "", is_consequence=is_consequence)
    except process_tree.Interrupted:
        link.finish("stopped")
        raise
    except Exception as error:
        link.finish("failed", f"{type(error).__name__}: {error}")
        raise
    return _report(job, failed, link)


def _prepared(
    job: Job,
    environ: Mapping[str, str],
    scratch: Path,
    signals: process_tree.Signals,
    sdk_command: str | None,
) -> launch.Launch:
    """Install the code and make the folders. Return what to start."""
    host, error_dir = devices.detect(environ), scratch / "errors"
    if sdk_command is None:
        code = entry_point.locate(job, environ, scratch)
        plan = launch.plan(job, host, code, error_dir, environ)
    else:
        plan = sdk_v3.start(job, host, error_dir, environ, sdk_command)
    detected = f"amphora {__version__} on {host.kind}: {host.reason}"
    for note in (detected, *plan.notes):
        log.info("%s", note)
    none = f"none in {job.paths.config / 'hyperparameters.json'}"
    log.info("hyperparameters: %s", ", ".join(sorted(job.hyperparameters)) or none)
    uploads = str(job.sagemaker.get("sagemaker_s3_output") or "")
    intermediate = job.paths.output_intermediate
    # If the folder exists, the platform uploads what is written to it.
    if uploads and not uploads.startswith("file:") and not intermediate.exists():
        raise ConfigError(
            f"sagemaker_s3_output is {uploads!r}, but {intermediate} is not uploaded here.",
            "Leave it out, and write to /opt/ml/checkpoints: SageMaker uploads that folder during"
            " training (checkpoint_s3_uri).",
        )
    for folder in (job.paths.model, job.paths.output_data, *([intermediate] if uploads else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The folder {folder} cannot be created: {error}.",
                "Mount a folder there that this user may write to.",
            ) from error
    if plan.cache is not None:
        try:
            plan.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("compiled programs cannot be kept in %s: %s", plan.cache, error)
    for install in plan.installs:
        with packages.index(environ, plan.cwd, install) as index:
            log.info("installing %s from %s", install, index.shown)
            ended = process_tree.run(index.argv, index.environ, plan.cwd, signals)
            if ended.stop_signal is not None:
                raise process_tree.Interrupted
            if ended.exit_code != 0:
                raise packages.failed(install, plan.cwd, ended.exit_code, ended.tail, index)
    if plan.script is not None:
        for path in packages.hidden_modules(plan.cwd):
            log.warning(
                "%s hides the installed module %s: rename it, unless that is meant", path, path.stem
            )
        transformers4.check(plan.script, plan.cwd)
    log.info("starting %s", plan.what)
    return plan


def _report(job: Job, failed: failure.Failure, link: cluster.Link) -> int:
    """Write the outcome and return the exit code. Another host's failure comes first."""
    code, other = failed.exit_code, link.abort
    if other is not None:
        code = code or PEER_EXIT_CODE
        cause = f"{other.host} failed first: {other.reason}"
        # The other host may only have lost this one, whose script had not ended yet.
        if other.is_consequence and failed.raised and not failed.is_consequence:
            failed = replace(failed, rest=f"{cause}\n\n{failed.rest}")
        else:
            rest = f"On this host: {failed.head}\n\n{failed.rest}"
            failed = replace(failed, head=cause, rest=rest)
    if code == 0:
        log.info("training ended with exit code 0")
        if job.current_host == job.hosts[0] and not any(job.paths.model.iterdir()):
            log.warning("the script has left nothing in %s: there is no model", job.paths.model)
        _write(job.paths.success, "")
        return 0
    if failed.is_stopped:
        log.warning("training was stopped, exit code %d: %s", code, failed.head)
    else:
        log.error("training failed with exit code %d: %s", code, failed.head)
    _write_failure(job.paths, failed.text)
    return code


def _write_failure(paths: Paths, text: str) -> None:
    """Write the failure file, unless the script wrote its own."""
    if not paths.failure.is_file():
        _write(paths.failure, logs.mask(text))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        log.error("%s cannot be written (%s): only this log has the outcome", path, error)
