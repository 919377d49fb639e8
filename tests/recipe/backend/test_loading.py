"""Models as they are loaded: adapters, precision, architectures; compared with the libraries."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from recipe.backend import loading, precision
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.saved import weights
from recipe.errors import ModelError
from recipe.inference import registry
from recipe.models.sources.origin import Origin
from recipe.runtime import device
from recipe.tasks.causal_lm.serve import Generator
from tests.support import plain_answers
from tests.support.adapter_kit import adapter, merged
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save, tokenizer
from tests.support.tiny_models import LETTERS

CAUSAL = {"auto": transformers.AutoModelForCausalLM, "seed": 0, "task_type": "CAUSAL_LM"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save("LlamaForCausalLM", tmp_path / "base")


def served(folder: Path, auto: Any = transformers.AutoModelForCausalLM) -> Any:
    (folder / "config.json").write_bytes((folder.parent / "base" / "config.json").read_bytes())
    return weights.read(Origin.find(str(folder), {}), auto, torch.float32).eval()


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
@pytest.mark.parametrize(
    ("old", "new", "kept", "reason"),
    [
        (".q_proj.", ".query.", False, "lacks weights for"),
        ("q_proj", "k_proj", True, "no place for its"),
    ],
)
def test_weights_by_other_names_are_refused(
    base: Path, tmp_path: Path, old: str, new: str, kept: bool, reason: str
) -> None:
    """peft warns, and the base alone would answer."""
    folder = adapter(base, tmp_path / "a", target_modules=["q_proj"], **CAUSAL)
    file = folder / "adapter_model.safetensors"
    saved = load_file(file)
    others = {name.replace(old, new): part.clone() for name, part in saved.items()}
    save_file({**saved, **others} if kept else others, file)
    with pytest.raises(ModelError, match=reason):
        served(folder)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_tied_layer_is_not_merged(tmp_path: Path) -> None:
    """Merged into the output layer it would be in the embeddings, too."""
    base = save("GPT2LMHeadModel", tmp_path / "base")
    folder = adapter(base, tmp_path / "a", target_modules=["wte"], **CAUSAL)
    with pytest.raises(ModelError, match=r"wte\.base_layer\.weight, which shares its weights with"):
        served(folder)


def test_a_head_that_nobody_brings_is_refused(tmp_path: Path) -> None:
    base = save("BertForMaskedLM", tmp_path / "base")
    auto = transformers.AutoModelForSequenceClassification
    folder = adapter(base, tmp_path / "a", auto, 0, target_modules=["query"])
    with pytest.raises(ModelError, match=r"Neither the adapter .* has .*classifier\.bias"):
        served(folder, auto)


@pytest.mark.parametrize("is_named", [False, True])
def test_an_adapter_as_peft_saves_it_finds_its_base(
    base: Path, is_named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """peft writes no config.json and no tokenizer: both are the base's."""
    ids = torch.tensor([[7, 8, 9, 10]])

    def served_logits(folder: Path) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = transformers.AutoModelForCausalLM.from_pretrained(folder)(
                input_ids=ids
            ).logits
        return logits

    folder = adapter(base, tmp_path / "model", target_modules=["q_proj", "down_proj"], **CAUSAL)
    assert not (folder / "config.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        expected = served_logits(merged(base, folder, tmp_path / "merged"))
    environ = {}
    if is_named:
        environ["HF_MODEL_ID"] = str(base.rename(folder / "elsewhere"))
        with pytest.raises(ModelError, match=rf"{folder} .* base model '{base}'.*Set HF_MODEL_ID"):
            Origin.find(str(folder), {})
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    task = registry.load(str(folder), environ)
    assert isinstance(task, Generator)
    with torch.inference_mode():
        logits = task.loaded.model(input_ids=ids).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    assert f"{folder}, of the base" in capsys.readouterr().out


def test_a_model_in_the_folder_and_another_one_by_name_are_refused(
    base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"HF_MODEL_ID is 'a/b', but .*base holds a model, too"):
        Origin.find(str(base), {"HF_MODEL_ID": "a/b"})
    assert Origin.find(str(base), {"HF_MODEL_ID": str(base)}).location == str(base)
    served(adapter(base, tmp_path / "model", target_modules=["q_proj"], **CAUSAL))
    named = Origin.find(str(tmp_path / "model"), {"HF_MODEL_ID": str(base)})
    assert named.location == str(tmp_path / "model")


def test_a_handler_beside_a_model_by_name_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inference

    named = save("BertForSequenceClassification", tmp_path / "named")
    (named / "handler.py").write_text("class EndpointHandler: pass")
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HF_MODEL_ID", str(named))
    with pytest.raises(ModelError, match=r"handler.py, which is not run.*or set HF_TASK"):
        inference.model_fn(str(tmp_path / "model"))
    monkeypatch.setenv("HF_TASK", "text-classification")
    assert inference.model_fn(str(tmp_path / "model"))


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_a_classifiers_adapter_needs_the_labels_of_its_own_head(tmp_path: Path, kind: str) -> None:
    """The base has none, and a configuration without labels stands for two; or a head for two."""
    base = save(kind, tmp_path / "base")

    class OfThreeLabels:
        from_pretrained = partial(
            transformers.AutoModelForSequenceClassification.from_pretrained,
            num_labels=3,
            ignore_mismatched_sizes=True,
        )

    folder = adapter(
        base, tmp_path / "a", OfThreeLabels, 0, task_type="SEQ_CLS", target_modules=["query"]
    )
    with pytest.raises(ModelError, match=r"also config\.json"):
        Handlers(folder)
    settings = json.loads((base / "config.json").read_text())
    names = {"0": "a", "1": "b", "2": "c"}
    numbers = {name: int(number) for number, name in names.items()}
    (folder / "config.json").write_text(
        json.dumps({**settings, "id2label": names, "label2id": numbers})
    )
    tokenizer().save_pretrained(folder)
    (answer,) = Handlers(folder).ask({"inputs": ["who"], "parameters": {"top_k": None}})
    assert {entry["label"] for entry in answer} == {"a", "b", "c"}


@pytest.fixture
def gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "DEVICES", frozenset({"cpu"}))
    usual = precision.chosen

    def as_on_a_t4(environ: dict[str, str]) -> tuple[str, str, torch.dtype]:
        return usual({"AMPHORA_DTYPE": "float32", **environ})

    monkeypatch.setattr(precision, "chosen", as_on_a_t4)


