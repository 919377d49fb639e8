"""Adapters, frozen layers, new tokens and scaled positions, compared with peft and transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.nn import functional

from recipe.data.labels import Labels
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import lora, pretrained
from recipe.models.changes import adapters
from recipe.models.sources.origin import Origin
from tests.support.adapter_kit import adapter, merged
from tests.support.jobs import BY_GRADIENT, RATE, Job, write
from tests.support.refusals import refused
from tests.support.serving_kit import Handlers, save, tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`:UserWarning"),
]
CAUSAL: Any = {"task_type": "CAUSAL_LM", "auto": transformers.AutoModelForCausalLM}
CLASSES: Any = {
    "task_type": "SEQ_CLS", "auto": transformers.AutoModelForSequenceClassification
}  # fmt: skip
IDS = torch.tensor([[7, 8, 9, 10]])
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXTS = ("the film was good", "anna said paris was bad", "who was in paris", "good film again .")
ROWS = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(TEXTS)]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save("LlamaForCausalLM", tmp_path / "base")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        answer: torch.Tensor = model.eval()(input_ids=IDS).logits
    return answer


def test_an_adapter_is_trained_further_with_its_own_settings(llama: Path, tmp_path: Path) -> None:
    folder = adapter(
        llama, tmp_path / "a", seed=1, target_modules=["q_proj"], lora_alpha=32, **CAUSAL
    )
    source = pretrained.find(None, {"model": folder, "base_model": llama})
    assert (source.location, source.base) == (str(folder), str(llama))
    given = adapters.settle(Hyperparameters(task="causal-lm", lora_alpha=32, lora_r=4), source)
    assert (given.lora_r, given.lora_alpha, given.lora_target_modules) == (4, 32, "q_proj")
    model, _ = pretrained.load_causal(source, given)
    plain = peft.PeftModel.from_pretrained(CAUSAL["auto"].from_pretrained(llama), folder)
    assert torch.equal(logits(model), logits(plain))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".q_proj.lora_" in name for name in trained)
    contradicting = Hyperparameters(task="causal-lm", lora_r=8, use_dora=True, added_tokens="<x>")
    with refused(
        HyperparameterError, "lora_r=8, and the adapter has 4", "use_dora=True", "added_tokens=<x>"
    ):
        adapters.settle(contradicting, source)
    lora.save(model, None, tmp_path / "again", Hyperparameters(lora_r=4, lora_save="adapter"))
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert again["base_model_name_or_path"] == str(llama)
    assert (again["r"], again["lora_alpha"], again["target_modules"]) == (4, 32, ["q_proj"])


def test_a_saved_adapter_names_its_layers_in_one_order(llama: Path, tmp_path: Path) -> None:
    for start in (None, "olora"):  # which is converted after saving
        given = Hyperparameters(lora_r=2, lora_save="adapter", init_lora_weights=start)
        model, _ = pretrained.load_causal(Origin(str(llama)), given)
        lora.save(model, None, tmp_path / str(start), given)
        saved = json.loads((tmp_path / str(start) / "adapter_config.json").read_text())
        assert len(saved["target_modules"]) > 5
        assert saved["target_modules"] == sorted(saved["target_modules"])


def test_an_adapter_is_merged_before_a_new_one_is_trained(llama: Path, tmp_path: Path) -> None:
    folder = adapter(llama, tmp_path / "a", seed=1, target_modules=["q_proj"], **CAUSAL)
    whole = CAUSAL["auto"].from_pretrained(merged(llama, folder, tmp_path / "merged"))
    source = pretrained.find(str(folder), {})
    for settings in ({}, {"lora_r": 2}):
        given = adapters.settle(Hyperparameters(merge_adapter=True, **settings), source)
        model, _ = pretrained.load_causal(source, given)
        assert torch.equal(logits(model), logits(whole))
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert len(trained) == (28 if settings else len([*whole.named_parameters()]))
    for settings, words in (
        ({"merge_adapter": True, "lora_r": 2, "lora_save": "adapter"}, "lora_save=merged"),
        ({"merge_adapter": True}, "lora_save=merged"),
        ({"merge_adapter": False}, "lora_save=adapter"),
    ):
        with pytest.raises(HyperparameterError, match=words):
            adapters.settle(
                Hyperparameters(**settings), source if "lora_r" in settings else Origin(str(llama))
            )


def test_an_adapter_of_another_base_or_without_one_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = adapter(llama, tmp_path / "a", seed=1, target_modules=["q_proj"], **CAUSAL)
    for other, words in (
        (save("LlamaForCausalLM", tmp_path / "wide", hidden_size=64), "size mismatch for"),
        (save("GPT2LMHeadModel", tmp_path / "gpt"), "Target modules {'q_proj'} not found"),
    ):
        source = pretrained.find("a", {"a": folder, "model": other})
        for merges in (None, True):
            with refused(ModelError, f"{folder} does not fit its base {other}", words):
                pretrained.load_causal(source, Hyperparameters(merge_adapter=merges))
    shutil.rmtree(llama)
    with refused(
        ModelError, f"the base model '{llama}'", "Give the base as the channel base_model"
    ):
        pretrained.find(str(folder), {})
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with refused(ModelError, "of type IA3", "merge_adapter=True"):
        adapters.settle(Hyperparameters(), Origin(str(folder), base="b"))


def test_the_head_of_an_adapter_is_kept_or_replaced_by_labels(tmp_path: Path) -> None:
    base = save("BertModel", tmp_path / "base")
    folder = adapter(base, tmp_path / "a", seed=1, target_modules=["query"], **CLASSES)
    source, two = Origin(str(folder), base=str(base)), Labels(("a", "b"))
    plain = peft.PeftModel.from_pretrained(CLASSES["auto"].from_pretrained(base), folder)
    for merges in (None, True):
        model, _ = pretrained.load(source, two, Hyperparameters(merge_adapter=merges))
        assert torch.allclose(logits(model), logits(plain), atol=1e-5)
    three = Labels(("a", "b", "c"))
    with refused(
        ModelError,
        "size mismatch for base_model.model.classifier",
        "merge_adapter=True for a new head",
    ):
        pretrained.load(source, three, Hyperparameters())
    model, _ = pretrained.load(source, three, Hyperparameters(merge_adapter=True, lora_r=2))
    assert logits(model).shape == (1, 3)
    shutil.copy(adapter(base, tmp_path / "b", transformers.AutoModel, 1, target_modules=["query"])
                / "adapter_model.safetensors", folder)  # fmt: skip
    with refused(ModelError, "does not fit its base"):
        pretrained.load(source, two, Hyperparameters())


def classes(tmp_path: Path) -> Path:
    """A classifier of two labels without dropout."""
    labels = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    return save("BertForSequenceClassification", tmp_path / "base", **labels, **STILL)


def job(base: Path, model: Path, task: str, *argv: str, **channels: Path) -> Job:
    """Train four rows in each step; the weights follow the gradients."""
    rows: list[dict[str, Any]] = ROWS
    if task == "causal-lm":
        rows = [{"input_ids": tokenizer()(text).input_ids} for text in TEXTS]
    channels = {"train": write(base / "train", rows), "model": model, **channels}
    usual = ("--task", task, "--batch_size", "4", "--eval_strategy", "no", "--use_cpu", "True")
    made = Job(base, channels, (*usual, "--bf16", "False", *BY_GRADIENT, *argv))
    made.run_here()
    return made


def losses(model: Any, task: str) -> torch.Tensor:
    """Return the mean loss of the four rows, each of which is computed alone."""
    total, count = torch.tensor(0.0), 0
    for row in ROWS:
        ids = torch.tensor(tokenizer()(row["text"]).input_ids)
        values = model(input_ids=ids[None]).logits[0]
        targets = torch.tensor("ab".index(row["label"]))
        if task == "causal-lm":
            values, targets = values[:-1], ids[1:]
        total = total + functional.cross_entropy(values, targets, reduction="sum")
        count += targets.numel()
    return total / count


def train_plainly(model: Any, task: str, steps: int) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, task).backward()
        optimizer.step()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.heavy
@pytest.mark.parametrize("task", ["causal-lm", "text-classification"])
def test_a_training_goes_on_as_without_an_end_and_as_in_peft(task: str, tmp_path: Path) -> None:
    base = save("LlamaForCausalLM", tmp_path / "base") if task == "causal-lm" else classes(tmp_path)
    auto = (CAUSAL if task == "causal-lm" else CLASSES)["auto"]
    lora_argv = ("--lora_r", "4", "--lora_save", "adapter")
    whole = job(tmp_path / "whole", base, task, *lora_argv, "--max_steps", "5")
    first = job(tmp_path / "first", base, task, *lora_argv, "--max_steps", "2")
    argv = ("--lora_save", "adapter", "--max_steps", "3")
    second = job(tmp_path / "second", first.model, task, *argv, base_model=base)
    assert apart(second.weights, first.weights) > 1e-4
    assert apart(second.weights, whole.weights) < 1e-7
    plain = peft.PeftModel.from_pretrained(
        auto.from_pretrained(base), first.model, is_trainable=True
    )
    train_plainly(plain, task, 3)
    assert apart(second.weights, peft.get_peft_model_state_dict(plain)) < 1e-6
    merged_model = job(tmp_path / "third", first.model, task, "--max_steps", "3", base_model=base)
    ours = auto.from_pretrained(merged_model.model)
    assert torch.allclose(logits(ours), logits(plain), atol=1e-5)


@pytest.mark.parametrize(
    "argv",
    [
        ["--lora_r", "4", "--init_lora_weights", "pissa", "--use_dora", "True"],
        ["--lora_r", "4", "--init_lora_weights", "olora", "--use_rslora", "True"],
        [
            "--lora_r",
            "4",
            "--modules_to_save",
            "embeddings,LayerNorm",
            "--added_tokens",
            "<a>,film",
        ],
        ["--lora_r", "4", "--added_tokens", "<a>,<b>"],
    ],
    ids=lambda argv: argv[3],
)
@pytest.mark.heavy
def test_a_saved_adapter_answers_alike_in_plain_peft(argv: list[str], tmp_path: Path) -> None:
    """The job has compared what it saved with the model in memory."""
    base = classes(tmp_path)
    argv = [*argv, "--lora_save", "adapter", "--max_steps", "2", "--lr", "0.2"]
    made = job(tmp_path / "job", base, "text-classification", *argv)
    reader = transformers.AutoTokenizer.from_pretrained(made.model)
    plain = CLASSES["auto"].from_pretrained(base)
    plain.resize_token_embeddings(len(reader))
    plain = peft.PeftModel.from_pretrained(plain, made.model).eval()
    text = "the film <a> was good <b>"
    with torch.inference_mode():
        scores = plain(**reader(text, return_tensors="pt")).logits.softmax(-1)[0]
    body = {"inputs": [text], "parameters": {"top_k": None}}
    served = {row["label"]: row["score"] for row in Handlers(made.model).ask(body)[0]}
    assert [served["a"], served["b"]] == pytest.approx(scores.tolist(), abs=1e-5)
    assert len(reader) == len(tokenizer()) + sum(one in str(argv) for one in ("<a>", "<b>"))
    # A job that trains it further begins with the same answers.
    further = job(
        tmp_path / "on", made.model, "text-classification", "--max_steps", "1", "--lr", "1e-9"
    )
    again = {row["label"]: row["score"] for row in Handlers(further.model).ask(body)[0]}
    assert again == pytest.approx(served, abs=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "argv",
    [
        ["--merge_adapter", "True", "--lora_r", "2"],
        ["--merge_adapter", "True", "--freeze_layers", "1"],
        ["--lora_save", "adapter"],
        ["--lora_r", "2", "--init_lora_weights", "pissa", "--added_tokens", "<a>"],
        ["--rope_scaling", '{"rope_type": "yarn", "factor": 2}', "--freeze_modules", "norm"],
    ],
    ids=" ".join,
)
def test_a_resumed_training_ends_with_the_same_bytes(argv: list[str], tmp_path: Path) -> None:
    base = save("LlamaForCausalLM", tmp_path / "base")
    model = adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], **CAUSAL)
    model = model if argv[0] in ("--merge_adapter", "--lora_save") else base
    argv = [
        *argv,
        "--max_steps",
        "4",
        "--save_strategy",
        "steps",
        "--save_steps",
        "2",
        "--lr",
        "0.1",
    ]
    whole = job(tmp_path / "whole", model, "causal-lm", *argv)
    shutil.copytree(whole.checkpoints / "checkpoint-2", tmp_path / "rest/checkpoints/checkpoint-2")
    rest = job(tmp_path / "rest", model, "causal-lm", *argv)
    assert rest.files == whole.files != {}


@pytest.mark.parametrize(
    ("kind", "given", "frozen"),
    [
        ("LlamaForCausalLM", {"freeze_layers": 1}, ("model.embed_tokens.", "model.layers.0.")),
        ("LlamaForCausalLM", {"freeze_layers": 0}, ("model.embed_tokens.",)),
        ("GPT2LMHeadModel", {"freeze_layers": 1}, ("transformer.wte", "transformer.wpe", "transformer.h.0.")),
        ("LlamaForCausalLM", {"freeze_modules": "lm_head,model.layers.*.mlp"}, (
            "lm_head.", "model.layers.0.mlp.", "model.layers.1.mlp.")),
        ("BertForSequenceClassification", {"freeze_layers": 2, "freeze_modules": "pooler"}, ("bert.",)),
        ("T5ForConditionalGeneration", {"freeze_layers": 1}, (
            "shared.", "encoder.block.0.", "decoder.block.0.")),
    ],
)  # fmt: skip
def test_layers_are_frozen(
    kind: str, given: Any, frozen: tuple[str, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = getattr(transformers, kind).from_pretrained(save(kind, tmp_path))
    model = lora.wrap(model, Hyperparameters(**given), None)
    weights = dict(model.named_parameters())
    assert {name for name in weights if not weights[name].requires_grad} == {
        name for name in weights if name.startswith(frozen)
    }
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)
    assert f"{trained:,} of {model.num_parameters():,} parameters" in capsys.readouterr().out


def test_what_cannot_be_frozen_or_named_is_refused(llama: Path) -> None:
    for given, words in (
        ({"freeze_layers": 3}, ["freeze_layers has value 3", "2 layers in layers"]),
        ({"freeze_modules": "lm_hed,mlp,q_prj"}, ["names 'lm_hed', 'q_prj'", "lm_head", "q_proj"]),
        ({"freeze_modules": "*"}, ["leave no weight to train"]),
        ({"freeze_layers": 1, "added_tokens": "<a>"}, ["the embeddings are frozen"]),
        ({"lora_r": 2, "modules_to_save": "lm_head,nrm,*"}, ["names 'nrm', '[*]'", "norm"]),
        ({"lora_r": 2, "init_lora_weights": "loftq"}, ["init_lora_weights has value 'loftq'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factr": 2}}, ["['factr']", "Give rope_type"]),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            ["('dynamic', 2)", "dynamic would"],
        ),
    ):
        with refused(HyperparameterError, *words):
            pretrained.load_causal(Origin(str(llama)), Hyperparameters(**given))  # type: ignore[arg-type]
    for given, words in (
        ({"freeze_layers": 1, "lora_r": 2}, ["freeze_layers=1 has no effect"]),
        (
            {"init_lora_weights": "loftq", "lora_r": 2, "lora_save": "adapter"},
            ["Give lora_save=merged"],
        ),
        (
            {"added_tokens": "<a>", "passed": {"do_train": False, "do_eval": True}},
            ["do_train is False"],
        ),
    ):
        with refused(HyperparameterError, *words):
            Hyperparameters(**given)  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.parametrize("given", [["--freeze_layers", "1"], ["--added_tokens", "<a>"]], ids=str)
def test_a_training_with_them_is_that_of_plain_torch(given: list[str], tmp_path: Path) -> None:
    base = classes(tmp_path)
    made = job(tmp_path / "job", base, "text-classification", *given, "--max_steps", "3")
    plain = CLASSES["auto"].from_pretrained(base)
    if "--added_tokens" in given:
        plain.resize_token_embeddings(len(tokenizer()) + 1)
        rows = made.weights["bert.embeddings.word_embeddings.weight"]
        assert torch.allclose(rows[-1], rows[:-1].mean(dim=0), atol=0.05)
        with torch.no_grad():
            plain.get_input_embeddings().weight[-1] = rows[-1]
    else:
        plain.bert.embeddings.requires_grad_(False)
        plain.bert.encoder.layer[0].requires_grad_(False)
    train_plainly(plain, "text-classification", 3)
    assert apart(made.weights, dict(plain.state_dict())) < 1e-6


@pytest.mark.heavy
def test_positions_are_scaled_as_in_transformers(tmp_path: Path) -> None:
    base = save("LlamaForCausalLM", tmp_path / "base")
    scaling = {"rope_type": "yarn", "factor": 4.0}
    argv = ["--rope_scaling", json.dumps(scaling), "--max_steps", "2"]
    made = job(tmp_path / "job", base, "causal-lm", *argv, "--max_length", "150")
    plain = CAUSAL["auto"].from_pretrained(
        base,
        rope_parameters={**scaling, "original_max_position_embeddings": 48, "rope_theta": 10_000.0},
    )
    train_plainly(plain, "causal-lm", 2)
    assert apart(made.weights, dict(plain.state_dict())) < 1e-6
    saved = CAUSAL["auto"].from_pretrained(made.model)
    assert saved.config.max_position_embeddings == 4 * 48
    far = torch.arange(190)[None] % 60 + 5
    with torch.inference_mode():
        assert torch.allclose(saved.eval()(far).logits, plain.eval()(far).logits, atol=1e-4)
    with refused(HyperparameterError, "a model of type gpt2 has no rotary positions"):
        pretrained.load_causal(
            Origin(str(save("GPT2LMHeadModel", tmp_path / "gpt2"))),
            Hyperparameters(rope_scaling=scaling),
        )
