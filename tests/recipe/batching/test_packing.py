"""Packed batches: the same logits, gradients and losses as without, in one shape, nearly full."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from recipe.batching import batches, flat
from recipe.batching import packing as plan
from recipe.batching.batches import Packed, Padded
from recipe.batching.document_batches import (
    NOT_LEARNED,
    DocumentLayout,
    Documents,
    TaggedTexts,
)
from recipe.batching.packing import Rows
from recipe.batching.window_batches import WindowLayout, Windows
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import (
    cpu_kernels,
    flat_attention,
    lora,
    packed_decoders,
    packed_encoders,
    token_heads,
)
from recipe.plan import batch_layout
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.tasks import classifiers
from recipe.tasks.text_classification.task import CLASSES
from recipe.tokenization import encoding
from recipe.training import engine
from recipe.training.preparation import lay_out
from tests.support.packed_batches import (
    KINDS,
    PAD,
    SIZE,
    SMALL,
    assert_same_losses,
    documents_of,
    gradients,
    make,
    samples_of,
    spread,
    to_train,
    tweet_lengths,
)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, attention) for kind in KINDS for attention in ("sdpa", flat_attention.ATTENTION)),
        *(
            (kind, attention)
            for kind in ("bert", "modernbert")
            for attention in ("eager", cpu_kernels.ATTENTION)
        ),
    ],
)
def test_packed_logits_and_gradients_are_those_of_samples_alone(kind: str, attention: str) -> None:
    model = make(kind, attn_implementation="eager" if attention == "eager" else "sdpa")
    samples = samples_of([30, 5, 17, 2, 41])
    rows = np.arange(5)
    labels = torch.from_numpy(samples.labels)
    expected = torch.cat([
        model(input_ids=torch.from_numpy(samples.tokens(row).astype(np.int64))[None]).logits
        for row in rows
    ])  # fmt: skip
    family = packed_encoders.family_of(model.config)
    assert family is not None
    packed_encoders.patch_forward_for_packing(model)
    if attention == cpu_kernels.ATTENTION:
        cpu_kernels.lighten(model, packed_attention=True)
        assert model.config._attn_implementation == cpu_kernels.ATTENTION
    shape: Any = plan.shape([samples.lengths])
    assert shape.rows > 1
    if attention == flat_attention.ATTENTION:
        flat_attention.use(model)
        shape = flat.row([samples.lengths])
    layout = Packed(shape, SIZE, PAD, family.first_position(model.config))
    logits = model(**layout.tensors(samples, rows)).logits
    assert logits.shape == (SIZE, 3)
    torch.testing.assert_close(logits[:5], expected, rtol=0, atol=1e-5)
    actual, wanted = (
        classifiers.sample_losses(some, labels) / 5 for some in (logits[:5], expected)
    )
    assert_same_losses(model, actual, wanted)


def test_every_family_is_held_to_that() -> None:
    assert {kind.split(",")[0] for kind in KINDS} == set(packed_encoders.FAMILIES)


@pytest.mark.parametrize("kind", [*KINDS, "padded bert", "deberta"])
def test_types_of_pairs_reach_a_model_that_takes_them(kind: str) -> None:
    is_roberta, packs = "roberta" in kind or kind == "camembert", kind in KINDS
    if kind == "deberta":
        torch.manual_seed(0)
        config = transformers.DebertaV2Config(**SMALL, type_vocab_size=0)
        model: Any = transformers.DebertaV2ForSequenceClassification(config).eval()
    else:
        model = make(kind.removeprefix("padded "))
    samples = samples_of([30, 5, 17, 2, 41])
    types = None if is_roberta else (samples.token_ids % 2).astype(np.int8)
    samples, rows = dataclasses.replace(samples, types=types), np.arange(5)
    typed = types is not None and encoding.takes_token_types(model)
    assert typed == (kind in ("bert", "electra", "padded bert"))
    alone = []
    for row in rows:
        given = {"input_ids": samples.tokens(row)}
        if types is not None and typed:
            given["token_type_ids"] = types[samples.span(row)]
        given = {
            name: torch.from_numpy(value.astype(np.int64))[None] for name, value in given.items()
        }
        alone.append(model(**given).logits)
    expected, labels = torch.cat(alone), torch.from_numpy(samples.labels)
    layout = CLASSES.layout(model, packs, SIZE, PAD, [(samples, rows)])
    assert isinstance(layout, Packed if packs else Padded)
    CLASSES.prepare(model, packs)
    logits = model(**layout.tensors(samples, rows)).logits[:5]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert_same_losses(
        model, *(classifiers.sample_losses(some, labels) / 5 for some in (logits, expected))
    )


def test_a_tokenizer_of_another_model_is_refused() -> None:
    samples = samples_of([3, 4])
    samples = dataclasses.replace(samples, types=np.ones(7, np.int8))
    with pytest.raises(ModelError, match="types up to 1"):
        CLASSES.layout(
            make("roberta", type_vocab_size=1), True, SIZE, PAD, [(samples, np.arange(2))]
        )
    assert samples.fingerprint() != dataclasses.replace(samples, types=None).fingerprint()


@pytest.mark.parametrize("size", [2, 31, 64])
def test_a_step_has_a_sample_of_each_length_class(size: int) -> None:
    """The shortest samples are not kept for the step of the longest: what goes with length would
    be learned worse."""
    lengths = np.random.default_rng(0).permutation(64 * size) + 1
    for step in plan.steps(lengths, size, 7, 0, True):
        assert sorted((lengths[step] - 1) // 64) == list(range(size))


def test_samples_of_nearly_one_length_get_a_block_each() -> None:
    """Four in a block would fill 95 % of it, and cost four times the attention."""
    drawn = np.random.default_rng(0)
    windows = drawn.integers(114, 129, 2000)
    windows[0] = 128
    steps = plan.steps(windows, 16, 7, 0, True)
    shape = plan.shape([windows[step] for step in steps])
    assert (shape.rows, shape.length) == (16, 128)
    for step in steps:
        assert len(set(shape.assign_blocks(windows[step]))) == len(step)
    # Where most are far shorter than the longest, they share blocks as before.
    windows[1:] = drawn.integers(20, 60, 1999)
    shape = plan.shape([windows[step] for step in plan.steps(windows, 16, 7, 0, True)])
    assert windows.mean() * 16 / shape.tokens > 0.9


def test_what_cannot_be_packed_has_four_lengths_at_most() -> None:
    lengths = np.asarray(tweet_lengths(2000))
    whole = plan.steps(lengths, 32, 7, 0, False)
    steps = [part for step in whole for part in plan.split(step, lengths, 4, 8, False)]
    chosen = plan.buckets([lengths[step] for step in steps])
    assert len(chosen) <= 4
    samples, layout = samples_of(lengths.tolist()), Padded(chosen, 8, PAD)
    shapes = {layout.tensors(samples, step)["input_ids"].shape for step in steps}
    assert shapes == {(8, length) for length in chosen}
    assert lengths.sum() / sum(layout.computed_tokens(samples, step) for step in steps) > 0.65


@pytest.mark.parametrize("spread", [True, False])
def test_a_padded_step_has_samples_of_many_lengths(spread: bool) -> None:
    # Steps of samples that are alike learned worse what goes with length.
    lengths = np.random.default_rng(0).integers(10, 500, 1600)
    if spread:
        steps = plan.spread(lengths, 100, (7, 0), False)
    else:
        steps = list(plan.steps(lengths, 16, 7, 0, False))
    within = [lengths[step].std() / lengths.std() for step in steps]
    assert np.mean(within) > 0.9
    assert min(within) > 0.4


def test_what_the_table_says_of_packing() -> None:
    run = batches.Training(samples=samples_of(tweet_lengths(75)), size=8)
    held_out = {"evaluation": samples_of(tweet_lengths(20))}

    def lay(model: transformers.PreTrainedModel, packing: bool | None) -> tuple[Any, Any, str]:
        table = Table()
        chosen = batch_layout.layouts(to_train(model, CLASSES, 8, packing), run, held_out, table)
        return *chosen, str(table.rows[0])

    deberta = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**SMALL))
    layout, _, row = lay(make("bert"), None)
    count = layout.shape.rows
    assert isinstance(layout, Packed)
    assert f"8 samples packed into {count} block{'s' * (count > 1)} of" in row
    assert isinstance(lay(make("bert"), False)[0], Padded)
    _, evaluation, row = lay(deberta, None)
    assert isinstance(evaluation, Padded) and "(deberta-v2 cannot be packed)" in row
    with pytest.raises(HyperparameterError, match=r"packing has value True.*deberta-v2"):
        lay(deberta, True)


@pytest.mark.parametrize(
    ("kind", "attention", "lay"),
    [
        *(
            (kind, "sdpa", layout)
            for kind in (*packed_decoders.DECODERS, "qwen2, with windows", "qwen3, with windows")
            for layout in ("packed", "one row")
        ),
        # Padded batches go through the library's own masks; eager attention takes masks that are added.
        *((kind, "sdpa", "padded") for kind in ("gpt2", "qwen3, with windows")),
        *((kind, "eager", "packed") for kind in ("gpt2", "qwen3, with windows", "gemma")),
    ],
)
def test_losses_of_documents_are_those_of_each_alone(
    kind: str, attention: str, lay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: dict[str, Any] = {
        "packed": lambda lengths: Packed(plan.shape(lengths), SIZE, PAD, 0),
        "padded": lambda lengths: Padded(plan.buckets(lengths), SIZE, PAD),
        "one row": lambda lengths: Packed(flat.row(lengths), SIZE, PAD, 0),
    }

    def alone(model: transformers.PreTrainedModel, documents: Documents, row: int) -> torch.Tensor:
        """[2]: the sum of a document's losses, and how often the model is right, by its own words."""
        ids = torch.from_numpy(documents.tokens(row).astype(np.int64))
        learned = documents.learned[documents.starts[row] : documents.starts[row + 1]]
        labels = ids.where(torch.from_numpy(learned), torch.tensor(-100))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100)
        return torch.stack([total, (logits.argmax(-1) == labels[1:]).sum()])

    values = {
        **SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 96, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    if kind in ("mistral", "phi3", "starcoder2") or "windows" in kind:
        values |= {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    config = transformers.CONFIG_MAPPING[kind.partition(",")[0]](**values)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = spread(transformers.AutoModelForCausalLM.from_config(config))
    documents = documents_of([30, 5, 17, 2, 41])
    rows = np.arange(5)
    expected = torch.stack([alone(model, documents, row) for row in rows])
    count = documents.weight(rows)
    packed_decoders.patch_forward_for_documents(model)
    if lay == "one row":
        flat_attention.use(model)
    layout = DocumentLayout(layouts[lay]([documents.lengths]), count + 3)
    # In several parts, too, whose logits are not kept.
    monkeypatch.setattr(
        packed_decoders, "_MOST_LOGITS", 50 * 16 if attention == "sdpa" else 1 << 26
    )
    batch = layout.tensors(documents, rows)
    answers = model(**batch).logits
    assert answers.shape == (SIZE, 2)
    assert answers[:5, 1].tolist() == expected[:, 1].tolist()
    assert answers[5].tolist() == [0, 0]
    assert_same_losses(model, answers[:5, 0] / count, expected[:, 0] / count)
    # What the model always took, it takes still.
    ids = torch.from_numpy(documents.tokens(0).astype(np.int64))[None]
    assert model(input_ids=ids).logits.shape == (1, 30, 50)


@pytest.mark.parametrize("weight", [None, 0.5, 0.0])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "jetmoe"])
def test_the_router_loss_is_that_of_transformers(kind: str, weight: float | None) -> None:
    values = {
        **SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8,
        "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "output_router_logits": True, "kv_channels": 8, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING[kind](**values)
    torch.manual_seed(0)
    model: Any = spread(transformers.AutoModelForCausalLM.from_config(config)).train()
    if weight is not None and kind == "jetmoe":
        with pytest.raises(HyperparameterError, match="jetmoe has no router loss"):
            packed_decoders.set_router_weight(model, weight)
        return
    if weight is not None:
        packed_decoders.set_router_weight(model, weight)
    documents = documents_of([30, 5, 17, 2, 41])
    rows = np.arange(5)
    count = documents.weight(rows)
    assert not packed_decoders.can_be_packed(model.config)
    layout = DocumentLayout(Padded(plan.buckets([documents.lengths]), SIZE, PAD), count + 3)
    batch = layout.tensors(documents, rows)
    ids = batch["input_ids"]
    labels = torch.full_like(ids, -100)
    is_used = batch["targets"] != NOT_LEARNED
    labels.view(-1)[batch["positions"][is_used] + 1] = batch["targets"][is_used]
    plain = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels)
    assert (plain.aux_loss is None) == (weight == 0)
    expected = gradients(model, plain.loss)
    packed_decoders.patch_forward_for_documents(model)
    loss = model(**batch).logits[:, 0].sum() / count
    torch.testing.assert_close(loss, plain.loss.detach(), rtol=1e-6, atol=0)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    losses = model.eval()(**batch).logits[:, 0].sum() / count
    without = plain.loss - (
        plain.aux_loss * packed_decoders.router_weight(model) if weight != 0 else 0
    )
    torch.testing.assert_close(losses, without, rtol=1e-5, atol=0)


