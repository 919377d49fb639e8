"""Models that a task cannot start from are refused with the reason, before anything is trained."""

import contextlib
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from recipe.arguments import parse
from recipe.compat import UNBOUNDED, new_weights, positions_of
from recipe.data.labels import Labels
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import encoder_decoders, lora, pretrained, quantized
from recipe.models.pretrained import longest_input
from recipe.models.sources.origin import Origin
from recipe.runtime.device import Device
from recipe.tasks.masked_lm import task as masked_models
from recipe.tasks.sentence_embedding import task as sentence_embedding
from recipe.tokenization import texts as tokens
from recipe.training import preflight
from tests.support import causal_kit, serving_kit, tasks
from tests.support.causal_kit import make_model
from tests.support.jobs import folders_of, run, write
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers

Load = Callable[[Origin, Hyperparameters], Any]


def without(folder: Path, name: str) -> Path:
    """The model without one of its weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def refusal(load: Load, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load(Origin(str(folder)), Hyperparameters())
    return str(refused.value)


def test_a_model_without_what_a_task_needs_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    assert "is of type bert, an encoder" in refusal(pretrained.load_causal, tiny_model)
    folder = without(causal_kit.make_model("llama", tmp_path / "decoder"), "lm_head.weight")
    words = "lacks 1 weights of a causal language model: lm_head.weight."
    assert words in refusal(pretrained.load_causal, folder)
    folder = tasks.JOBS["summarization"].model(tmp_path / "both", 0.0)
    name = next(name for name in load_file(folder / "model.safetensors") if "decoder" in name)
    message = refusal(encoder_decoders.load, without(folder, name))
    assert "lacks 1 weights of its own layers" in message and name in message


@pytest.mark.parametrize("name", ["text-classification", "summarization"])
def test_tokens_without_embeddings_are_refused_before_training(tmp_path: Path, name: str) -> None:
    data, (_, model, *arguments) = tasks.make(name, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    tokenizer.save_pretrained(model)
    channels = {"train": data, "model": Path(model)}
    *_, last = preflight.inspect(arguments, folders_of(tmp_path, channels), 1)
    assert " tokens, and the model " in last.detail, last


@pytest.mark.parametrize("kind", ["deberta", "xmod", "bert"])
def test_what_autocast_does_not_compute_is_refused(kind: str) -> None:
    config: Any = transformers.CONFIG_MAPPING[kind]
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"languages": ["en_XX"], "default_language": "en_XX"} if kind == "xmod" else {}
    if kind == "deberta":
        more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    auto: Any = transformers.AutoModelForSequenceClassification
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


def test_sparse_attention_that_a_short_batch_would_end_is_not_used(
    tmp_path: Path, tiny_model: Path
) -> None:
    """tests/recipe/tasks/test_sentences.py has what BigBird's would change."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BigBirdConfig(vocab_size=20, intermediate_size=16, **size)
    transformers.BigBirdForSequenceClassification(config).save_pretrained(folder)
    source = Origin(str(folder))
    auto: Any = transformers.AutoModelForSequenceClassification
    model: Any = pretrained.read(auto, source, Hyperparameters())[0]
    assert model.config.attention_type == "original_full"
    assert type(model.bert.encoder.layer[0].attention.self).__name__ == "BigBirdSelfAttention"


@pytest.mark.parametrize(
    "load",
    [
        lambda *args: pretrained.load(args[0], Labels(("a", "b")), args[1]),
        sentence_embedding.load,
        masked_models.load_model,
    ],
)
def test_layers_that_the_files_lack_are_not_drawn_at_random(
    load: Load, tmp_path: Path, tiny_model: Path
) -> None:
    source = Origin(str(tiny_model))
    load(source, Hyperparameters())
    folder = Path(shutil.copytree(tiny_model, tmp_path / "lacking"))
    name = "encoder.layer.1.output.dense.weight"
    assert "lacks 1 weights of its own layers" in refusal(load, without(folder, name))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "shorter"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("position_embeddings.weight"))
    weights[name] = weights[name][:32].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refusal_text = refusal(load, folder)
    assert "position_embeddings.weight" in refusal_text or "contradicts the shapes" in refusal_text
    folder = Path(shutil.copytree(tiny_model, tmp_path / "unpooled"))
    load(Origin(str(without(folder, "pooler.dense.weight"))),
         Hyperparameters())  # fmt: skip


