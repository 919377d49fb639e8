"""What the steps of a training may depend on, for every task: not on interruptions, processes or
packing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import tasks
from tests.support.jobs import BY_GRADIENT, QUICK, Job, assert_same
from tests.support.serving_kit import Handlers, assert_close
from tests.support.tasks import JOBS, SmallJob

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]
STOPPED = 75
STEPS = 8
"""Two epochs, of which the first ends with a smaller step."""
USUAL = (
    "--max_steps", str(STEPS), "--logging_steps", "1", "--eval_strategy", "no", "--bf16", "False",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A job's channel and its models, with dropout and without."""

    job: SmallJob
    base: Path
    variables: Mapping[str, str]

    def training(self, name: str, dropout: float, *argv: str) -> Job:
        model = self.base / f"model-{dropout}"
        if not model.exists():
            self.job.model(model, dropout)
        words = ("--model_name_or_path", str(model), *self.job.arguments, *USUAL, *argv)
        channels = {"train": self.base / "train"}
        return Job(self.base / name, channels, words, {**self.variables, **QUICK})


@pytest.fixture(scope="module", params=JOBS)
def start(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded: Mapping[str, str],
) -> Start:
    job, base = JOBS[request.param], tmp_path_factory.mktemp("start")
    tasks.write(base / "train", job.rows(tasks.TRAIN_ROWS))
    return Start(job, base, preloaded)


# peft asks for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_stopped_and_resumed_training_ends_with_the_same_bytes(start: Start) -> None:
    def stop(job: Job, line: str, step: int) -> None:
        """Run a job until it prints a line, when it gets SIGTERM and ends the step."""
        assert job.interrupt(line).codes == {STOPPED}, job.log + job.errors
        assert f"stopped at step {step} of {STEPS}" in job.log
        assert job.metrics["partial"] == {"step": step, "stopped_at": step, "of_steps": STEPS}
        card = (job.model / "README.md").read_text()
        assert f"A partial model: training stopped after step {step} of {STEPS}" in card

    argv = ("--batch_size", str(tasks.BATCH), "--lr", "3e-3")
    whole = start.training("undisturbed", 0.1, *argv).finish()
    assert list(whole.losses) == list(range(1, STEPS + 1))
    stopped = start.training("stopped", 0.1, *argv)
    step, losses = 4, {}
    if start.job.task == "text-classification":
        # Within an epoch, after a start that made one step, and after the last but one.
        stop(stopped, "metric step=1 {'loss'", 2)
        losses |= stopped.losses
        for line, step in (("resuming from", 3), ("metric step=6 {'loss'", 7)):
            stop(stopped, line, step)
            losses |= stopped.losses
        body, expected = start.job.answer(stopped.model, start.job.rows(5, seed=2))
        assert_close(Handlers(stopped.model).ask(body), expected, 1e-4)  # a partial model is served
    else:
        stop(stopped, f"metric step={step - 1} {{'loss'", step)
        losses |= stopped.losses
    assert list(losses) == list(range(1, step + 1))
    stopped.finish()
    assert f"checkpoint-{step}" in stopped.log
    assert losses | stopped.losses == whole.losses
    assert min(stopped.losses) == step + 1
    assert whole.files and stopped.files == whole.files
    assert "partial" not in stopped.metrics


def test_two_processes_give_the_weights_of_one(start: Start) -> None:
    one, two = (
        start.training(f"by {processes}", 0.0, "--batch_size", str(tasks.BATCH // processes),
                       *BY_GRADIENT).finish(processes=processes)
        for processes in (1, 2)
    )  # fmt: skip
    assert two.log.count("cpu, 2 processes") == two.log.count("model written to") == 1
    assert len(one.losses) == STEPS
    assert_same(two, one, start.job.tolerance)


def test_packed_and_padded_batches_give_equal_losses_and_gradients(start: Start) -> None:
    # All samples in each step: packing chooses which samples share one. Each of up to four documents
    # of a query is a sample.
    samples = tasks.TRAIN_ROWS * (4 if start.job.task == "reranking" else 1)
    argv = ("--batch_size", str(samples), "--max_steps", "3", *BY_GRADIENT)
    if not start.job.packs:
        refused = start.training("packed", 0.0, *argv, "--packing", "True").run()
        assert refused.codes == {1}
        assert "HyperparameterError: Hyperparameter packing has value True" in refused.errors
        return
    packed, padded = (
        start.training(f"packing {value}", 0.0, *argv, "--packing", value).finish()
        for value in ("True", "False")
    )
    assert list(packed.losses) == [1, 2, 3] and packed.metrics["epoch"] == 3.0
    assert " packed into " in packed.log
    assert " packed into " not in padded.log
    assert_same(padded, packed, start.job.tolerance)