def test_a_gpu_keeps_more_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 << 30)  # a stand-in: there is none here
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    # 2.5 GB of 80 GB, in float32; never fewer than on a CPU
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == (80 << 30) // 32 // 4
    gpu.total_memory = 1 << 20
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == packed_decoders._MOST_LOGITS


LENGTHS = [30, 5, 17, 2, 41]
STARTS = np.cumsum([0, *LENGTHS])
ROWS = np.arange(len(LENGTHS))


def ids() -> Rows:
    return np.random.default_rng(0).integers(4, 50, STARTS[-1]).astype(np.int32)


def tagged() -> TaggedTexts:
    random = np.random.default_rng(1)
    tags = random.integers(0, 3, STARTS[-1])
    tags[random.random(STARTS[-1]) < 0.4] = NOT_LEARNED
    tags[STARTS[:-1]] = 1
    sums = np.concatenate([[0], np.cumsum(tags != NOT_LEARNED)])
    labels = np.stack([np.diff(sums[STARTS]), ROWS], axis=1)
    return TaggedTexts(ids(), STARTS, labels, tags.astype(np.int16), judged=True)


def windows() -> Windows:
    starts = np.array([2, 1, 0, 1, 20])
    labels = np.stack([starts, starts + np.array([3, 2, 0, 0, 9]), ROWS], axis=1)
    none = np.zeros(STARTS[-1], dtype=np.int32)
    return Windows(ids(), STARTS, labels, none, none, judged=True)