def test_what_only_pretraining_uses_may_be_new(tmp_path: Path) -> None:
    model = tasks.JOBS["image-classification"].model(tmp_path / "model", 0.0)
    config = json.loads((model / "config.json").read_text())
    kind: Any = transformers.CONFIG_MAPPING[config["model_type"]].from_pretrained(model)
    whole = transformers.ViTModel(kind, use_mask_token=True)
    names = [name for name, _ in whole.named_parameters() if "mask_token" in name]
    assert names == ["embeddings.mask_token"]
    new_weights.check_layers("here", whole, names)
    with pytest.raises(ModelError, match="lacks 1 weights of its own layers"):
        new_weights.check_layers("here", whole, ["embeddings.cls_token"])


def test_a_decoder_whose_layers_another_head_calls_otherwise(tmp_path: Path) -> None:
    """transformers' LlamaForQuestionAnswering reads none of what LlamaForCausalLM has saved."""
    folder = causal_kit.make_model("llama", tmp_path / "model")

    def load(source: Origin, hyperparameters: Hyperparameters) -> Any:
        architecture = transformers.AutoModelForQuestionAnswering
        return pretrained.load_head(architecture, source, hyperparameters, "answers")

    refusal_text = refusal(load, folder)
    assert "without it: AutoModel" in refusal_text
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    model, _ = load(Origin(str(folder)), Hyperparameters())
    expected = transformers.AutoModel.from_pretrained(folder).get_parameter(
        "layers.0.mlp.up_proj.weight"
    )
    assert torch.equal(model.get_parameter("transformer.layers.0.mlp.up_proj.weight"), expected)


@pytest.mark.parametrize("kind", ["fnet", "longformer", "ernie"])
def test_a_new_head_for_masked_tokens_holds_no_numbers_of_old_memory(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"attention_window": 4} if kind == "longformer" else {}
    config: Any = transformers.CONFIG_MAPPING[kind](
        vocab_size=80, intermediate_size=16, **size, **more
    )
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    source = Origin(str(folder))
    model, _ = masked_models.load_model(source, Hyperparameters())
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert model.get_output_embeddings().bias.count_nonzero() == 0


LABELS = Labels(("neg", "pos"))


@pytest.mark.parametrize("requested", [None, "model", "{path}"])
def test_a_local_model_is_found(tiny_model: Path, requested: str | None) -> None:
    requested = requested and requested.format(path=tiny_model)
    source = pretrained.find(requested, {"model": tiny_model})
    assert (source.location, source.is_local) == (str(tiny_model), True)


def test_a_model_by_name_is_the_hubs_or_refused_by_its_name(tmp_path: Path) -> None:
    assert pretrained.find("distilbert/distilbert-base-uncased", {}).is_local is False
    with pytest.raises(HyperparameterError, match="model_name_or_path is not given"):
        pretrained.find(None, {"train": tmp_path})
    with pytest.raises(ModelError, match=r"'/no/such/folder'.*no such folder"):
        pretrained.find("/no/such/folder", {})
    with pytest.raises(ModelError, match=r"without config\.json"):
        pretrained.find(str(tmp_path), {})
    with pytest.raises(ModelError, match=r"Channel train .*holds no model"):
        pretrained.find("train", {"train": tmp_path})
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"pointers of Git LFS .*: config.json.*git lfs pull"):
        pretrained.find(str(tmp_path), {})


def test_without_a_network_the_hub_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for load in (
        lambda: pretrained.load(Origin("a/b"), LABELS, Hyperparameters()),
        lambda: sentence_embedding.load(Origin("a/b"), Hyperparameters()),
        lambda: Origin.find("/no/such/folder", {"HF_MODEL_ID": "a/b"}).config(),
    ):
        with refused(
            ModelError, "127.0.0.1 cannot be reached", "channel called model", "HF_MODEL_ID"
        ):
            load()
    assert waits == [0, 1, 2]


