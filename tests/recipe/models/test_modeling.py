"""Which model is taken, how texts become token ids for it, and how those become batches."""

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
    XLNetModel,
)

from recipe.compat import UNBOUNDED, positions_of
from recipe.data.labels import Labels
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import encoder_decoders, pretrained
from recipe.models.pretrained import longest_input
from recipe.tasks.masked_lm import task as masked_lm
from recipe.tasks.sentence_embedding import task as sentence_embedding
from recipe.tokenization import texts as tokens
from tests.support import serving_kit
from tests.support.refusals import refused

LABELS = Labels(("neg", "pos"))


@pytest.mark.parametrize("requested", [None, "model", "{path}"])
def test_a_local_model_is_found(tiny_model: Path, requested: str | None) -> None:
    requested = requested and requested.format(path=tiny_model)
    source = pretrained.find(requested, {"model": tiny_model})
    assert (source.name, source.is_local) == (str(tiny_model), True)


def test_a_name_on_the_hub_is_left_to_it() -> None:
    assert pretrained.find("distilbert/distilbert-base-uncased", {}).is_local is False


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError, match="model_name_or_path is not given"):
        pretrained.find(None, {"train": tmp_path})
    with pytest.raises(ModelError, match=r"'/no/such/folder'.*no such folder"):
        pretrained.find("/no/such/folder", {})
    with pytest.raises(ModelError, match=r"without config\.json"):
        pretrained.find(str(tmp_path), {})
    with pytest.raises(ModelError, match=r"Channel train .*holds no model"):
        pretrained.find("train", {"train": tmp_path})


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_no_model_to_train(tmp_path: Path, has_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    if has_config:  # as lora_save=adapter writes it
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with refused(ModelError, "is a LoRA adapter", "lora_save=merged", "merge_and_unload"):
        pretrained.find(str(tmp_path), {})


def test_a_damaged_model_is_named(tmp_path: Path, tiny_model: Path) -> None:
    for entry in tiny_model.iterdir():
        (tmp_path / entry.name).write_bytes(entry.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    source = pretrained.find(str(tmp_path), {})
    with pytest.raises(ModelError, match=r"cannot be loaded.*model\.safetensors"):
        pretrained.load(source, LABELS, Hyperparameters())


def test_a_model_is_loaded_in_float32_with_a_head_for_the_labels(
    tmp_path: Path, tiny_model: Path
) -> None:
    AutoModel.from_pretrained(tiny_model).to(torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    model, _ = pretrained.load(pretrained.find(str(tmp_path), {}), LABELS, Hyperparameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.id2label == {0: "neg", 1: "pos"}
    three = Labels(("a", "b", "c"))
    model.save_pretrained(tmp_path)
    model, _ = pretrained.load(pretrained.find(str(tmp_path), {}), three, Hyperparameters())
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.classifier.out_features == 3


def test_data_that_came_tokenised_is_cut(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    split = datasets.Dataset.from_dict({"input_ids": [[2, 5, 6, 7, 3], [2, 3]], "label": [0, 1]})
    cut = tokens.samples(split, tokenizer, 4)
    assert cut.token_ids.tolist() == [2, 5, 6, 3, 2, 3]
    assert cut.starts.tolist() == [0, 4, 6]


@pytest.mark.parametrize("what", ["outside", "absolute", "bomb", "link", "missing link"])
def test_an_archive_made_up_to_harm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {"outside": "../evil", "absolute": str(tmp_path / "evil")}
    member = tarfile.TarInfo(names.get(what, "weights"))
    if what == "bomb":
        member.size = 2**60
    elif what == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "."
    elif what == "missing link":
        member.type, member.linkname = tarfile.LNKTYPE, "nowhere"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.tar.gz").write_bytes(member.tobuf() + bytes(1024))
    with pytest.raises(ModelError, match="cannot be unpacked"):
        pretrained.find("model", {"model": tmp_path / "model"})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_an_adapter_of_tied_weights_is_not_merged(tmp_path: Path) -> None:
    """Merged into the output layer it would be in the embeddings, too."""
    folder = serving_kit.save("LlamaForCausalLM", tmp_path / "tied", tie_word_embeddings=True)
    source = pretrained.Source(name=str(folder), is_local=True)
    named = {"task": "causal-lm", "lora_r": 2, "lora_target_modules": "q_proj, lm_head"}
    with pytest.raises(HyperparameterError, match=r"lora_target_modules.*lm_head.*lora_save=adap"):
        pretrained.load_causal(source, Hyperparameters(**named))
    kept, _ = pretrained.load_causal(source, Hyperparameters(**named, lora_save="adapter"))
    assert "lm_head" in str(kept.peft_config["default"].target_modules)
    with pytest.raises(HyperparameterError, match=r"no layer 'v_prj'. Did you mean v_proj"):
        pretrained.load_causal(
            source, Hyperparameters(**{**named, "lora_target_modules": "q_proj,v_prj"})
        )
    pretrained.load_causal(source, Hyperparameters(**{**named, "lora_target_modules": "q_proj"}))


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (encoder_decoders.load, "T5ForConditionalGeneration"),
        (masked_lm.load_model, "BertForMaskedLM"),
        (pretrained.load_causal, "LlamaForCausalLM"),
        (sentence_embedding.load, "BertModel"),
    ],
)
def test_adapters_are_all_that_is_trained_of_a_model_with_its_head(
    load: Any, kind: str, tmp_path: Path
) -> None:
    source = pretrained.Source(name=str(serving_kit.save(kind, tmp_path)), is_local=True)
    model, *_ = load(source, Hyperparameters(lora_r=2))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


def reader(longest: int) -> Any:
    return SimpleNamespace(model_max_length=longest)


@pytest.mark.parametrize(
    ("model", "config", "padding"),
    [
        (BertModel, BertConfig, 3),
        (RobertaModel, RobertaConfig, 0),
        (RobertaModel, RobertaConfig, 3),
        (MPNetModel, MPNetConfig, 1),
    ],
)
def test_the_longest_text_is_read_and_a_longer_one_is_not(
    model: type, config: type, padding: int
) -> None:
    size = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "max_position_embeddings": 12}  # fmt: skip
    made = model(config(**size, pad_token_id=padding)).eval()
    most = positions_of(made)
    assert most == (12 if model is BertModel else 12 - padding - 1)
    # A tokenizer that was saved without a limit of its own says 1e30.
    assert longest_input(made, reader(10**30), None) == most
    with torch.inference_mode():
        made(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            made(input_ids=torch.full((1, most + 1), 5))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (XLNetModel, XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)),
        (T5EncoderModel, T5Config(vocab_size=20, d_model=8, d_kv=4, num_layers=1, num_heads=2)),
    ],
)
def test_models_without_positions_read_what_the_tokenizer_lets_through(
    model: type, config: Any
) -> None:
    made = model(config).eval()
    assert positions_of(made) == UNBOUNDED
    assert longest_input(made, reader(10**30), None) == 512
    assert longest_input(made, reader(10**30), 700) == 700
    with pytest.raises(HyperparameterError, match="the model takes 600 tokens"):
        longest_input(made, reader(600), 700)
    with torch.inference_mode():
        assert made(input_ids=torch.full((1, 700), 5))[0].shape == (1, 700, 8)