def layout_of(kind: Any, packed: bool, model: Any, *more: Any) -> Any:
    lengths = [np.asarray(LENGTHS)]
    if not packed:
        return kind(Padded(plan.buckets(lengths), SIZE, PAD), *more)
    family = packed_encoders.family_of(model.config)
    assert family is not None
    shape = plan.shape(lengths)
    assert shape.rows > 1
    return kind(Packed(shape, SIZE, PAD, family.first_position(model.config)), *more)


PAIRS = [("bert", True), ("distilbert", True), ("modernbert", True), ("roberta", False)]
"""How an encoder is packed depends on its family (above), and the heads' losses do not."""


@pytest.mark.parametrize(("kind", "packed"), PAIRS)
def test_words_are_tagged_as_alone(kind: str, packed: bool) -> None:
    model, samples = make(kind, "ForTokenClassification"), tagged()
    alone = [model(input_ids=torch.tensor(samples.tokens(row))[None].long()).logits[0]
             for row in ROWS]  # fmt: skip
    tags = [torch.tensor(samples.tags[samples.span(row)]).long() for row in ROWS]
    wanted = torch.stack([
        functional.cross_entropy(logits, word_tags, ignore_index=NOT_LEARNED, reduction="sum")
        for logits, word_tags in zip(alone, tags, strict=True)
    ])  # fmt: skip
    token_heads.patch_forward_for_tags(model, 0.0)
    learned, words = samples.weight(ROWS), max(LENGTHS)
    layout = layout_of(DocumentLayout, packed, model, learned, words)
    batch = layout.tensors(samples, ROWS)
    packed_logits = model(**batch).logits
    assert packed_logits.shape == (SIZE, 1 + 3 * words)
    for row in ROWS:
        tags = samples.tags[samples.span(row)]
        judged = packed_logits[row, 1:].reshape(3, words).detach()
        heads = judged[2] != token_heads.NO_TAG
        assert (judged[2][: len(tags)].numpy() == np.maximum(tags, token_heads.NO_TAG)).all()
        assert not heads[len(tags) :].any()
        expected = alone[row].detach()[heads[: len(tags)]].softmax(-1).max(-1)
        torch.testing.assert_close(judged[0][heads].long(), expected.indices)
        torch.testing.assert_close(judged[1][heads], expected.values, rtol=0, atol=1e-5)
    assert_same_losses(model, packed_logits[: len(ROWS), 0], wanted, 2e-5)


