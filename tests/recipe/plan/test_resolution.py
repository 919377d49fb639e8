"""A plan of a job: the same from inside the job and for doctor, each decision with its reason."""

import json
from pathlib import Path

import pytest

from recipe.arguments import parse
from recipe.errors import HyperparameterError
from recipe.paths import Folders
from recipe.plan import resolution, trainer_arguments
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from tests.support.refusals import refused


def plan_of(
    tmp_path: Path, model: Path, processes: int | None, *argv: str
) -> tuple[Plan, list[str]]:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    rows = ({"text": f"a film of {n}", "label": "ab"[n % 2]} for n in range(20))
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folders = Folders(
        channels={"train": data, "model": model},
        model_dir=tmp_path,
        output_data_dir=tmp_path,
        checkpoints=tmp_path,
        tensorboard=tmp_path,
    )
    table = Table()
    given = parse(["--use_cpu", "True", *argv], folders)
    plan = resolution.resolve(given, folders, {}, table, processes)
    resolution.load(plan, table)
    return plan, [f"{decision.what:15} {decision}" for decision in table.rows]


def test_doctor_plans_for_more_processes_than_its_own(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ["--fsdp", "True"]
    alone, _ = plan_of(tmp_path, tiny_model, 1, *arguments)
    plan, rows = plan_of(tmp_path, tiny_model, 2, *arguments)
    assert not alone.is_sharded and plan.is_sharded
    assert any(row.startswith("device          cpu, 2 processes") for row in rows)
    assert plan.device.threads is None, "how many share this host's cores is not known"


@pytest.mark.parametrize(
    ("argv", "decided"),
    [
        (["--warmup_steps", "0.1"], "adamw_torch_fused, linear, warm-up for 10% of all steps"),
        (["--warmup_steps", "7"], "adamw_torch_fused, linear, warm-up for 7 steps"),
        (["--warmup_steps", "0"], "adamw_torch_fused, linear, no warm-up"),
        (["--lr_scheduler_type", "constant"], "adamw_torch_fused, constant, no warm-up"),
        (["--save_steps", "0.2"], "every 20% of all steps, and"),
    ],
)
def test_schedule_and_checkpoints_are_described_as_they_happen(
    tmp_path: Path, tiny_model: Path, argv: list[str], decided: str
) -> None:
    _, rows = plan_of(tmp_path, tiny_model, 1, *argv)
    assert any(decided in row for row in rows), rows


@pytest.mark.parametrize(
    ("argv", "evaluations", "saves"),
    [
        ([], ("epoch", None), ("epoch", 500)),
        (["--eval_steps", "3"], ("steps", 3), ("epoch", 500)),
        (["--eval_steps", "3", "--early_stopping_patience", "2"], ("steps", 3), ("steps", 3)),
        (["--eval_steps", "3", "--eval_strategy", "epoch"], ("epoch", 3), ("epoch", 500)),
        (
            ["--eval_strategy", "steps", "--load_best_model_at_end", "True"],
            ("steps", 0.05),
            ("steps", 0.05),
        ),
        (
            ["--eval_steps", "2", "--save_steps", "4", "--load_best_model_at_end", "True"],
            ("steps", 2),
            ("steps", 4),
        ),
    ],
)
def test_evaluations_follow_the_steps_that_are_given_and_checkpoints_the_best_of_them(
    tmp_path: Path,
    tiny_model: Path,
    argv: list[str],
    evaluations: tuple[str, float | None],
    saves: tuple[str, float],
) -> None:
    plan, _ = plan_of(tmp_path, tiny_model, 1, *argv)
    given = plan.arguments
    assert (given.eval_strategy, given.eval_steps) == evaluations
    assert (given.save_strategy, given.save_steps) == saves


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--early_stopping_patience 1 --eval_strategy no", ["early_stopping_patience", "=epoch"]),
        ("--load_best_model_at_end True --do_eval False", ["load_best_model_at_end", "=epoch"]),
        ("--early_stopping_patience 1 --save_strategy no", ["eval_strategy is epoch", "is no"]),
        (
            "--lr_scheduler_type warmup_stable_decay",
            ["lr_scheduler_kwargs", "warmup_stable_decay", "num_decay_steps"],
        ),
        ("--lr_scheduler_kwargs num_cycles=3", ["lr_scheduler_kwargs", "linear", "num_cycles"]),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_data_is_read(
    tmp_path: Path, tiny_model: Path, argv: str, words: list[str]
) -> None:
    with refused(HyperparameterError, *words):
        plan_of(tmp_path, tiny_model, 1, *argv.split())


def test_early_stopping_without_the_best_model_watches_the_loss(
    tmp_path: Path, tiny_model: Path
) -> None:
    argv = ["--early_stopping_patience", "1", "--load_best_model_at_end", "False"]
    plan, _ = plan_of(tmp_path, tiny_model, 1, *argv)
    assert plan.arguments.metric_for_best_model == "loss"
    assert plan.arguments.greater_is_better is False


def test_noise_of_a_rows_length_is_for_rows_of_one_text(tmp_path: Path, tiny_model: Path) -> None:
    _, rows = plan_of(tmp_path, tiny_model, 1, "--neftune_noise_alpha", "5")
    assert any(row.startswith("packing         off") for row in rows)


@pytest.mark.parametrize(
    ("argv", "steps", "warmup", "words"),
    [
        (["--epochs", "1"], 1, 0, "no warm-up: the learning rate of the only step would be 0"),
        (["--epochs", "1"], 9, 1, ""),
        (["--max_steps", "6", "--warmup_steps", "50"], 9, 50, "reaches 0.1 of its peak"),
        (["--epochs", "1", "--lr_scheduler_type", "constant"], 1, 1, ""),
    ],
)
def test_a_warm_up_leaves_a_step_to_learn(
    tmp_path: Path, tiny_model: Path, argv: list[str], steps: int, warmup: int, words: str
) -> None:
    """Its first step has a learning rate of 0."""
    arguments, table = plan_of(tmp_path, tiny_model, 1, *argv)[0].arguments, Table()
    values = trainer_arguments.fitted_warmup(arguments, steps, table)
    fitted = trainer_arguments.changed(arguments, **values)
    assert fitted.get_warmup_steps(6 if "--max_steps" in argv else steps) == warmup
    assert words in "".join(row.detail for row in table.rows)
    assert bool(words) == bool(table.rows)
