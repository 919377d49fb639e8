"""The file by which a supervisor sees that a training moves on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from recipe.training.progress import ProgressFile

EVENTS = (
    "on_train_begin", "on_substep_end", "on_step_end", "on_prediction_step", "on_evaluate", "on_save",
)  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_each_step_touches_the_file(tmp_path: Path, event: str) -> None:
    file = tmp_path / "progress"
    file.touch()
    os.utime(file, (0, 0))
    handler = CallbackHandler([ProgressFile(str(file))], None, None, None, None)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    handler.call_event(event, arguments, TrainerState(), TrainerControl())
    assert file.stat().st_mtime > 0


def test_a_file_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    ProgressFile(str(tmp_path / "gone"))._touch()