def test_a_damaged_model_is_named(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    source = pretrained.find(str(tmp_path), {})
    with pytest.raises(ModelError, match=r"cannot be loaded.*model\.safetensors"):
        pretrained.load(source, LABELS, Hyperparameters())


def test_a_model_is_loaded_in_float32_with_a_head_for_the_labels(
    tmp_path: Path, tiny_model: Path
) -> None:
    transformers.AutoModel.from_pretrained(tiny_model).to(torch.bfloat16).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    model, _ = pretrained.load(pretrained.find(str(tmp_path), {}), LABELS, Hyperparameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.id2label == {0: "neg", 1: "pos"}
    three = Labels(("a", "b", "c"))
    model.save_pretrained(tmp_path)
    model, _ = pretrained.load(pretrained.find(str(tmp_path), {}), three, Hyperparameters())
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.classifier.out_features == 3


def test_data_that_came_tokenized_is_cut(tiny_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    split = datasets.Dataset.from_dict({"input_ids": [[2, 0, 6, 7, 3], [2, 3]], "label": [0, 1]})
    cut = tokens.samples(split, tokenizer, 4)
    assert cut.token_ids.tolist() == [2, 0, 6, 3, 2, 3]
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
    source = Origin(str(folder))
    named = {"task": "causal-lm", "lora_r": 2, "lora_target_modules": "q_proj, lm_head"}
    with pytest.raises(HyperparameterError, match=r"lora_target_modules.*lm_head.*lora_save=adap"):
        pretrained.load_causal(source, Hyperparameters(**named))
    kept, _ = pretrained.load_causal(source, Hyperparameters(**named, lora_save="adapter"))
    assert "lm_head" in str(kept.peft_config["default"].target_modules)
    with pytest.raises(HyperparameterError, match=r"names 'v_prj', .* Did you mean v_proj"):
        pretrained.load_causal(
            source, Hyperparameters(**{**named, "lora_target_modules": "q_proj,v_prj"})
        )
    pretrained.load_causal(source, Hyperparameters(**{**named, "lora_target_modules": "q_proj"}))


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (encoder_decoders.load, "T5ForConditionalGeneration"),
        (masked_models.load_model, "BertForMaskedLM"),
        (pretrained.load_causal, "LlamaForCausalLM"),
        (sentence_embedding.load, "BertModel"),
    ],
)
def test_adapters_are_all_that_is_trained_of_a_model_with_its_head(
    load: Any, kind: str, tmp_path: Path
) -> None:
    source = Origin(str(serving_kit.save(kind, tmp_path)))
    model, *_ = load(source, Hyperparameters(lora_r=2))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
@pytest.mark.parametrize("setting", ["use_rslora", "use_dora"])
def test_variants_of_lora_are_those_of_peft(setting: str, tmp_path: Path) -> None:
    folder = serving_kit.save("LlamaForCausalLM", tmp_path)
    given: Any = {setting: True}
    with pytest.raises(HyperparameterError, match=f"{setting} has no effect"):
        Hyperparameters(**given)
    ours, _ = pretrained.load_causal(Origin(str(folder)), Hyperparameters(lora_r=4, **given))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", **given
    )
    plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)
    with torch.no_grad():
        for (name, weight), (_, same) in zip(
            ours.named_parameters(), plain.named_parameters(), strict=True
        ):
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape))
                same.copy_(weight)
        ids = torch.arange(8)[None]
        expected = plain.eval()(ids).logits
        torch.testing.assert_close(ours.eval()(ids).logits, expected)
        lora.save(ours, None, tmp_path / "merged", Hyperparameters(lora_r=4, **given))
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)


def limited(longest: int) -> Any:
    return SimpleNamespace(model_max_length=longest)


@pytest.mark.parametrize(
    ("model", "config", "padding"),
    [
        (transformers.BertModel, transformers.BertConfig, 3),
        (transformers.RobertaModel, transformers.RobertaConfig, 0),
        (transformers.RobertaModel, transformers.RobertaConfig, 3),
        (transformers.MPNetModel, transformers.MPNetConfig, 1),
    ],
)
def test_the_longest_text_is_read_and_a_longer_one_is_not(
    model: type, config: type, padding: int
) -> None:
    size = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "max_position_embeddings": 12}  # fmt: skip
    made = model(config(**size, pad_token_id=padding)).eval()
    most = positions_of(made)
    assert most == (12 if model is transformers.BertModel else 12 - padding - 1)
    # A tokenizer that was saved without a limit of its own says 1e30.
    assert longest_input(made, limited(10**30), None) == most
    with torch.inference_mode():
        made(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            made(input_ids=torch.full((1, most + 1), 5))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (
            transformers.XLNetModel,
            transformers.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8),
        ),
        (
            transformers.T5EncoderModel,
            transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, num_layers=1, num_heads=2),
        ),
    ],
)
def test_models_without_positions_read_what_the_tokenizer_lets_through(
    model: type, config: Any
) -> None:
    made = model(config).eval()
    assert positions_of(made) == UNBOUNDED
    assert longest_input(made, limited(10**30), None) == 512
    assert longest_input(made, limited(10**30), 700) == 700
    with pytest.raises(HyperparameterError, match="the model takes 600 tokens"):
        longest_input(made, limited(600), 700)
    with torch.inference_mode():
        assert made(input_ids=torch.full((1, 700), 5))[0].shape == (1, 700, 8)


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
    on = Device(kind=kind, bf16=True, reason="told", processes=1, threads=None)
    with pytest.raises(HyperparameterError, match=words):
        quantized.check(on, is_sharded, is_compiled)


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
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=3,
    )  # fmt: skip
    hyperparameters = parse(["--lora_r", "4"])
    model = lora.wrap(transformers.LlamaForCausalLM(config), hyperparameters, "CAUSAL_LM")
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
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(base)
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
