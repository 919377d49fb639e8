"""Weights of 4 bits under adapters: what is refused, what is asked of bitsandbytes.

With bitsandbytes in the environment a training is run too, on its layers for CPUs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipe.arguments import parse
from recipe.errors import HyperparameterError, ModelError
from recipe.models import lora, quantized
from recipe.runtime.device import Device
from recipe.training import preflight
from tests.support.causal_kit import make_model
from tests.support.jobs import folders_of, run, write
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers

ARGV = ["--model_id", "any", "--task", "causal-lm", "--load_in_4bit", "True"]
RIGHT = [*ARGV, "--lora_r", "4", "--lora_save", "adapter"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (ARGV, ["Give lora_r", "lora_save=adapter"]),
        ([*ARGV, "--lora_r", "4"], ["Give lora_save=adapter"]),
        ([*RIGHT, "--do_train", "False", "--do_eval", "True"], ["do_train is False"]),
        (
            ["--task", "text-classification", *RIGHT[:2], *RIGHT[4:]],
            ["belongs to task=causal-lm"],
        ),
    ],
)
def test_what_does_not_go_together_is_told_at_once(argv: list[str], words: list[str]) -> None:
    with refused(HyperparameterError, *words):
        parse(argv)


@pytest.mark.parametrize(
    ("kind", "is_sharded", "is_compiled", "words"),
    [
        ("cpu", False, False, "computes on cpu"),
        ("neuron", False, False, "computes on neuron"),
        ("cuda", True, False, "is to be sharded"),
        ("cuda", False, True, "is to be compiled"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused(
    kind: str, is_sharded: bool, is_compiled: bool, words: str
) -> None:
    def on(kind: str) -> Device:
        return Device(kind=kind, bf16=True, reason="told", processes=1, threads=None)

    with pytest.raises(HyperparameterError, match=words):
        quantized.check(on(kind), is_sharded, is_compiled)


def test_doctor_and_a_training_on_a_cpu_tell_the_same(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base")
    data = write(tmp_path / "data", [{"text": "the cat is good"}] * 4)
    argv = ["--model_name_or_path", str(base), *RIGHT[2:], "--use_cpu", "True"]
    *_, last = preflight.inspect(argv, folders_of(tmp_path, {"train": data}), 1)
    assert last.level == "error"
    assert "computes on cpu" in last.detail
    with pytest.raises(HyperparameterError, match="computes on cpu"):
        run(tmp_path / "job", base, {"train": data}, *RIGHT[2:])


@pytest.mark.parametrize(
    ("method", "more"), [("gptq", []), ("bitsandbytes", RIGHT[4:]), (None, [])]
)
def test_a_model_saved_with_quantized_weights_is_not_trained(
    method: str | None, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True, "quant_method": method}
    (base / "config.json").write_text(json.dumps(config))
    data = write(tmp_path / "data", [{"text": "the cat is good"}] * 4)
    monkeypatch.setattr(quantized, "check", lambda *_: None)
    with pytest.raises(ModelError, match=r"with quantized weights .* Give the original model"):
        run(tmp_path / "job", base, {"train": data}, "--task", "causal-lm", *more)


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        (["--bf16", "True"], torch.bfloat16),
        (["--bf16", "False"], torch.float32),
        (["--fp16", "True"], torch.float16),
    ],
)
def test_weights_are_nf4_and_multiplied_as_the_training_computes(
    more: list[str], dtype: torch.dtype
) -> None:
    given = parse([*RIGHT, *more])
    fp16 = bool(given.passed.get("fp16"))
    config = quantized.options(bool(given.bf16), fp16)["quantization_config"]
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == dtype


def test_the_layers_of_4_bits_are_all_but_head_and_adapters() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=3,
    )  # fmt: skip
    hyperparameters = parse(["--lora_r", "4"])
    model = lora.wrap(LlamaForCausalLM(config), hyperparameters, (), "CAUSAL_LM", trains_head=False)
    assert len(quantized.layers(model)) == 7 * 3


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_training_on_weights_of_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # Its layers compute on a CPU too, which the recipe does not offer: on CPUs with avx512_bf16 an
    # evaluation leaves them in a form that has no gradients.
    monkeypatch.setattr(quantized, "check", lambda *_: None)
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    made: list[Any] = []
    usual = lora.wrap

    def kept(model: Any, *given: Any, **named: Any) -> Any:
        made.append(model)
        return usual(model, *given, **named)

    monkeypatch.setattr(lora, "wrap", kept)
    base = make_model("llama", tmp_path / "base")
    # Weights large enough that adapters around them can say something.
    config = json.loads((base / "config.json").read_text()) | {"initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(base)
    rows = [{"text": f"the {['cat', 'dog', 'bird'][n % 3]} is {n % 3}"} for n in range(120)]
    channels = {"train": write(tmp_path / "data", rows)}
    argv = ["--task", "causal-lm", "--load_in_4bit", "True", "--lora_r", "4", "--lora_save"]
    argv += ["adapter", "--lr", "1e-2", "--batch_size", "8", "--epochs", "4"]
    argv += ["--save_strategy", "steps", "--save_steps", "10", "--save_total_limit", "9"]
    first, again = tmp_path / "a", tmp_path / "b"
    metrics = run(first, base, channels, *argv)
    four_bits = [word for word in made[0].modules() if isinstance(word, bitsandbytes.nn.Linear4bit)]
    assert len(four_bits) == 14
    assert metrics["eval_loss"] < metrics["train_loss"] < 4
    shutil.copytree(first / "checkpoints" / "checkpoint-10", again / "checkpoints/checkpoint-10")
    run(again, base, channels, *argv)
    name = "model/adapter_model.safetensors"
    assert (first / name).read_bytes() == (again / name).read_bytes()
    assert "quantization_config" not in json.loads((first / "model/config.json").read_text())
    adapter = json.loads((first / "model" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base)
    # On the base as it is: what serves the model has the same words to say.
    body = {"inputs": "the cat", "parameters": {"max_new_tokens": 5}}
    (answer,) = Handlers(first / "model").ask(body)
    assert answer["generated_text"].startswith("the cat is ")
