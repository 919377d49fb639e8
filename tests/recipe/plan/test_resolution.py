"""A plan of a job: the same from inside the job and for doctor, each decision with its reason."""

import json
from pathlib import Path

import pytest

from recipe.arguments import parse
from recipe.paths import Folders
from recipe.plan import resolution
from recipe.plan.resolution import Plan
from recipe.plan.table import Table


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
    arguments = ["--mp_parameters", "partitions=2"]
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
