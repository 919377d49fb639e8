"""task=summarization, translation, text2text-generation: what is read, learned and scored."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LabelSmoother

from recipe.batching.text_pairs import PaddedPairs, Pairs, pair_shapes
from recipe.compat import new_weights
from recipe.data.held_out import DataSets
from recipe.errors import CheckpointError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.models import encoder_decoders
from recipe.models.sources.origin import Origin
from recipe.models.sources.tokenizers import load_tokenizer
from recipe.tasks.text_scores import score_texts
from recipe.tasks.text_to_text import data as text_pairs
from recipe.tokenization import languages, texts
from tests.support import jobs, serving_kit
from tests.support.jobs import write
from tests.support.packed_batches import spread

PAIRS = [
    ("anna said the film was good again .", "film good"),
    ("paris was bad", "bad bad bad bad who said paris"),
    ("the film", "anna"),
    ("who said the film in paris was good again ? anna said the film was good", "anna said good"),
]


def tokenize_split(prefix: str = "", **lengths: int) -> Pairs:
    columns = {"source": [a for a, _ in PAIRS], "target": [b for _, b in PAIRS]}
    split = datasets.Dataset.from_dict(columns)
    longest = {"source": 40, "target": 20, **lengths}
    return texts.source_target_samples("train", split, serving_kit.tokenizer(), prefix, longest)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("T5ForConditionalGeneration", {}),
        (
            "T5ForConditionalGeneration",
            {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        ("BartForConditionalGeneration", {}),
        ("MarianMTModel", {"share_encoder_decoder_embeddings": True}),
        ("M2M100ForConditionalGeneration", {}),
        ("MBartForConditionalGeneration", {}),
        ("PegasusForConditionalGeneration", {}),
    ],
)
def test_loss_and_gradients_are_those_of_the_reference(
    kind: str, settings: dict[str, Any], smoothing: float
) -> None:
    """Of transformers' collator and its model's own loss, or the Trainer's label smoother."""
    values: dict[str, Any] = {
        "vocab_size": 71, "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2, "decoder_start_token_id": 3,
        "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64,
        **dict.fromkeys(("dropout_rate", "dropout", "attention_dropout", "activation_dropout"), 0.0),
    }  # fmt: skip
    for half in ("encoder", "decoder"):
        sizes = {f"{half}_layers": 2, f"{half}_attention_heads": 2, f"{half}_ffn_dim": 48}
        values |= {} if kind.startswith("T5") else sizes
    stem = kind.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
    config = getattr(transformers, f"{stem}Config")(**values, **settings)
    torch.manual_seed(0)
    model: Any = spread(getattr(transformers, kind)(config))
    pairs, rows = tokenize_split(), np.arange(4)
    tokenizer = serving_kit.tokenizer()
    cuts = [np.split(pairs.tokens(row), [pairs.sources[row]]) for row in range(4)]
    features = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in cuts]
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)(features)
    if "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = encoder_decoders.shift_of(model)(batch["labels"])
    batch.pop("token_type_ids", None)
    output = model(**batch)
    wanted = output.loss
    if smoothing:
        wanted = LabelSmoother(epsilon=smoothing)(output, batch["labels"])
    model.zero_grad()
    wanted.backward()
    grads = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    correct = (output.logits.argmax(-1) == batch["labels"]).sum()
    layout = PaddedPairs(pair_shapes([(pairs, rows)]), 6, 0, encoder_decoders.shift_of(model), 40)
    encoder_decoders.patch_forward_for_pairs(model, smoothing)
    model.zero_grad()
    # Without dropout it may train: smoothing is of training alone.
    sums = model.train(smoothing > 0)(**layout.tensors(pairs, rows)).logits
    assert sums.shape == (6, 2) and sums[4:].abs().sum() == 0
    loss = sums[:, 0].sum() / pairs.weight(rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    assert sums[:, 1].sum() == correct
    loss.backward()
    for name, weight in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(weight.grad, grads[name], rtol=1e-4, atol=2e-5)


def test_batches_have_few_shapes() -> None:
    """That every token is in its place, the gradients above show."""
    pairs = tokenize_split()
    halves = [np.asarray([0, 2]), np.asarray([1, 3])]
    few = pair_shapes([(pairs, rows) for rows in halves])
    layout = PaddedPairs(few, 2, 0, lambda labels: labels.clamp(min=0), 3)
    for rows in (*halves, np.asarray([3, 1]), np.asarray([2])):
        batch = layout.tensors(pairs, rows)
        assert (batch["input_ids"].shape[1], batch["decoder_input_ids"].shape[1]) in few


def test_prefix_cuts_and_end_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tokenize_split("who said ", source=8, target=5)
    tokenizer = serving_kit.tokenizer()
    assert "cut (" in capsys.readouterr().out
    for row in range(4):
        source, target = np.split(pairs.tokens(row), [pairs.sources[row]])
        assert len(source) <= 8 and len(target) <= 5
        assert source[-1] == target[-1] == tokenizer.sep_token_id
        assert tokenizer.decode(source[1:3]) == "who said"


def read(folder: Path, rows: list[dict[str, Any]], **options: Any) -> DataSets:
    given = Hyperparameters(task="translation", **options)
    return text_pairs.load({"train": write(folder, rows)}, given)


@pytest.mark.parametrize(
    ("row", "options", "source", "target"),
    [
        ({"translation": {"en": "yes", "ro": "da"}}, {"source_lang": "en_XX", "target_lang": "ro_RO"}, "yes", "da"),
        ({"a": "yes", "b": "ja"}, {"text_column": "b", "label_column": "a"}, "ja", "yes"),
        ({"text": "long", "target": "l", "summary": "s"}, {"label_column": "target"}, "long", "l"),
    ],
)  # fmt: skip
def test_columns_of_pairs(
    tmp_path: Path, row: dict[str, Any], options: dict[str, str], source: str, target: str
) -> None:
    loaded = read(tmp_path, [row] * 20, **options)
    assert loaded.train[0] == {"source": source, "target": target}
    assert len(loaded.train) == 18 and len(loaded.evaluation) == 2


def test_rows_without_a_target_are_left_out_and_counted(tmp_path: Path) -> None:
    loaded = read(tmp_path, [{"text": "a", "summary": "b"}] * 9 + [{"text": "a", "summary": None}])
    assert "1 rows of" in loaded.notes[0] and len(loaded.train) + len(loaded.evaluation) == 9


def test_scores_of_generated_texts() -> None:
    same = ["the film was good in paris", "anna said that paris was bad again"]
    assert score_texts(same, same, None) == pytest.approx(
        dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf"), 100.0)
    )
    half = score_texts(["the film was bad", "anna"], ["the film was good", "anna"], None)
    assert half["rouge1"] == pytest.approx((75 + 100) / 2)
    # Of words that the library does not know, it would say 0.
    cyrillic = score_texts(["фильм был хорош"], ["фильм был плох"], None)
    assert cyrillic["rouge1"] == pytest.approx(100 * 2 / 3)
    assert score_texts(["電影很好"], ["電影很壞"], "zh")["rouge1"] == pytest.approx(75)


def test_a_model_of_several_languages_learns_and_keeps_them(tmp_path: Path) -> None:
    serving_kit.save_nllb(tmp_path / "nllb")
    source, given = Origin(str(tmp_path / "nllb")), Hyperparameters()
    with pytest.raises(HyperparameterError, match=r"target_lang has value 'xx'.*eng_Latn"):
        languages.mark(*encoder_decoders.load(source, given), "eng", "xx")
    model, tokenizer = encoder_decoders.load(source, given)
    languages.mark(model, tokenizer, "deu", "fra_Latn")
    split = datasets.Dataset.from_dict({"source": ["the film"], "target": ["the film"]})
    longest = {"source": 9, "target": 9}
    pairs = texts.source_target_samples("train", split, tokenizer, "", longest)
    read_ids, written_ids = (ids.tolist() for ids in np.split(pairs.tokens(0), pairs.sources))
    named: Any = tokenizer.convert_tokens_to_ids
    assert named("deu_Latn") in read_ids and named("fra_Latn") in written_ids
    model.save_pretrained(tmp_path / "kept")
    tokenizer.save_pretrained(tmp_path / "kept")
    kept = load_tokenizer(str(tmp_path / "kept"))
    assert kept("the film").input_ids == read_ids
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "kept")
    assert settings.forced_bos_token_id == named("fra_Latn")


