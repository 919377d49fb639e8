"""The memory of a training step, predicted by fake tensors, beside that of a real one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine, step_memory
from recipe.training.preparation import PreparedTraining, lay_out
from tests.support import packed_batches

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256,
    "vocab_size": 500, "max_position_embeddings": 128,
}  # fmt: skip
CHECKPOINTS = {
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"bf16": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpoints": CHECKPOINTS,
    "padded": {"packing": False},
    "copies": {"bf16": True, "bf16_weights": True},
    "copies, accumulated": {"bf16": True, "bf16_weights": True, "gradient_accumulation_steps": 2},
}


def prepare(
    kind: str, folder: Path, packing: bool | None = None, bf16_weights: bool = False,
    cuda_graphs: bool = False, **changes: Any,
) -> PreparedTraining:  # fmt: skip
    """Lay out batches of 16 tweets for a small random model."""
    model: Any
    if kind == "llama":
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, pad_token_id=1))
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
        samples: Any = packed_batches.documents_of(packed_batches.tweet_lengths(64))
    else:
        model = packed_batches.make(kind, **SIZES)
        samples = packed_batches.samples_of(packed_batches.tweet_lengths(64))
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, use_cpu=True, report_to="none",
        max_steps=9, save_strategy="no", logging_steps=500, disable_tqdm=True, **changes,
    )  # fmt: skip
    tokenizer: Any = SimpleNamespace(pad_token_id=1)
    loaded = TrainableModel(
        model=model, tokenizer=tokenizer, arguments=args, packing=packing,
        objective=NEXT_TOKENS if kind == "llama" else CLASSES, bf16_weights=bf16_weights,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return lay_out(loaded, {"train": samples, "evaluation": samples}, Table())


def measure(prepared: PreparedTraining) -> tuple[int, int]:
    """Train nine steps; return the peak of all but the first, and the optimizer's bytes."""
    trainer = engine.build(prepared)
    live = step_memory._Live(1)
    model = prepared.loaded.model
    live._seen.update(part.untyped_storage() for part in (*model.parameters(), *model.buffers()))

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 1:
                live.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            live.__exit__(None, None, None)

    trainer.add_callback(Watch())
    trainer.train()
    prepared_optimizer: Any = trainer.optimizer
    states = [value for state in prepared_optimizer.state.values() for value in state.values()]
    return live.peak, sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


@pytest.mark.filterwarnings("ignore")  # use_cache beside gradient_checkpointing
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", "bfloat16"),
        ("bert", "copies"),
        pytest.param("modernbert", "copies, accumulated", marks=pytest.mark.heavy),
        pytest.param("llama", "copies", marks=pytest.mark.heavy),
        pytest.param("bert", "padded", marks=pytest.mark.heavy),
        pytest.param("modernbert", "accumulated", marks=pytest.mark.heavy),
        pytest.param("llama", "bfloat16", marks=pytest.mark.heavy),
        pytest.param("llama", "checkpoints", marks=pytest.mark.heavy),
    ],
)
def test_the_predicted_peak_is_that_of_a_step(kind: str, options: str, tmp_path: Path) -> None:
    prepared = prepare(kind, tmp_path, **OPTIONS[options])
    attention = prepared.loaded.model.config._attn_implementation
    predicted = step_memory.predict(prepared, "cpu", "bf16" in OPTIONS[options])
    on_gpu = step_memory.predict(prepared, "cuda", True)
    assert prepared.loaded.model.config._attn_implementation == attention
    peak, state = measure(prepared)
    assert predicted.optimizer == state
    assert predicted.activations is not None and on_gpu.activations is not None
    assert peak == pytest.approx(predicted.activations + predicted.gradients, rel=0.15)
    kept = predicted.weights, predicted.gradients, predicted.optimizer
    assert (on_gpu.weights, on_gpu.gradients, on_gpu.optimizer) == kept


def test_what_changes_the_peak(tmp_path: Path) -> None:
    prepared = prepare("bert", tmp_path)
    usual, recomputed, wide = (
        step_memory.predict(prepared, "cuda", bf16, checkpoints=checkpoints).activations or 0
        for bf16, checkpoints in ((True, False), (True, True), (False, False))
    )
    assert recomputed < 0.7 * usual and usual < 0.8 * wide
    halved = step_memory.predict(prepared, "cpu", False, shards=2)
    whole = step_memory.predict(prepared, "cpu", False)
    assert np.allclose([2 * halved.weights, 2 * halved.optimizer], [whole.weights, whole.optimizer])
    assert halved.activations == whole.activations


def test_copies_and_graphs_are_counted(tmp_path: Path) -> None:
    usual = step_memory.predict(prepare("bert", tmp_path), "cuda", True)
    prepared = prepare("bert", tmp_path, bf16_weights=True, cuda_graphs=True)
    model = prepared.loaded.model
    before = model.forward, {name: weight.clone() for name, weight in model.named_parameters()}
    more = step_memory.predict(prepared, "cuda", True)
    embeddings = sum(weight.nbytes for weight in model.bert.embeddings.parameters())
    assert more.copies == pytest.approx((usual.weights - embeddings) / 2, rel=0.05)
    assert usual.gradients < more.graphs < 1.1 * usual.gradients
    assert "bfloat16 copies" in more.describe() and "graphs" in more.describe()
    assert "copies" not in usual.describe()
    kept = more.weights + more.gradients + more.optimizer + (more.activations or 0)
    assert more.total == kept + more.copies + more.graphs
    # Nothing of it is left in the model.
    assert model.forward == before[0]
    for name, weight in model.named_parameters():
        assert weight.grad is None and torch.equal(weight, before[1][name])
    # Masks separate the samples in float32: no graph.
    assert step_memory.predict(prepared, "cuda", False).graphs == 0
