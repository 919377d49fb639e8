"""What else the recipe trains: numbers, sets of labels, decoders, adapters; and how."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Reviews = Callable[[int], list[tuple[str, str]]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

FAST = ("--batch_size", "8", "--lr", "5e-3", "--max_length", "32", "--bf16", "False")
GOOD = "the film number 7 was good , truly great"
BAD = "the film number 8 was bad , truly awful"


def write(folder: Path, rows: Sequence[tuple[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


def trained(
    train: Run,
    base: Path,
    model: Path,
    rows: Sequence[tuple[str, Any]],
    *arguments: str,
    **how: Any,
) -> tuple[str, dict[str, float]]:
    """The output and metrics of a run on `rows`, evaluated on its last fifth."""
    split = len(rows) * 4 // 5
    channels = {
        "train": write(base / "in" / "train", rows[:split]),
        "test": write(base / "in" / "test", rows[split:]),
    }
    if "--epochs" not in arguments:
        arguments = ("--epochs", "4", *arguments)
    done = train(base, channels, "--model_id", str(model), *FAST, *arguments, **how)
    assert done.returncode == 0, done.stderr
    metrics: dict[str, float] = json.loads((base / "output" / "data" / "metrics.json").read_text())
    return done.stdout, metrics


def ask(base: Path, *texts: str, **parameters: Any) -> Any:
    """What the default handlers answer from the model that was trained in `base`."""
    import inference

    model = inference.model_fn(str(base / "model"))
    body = json.dumps({"inputs": texts, "parameters": parameters}).encode()
    request = inference.input_fn(body, "application/json")
    answer, _ = inference.output_fn(inference.predict_fn(request, model), "application/json")
    return json.loads(answer)


@pytest.mark.heavy
def test_fractions_are_learned_as_numbers(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    rows = [(text, 0.75 if label == "pos" else -1.25) for text, label in reviews(200)]
    output, metrics = trained(train, tmp_path, tiny_model, rows)
    assert "label: a number from -1.25 to 0.75" in output
    assert metrics["eval_pearson"] > 0.95
    assert metrics["eval_mse"] == pytest.approx(metrics["eval_loss"], rel=1e-3)
    good, bad = ask(tmp_path, GOOD, BAD)
    assert good["label"] == "label"
    assert (good["score"], bad["score"]) == pytest.approx((0.75, -1.25), abs=0.4)


@pytest.mark.heavy
def test_lists_are_learned_as_sets_of_labels(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    names = {"pos": ["kind", "short"], "neg": ["harsh"]}
    # Each number stands in a row of either kind: it would be a way to tell them apart, too.
    rows = [
        (re.sub(r"\d+", str(row // 2), text), names[label])
        for row, (text, label) in enumerate(reviews(160))
    ]
    _, metrics = trained(train, tmp_path, tiny_model, rows, "--epochs", "6")
    assert metrics["eval_f1_micro"] == metrics["eval_accuracy"] == 1.0
    good, bad = (
        {each["label"] for each in answer if each["score"] >= 0.5}
        for answer in ask(tmp_path, GOOD, BAD, top_k=None)
    )
    assert (good, bad) == ({"kind", "short"}, {"harsh"})


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.heavy)])
def tiny_decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers whose tokenizer has an end token and none for padding."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        PreTrainedTokenizerFast,
        Qwen3Config,
    )

    from tests.support.words import WORDS

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", model_max_length=64
    )
    config = kind(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.heavy
@pytest.mark.long
def test_a_decoder_is_a_classifier_too(
    tmp_path: Path, tiny_decoder: Path, reviews: Reviews, train: Run
) -> None:
    rows = [(f"{'the ' * (at % 7)}{text}", label) for at, (text, label) in enumerate(reviews(160))]
    output, metrics = trained(train, tmp_path, tiny_decoder, rows)
    assert "padding token: </s>, the end token" in output
    assert metrics["eval_accuracy"] == 1.0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["pad_token_id"] == 1
    assert [each["label"] for each in ask(tmp_path, GOOD, f"the the the the {BAD}")] == [
        "pos",
        "neg",
    ]


@pytest.mark.heavy
@pytest.mark.long
def test_a_sharded_lora_training_is_merged_into_a_model_like_any_other(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    arguments = ["--lora_r", "4", "--lora_alpha", "8", "--mp_parameters", "partitions=2"]
    rows = reviews(160)
    output, _ = trained(train, tmp_path, tiny_model, rows, *arguments, processes=2)
    assert "LoRA: rank 4" in output
    kinds = {path.suffix for path in (tmp_path / "model").iterdir()}
    assert kinds == {".json", ".safetensors", ".md", ""}
    start = load_file(tiny_model / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name in start if not (start[name] == after[f"bert.{name}"]).all()}
    assert "encoder.layer.0.attention.self.query.weight" in changed
    assert "embeddings.word_embeddings.weight" not in changed
    assert {each["label"] for each in ask(tmp_path, GOOD, BAD)} <= {"pos", "neg"}


# peft 0.21 asks transformers 5 by an old name.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.long
def test_an_adapter_alone_is_saved_where_it_is_asked_for(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    arguments = ["--lora_r", "4", "--lora_save", "adapter", "--lora_target_modules", "query,value"]
    trained(train, tmp_path, tiny_model, reviews(40), *arguments)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} < names
    assert "model.safetensors" not in names
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "model"))
    assert adapted.peft_config["default"].target_modules == {"query", "value"}


@pytest.mark.heavy
def test_what_shapes_a_training_is_passed_on(
    tmp_path: Path, tiny_model: Path, reviews: Reviews, train: Run
) -> None:
    """Accumulation, checkpointing, smoothing, class weights, and the best model by early stopping."""
    rows = [row for row in reviews(120) if row[1] == "pos" or "0" in row[0]]
    arguments = ["--early_stopping_patience", "1", "--metric_for_best_model", "eval_f1_macro"]
    arguments += ["--early_stopping_threshold", "2", "--class_weight", "balanced"]
    arguments += ["--gradient_accumulation_steps", "2", "--gradient_checkpointing", "True"]
    arguments += ["--label_smoothing_factor", "0.1", "--epochs", "9"]
    _, metrics = trained(train, tmp_path, tiny_model, rows, *arguments)
    assert metrics["epoch"] == 2, "no f1 is better by 2, so the second evaluation is the last"
    state = json.loads(next((tmp_path / "checkpoints").rglob("trainer_state.json")).read_text())
    per_epoch = -(-(len(rows) * 4 // 5) // 16)
    assert state["best_global_step"] in (per_epoch, 2 * per_epoch)
    assert not (tmp_path / "output" / "tensorboard").exists()