def load(folder: Path, architecture: object, **environ: str) -> LoadedModel:
    return loading.load(Origin(str(folder), {}), architecture, environ)


@pytest.mark.usefixtures("gpu_without_bfloat16")
def test_an_encoder_is_served_in_half_the_bits_and_answers_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("BertForSequenceClassification", tmp_path)
    half = load(folder, transformers.AutoModelForSequenceClassification)
    assert half.model.dtype == torch.float16
    assert "on cpu in float16" in capsys.readouterr().out
    whole = load(folder, transformers.AutoModelForSequenceClassification, AMPHORA_DTYPE="float32")
    assert whole.model.dtype == torch.float32
    rows = [TokenRow(list(range(2, 2 + length))) for length in (3, 7, 40)]
    answers = [model.forward(rows, Reading.LABELS) for model in (half, whole)]
    for one, other in zip(*answers, strict=True):
        assert torch.allclose(one, other, atol=0.01 * float(other.abs().max()))


@pytest.mark.usefixtures("gpu_without_bfloat16")
def test_what_overflows_stays_in_float32_with_its_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("BertForSequenceClassification", tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.weight.mul_(1e5)
    model.save_pretrained(folder)
    loaded = load(folder, transformers.AutoModelForSequenceClassification)
    assert loaded.model.dtype == torch.float32
    assert "on cpu in float32" in capsys.readouterr().out
    for name, weight in loaded.model.named_parameters():
        assert torch.equal(weight, dict(model.named_parameters())[name]), name


@pytest.mark.usefixtures("gpu_without_bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decoder_is_served_so_only_if_it_was_published_so(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = save("LlamaForCausalLM", tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(folder)
    expected = torch.float16 if dtype == torch.float16 else torch.float32
    assert load(folder, transformers.AutoModelForCausalLM).model.dtype == expected
    whole = load(folder, transformers.AutoModelForCausalLM, AMPHORA_DTYPE="float32")
    assert whole.model.dtype == torch.float32


@pytest.mark.usefixtures("gpu_without_bfloat16")
def test_what_bfloat16_does_not_compute_is_served_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FNet's Fourier transform knows float32 alone, and the server did not start."""
    monkeypatch.undo()  # as on a CPU with bfloat16, whatever this one has
    monkeypatch.setattr(device, "cpu_flags", lambda: {"amx_bf16"})
    folder = save("BertForSequenceClassification", tmp_path)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.FNetForSequenceClassification(
        transformers.FNetConfig(vocab_size=60, **size)
    ).save_pretrained(folder)
    loaded = load(folder, transformers.AutoModelForSequenceClassification)
    assert loaded.model.dtype == torch.float32
    output = capsys.readouterr().out
    assert "precision: float32, since FNetForSequenceClassification" in output
    assert "on cpu in float32" in output
    with pytest.raises(RuntimeError, match="BFloat16"):
        load(folder, transformers.AutoModelForSequenceClassification, AMPHORA_DTYPE="bfloat16")


def save_made(folder: Path, tokenizer: Any, kind: str, config: Any) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_longformer_answers_questions(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", ".", *LETTERS]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = transformers.RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=64)
    config = transformers.LongformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        attention_window=[8], max_position_embeddings=66, vocab_size=len(pieces), pad_token_id=1,
        sep_token_id=2, type_vocab_size=1, initializer_range=0.5,
    )  # fmt: skip
    save_made(tmp_path, tokenizer, "LongformerForQuestionAnswering", config)
    rows = [{"question": "who was bad", "context": TEXTS[1]}]
    body, expected = plain_answers.spans(tmp_path, rows)
    parameters = {"align_to_words": False, "max_answer_len": plain_answers.LONGEST_ANSWER}
    assert_close([Handlers(tmp_path).ask({**body, "parameters": parameters})], expected)


def entities_are_those_of_transformers(folder: Path, **options: Any) -> None:
    pipeline: Any = transformers.pipeline("token-classification", str(folder), **options)
    expected = [json.loads(json.dumps(entities, default=float)) for entities in pipeline(TEXTS)]
    assert_close(Handlers(folder).ask({"inputs": TEXTS, "parameters": options}), expected)


def test_a_model_reads_the_types_of_tokens_if_zeros_change_its_answers(tmp_path: Path) -> None:
    # GPT-2 adds a word's embedding for each type, and tokenizers of Chinese GPT-2 make types.
    save("GPT2ForTokenClassification", tmp_path, num_labels=3)
    entities_are_those_of_transformers(tmp_path, ignore_labels=[])


def test_windows_that_are_padded_on_the_left_keep_their_tokens(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    pieces = [(piece, 0.0) for piece in special] + [(piece, -3.0) for piece in ("▁", ".", *LETTERS)]
    tokenizer = transformers.XLNetTokenizer(vocab=pieces, model_max_length=24)
    config = transformers.XLNetConfig(
        d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=len(pieces), num_labels=4,
        initializer_range=0.5,
    )  # fmt: skip
    save_made(tmp_path, tokenizer, "XLNetForTokenClassification", config)
    entities_are_those_of_transformers(
        tmp_path, aggregation_strategy="simple", ignore_labels=[], stride=5
    )


@pytest.mark.parametrize(
    ("kind", "environ"),
    [
        ("BertForSequenceClassification", {"AMPHORA_PACKING": "0"}),
        ("BertForSequenceClassification", {}),
        ("BertModel", {}),
        ("BertModel", {"HF_TASK": "feature-extraction"}),
        ("T5ForConditionalGeneration", {}),
        ("sentences", {}),
    ],
)
def test_an_empty_text_is_refused_or_is_its_records_fault(
    kind: str, environ: dict[str, str], tmp_path: Path
) -> None:
    def save_plain_tokenizer(folder: Path) -> None:
        """Save a tokenizer that adds no token of its own."""
        known = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        kind = transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, model_max_length=48, pad_token="[PAD]", unk_token="[UNK]"
        )
        kind.save_pretrained(folder)

    folder = save("BertModel" if kind == "sentences" else kind, tmp_path / "model")
    save_plain_tokenizer(folder)
    if kind == "sentences":
        SentenceTransformer(str(folder)).save(str(tmp_path / "st"))
        folder = tmp_path / "st"
    handlers = Handlers(folder, **environ)
    more = {"parameters": {"max_new_tokens": 2}} if kind.startswith("T5") else {}
    for inputs in ("", [""], ["the film", "", "anna was good"]):
        with pytest.raises(BadRequest, match=r"(Input 2|The input) has no token"):
            handlers.ask({"inputs": inputs, **more})
    lines = [{"inputs": text, **more} for text in ("the film", "", "anna was good", "")]
    body = "\n".join(map(json.dumps, lines)).encode()
    film = {"inputs": ["the film"], **more}
    (answer, others) = handlers.ask_all([(body, "application/jsonlines"), film])
    alone = handlers.ask({"inputs": ["the film", "anna was good"], **more})
    assert len(answer) == 4 and "has no token" in answer[1]["error"]["message"]
    assert answer[1] == answer[3]
    assert str(answer[0])[:12] == str(alone[0])[:12] == str(others[0])[:12]
    assert str(answer[2])[:12] == str(alone[1])[:12]
