"""Samples end to end in one row: what is not said by the tests of packing (logits, gradients)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, TrainingArguments

from recipe.batching import flat
from recipe.batching.batches import Packed
from recipe.models import flat_attention, packed_encoders
from recipe.plan.batch_layout import Loaded
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine
from tests.support.packed_batches import PAD, make, samples_of, tweet_lengths


@pytest.mark.parametrize("count", [0, 5, 8])
def test_starts_are_as_many_for_any_batch_and_no_piece_is_longer_than_a_sample(count: int) -> None:
    lengths = np.asarray(tweet_lengths(8))
    row = flat.row([lengths])
    starts = row.starts(lengths[:count], 8)
    assert len(starts) == len(row.starts(lengths, 8))
    assert starts[0] == 0
    assert starts[-1] == row.length
    assert (np.diff(starts) >= 0).all()
    assert np.diff(starts).max() <= row.longest
    assert np.diff(starts)[:count].tolist() == lengths[:count].tolist()


def test_a_fuller_batch_gets_a_longer_row() -> None:
    samples = samples_of([30, 5, 17, 2, 41])
    layout = Packed(flat.row([np.asarray([30, 5])]), 6, PAD, 0)
    few, all_ = (layout.tensors(samples, np.arange(count)) for count in (2, 5))
    assert (few["input_ids"].shape, all_["input_ids"].shape) == ((1, 64), (1, 128))
    assert (few["longest"], all_["longest"]) == (30, 41)
    model = make("bert")
    packed_encoders.patch_forward_for_packing(model)
    flat_attention.use(model)
    torch.testing.assert_close(model(**all_).logits[:2], model(**few).logits[:2], rtol=0, atol=1e-5)


def test_a_padded_batch_is_still_masked() -> None:
    model = make("bert")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = model(input_ids=ids, attention_mask=mask).logits
    flat_attention.use(model)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected)
    alone = model(input_ids=ids[1:, :2]).logits
    torch.testing.assert_close(alone, expected[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_call_of_flash_attention_has_its_shapes(window: int | None, causal: bool) -> None:
    """On tensors without data, with gradients, since there is no GPU here."""
    row = flat.row([np.asarray([30, 5, 17])])
    meta = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, 4, row.length, 64, **meta)  # type: ignore[call-overload]
    key = torch.empty(1, 2, row.length, 64, **meta)  # type: ignore[call-overload]
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    module: Any = SimpleNamespace(is_causal=causal)
    inputs = flat_attention.inputs_of(starts, row.longest)
    mask = inputs.pop("attention_mask")
    output, weights = flat_attention.attend(
        module, query, key, key, mask, dropout=0.1, sliding_window=window, **inputs
    )
    assert weights is None
    assert output.shape == (1, row.length, 4, 64)
    output.sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "reason"),
    [
        ((9, 0), torch.bfloat16, {}, None),
        ((8, 0), torch.float16, {}, None),
        ((7, 5), torch.float16, {}, "compute capability 7.5"),
        ((9, 0), torch.float32, {}, "float32"),
        ((9, 0), torch.bfloat16, {"hidden_size": 24, "num_attention_heads": 2}, "12 wide"),
    ],
)
def test_where_it_is_not_used_the_reason_is_given(
    capability: tuple[int, int],
    dtype: torch.dtype,
    changes: dict[str, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    actual = flat_attention.why_not(BertConfig(**changes), cuda, dtype)
    assert actual is None if reason is None else reason in str(actual)
    assert flat_attention.why_not(BertConfig(), torch.device("cpu"), dtype)


def test_a_training_in_rows_is_one_in_blocks(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, step by step and in evaluations, without dropout."""
    losses = []
    for is_flat in (False, True):
        reason = None if is_flat else "not asked for"
        monkeypatch.setattr(flat_attention, "why_not", lambda *_, reason=reason: reason)
        model = make("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        samples = samples_of(tweet_lengths(24))
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            max_steps=3,
            learning_rate=0.02,
            optim="sgd",
            eval_strategy="epoch",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        loaded = Loaded(
            model=model,
            tokenizer=AutoTokenizer.from_pretrained(tiny_model, pad_token_id=PAD),
            arguments=arguments,
            objective=CLASSES,
        )
        trainer = engine.build(loaded, {"train": samples, "evaluation": samples})
        assert ("one row" in trainer._train_layout.describe()) == is_flat
        trainer.train()
        history = trainer.state.log_history
        losses.append([entry.get("loss", entry.get("eval_loss")) for entry in history[:-1]])
    assert len(losses[0]) >= 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
