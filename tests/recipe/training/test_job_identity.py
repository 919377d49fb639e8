"""Which hyperparameters a checkpoint's job is told by."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import TrainingArguments

from recipe.arguments import parse
from recipe.errors import CheckpointError
from recipe.hyperparameters import Hyperparameters
from recipe.paths import from_environment
from recipe.plan import trainer_arguments
from recipe.runtime import distribution
from recipe.runtime.device import Device
from recipe.storage import checkpoints
from recipe.training import job_identity

# A new hyperparameter: decide whether it changes the weights that training ends with. If so, add
# it here; if not, to the table of job_identity that says why.
DECISIVE = {
    "task",
    "class_weight",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "compile",
    "early_stopping_patience",
    "early_stopping_threshold",
    "negative_columns",
    "scale",
    "mini_batch_size",
    "matryoshka_dims",
    "query_prompt",
    "document_prompt",
    "listwise",
    "beta",
    "loss_type",
    "label_smoothing",
    "load_in_4bit",
    "augmentation",
}
TABLES = [
    job_identity.IN_THE_DATA,
    job_identity.IN_THE_MODEL,
    job_identity.IN_THE_BATCHES,
    job_identity.WITHOUT_EFFECT,
    job_identity.OF_THE_TRAINER,
    job_identity.OF_THE_BEST,
    DECISIVE,
]


def test_every_hyperparameter_is_classified_once() -> None:
    for item in dataclasses.fields(Hyperparameters):
        if item.metadata:
            found = [table for table in TABLES if item.name in table]
            assert len(found) == 1, item.name


def job(tmp_path: Path, *argv: str) -> dict[str, object]:
    given = parse(argv)
    device = Device(kind="cpu", bf16=False, reason="", processes=1, threads=1)
    places = from_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    shared = distribution.Distribution()
    args = trainer_arguments.make(given, places, device, shared)
    found = job_identity.decisive(given, args)
    assert json.loads(json.dumps(found)) == found
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ["--class_weight", "balanced"],
        ["--lora_r", "8"],
        ["--lora_alpha", "8"],
        ["--lora_dropout", "0.1"],
        ["--adam_beta1", "0.8"],
        ["--adam_epsilon", "1e-6"],
        ["--optim_args", "momentum=0.9"],
        ["--lr_scheduler_kwargs", '{"num_cycles": 2}'],
        ["--neftune_noise_alpha", "5"],
        ["--data_seed", "7"],
        ["--max_grad_norm", "0.5"],
        ["--warmup_steps", "3"],
        ["--task", "causal-lm"],
        ["--compile"],
        ["--early_stopping_patience", "2"],
    ],
)
def test_what_changes_the_weights_is_refused_either_way(tmp_path: Path, argv: list[str]) -> None:
    before, after = job(tmp_path), job(tmp_path, *argv)
    for was, now in ((before, after), (after, before)):
        with pytest.raises(CheckpointError, match=argv[0].removeprefix("--")):
            checkpoints.check_same(checkpoints.Checkpoint(tmp_path, was, False), now)


@pytest.mark.parametrize(
    "argv",
    [
        ["--logging_steps", "1"],
        ["--report_to", "tensorboard"],
        ["--save_steps", "5"],
        ["--eval_strategy", "no"],
        ["--save_total_limit", "1"],
        ["--price_per_hour", "3"],
        ["--logging_first_step"],
        ["--dataloader_num_workers", "2"],
        ["--hf_token", "hf_planted"],
        ["--output_dir", "/tmp/elsewhere"],
        ["--lora_save", "adapter"],
        ["--gradient_accumulation_steps", "2"],
        ["--mp_parameters", "partitions=2"],
    ],
)
def test_what_changes_no_weight_is_not(tmp_path: Path, argv: list[str]) -> None:
    assert job(tmp_path, *argv) == job(tmp_path)


def test_where_the_best_weights_are_kept_evaluation_decides(tmp_path: Path) -> None:
    best = ["--early_stopping_patience", "2"]
    steps = ["--eval_strategy", "steps", "--save_strategy", "steps", "--eval_steps", "2"]
    assert job(tmp_path, *best) != job(tmp_path, *best, *steps, "--save_steps", "2")


def test_the_trainers_names_exist() -> None:
    fields = {item.name for item in dataclasses.fields(TrainingArguments)}
    own = {item.name for item in dataclasses.fields(Hyperparameters)}
    assert fields | own >= job_identity.OF_THE_BEST
    assert own >= job_identity.IN_THE_BATCHES | job_identity.OF_THE_TRAINER
