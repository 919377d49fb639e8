"""How often a step of each task would wait for a GPU, counted on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from recipe import paths
from recipe.arguments import parse
from recipe.training import engine as engines
from recipe.training import run
from tests.support.task_cases import CASES, make
from tests.support.waits import Waits

pytestmark = pytest.mark.heavy
IN_EVERY_CHECK = ("classes", "embeddings in parts", "completions, LoRA")
OF_THE_LIBRARY = {"summaries": 2, "summaries, LoRA": 2}
"""Waits for each batch: transformers asks whether a mask leaves anything out, of the encoder's
attention and of the decoder's to the encoder."""
BATCHES = 2
ARGUMENTS = (
    *("--max_steps", "7", "--save_strategy", "no", "--eval_strategy", "no", "--bf16", "True"),
    *("--logging_strategy", "no", "--batch_size", "4", "--gradient_accumulation_steps", "2"),
)


class Quiet(TrainerCallback):
    """Counts over the steps from the third to the last but one, in which nothing is logged."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.counts = waits, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.counts[state.global_step] = len(self.waits.found)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # of the training process, not of what is tested
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_EVERY_CHECK)) for name in CASES],
)
def test_no_step_waits_for_the_device(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model, data, variables, arguments = make(case, tmp_path, tiny_model)
    for variable, value in {
        "SAGEMAKER_BASE_DIR": str(tmp_path / "base"), "SM_CHANNEL_TRAIN": data, **variables
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    waits = Waits()
    quiet = Quiet(waits)
    real = engines.build

    def build(*given: Any, **options: Any) -> Any:
        trainer = real(*given, **options)
        trainer._looks_at_once = False  # as on an accelerator
        trainer.add_callback(quiet)
        train = trainer.run

        def watched() -> Any:
            with waits:
                return train()

        monkeypatch.setattr(trainer, "run", watched)
        return trainer

    monkeypatch.setattr(engines, "build", build)
    argv = ["--task", case.task, "--model_id", str(model), *ARGUMENTS, *arguments, *case.more]
    places = paths.from_environment(os.environ)
    run.run(parse(argv, places), places, os.environ)
    expected = OF_THE_LIBRARY.get(name, 0) * BATCHES * 4
    assert quiet.counts[6] - quiet.counts[2] == expected, waits.found
    assert waits.found.count("_local_scalar_dense") >= 1, "it counts nothing"
