"""Models that a task cannot start from are refused with the reason, before anything is trained."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    ViTModel,
)

from recipe.compat import new_weights
from recipe.data.labels import Labels
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import encoder_decoders, pretrained
from recipe.tasks.masked_lm import task as masked_models
from recipe.tasks.sentence_embedding import task as sentence_embedding
from recipe.training import preflight
from tests.support import causal_kit, tasks
from tests.support.jobs import folders_of

Load = Callable[[pretrained.Source, Hyperparameters], Any]


def without(folder: Path, name: str) -> Path:
    """The model without one of its weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def refusal(load: Load, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load(pretrained.Source(name=str(folder), is_local=True), Hyperparameters())
    return str(refused.value)


def test_an_encoder_goes_on_with_no_text(tiny_model: Path) -> None:
    assert "is of type bert, an encoder" in refusal(pretrained.load_causal, tiny_model)


def test_a_decoder_without_its_head(tmp_path: Path) -> None:
    folder = without(causal_kit.make_model("llama", tmp_path / "model"), "lm_head.weight")
    refusal_text = refusal(pretrained.load_causal, folder)
    assert "lacks 1 weights of a causal language model: lm_head.weight." in refusal_text


def test_an_encoder_with_a_decoder_without_a_weight(tmp_path: Path) -> None:
    model = tasks.JOBS["summarization"].model(tmp_path / "model", 0.0)
    name = next(name for name in load_file(model / "model.safetensors") if "decoder" in name)
    refusal_text = refusal(encoder_decoders.load, without(model, name))
    assert "lacks 1 weights of its own layers" in refusal_text and name in refusal_text


@pytest.mark.parametrize("name", ["text-classification", "summarization"])
def test_tokens_without_embeddings_are_refused_before_training(tmp_path: Path, name: str) -> None:
    def add_tokens_without_embeddings(folder: Path) -> Path:
        """The model, its tokenizer with 3 tokens that it has no embeddings for."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<one>", "<two>", "<three>"])
        tokenizer.save_pretrained(folder)
        return folder

    data, (_, model, *arguments) = tasks.make(name, tmp_path)
    channels = {"train": data, "model": add_tokens_without_embeddings(Path(model))}
    *_, last = preflight.inspect(arguments, folders_of(tmp_path, channels), 1)
    assert " tokens, and the model " in last.detail, last


@pytest.mark.parametrize("kind", ["deberta", "xmod", "bert"])
def test_what_autocast_does_not_compute_is_refused(kind: str) -> None:
    config: Any = CONFIG_MAPPING[kind]
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"languages": ["en_XX"], "default_language": "en_XX"} if kind == "xmod" else {}
    if kind == "deberta":
        more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    auto: Any = AutoModelForSequenceClassification
    model = auto.from_config(config(vocab_size=20, intermediate_size=16, **size, **more))
    pretrained.check_precision(model, bf16=False, fp16=False)
    fails = contextlib.nullcontext() if kind == "bert" else pytest.raises(RuntimeError)
    with torch.autocast("cpu", dtype=torch.bfloat16), fails:  # as the model's own code has it
        model(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 1]]))
    if kind == "bert":
        pretrained.check_precision(model, bf16=True, fp16=False)
        return
    for name in ("bf16", "fp16"):
        with pytest.raises(HyperparameterError, match=f"Give {name}=False"):
            pretrained.check_precision(model, bf16=name == "bf16", fp16=name == "fp16")


def test_a_long_text_is_answered_alike_whatever_came_before(
    tmp_path: Path, tiny_model: Path
) -> None:
    """BigBird ends its sparse attention at the first short batch."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BigBirdConfig(vocab_size=20, intermediate_size=16, block_size=4, num_random_blocks=1,
                           **size)  # fmt: skip
    torch.manual_seed(0)
    made = BigBirdForSequenceClassification(config)
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.7)
    made.save_pretrained(folder)
    source = pretrained.Source(name=str(folder), is_local=True)
    auto: Any = AutoModelForSequenceClassification
    model: Any = pretrained.read(auto, source, Hyperparameters())[0].eval()
    plain: Any = auto.from_pretrained(folder).eval()
    long, short = (torch.arange(length)[None] * 7 % 15 + 5 for length in (64, 8))
    with torch.inference_mode():
        before, sparse = model(input_ids=long).logits, plain(input_ids=long).logits
        assert not torch.allclose(before, sparse, atol=1e-3)
        model(input_ids=short)
        plain(input_ids=short)
        assert torch.equal(model(input_ids=long).logits, before)
        torch.testing.assert_close(plain(input_ids=long).logits, before)
    assert model.config.attention_type == "original_full"


