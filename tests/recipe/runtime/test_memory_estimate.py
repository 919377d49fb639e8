"""The estimate of a step's memory, held to what PyTorch's own tracker counts in a real step."""

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from recipe.arguments import parse
from recipe.batching import flat, packing
from recipe.batching.batches import Packed, finish
from recipe.batching.document_batches import DocumentLayout
from recipe.models import flat_attention, lora, packed_decoders, packed_encoders
from recipe.runtime import memory_estimate
from recipe.runtime.memory_estimate import Estimate, Setting
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import preflight
from tests.support.packed_batches import PAD, documents_of, samples_of, tweet_lengths

SIZES = {
    "vocab_size": 800, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 192, "max_position_embeddings": 128, "pad_token_id": PAD,
    "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "num_labels": 3,
}  # fmt: skip
T5 = {"vocab_size": 800, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16}
BF16, CPU = torch.bfloat16, Setting(on_gpu=False, dtype=torch.bfloat16)


class Sequences:
    """A T5's own logits, [rows, length, tokens]."""

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)


def made(kind: str, size: int, is_flat: bool = False) -> tuple[Any, dict[str, Any], Any]:
    """A model that takes a batch, that batch, and what its losses are."""
    torch.manual_seed(0)
    rows = np.arange(size)
    if kind == "t5":
        model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
        ids = torch.randint(2, 800, (size, 24))
        batch = {"input_ids": ids, "decoder_input_ids": ids[:, :16], "labels": ids[:, :16]}
        extra = {"rows": torch.from_numpy(rows), "total": torch.ones(1)}
        return model, {**batch, **extra}, Sequences()
    name = {"bert": "Bert", "modernbert": "ModernBert", "qwen3": "Qwen3", "llama": "Llama"}
    more = {"num_key_value_heads": 2} if kind in ("qwen3", "llama", "lora") else {}
    family = name.get(kind, "Llama")
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    objective: Any = CLASSES
    samples: Any = samples_of(tweet_lengths(size))
    shape: Any = (flat.row if is_flat else packing.shape)([samples.lengths])
    if more:
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        if kind == "lora":
            model = lora.wrap(model, parse(["--lora_r", "4"]), (), "CAUSAL_LM", trains_head=False)
        samples, objective = documents_of(tweet_lengths(size)), NEXT_TOKENS
        layout: Any = DocumentLayout(Packed(shape, size, PAD, 0), samples.weight(rows))
        packed_decoders.patch_forward_for_documents(model)
    else:
        model = getattr(transformers, f"{family}ForSequenceClassification")(config)
        layout = Packed(shape, size, PAD, 0)
        packed_encoders.patch_forward_for_packing(model)
    if is_flat:
        flat_attention.use(model)
    return model, finish(samples, layout, rows, size, size), objective


def estimate_step(model: Any, batch: dict[str, Any], objective: Any, setting: Setting) -> Estimate:
    with flat_attention.force_flash_attention() if setting.on_gpu else contextlib.nullcontext():
        return memory_estimate.estimate_step(model, batch, objective.losses, setting)


