"""report_to: metrics of a run in MLflow's own store, without secrets."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from recipe.errors import HyperparameterError
from recipe.reports import tracking
from tests.support.jobs import QUICK, Job
from tests.support.words import write_reviews


@pytest.mark.parametrize(
    ("requested", "trackers"),
    [
        (None, []),
        ("none", []),
        ("mlflow", ["mlflow"]),
        ("tensorboard, mlflow", ["tensorboard", "mlflow"]),
        ('["tensorboard", "mlflow"]', ["tensorboard", "mlflow"]),
        ("all", ["all"]),
    ],
)
def test_report_to_is_a_name_or_several(requested: str | None, trackers: list[str]) -> None:
    assert tracking.names(requested) == trackers


def test_an_integration_that_nobody_knows_is_named() -> None:
    with pytest.raises(HyperparameterError, match=r"report_to has value 'mflow': .*mlflow"):
        tracking.names("mflow")


@pytest.mark.heavy
def test_a_run_has_metrics_by_step_and_no_secret(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    def values(folder: Path) -> dict[str, list[str]]:
        """File name to its lines, of what MLflow's file store keeps in `folder`."""
        return {path.name: path.read_text().splitlines() for path in folder.iterdir()}

    counts = {"train": 80, "validation": 20, "test": 20}
    data = {
        name: write_reviews(tmp_path / name / f"{name}.csv", rows).parent
        for name, rows in counts.items()
    }
    arguments = ["--model_id", str(tiny_model), "--batch_size", "8", "--epochs", "2"]
    arguments += ["--report_to", "mlflow,tensorboard", "--logging_steps", "5", "--max_length", "32"]
    arguments += ["--hf_token", "hf_planted", "--hub_token", "hf_planted", "--run_name", "first"]
    Job(tmp_path, data, arguments, {**preloaded, **QUICK}).finish()
    store = tmp_path / "output" / "data" / "mlflow"
    (run,) = [path.parent for path in store.glob("*/*/meta.yaml")]
    assert "status: 3" in (run / "meta.yaml").read_text(), "it is not FINISHED"
    metrics = values(run / "metrics")
    steps = [line.split()[2] for line in metrics["loss"]]
    assert steps == ["5", "10", "15", "20"]
    assert [line.split()[2] for line in metrics["eval_accuracy"]] == ["10", "20"]
    assert [line.split()[2] for line in metrics["test_accuracy"]] == ["20"]
    parameters = values(run / "params")
    assert parameters["recipe.num_train_epochs"] == ["2.0"]
    assert parameters["learning_rate"] == ["5e-05"]
    assert not [
        path for path in store.rglob("*") if path.is_file() and "hf_planted" in path.read_text()
    ]
    assert (tmp_path / "output" / "tensorboard").is_dir()


@pytest.mark.heavy
def test_a_run_of_wandb_is_kept_offline_without_its_key(
    tmp_path: Path, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    data = {"train": write_reviews(tmp_path / "in" / "train.csv", 40).parent}
    arguments = ["--model_id", str(tiny_model), "--max_steps", "4", "--logging_steps", "1"]
    arguments += ["--report_to", "wandb", "--hf_token", "hf_planted"]
    job = Job(tmp_path, data, arguments, {**preloaded, **QUICK})
    assert 0 not in job.run(WANDB_MODE="online", WANDB_API_KEY="").codes
    assert "WANDB_API_KEY is not set" in job.errors + job.log
    key = "0123456789abcdef" * 2 + "planted0"
    job.finish(WANDB_MODE="offline", WANDB_API_KEY=key)
    store = tmp_path / "output/data/wandb"
    (run,) = store.glob("offline-run-*/*.wandb")
    kept = run.read_bytes()
    assert b"train/loss" in kept and b"num_train_epochs" in kept
    written = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert not [path for path, kept in written.items() if b"hf_planted" in kept]
    assert not [path for path, kept in written.items() if key.encode() in kept]
    assert key not in job.log + job.errors