TO_LABELS: dict[str, Load] = {
    "text-classification": lambda *args: pretrained.load(args[0], Labels(("a", "b")), args[1]),
    "sentence-embedding": sentence_embedding.load,
    "masked-lm": masked_models.load_model,
}


@pytest.mark.parametrize("load", TO_LABELS.values(), ids=TO_LABELS)
def test_layers_that_the_files_lack_are_not_drawn_at_random(
    load: Load, tmp_path: Path, tiny_model: Path
) -> None:
    def cut_positions(folder: Path) -> Path:
        """The model, of whose positions half are in its file."""
        file = folder / "model.safetensors"
        weights = load_file(file)
        name = next(name for name in weights if name.endswith("position_embeddings.weight"))
        weights[name] = weights[name][:32].contiguous()
        save_file(weights, file, metadata={"format": "pt"})
        return folder

    source = pretrained.Source(name=str(tiny_model), is_local=True)
    load(source, Hyperparameters())
    folder = Path(shutil.copytree(tiny_model, tmp_path / "lacking"))
    name = "encoder.layer.1.output.dense.weight"
    assert "lacks 1 weights of its own layers" in refusal(load, without(folder, name))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "shorter"))
    refusal_text = refusal(load, cut_positions(folder))
    assert "position_embeddings.weight" in refusal_text or "contradicts the shapes" in refusal_text
    folder = Path(shutil.copytree(tiny_model, tmp_path / "unpooled"))
    load(pretrained.Source(name=str(without(folder, "pooler.dense.weight")), is_local=True),
         Hyperparameters())  # fmt: skip


def test_what_only_pretraining_uses_may_be_new(tmp_path: Path) -> None:
    model = tasks.JOBS["image-classification"].model(tmp_path / "model", 0.0)
    config = json.loads((model / "config.json").read_text())
    kind: Any = CONFIG_MAPPING[config["model_type"]].from_pretrained(model)
    whole = ViTModel(kind, use_mask_token=True)
    names = [name for name, _ in whole.named_parameters() if "mask_token" in name]
    assert names == ["embeddings.mask_token"]
    new_weights.check_layers("here", whole, names)
    with pytest.raises(ModelError, match="lacks 1 weights of its own layers"):
        new_weights.check_layers("here", whole, ["embeddings.cls_token"])


def test_a_decoder_whose_layers_another_head_calls_otherwise(tmp_path: Path) -> None:
    """transformers' LlamaForQuestionAnswering reads none of what LlamaForCausalLM has saved."""
    folder = causal_kit.make_model("llama", tmp_path / "model")

    def load(source: pretrained.Source, hyperparameters: Hyperparameters) -> Any:
        options = {"adapters": "QUESTION_ANS", "what": "answers"}
        return pretrained.load_head(
            AutoModelForQuestionAnswering, source, hyperparameters, **options
        )

    refusal_text = refusal(load, folder)
    assert "without it: AutoModel" in refusal_text
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    model, _ = load(pretrained.Source(name=str(folder), is_local=True), Hyperparameters())
    expected = AutoModel.from_pretrained(folder).get_parameter("layers.0.mlp.up_proj.weight")
    assert torch.equal(model.get_parameter("transformer.layers.0.mlp.up_proj.weight"), expected)


@pytest.mark.parametrize("kind", ["fnet", "longformer", "ernie"])
def test_a_new_head_for_masked_tokens_holds_no_numbers_of_old_memory(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"attention_window": 4} if kind == "longformer" else {}
    config: Any = CONFIG_MAPPING[kind](vocab_size=80, intermediate_size=16, **size, **more)
    AutoModel.from_config(config).save_pretrained(folder)
    source = pretrained.Source(name=str(folder), is_local=True)
    model, _ = masked_models.load_model(source, Hyperparameters())
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert model.get_output_embeddings().bias.count_nonzero() == 0