@pytest.mark.parametrize(("kind", "packed"), PAIRS)
def test_answers_are_found_as_alone(kind: str, packed: bool) -> None:
    model, samples = make(kind, "ForQuestionAnswering", num_labels=2), windows()
    outputs = [model(input_ids=torch.tensor(samples.tokens(row))[None].long()) for row in ROWS]
    spans = torch.tensor(samples.labels[:, :2])
    wanted = torch.stack([
        (functional.cross_entropy(output.start_logits[0], span[0])
         + functional.cross_entropy(output.end_logits[0], span[1])) / 2
        for output, span in zip(outputs, spans, strict=True)
    ])  # fmt: skip
    token_heads.patch_forward_for_spans(model)
    layout = layout_of(WindowLayout, packed, model, max(LENGTHS), True)
    logits = model(**layout.tensors(samples, ROWS)).logits
    for row in ROWS:
        both = logits[row, 1:].reshape(2, max(LENGTHS))
        expected = torch.stack([outputs[row].start_logits[0], outputs[row].end_logits[0]])
        torch.testing.assert_close(both[:, : LENGTHS[row]], expected, rtol=0, atol=1e-5)
        assert (both[:, LENGTHS[row] :] < -1e8).all()
    assert_same_losses(model, logits[: len(ROWS), 0], wanted, 2e-5)


