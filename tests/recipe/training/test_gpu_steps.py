"""What a step does otherwise on a GPU, tried on a CPU: stops and buffers."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ResNetConfig, ResNetForImageClassification, TrainerCallback

from recipe.runtime import distribution, transfers
from recipe.training import engine as engines
from recipe.training import interruptions
from tests.support import packed_batches
from tests.support.job_tree import clean_environ
from tests.support.jobs import Job
from tests.support.paths import ROOT
from tests.support.tasks import CASES, make


def test_buffers_are_sent_where_a_step_changes_them() -> None:
    small = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "num_labels": 2}
    assert distribution.has_changing_buffers(ResNetForImageClassification(ResNetConfig(**small)))
    assert not distribution.has_changing_buffers(packed_batches.make("bert"))
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(2), persistent=False)
    assert not distribution.has_changing_buffers(module)
    module.register_buffer("sum", torch.zeros(2))
    assert distribution.has_changing_buffers(module)


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 16), (0.2, 2), (3.0, 1)])
def test_a_stop_is_agreed_on_in_time(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on each of many short steps, and on each of long ones."""

    class Group:
        """Other processes that take so long for a step, one of which is asked to stop in one of its."""

        def __init__(self, asked_at: int = 10**9) -> None:
            self.asked_at, self.step, self.polls = asked_at, 0, 0

        def all_reduce(self, flags: Tensor, **_: Any) -> None:
            self.polls += 1
            flags[0] = max(int(flags[0]), int(self.step >= self.asked_at))

    now, group = [0.0], Group(asked_at=100)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(interruptions.dist, "all_reduce", group.all_reduce)
    monkeypatch.setattr(interruptions.dist, "get_rank", lambda: 1)
    asking = interruptions.Interruptions(None)
    asking._group = "of hosts"
    stopped = False
    while not stopped:
        group.step += 1
        now[0] += seconds
        stopped, _ = asking._agreed("step")
    assert 100 <= group.step < 100 + most
    assert group.step / most <= group.polls <= group.step / most + 8
    # A batch of an evaluation may take longer than all of them: they ask after the first.
    polls, group.asked_at = group.polls, 0
    now[0] += 30
    assert asking._agreed("evaluation")[0]
    assert group.polls == polls + 1


def test_logits_of_an_evaluation_leave_the_device_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    on_device: list[int] = []

    def start_copy(tensors: Sequence[Tensor]) -> SimpleNamespace:
        copied.append(len(tensors[1]))
        on_device.append(len(copied))
        assert len(on_device) <= 2, "logits of more batches are on the device"

        def wait() -> Sequence[Tensor]:
            on_device.pop(0)
            return tensors

        return SimpleNamespace(wait=wait)

    trainer = packed_batches.engine(tmp_path, per_device_eval_batch_size=2)
    expected = trainer.evaluation_loop(trainer.eval_dataset, "").predictions
    monkeypatch.setattr(transfers, "start_copy", start_copy)
    answers = trainer.evaluation_loop(trainer.eval_dataset, "").predictions
    assert (answers == expected).all() and not on_device
    assert len(copied) >= 8 and len(answers) == 16


@pytest.mark.heavy
def test_a_step_of_rows_is_one_graph() -> None:
    script = ROOT / "benchmarks" / "gpu" / "graph.py"
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False,
        env=clean_environ(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    # A slow machine says how far it is, too.
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert result.returncode == 0, (rows, result.stderr[-2000:])
    assert [row["model"] for row in rows] == ["BERT", "ModernBERT", "Llama, LoRA"]
    assert all(row["batches"] > row["shapes"] for row in rows)
    assert all(row["casts by autocast"] > 5 for row in rows), "it counts nothing"


IN_EVERY_CHECK = ("sentence-embedding", "causal-lm, LoRA")


@pytest.mark.heavy
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
        trainer._is_synchronous = False  # as on an accelerator
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
