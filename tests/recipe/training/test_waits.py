"""How often a step of each task would wait for a GPU, counted on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from recipe.training import engine as engines
from tests.support.jobs import Job
from tests.support.tasks import CASES, make

pytestmark = pytest.mark.heavy
IN_EVERY_CHECK = ("sentence-embedding", "causal-lm, LoRA")


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # of the training process, not of what is tested
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_EVERY_CHECK)) for name in CASES],
)
def test_no_step_waits_for_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TO_TEXT = ("summarization", "summarization, LoRA", "translation", "text2text-generation")
    # Waits for each batch: transformers asks whether a mask leaves anything out, of the
    # encoder's attention and of the decoder's to the encoder.
    OF_THE_LIBRARY = dict.fromkeys(TO_TEXT, 2)
    BATCHES = 2
    ARGUMENTS = (
        *("--max_steps", "7", "--save_strategy", "no", "--eval_strategy", "no", "--bf16", "True"),
        *("--logging_strategy", "no", "--batch_size", "4", "--gradient_accumulation_steps", "2"),
    )

    class Waits(TorchDispatchMode):
        """Counts the operations for whose result a process would wait for its GPU."""

        NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")

        def __init__(self) -> None:
            super().__init__()
            self.operations: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.name().partition("::")[2].partition(".")[0]
            # By a mask, of which it must know how many places are True.
            by_mask = name in ("index", "index_put_", "index_put") and any(
                arg is not None and arg.dtype in (torch.bool, torch.uint8) for arg in args[1]
            )
            if name.startswith(self.NAMES) or by_mask:
                self.operations.append(name)
            return func(*args, **(kwargs or {}))

    class Quiet(TrainerCallback):
        """Counts over the steps from the third to the last but one, in which nothing is logged."""

        def __init__(self, waits: Waits) -> None:
            self.waits, self.counts = waits, {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.counts[state.global_step] = len(self.waits.operations)

    data, arguments = make(name, tmp_path)
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
    Job(tmp_path / "base", {"train": data}, (*arguments, *ARGUMENTS)).run_here()
    expected = OF_THE_LIBRARY.get(name, 0) * BATCHES * 4
    assert quiet.counts[6] - quiet.counts[2] == expected, waits.operations
    assert waits.operations.count("_local_scalar_dense") >= 1, "it counts nothing"