@pytest.mark.parametrize("task", ["TOKEN_CLS", "QUESTION_ANS"])
def test_around_adapters_too(task: str) -> None:
    """Which add nothing before they are trained; peft must pass all on that a batch has."""
    if task == "TOKEN_CLS":
        samples: Any = tagged()
        head, kind, more = (
            "ForTokenClassification",
            DocumentLayout,
            (samples.weight(ROWS), max(LENGTHS)),
        )
        patch: Any = functools.partial(token_heads.patch_forward_for_tags, smoothing=0.0)
    else:
        samples, head, kind, more = windows(), "ForQuestionAnswering", WindowLayout, (41, True)
        patch = token_heads.patch_forward_for_spans
    logits = []
    for adapters in (None, 4):
        model: Any = make("bert", head, num_labels=2 if task == "QUESTION_ANS" else 3)
        batch = layout_of(kind, True, model, *more).tensors(samples, ROWS)
        batch["token_type_ids"] = (batch["position_ids"] > 3).long()
        model = lora.wrap(model, Hyperparameters(lora_r=adapters), task, new=())
        patch(model)
        logits.append(model.eval()(**batch).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)


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
    actual = flat_attention.why_not(transformers.BertConfig(**changes), cuda, dtype)
    assert actual is None if reason is None else reason in str(actual)
    assert flat_attention.why_not(transformers.BertConfig(), torch.device("cpu"), dtype)


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
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, per_device_eval_batch_size=8,
            max_steps=3, learning_rate=0.02, optim="sgd", eval_strategy="epoch", logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        loaded = TrainableModel(
            model=model,
            tokenizer=transformers.AutoTokenizer.from_pretrained(tiny_model, pad_token_id=PAD),
            arguments=arguments,
            objective=CLASSES,
        )
        trainer = engine.build(lay_out(loaded, {"train": samples, "evaluation": samples}, Table()))
        assert ("one row" in trainer._train_layout.describe()) == is_flat
        trainer.train()
        history = trainer.state.log_history
        losses.append([entry.get("loss", entry.get("eval_loss")) for entry in history[:-1]])
    assert len(losses[0]) >= 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_attention_by_sample(dropout: float) -> None:
    """Against differences of its results, with windows, grouped queries and a sample of no tokens."""
    torch.manual_seed(0)
    parts = [
        torch.randn(9, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)  # the same dropout
        result: torch.Tensor = flat_attention.attend_samples(*parts, starts, dropout, True, 2, 0.5)[
            0
        ]
        return result

    assert torch.autograd.gradcheck(attend, parts)