def tracked(model: Any, batch: dict[str, Any], objective: Any, setting: Setting) -> int:
    """Bytes that live at the peak of a second step, the first having made the moments."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "rows", "total")}
    if setting.checkpoints:
        memory_estimate.recompute_activations(model)
    model.train()

    def step(tracker: Any) -> None:
        for _ in range(setting.accumulation):
            if tracker:
                tracker.reset_mod_stats()
            with torch.autocast("cpu", BF16, enabled=setting.dtype is not None):
                logits = model(**inputs).logits.float()
                loss = objective.losses(logits, batch["labels"], 0.0).sum() / batch["total"][0]
            del logits
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step(None)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(tracker)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize(
    ("kind", "size", "changes"),
    [
        ("bert", 32, {}),
        ("bert", 8, {"dtype": None}),
        ("modernbert", 16, {}),
        ("llama", 8, {"checkpoints": True}),
        ("llama", 8, {"accumulation": 2}),
        ("t5", 4, {}),
    ],
)
def test_it_is_what_a_real_step_holds(kind: str, size: int, changes: dict[str, Any]) -> None:
    model, batch, objective = made(kind, size)
    setting = Setting(**{"on_gpu": False, "dtype": BF16, **changes})
    real = tracked(copy.deepcopy(model), batch, objective, setting)
    estimate = estimate_step(model, batch, objective, setting)
    assert estimate.total == pytest.approx(real, rel=0.05)


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    """PyTorch's tracker takes no inputs of frozen layers: the whole model's count is what is less."""
    model, batch, objective = made("lora", 8)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    weights = {
        id(parameter): parameter.nbytes for parameter in (*model.parameters(), *model.buffers())
    }
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "rows", "total")}
    live = memory_estimate._Live()
    real = copy.deepcopy(model).train()
    with live:
        with torch.autocast("cpu", BF16):
            logits = real(**inputs).logits.float()
        objective.losses(logits, batch["labels"], 0.0).sum().backward()
    whole = estimate_step(*made("llama", 8), CPU)
    estimate = estimate_step(model, batch, objective, CPU)
    assert estimate.optimizer == 8 * trained < whole.optimizer / 20
    assert estimate.weights == sum(weights.values())
    assert estimate.step == pytest.approx(live.peak, rel=0.05)
    assert estimate.step < whole.step


def test_logits_of_a_large_vocabulary_count_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = estimate_step(*made("llama", 8), CPU)
    monkeypatch.setattr(packed_decoders, "_MOST_LOGITS", 1 << 14)
    parts = estimate_step(*made("llama", 8), CPU)
    assert parts.step < 0.9 * whole.step
    gpu = SimpleNamespace(total_memory=80 << 30)  # a stand-in: there is none here
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with packed_decoders.parts_as_on(torch.device("cuda", 0)):
        assert estimate_step(*made("llama", 8), CPU) == whole
    assert packed_decoders._elsewhere is None
    # 2.5 GB of 80 GB, in float32; never fewer than on a CPU
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == (80 << 30) // 32 // 4
    gpu.total_memory = 1 << 20
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == 1 << 14


def test_flash_attention_needs_memory_for_each_sample() -> None:
    """Seen on an H200: 874 MB for 512 short texts, of which the estimate lacked 150."""
    steps = []
    for lengths in ([4] * 64, [64] * 4):
        model, _, objective = made("bert", 4, True)
        samples, rows = samples_of(lengths), np.arange(len(lengths))
        layout = Packed(flat.row([samples.lengths]), len(lengths), PAD, 0)
        batch = finish(samples, layout, rows, len(lengths), len(lengths))
        on_gpu = Setting(on_gpu=True, dtype=BF16)
        steps.append(estimate_step(model, batch, objective, on_gpu).step)
    # 4 heads, whose width of 24 is computed as 32
    assert steps[0] - steps[1] > 0.9 * 4 * 128 * 60 * 4 * 32


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_of_a_gpu_it_is_made_by_the_calls_of_a_gpu(kind: str) -> None:
    """Flash attention keeps no scores, dropout a byte for a number, layer norms are in float32."""
    on_gpu = Setting(on_gpu=True, dtype=BF16)
    row, blocks = (estimate_step(*made(kind, 32, is_flat), on_gpu) for is_flat in (True, False))
    plain = estimate_step(*made(kind, 32), CPU)
    assert row.weights == plain.weights
    # The float32 buffers of flash attention's backward pass: 128 tokens for each start.
    buffers = 4 * 128 * 56 * 4 * (128 if kind == "qwen3" else 32)
    assert 0.4 * plain.step < row.step <= 1.1 * (blocks.step + buffers)
    if kind == "bert":  # which has dropout, of scores, too
        assert blocks.step < 0.9 * plain.step
    if kind == "modernbert":  # without dropout: what differs are its norms
        assert blocks.step > plain.step
    is_registered = transformers.AttentionInterface()[flat_attention.ATTENTION]
    assert is_registered is flat_attention.attend


def test_shards_take_their_share() -> None:
    alone, four = (
        estimate_step(
            *made("llama", 4), Setting(on_gpu=True, dtype=BF16, processes=count, is_sharded=shards)
        )
        for count, shards in ((4, False), (4, True))
    )
    assert four.optimizer == alone.optimizer // 4
    assert four.gradients == alone.gradients // 4
    assert four.weights == pytest.approx(alone.weights / 4, rel=0.01)
    assert four.total < alone.total


def test_what_to_change_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = SimpleNamespace(
        per_device_train_batch_size=32, gradient_accumulation_steps=1, gradient_checkpointing=False
    )
    job: Any = SimpleNamespace(
        hyperparameters=parse([]),
        arguments=args,
        device=SimpleNamespace(processes=2),
        is_sharded=False,
    )
    estimate = Estimate(weights=10, gradients=10, optimizer=20, step=320)
    assert list(preflight._remedies(estimate, 200, job)) == [
        "per_device_train_batch_size=16 (with gradient_accumulation_steps=2, a step has as many "
        "texts)",
        "gradient_checkpointing=True",
        "fsdp=full_shard",
        "a smaller max_length",
    ]
    assert "lora_r=16" in list(preflight._remedies(estimate, 30, job))
