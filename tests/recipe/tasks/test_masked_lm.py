"""task=masked-lm: what is masked, what is learned of it, and a run."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import DataCollatorForLanguageModeling

from recipe.batching import batches, packing
from recipe.batching.document_batches import DocumentLayout
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import packed_encoders
from recipe.models.sources.origin import Origin
from recipe.tasks.masked_lm import task as masked_models
from recipe.tasks.masked_lm import tokens as masked_texts
from recipe.tasks.masked_lm.batches import MaskedTexts
from recipe.tasks.masked_lm.spec import Options
from tests.support import serving_kit
from tests.support.packed_batches import KINDS, SMALL, make

LONG = "paris was unbelievable , said anna in the incredible film ; " * 9


def tokenize_split(
    texts: list[str], name: str = "train", max_length: int = 24, **options: Any
) -> MaskedTexts:
    split = datasets.Dataset.from_dict({"text": texts})
    tokenizer = serving_kit.tokenizer()
    return masked_texts.tokenize_split(
        name, split, tokenizer, max_length, Options(**options), False
    )


def test_texts_that_came_tokenized_are_framed_once() -> None:
    tokenizer = serving_kit.tokenizer()
    rows = [tokenizer(text).input_ids for text in ("the film", LONG)]
    split = datasets.Dataset.from_dict({"input_ids": rows})
    samples = masked_texts.tokenize_split("train", split, tokenizer, 400, Options(), False)
    assert [samples.tokens(row).tolist() for row in range(2)] == rows


def test_as_much_is_masked_as_by_the_reference() -> None:
    def collated(texts: list[str], times: int) -> tuple[Any, Any, Any]:
        """What transformers' own collator masks: ids before, ids after, labels; flat, specials left
        out."""
        tokenizer = serving_kit.tokenizer(500)
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=7)
        encoded = tokenizer(texts, return_special_tokens_mask=True)
        rows = [{name: encoded[name][row] for name in encoded} for row in range(len(texts))]
        before, after, labels = [], [], []
        for _ in range(times):
            batch = collator([dict(row) for row in rows])
            real = torch.tensor(
                [
                    [bool(bit) for bit in mask] + [True] * (batch["input_ids"].shape[1] - len(mask))
                    for mask in encoded["special_tokens_mask"]
                ]
            )
            labels.append(batch["labels"][~real])
            after.append(batch["input_ids"][~real])
            before.append(torch.where(labels[-1] == -100, after[-1], labels[-1]))
        return tuple(torch.cat(part).numpy() for part in (before, after, labels))  # type: ignore[return-value]

    def shares(before: Any, after: Any, is_masked: Any, mask_id: int) -> tuple[float, ...]:
        """Of all tokens the masked; of these, those under the mask, changed and kept."""
        chosen = after[is_masked]
        under = chosen == mask_id
        kept = chosen == before[is_masked]
        return tuple(float(x.mean()) for x in (is_masked, under, ~under & ~kept, kept))

    texts = [LONG] * 4
    samples = tokenize_split(texts, max_length=400)
    real = np.flatnonzero(~np.isin(samples.token_ids, samples.masking.never))
    befores, afters, masks = [], [], []
    for epoch in range(120):
        drawn = samples.draw_epoch(3, epoch)
        indices, instead = drawn.masked(real)
        after = samples.token_ids[real].copy()
        after[indices] = instead
        is_masked = np.zeros(len(real), dtype=bool)
        is_masked[indices] = True
        assert drawn.weight(np.arange(len(samples))) == len(indices) > 0
        befores.append(samples.token_ids[real])
        afters.append(after)
        masks.append(is_masked)
    mask_id = samples.masking.mask_id
    ours = shares(*(np.concatenate(part) for part in (befores, afters, masks)), mask_id)
    before, after, labels = collated(texts, 120)
    theirs = shares(before, after, labels != -100, mask_id)
    assert ours == pytest.approx(theirs, abs=0.015)
    assert ours == pytest.approx((0.15, 0.8, 0.1, 0.1), abs=0.02)


def test_what_is_masked_depends_on_seed_epoch_and_place_alone() -> None:
    TEXTS = ["the film was good", "anna said paris was unbelievable again .", "who", ""] * 2
    samples = tokenize_split([LONG, *TEXTS, LONG], max_length=20)
    whole = np.arange(len(samples.token_ids))

    def drawn(seed: int, epoch: int) -> list[tuple[int, int]]:
        index, instead = samples.draw_epoch(seed, epoch).masked(whole)
        return list(zip(index.tolist(), instead.tolist(), strict=True))

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    once = samples.draw_epoch(1, 0)
    for rows in ([3, 0], [1], [2, 4, 5]):
        source, _, _ = once.token_positions(np.asarray(rows))
        indices, instead = once.masked(source)
        assert {*zip(source[indices].tolist(), instead.tolist(), strict=True)} <= set(drawn(1, 0))
    fixed = tokenize_split([LONG, *TEXTS], "evaluation", 20)
    again = tokenize_split([LONG, *TEXTS], "evaluation", 20)
    assert fixed.labels.tolist() == again.labels.tolist() and fixed.labels.sum() > 0
    assert fixed.weight(np.arange(len(fixed))) == fixed.labels.sum()
    assert fixed.fingerprint() != tokenize_split([LONG, *TEXTS], "evaluation", 20,
                                           mlm_probability=0.3).fingerprint()  # fmt: skip


def test_an_evaluation_masks_at_least_one_token() -> None:
    for text in ("who", "the film", "bad"):
        fixed = tokenize_split([text], "evaluation", mlm_probability=0.001)
        assert fixed.labels.sum() == fixed.weight(np.arange(1)) == 1


@pytest.mark.parametrize(
    "kind", ["bert", "distilbert", "electra", "roberta", "modernbert", "deberta-v2"]
)
def test_loss_and_gradients_are_those_of_each_text_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "deberta-v2", ("DebertaV2", {**SMALL, "relative_attention": True}))
    model = make(kind, "ForMaskedLM", vocab_size=71, pad_token_id=0)
    config: Any = model.config
    samples = tokenize_split(
        [LONG, "the film was good", "who", "in paris", LONG[:40]], max_length=60
    )
    samples = samples.draw_epoch(1, 4)
    rows = np.arange(5)
    expected, correct = torch.zeros(()), 0
    for row in rows:
        source = np.arange(samples.starts[row], samples.starts[row + 1])
        indices, instead = samples.masked(source)
        ids = samples.tokens(row).astype(np.int64)
        labels = np.full_like(ids, -100)
        labels[indices], ids[indices] = ids[indices], instead
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        wanted = torch.from_numpy(labels)
        # A sum over none of a text's tokens is 0.
        expected = expected + functional.cross_entropy(logits, wanted, reduction="sum")
        correct += int((logits.argmax(-1) == wanted).sum())
    weight = samples.weight(rows)
    model.zero_grad()
    (expected / weight).backward()
    wanted_grads = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    masked_models.patch_forward_for_masking(model)
    family = packed_encoders.family_of(config)
    lengths = [samples.lengths[rows]]
    layouts: list[batches.Layout] = [
        DocumentLayout(batches.Padded(packing.buckets(lengths), 6, 0), 9)
    ]
    if kind != "deberta-v2":
        assert family is not None
        first = family.first_position(config)
        layouts.append(DocumentLayout(batches.Packed(packing.shape(lengths), 6, 0, first), 9))
    for layout in layouts:
        model.zero_grad()
        sums = model(**layout.tensors(samples, rows)).logits
        assert sums.shape == (6, 2) and sums[5].tolist() == [0, 0]
        torch.testing.assert_close(sums[:, 0].sum(), expected, rtol=1e-5, atol=1e-5)
        assert int(sums[:, 1].sum()) == correct
        (sums[:, 0].sum() / weight).backward()
        for name, parameter in model.named_parameters():
            if name in wanted_grads:
                torch.testing.assert_close(parameter.grad, wanted_grads[name], rtol=1e-4, atol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match=r"mlm_probability has value 1\.0"):
        Hyperparameters(task="masked-lm", task_values={"mlm_probability": 1.0})
    with pytest.raises(HyperparameterError, match="belongs to task=masked-lm"):
        Hyperparameters(task="causal-lm", task_values={"mlm_probability": 0.3})
    seq2seq = serving_kit.save("BartForConditionalGeneration", tmp_path / "bart")
    with pytest.raises(ModelError, match="does not fill masks"):
        masked_models.load_model(Origin(str(seq2seq)), Hyperparameters())
    headless = serving_kit.save("BertModel", tmp_path / "bert")
    with pytest.raises(ModelError, match="stay random with LoRA"):
        source = Origin(str(headless))
        masked_models.load_model(source, Hyperparameters(task="masked-lm", lora_r=2))
