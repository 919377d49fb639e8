"""Trainings killed (KILL) and stopped (TERM) at random moments until they end.

Most starts are forks of this process, which has imported the recipe: so a start costs a fraction of
a second, and the moments fall into reading data, steps, evaluations, checkpoints and the writing of
the model. One in `WHOLE` is `amphora train` with everything below it, as a container has it. Some
kinds of jobs (`ordeal.trainings`) go on by other numbers of processes.
"""

from __future__ import annotations

import os
import re
import signal
import time

from ordeal.common import Trial, exit_code
from ordeal.trainings import KINDS, Job, make_material
from tests.support.processes import kill_tree, send

WEIGHTS = (
    "a disturbed training ends with the undisturbed one's weights, bit for bit; one that goes on "
    "by another number of processes has its losses, within 0.1 %"
)
CHOSEN = "only whole checkpoints are resumed from"
STOPPED = "TERM ends a training within 20 s, with exit code 75 or its own end"
MODEL = "a model folder is never there in part after a success"
PROMISES = (WEIGHTS, CHOSEN, STOPPED, MODEL)

BUDGET = 20.0
WHOLE = 20
CLOSE = 0.001
"""Of a loss, and at least of one of 0.1, where the processes were others."""


def run(trial: Trial) -> None:
    """Interrupt jobs of every kind and number of processes, until there have been enough kills."""
    import recipe.training.run  # noqa: F401  # before the forks

    wanted = 6 if trial.short else 220
    cases = [(kind, processes) for kind in KINDS for processes in kind.processes]
    trial.random.shuffle(cases)
    references: dict[tuple[str, int], tuple[Job, float]] = {}
    round_ = 0
    while _needs_more(trial, wanted) and trial.has_time():
        kind, processes = cases[round_ % len(cases)]
        material = make_material(kind.material, trial.folder / "material")
        if (kind.name, processes) not in references:
            name = re.sub(r"\W+", "-", f"whole-{processes}-{kind.name}")
            job = Job(trial.folder / name, kind, material, processes)
            began = time.monotonic()
            codes = [_code(pid, 300) for pid in job.start_processes()]
            assert codes == [0] * processes, job.log.read_text()[-3000:]
            references[kind.name, processes] = (job, time.monotonic() - began)
        reference, seconds = references[kind.name, processes]
        job = Job(trial.folder / f"job-{round_}", kind, material, processes)
        _interrupt(trial, job, seconds, wanted)
        trial.count(f"trainings by {processes} {kind.name}".strip())
        if kind.changes:
            _check_losses(trial, job, reference)
        else:
            trial.check(WEIGHTS, job.weights() == reference.weights() != {}, job.base)
        there = {path.name for path in (job.base / "model").iterdir()}
        expected = {path.name for path in (reference.base / "model").iterdir()}
        trial.check(MODEL, there == expected, (there, expected))
        round_ += 1
    trial.figure("trainings", round_)


def _check_losses(trial: Trial, job: Job, reference: Job) -> None:
    """Compare the loss of each step, from all starts, with the undisturbed training's."""
    expected, losses = reference.losses(), job.losses()
    trial.check(WEIGHTS, losses.keys() == expected.keys(), (job.base, sorted(losses)))
    for step, (loss,) in expected.items():
        off = max(abs(item - loss) for item in losses.get(step, {loss})) / max(loss, 0.1)
        trial.figure("farthest loss", max(trial.figures.get("farthest loss", 0), round(off, 5)))
        trial.check(WEIGHTS, off < CLOSE, f"{job.base}: step {step} {losses.get(step)}, {loss}")


def _interrupt(trial: Trial, job: Job, seconds: float, wanted: int) -> None:
    """Interrupt a job repeatedly, each time a little later on average, until it ends."""
    patience = seconds * 0.7
    kind = job.kind
    while True:
        # `amphora train` on one machine is one host.
        may_be_whole = not kind.host_processes and not kind.changes
        is_whole = trial.random.randrange(WHOLE) == 0 and may_be_whole
        number = trial.random.choice((signal.SIGKILL, signal.SIGTERM))
        # Before the first checkpoint there is no step to be kept, but those of another job.
        goes_on = kind.changes and any((job.base / "checkpoints").glob("checkpoint-*"))
        processes = trial.random.choice((1, 2, 3, 4)) if goes_on else job.processes
        pids = [job.start_container()] if is_whole else job.start_processes(processes)
        if processes != job.processes:
            trial.count("starts by other numbers of processes")
        disturbs = _needs_more(trial, wanted)
        if disturbs:
            patience *= 1.05
            time.sleep(trial.random.uniform(0, patience + (5 if is_whole else 0)))
            disturbs = not any(map(_has_ended, pids))
        codes = _end(trial, job, pids, number) if disturbs else [_code(pid, 300) for pid in pids]
        text = _log_of(trial, job)
        if not any(codes):
            return
        assert disturbs, (codes, text[-3000:])


def _needs_more(trial: Trial, wanted: int) -> bool:
    """Return whether to interrupt more: few may be KILLs only, or precede all checkpoints."""
    was_tried = all(trial.promises[item].times for item in (CHOSEN, STOPPED))
    interruptions = sum(trial.figures.get(name, 0) for name in ("KILL", "TERM"))
    return interruptions < wanted or not was_tried


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(trial: Trial, job: Job, pids: list[int], number: signal.Signals) -> list[int]:
    """Kill or stop a start; return the exit codes."""
    trial.count(number.name[3:])
    if any((job.base / "checkpoints").glob(".writing-*")):
        trial.count("while a checkpoint was written")
    for pid in pids:
        kill_tree(pid) if number == signal.SIGKILL else send(pid, number)
    began = time.monotonic()
    codes = [_code(pid, BUDGET * 3) for pid in pids]
    took = time.monotonic() - began
    if number == signal.SIGTERM:
        trial.longest("longest stop, s", took)
        # Before it listens, a process ends by the signal itself; it has nothing to save then.
        fine = set(codes) <= {0, 75, -15, 143}
        trial.check(STOPPED, took < BUDGET and fine, (took, codes, job.log.read_text()[-1500:]))
    return codes


def _log_of(trial: Trial, job: Job) -> str:
    """Return what the last start printed, after a check of the checkpoint that it chose."""
    text = job.log.read_text(errors="replace") if job.log.exists() else ""
    for name in re.findall(r"resuming from \S*/(checkpoint-\d+)", text):
        trial.check(CHOSEN, True, name)
    unusable = re.findall(r"^.*(?:is damaged|CheckpointError).*$", text, re.MULTILINE)
    trial.check(CHOSEN, not unusable, unusable[:3])
    job.log.replace(job.base / f"log-{len(list(job.base.glob('log-*')))}.txt")
    return text


def _code(pid: int, seconds: float) -> int:
    """Return the exit code of a child, which is killed after so many seconds (-99)."""
    code = exit_code(pid, seconds, lambda: kill_tree(pid))
    return -99 if code is None else code