def test_the_saved_marian_is_the_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = serving_kit.save("MarianMTModel", tmp_path / "start")
    rows = [{"document": source, "summary": target} for source, target in PAIRS]
    channels = {name: write(tmp_path / name, rows, name) for name in ("train", "test")}
    argv = ("--task", "summarization", "--predict_with_generate", "False", "--lr", "1e-2",
            "--save_steps", "2")  # fmt: skip
    trained = jobs.run(tmp_path / "job", start, channels, *argv)
    options = ("--do_train", "False", "--do_eval", "True")
    saved = jobs.run(tmp_path / "again", tmp_path / "job" / "model", channels, *argv, *options)
    assert saved["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-5)
    monkeypatch.setattr(new_weights, "freeze_unsaved", lambda model: None)
    shutil.rmtree(tmp_path / "job" / "checkpoints" / "checkpoint-3")
    with pytest.raises(CheckpointError, match=r"updates \d+ weights, and this version"):
        jobs.run(tmp_path / "job", start, channels, *argv)


def test_a_pair_longer_than_every_planned_shape_has_room() -> None:
    starts = np.array([0, 5, 41, 70])
    rows = datasets.Dataset.from_dict({})
    pairs = Pairs(np.arange(70), starts, np.array([2, 3, 26]), np.array([3, 33, 3]), rows)
    layout = PaddedPairs([(8, 8)], 2, 0, lambda labels: labels.clamp(min=0), 8)
    for row, shape in enumerate([(8, 8), (36, 8), (8, 28)]):
        batch = layout.tensors(pairs, np.array([row]))
        read, written = int(pairs.sources[row]), int(pairs.labels[row])
        tokens = pairs.tokens(row)
        ids: Any = batch["input_ids"]
        assert (ids.shape[1], batch["decoder_input_ids"].shape[1]) == shape
        assert ids[0, :read].tolist() == tokens[:read].tolist()
        assert batch["decoder_input_ids"][0, :written].tolist() == tokens[read:].tolist()
