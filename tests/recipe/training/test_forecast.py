"""A budget of time, and the forecast of time and price, with a clock of their own."""

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from recipe import arguments
from recipe.errors import HyperparameterError
from recipe.training.forecast import Forecast
from tests.support.jobs import Job
from tests.support.words import write_reviews

BATCH, ROWS = 4, 200
STEPS_OF_EPOCH = ROWS // BATCH
SETUP, EVALUATION, SAVE, WRITING = 30.0, 20.0, 3.0, 10.0
REPORT = 5.0


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any = None) -> Mapping[str, Any]:
        return {"loss": (self.weight - labels).square().mean(), "logits": x}


class _Timed(Trainer):
    """A Trainer whose steps, evaluations and saves move a clock."""

    def __init__(self, folder: Path, seconds: Callable[[int], float], **options: Any) -> None:
        args = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH, report_to="none",
            disable_tqdm=True, logging_steps=1, use_cpu=True, learning_rate=1.0, **options,
        )  # fmt: skip
        rows = [{"x": torch.zeros(1), "labels": torch.ones(1)} for _ in range(ROWS)]
        super().__init__(_Model(), args, train_dataset=rows, eval_dataset=rows[:8])
        self.now, self._seconds = SETUP, seconds

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        self.now += self._seconds(self.state.global_step + 1)
        return super().training_step(*arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        self.now += EVALUATION
        return super().evaluate(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.now += SAVE
        super()._save_checkpoint(*arguments, **options)

    def forecast(
        self, budget: float | None, started: float = 0.0, evaluation: float = 1.0
    ) -> Forecast:
        forecast = Forecast(
            started=started, steps_of_epoch=STEPS_OF_EPOCH, evaluation=evaluation, after=0.0,
            written=WRITING * 3e8, budget=budget, price=3.6, clock=lambda: self.now,
        )  # fmt: skip
        self.add_callback(forecast)
        return forecast

    def rates(self) -> list[float]:
        return [entry["learning_rate"] for entry in self.state.log_history
                if "learning_rate" in entry]  # fmt: skip


SECONDS = 2.0
"""Of a usual step: fewer steps take less of the tests' own time."""


def steady(step: int) -> float:
    return SECONDS


SPEEDS: dict[str, Callable[[int], float]] = {
    "as the first steps": steady,
    "slow at first": lambda step: 18.0 if step <= 2 else SECONDS,
    "compiled at first": lambda step: 150.0 if step == 1 else SECONDS,
    "slower later": lambda step: SECONDS if step < 75 else 4.0,
    "faster later": lambda step: 4.0 if step < 75 else SECONDS,
}


@pytest.mark.parametrize(
    ("speed", "strategy"),
    [
        ("slow at first", "no"),
        ("compiled at first", "epoch"),
        ("slower later", "steps"),
        ("faster later", "epoch"),
    ],
)
def test_a_budget_holds_and_the_learning_rate_ends_with_it(
    speed: str, strategy: str, tmp_path: Path
) -> None:
    trainer = _Timed(
        tmp_path, SPEEDS[speed], num_train_epochs=50, warmup_steps=0.1, eval_strategy=strategy,
        eval_steps=0.25, save_strategy=strategy, save_steps=0.25,
    )  # fmt: skip
    trainer.forecast(budget=600.0)
    trainer.train()
    # `writing` has the last save.
    spent = trainer.now + WRITING + REPORT - SAVE * (strategy != "no")
    assert 600 - 35 <= spent <= 600 + 2 * SECONDS, spent  # an epoch's evaluation more would not fit
    rates, steps = trainer.rates(), trainer.state.global_step
    assert steps == len(rates) < 50 * STEPS_OF_EPOCH
    peak = rates.index(max(rates))
    assert 0.05 * steps <= peak <= 0.2 * steps
    assert 0.8 < max(rates) <= 1.0 and rates[-1] < 0.04 * SECONDS
    after_first = rates[max(peak, 12) :]
    assert all(a > b for a, b in itertools.pairwise(after_first))
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert bool(evaluations) == (strategy != "no")
    if evaluations:
        assert evaluations[-1]["step"] == steps


def test_a_budget_that_all_steps_fit_into_changes_nothing(tmp_path: Path) -> None:
    free, limited = (
        _Timed(tmp_path / name, steady, num_train_epochs=1, save_strategy="no") for name in "ab"
    )
    limited.forecast(budget=1e6)
    free.train()
    limited.train()
    assert limited.rates() == pytest.approx(free.rates(), rel=1e-9)
    assert limited.state.max_steps == STEPS_OF_EPOCH


def test_a_budget_of_few_steps_is_kept_and_one_of_none_refused(tmp_path: Path) -> None:
    trainer = _Timed(tmp_path, lambda step: 50.0, num_train_epochs=1, save_strategy="no")
    trainer.forecast(budget=400.0)
    trainer.train()
    assert trainer.state.global_step == 7
    assert trainer.rates()[-1] < 0.3
    trainer = _Timed(tmp_path, steady, num_train_epochs=1)
    trainer.forecast(budget=20.0)
    with pytest.raises(HyperparameterError, match="used up before the first step, after 30 s"):
        trainer.train()


def test_a_resumed_job_counts_the_time_before_and_continues_the_schedule(tmp_path: Path) -> None:
    options = {"num_train_epochs": 50, "save_strategy": "steps", "save_steps": 50}
    whole = _Timed(tmp_path, steady, **options)
    forecast = whole.forecast(budget=600.0)
    kept: list[bytes] = []
    usual = whole._save_checkpoint

    def save(*arguments: Any, **more: Any) -> None:
        usual(*arguments, **more)
        kept.append(forecast.state())

    whole._save_checkpoint = save  # type: ignore[method-assign]
    whole.train()
    resumed = _Timed(tmp_path, steady, **options)
    resumed.now = 1000.0
    again = resumed.forecast(budget=600.0, started=1000.0)
    again.restore(kept[1])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-100"))
    assert abs(resumed.state.global_step - whole.state.global_step) <= 3
    assert again.elapsed() == pytest.approx(forecast.elapsed(), abs=5)
    assert resumed.rates() == pytest.approx(whole.rates()[: len(resumed.rates())], abs=0.02)


@pytest.mark.parametrize("speed", ["as the first steps", "compiled at first", "slower later"])
def test_the_forecast_is_right_and_logged_once_or_corrected_once(
    speed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = _Timed(
        tmp_path, SPEEDS[speed], num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch"
    )
    trainer.forecast(budget=None, evaluation=EVALUATION / SECONDS)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("estimate")]
    assert len(lines) == 1 if speed == "as the first steps" else len(lines) <= 2, lines
    assert "140 steps are left" in lines[0]
    assert all("evaluations and saves included" in line for line in lines)
    if speed == "as the first steps":
        spent = trainer.now + WRITING + REPORT
        minutes, seconds, price = re.findall(
            r"takes (\d+) min (\d+) s, ([\d.]+) at 3.6 an hour", lines[0]
        )[0]
        assert 60 * int(minutes) + int(seconds) == pytest.approx(spent, rel=0.15)
        assert float(price) == pytest.approx(spent / 1000, rel=0.15)


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        (["--max_minutes", "0"], "max_minutes has value 0.0. Give a number above 0"),
        (["--max_minutes", "-3"], "max_minutes has value -3.0"),
        (["--max_minutes", "nan"], "max_minutes has value nan"),
        (["--max_minutes", "inf"], "max_minutes has value inf"),
        (["--max_minutes", "1e308"], "at most 1e9"),
        (["--max_price", "0", "--price_per_hour", "1"], "max_price has value 0.0"),
        (["--max_price", "2"], "max_price=2 needs the price of an instance. Give price_per_hour"),
        (["--max_price", "2", "--price_per_hour", "0"], "needs the price of an instance"),
        (["--max_minutes", "5", "--do_train", "False", "--do_eval", "True"], "do_train is False"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(argv: list[str], refusal: str) -> None:
    with pytest.raises(HyperparameterError, match=refusal):
        arguments.parse(argv)


@pytest.mark.parametrize(
    ("given", "hosts", "seconds"),
    [
        ({}, 1, None),
        ({"max_minutes": 5}, 4, 300),
        ({"max_price": 6, "price_per_hour": 3}, 2, 3600),
        ({"max_price": 6, "price_per_hour": 3, "max_minutes": 5}, 2, 300),
    ],
)
def test_the_smaller_limit_counts(
    given: dict[str, float], hosts: int, seconds: float | None
) -> None:
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert arguments.parse(argv).budget_seconds(hosts) == seconds


@pytest.mark.heavy
def test_a_real_job_ends_with_its_budget(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    """Of two processes, which have to stop at one step."""
    channels = {"train": write_reviews(tmp_path / "in" / "reviews.csv", 400).parent}
    argv = (
        "--model_id", str(tiny_model), "--epochs", "10000", "--batch_size", "8", "--max_minutes",
        "0.25", "--lr", "1e-3", "--eval_strategy", "steps", "--eval_steps", "0.2", "--save_strategy",
        "no",
    )  # fmt: skip
    job = Job(tmp_path, channels, argv, preloaded)
    job.finish(processes=2)
    # On a machine whose speed changes; the exact budget is tested by a clock above.
    assert job.metrics["train_runtime"] < 1.25 * 15
    assert job.log.count("steps fit into 15 s; the learning rate ends there") in (1, 2)
    rates = [float(rate) for rate in re.findall(r"'learning_rate': ([\d.]+)", job.log)]
    assert rates[-1] < 0.2 * max(rates)
    assert job.metrics["epoch"] < 10000 and "eval_accuracy" in job.metrics
    per_second, runtime = (
        job.metrics[f"train_{name}"] for name in ("samples_per_second", "runtime")
    )
    assert per_second * runtime == pytest.approx(job.metrics["epoch"] * 360, rel=0.02)
