"""What a step does otherwise on a GPU, tried on a CPU: stops, buffers, copies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    TrainerCallback,
    TrainingArguments,
)

from recipe.arguments import parse
from recipe.errors import HyperparameterError
from recipe.models import lora
from recipe.runtime import distribution
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine as engines
from recipe.training import interruptions
from tests.support.packed_batches import (
    PAD,
    SMALL,
    documents_of,
    make,
    samples_of,
    tweet_lengths,
)
from tests.support.waits import Waits


def without_dropout(_: str) -> Any:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, **none))


def test_modes_of_torch_compile_with_cuda_graphs_are_refused() -> None:
    assert parse(["--torch_compile_mode", "default"])
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(HyperparameterError, match=f"torch_compile_mode has value '{mode}'"):
            parse(["--torch_compile_mode", mode])


def test_kernels_that_replace_a_forward_pass_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match="use_liger_kernel has value True"):
        parse(["--use_liger_kernel"])
    with pytest.raises(HyperparameterError, match="use_liger_kernel has value True"):
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        arguments.use_liger_kernel = True
        engines.check(arguments)


def test_buffers_are_sent_where_a_step_changes_them() -> None:
    small = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "num_labels": 2}
    assert distribution.has_changing_buffers(ResNetForImageClassification(ResNetConfig(**small)))
    assert not distribution.has_changing_buffers(without_dropout("bert"))
    own = torch.nn.Module()
    own.register_buffer("mean", torch.zeros(2), persistent=False)
    assert not distribution.has_changing_buffers(own)
    own.register_buffer("sum", torch.zeros(2))
    assert distribution.has_changing_buffers(own)


class Watch(TrainerCallback):
    """Counts over the steps from the third to the last but one, in which nothing is logged."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.at = waits, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at[state.global_step] = len(self.waits.found)


@pytest.mark.parametrize("kind", ["bert", "modernbert, mean", "causal-lm", "causal-lm, LoRA"])
def test_no_step_waits_for_the_device(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    """But for a look at the losses of 16 batches, and where something is logged.

    All steps are of one epoch, at whose start the loader draws a number on the CPU.
    """
    if kind.startswith("causal-lm"):
        config = LlamaConfig(**{**SMALL, "num_hidden_layers": 1}, num_key_value_heads=1)
        model: Any = LlamaForCausalLM(config)
        if kind.endswith("LoRA"):
            model = lora.wrap(model, parse(["--lora_r", "2"]), (), "CAUSAL_LM", trains_head=False)
        samples, objective = documents_of(tweet_lengths(112)), NEXT_TOKENS
    else:
        model, samples, objective = make(kind), samples_of(tweet_lengths(112)), CLASSES
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=7, use_cpu=True,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none",
        disable_tqdm=True, optim="adamw_torch_fused", logging_nan_inf_filter=False,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, pad_token_id=PAD)
    split = {"train": samples, "evaluation": samples}
    trainer = engines.build(model, tokenizer, arguments, parse([]), split, objective)
    assert trainer._train_layout.balanced
    trainer._looks_at_once = False
    waits = Waits()
    trainer.add_callback(watch := Watch(waits))
    with waits:
        trainer.train()
    assert watch.at[6] - watch.at[2] == 0, waits.found
    assert waits.found.count("_local_scalar_dense") >= 1, "it counts nothing"


class Group:
    """Other processes that take so long for a step, one of which is asked to stop in one of its."""

    def __init__(self, asked_at: int = 10**9) -> None:
        self.asked_at, self.step, self.asked = asked_at, 0, 0

    def all_reduce(self, flags: Tensor, **_: Any) -> None:
        self.asked += 1
        flags[0] = max(int(flags[0]), int(self.step >= self.asked_at))


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 16), (0.2, 2), (3.0, 1)])
def test_a_stop_is_agreed_on_in_time(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on each of many short steps, and on each of long ones."""
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
    assert group.step / most <= group.asked <= group.step / most + 8
    # A batch of an evaluation may take longer than all of them: they ask after the first.
    asked, group.asked_at = group.asked, 0
    now[0] += 30
    assert asking._agreed("evaluation")[0]
    assert group.asked == asked + 1
