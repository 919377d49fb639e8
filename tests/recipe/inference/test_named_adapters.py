"""Adapters of one encoder in memory, compared with each adapter merged into the encoder by peft."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from recipe.backend import packed_rows
from recipe.backend.proofs import checking
from recipe.backend.requests.payloads import Request
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.inference import named_adapters, registry
from recipe.models.sources.origin import Origin
from recipe.runtime import blocked_weights
from tests.support.adapter_kit import adapter, merged
from tests.support.refusals import refused
from tests.support.replays import Replays
from tests.support.serving_kit import TEXTS, assert_close, save, tokenizer

# Of peft, which asks transformers by old names.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
AUTO: Mapping[str, Any] = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "FEATURE_EXTRACTION": transformers.AutoModel,
}
LINEAR = ["query", "value", "intermediate.dense", "output.dense"]
ENVIRON = {"AMPHORA_ADAPTERS": "8", "AMPHORA_DTYPE": "float32"}


def loaded(folder: Path, **environ: str) -> tuple[ServedTask, Origin]:
    """Return the model in a folder as a server loads it, which may get adapters."""
    with mock.patch.dict(os.environ, ENVIRON | environ):
        return registry.load(str(folder), os.environ), Origin.find(str(folder), os.environ)


def load(name: str, folder: Path, base: tuple[ServedTask, Origin]) -> ServedTask:
    return named_adapters.load(name, str(folder), *base, ENVIRON)


def ask(model: ServedTask, named: Sequence[tuple[str, list[str]]]) -> list[Any]:
    """Return the entries of requests to adapters, which are predicted together."""
    prepared = []
    for name, texts in named:
        request = Request(inputs=texts, adapter=name)
        task = named_adapters.select(request, model)
        prepared.append(replace(task.prepare(request), task=task if name else None))
    return [answer["entries"] for answer in named_adapters.predict(prepared, model)]


def values_of(task: ServedTask, texts: list[str]) -> torch.Tensor:
    """Return the raw values of some texts, one after the other."""
    prepared = task.prepare(Request(inputs=texts))
    rows, reading = checking.rows_of(task, prepared)
    assert task.loaded_model is not None
    return torch.cat([value.flatten() for value in task.loaded_model.forward(rows, reading)])


def write_encoder(kind: str, folder: Path) -> Path:
    """Save a tiny encoder, of a family that the kit does not make."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
                             "num_attention_heads": 2, "max_position_embeddings": 48}  # fmt: skip
    if kind == "DistilBert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    if kind == "ModernBert":
        sizes |= dict.fromkeys(("bos_token_id", "cls_token_id"), 2)
        sizes |= dict.fromkeys(("eos_token_id", "sep_token_id"), 3)
    reader = tokenizer()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(reader), pad_token_id=0, initializer_range=0.3, **sizes
    )
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "targets", "head"),
    [
        ("BertModel", ["query", "value", "dense"], None),
        # Its class has no pooler, but its files need not have one: the adapter has.
        ("BertForMaskedLM", LINEAR, ["pooler", "classifier"]),
        pytest.param("RobertaModel", LINEAR, None, marks=pytest.mark.heavy),
        pytest.param("ElectraModel", LINEAR, None, marks=pytest.mark.heavy),
        pytest.param(
            "DistilBertModel", ["q_lin", "lin1"], ["pre_classifier", "classifier"],
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            "ModernBertModel", ["Wqkv", "Wi"], ["head", "classifier"], marks=pytest.mark.heavy
        ),
    ],
)  # fmt: skip
def test_a_batch_of_several_adapters_answers_as_each_merged_model(
    kind: str, targets: list[str], head: list[str] | None, tmp_path: Path
) -> None:
    """And as the base itself, which its adapters do not change."""
    base = tmp_path / "base"
    if kind.startswith(("Bert", "Roberta")):
        save(kind, base)
    else:
        write_encoder(kind.removesuffix("Model"), base)
    texts = [f"[MASK] {text}" for text in TEXTS]
    plain = {"": loaded(base)[0]}
    folders = {}
    for seed, (task, auto) in enumerate(AUTO.items()):
        parts = [name for name in head or () if task == "SEQ_CLS" or name in ("classifier", "head")]
        folders[task] = adapter(
            base, tmp_path / task, auto, seed, task_type=task, target_modules=targets,
            modules_to_save=parts if parts and task != "FEATURE_EXTRACTION" else None,
        )  # fmt: skip
        whole = merged(base, folders[task], tmp_path / f"{task}-merged", auto)
        plain[task] = loaded(whole, AMPHORA_ADAPTERS="0")[0]
    served = loaded(base)
    for name, folder in folders.items():
        load(name, folder, served)
    # Texts of all lengths, of each adapter two requests that are not next to each other.
    requests = [(name, texts[start : start + 2]) for start in (0, 2) for name in plain]
    for answer, (name, some) in zip(ask(served[0], requests), requests, strict=True):
        assert_close(answer, ask(plain[name], [("", some)])[0], 1e-4)


@pytest.mark.heavy
def test_adapters_in_bfloat16_are_as_near_to_float32_as_their_merged_models(tmp_path: Path) -> None:
    """A merged weight is rounded once; here the product is rounded with the base's output."""
    base = save("BertModel", tmp_path / "base", initializer_range=0.2)
    served = loaded(base, AMPHORA_DTYPE="bfloat16")
    texts = [" ".join(TEXTS[: 1 + number % 3]) for number in range(24)]
    apart = {"named": 0.0, "merged": 0.0}
    for seed, (task, auto) in enumerate(AUTO.items()):
        folder = adapter(base, tmp_path / task, auto, seed, task_type=task,
                         target_modules=["query", "value", "dense"])  # fmt: skip
        whole = merged(base, folder, tmp_path / f"{task}-merged", auto)
        exact, rounded = (
            values_of(loaded(whole, AMPHORA_ADAPTERS="0", AMPHORA_DTYPE=dtype)[0], texts)
            for dtype in ("float32", "bfloat16")
        )
        named = values_of(load(task, folder, served), texts)
        for name, values in (("named", named), ("merged", rounded)):
            apart[name] += float((values - exact).norm() / exact.norm())
    assert 0 < apart["named"] <= 2 * apart["merged"] < 0.2


@pytest.mark.parametrize("environ", [{"AMPHORA_PACKING": "0"}, {"AMPHORA_CUDA_GRAPHS": "1"}])
def test_adapters_share_an_encoder_whose_texts_are_padded_or_computed_by_graphs(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph computes the base alone: it has no adapter's products."""
    monkeypatch.setattr(packed_rows, "_GRAPH_TOKENS", (128,))
    monkeypatch.setattr(blocked_weights, "_is_faster", lambda: False)  # graphs need plain weights
    monkeypatch.setitem(packed_rows.RECORDERS, "cpu", Replays)  # type: ignore[misc]
    Replays.made.clear()
    base = save("BertModel", tmp_path / "base")
    served = loaded(base, **environ)
    alone = ask(served[0], [("", TEXTS)])
    before = [recorder.replayed for recorder in Replays.made]
    assert (before > [2]) == ("AMPHORA_CUDA_GRAPHS" in environ)
    for seed, name in enumerate("ab"):
        folder = adapter(base, tmp_path / name, AUTO["SEQ_CLS"], seed, task_type="SEQ_CLS",
                         target_modules=["query"])  # fmt: skip
        load(name, folder, served)
    whole = merged(base, tmp_path / "b", tmp_path / "merged", AUTO["SEQ_CLS"])
    answers = ask(served[0], [("a", TEXTS), ("b", TEXTS), ("", TEXTS)])
    assert_close(answers[1], ask(loaded(whole)[0], [("", TEXTS)])[0], 1e-4)
    assert answers[0] != answers[1]
    ask(served[0], [("a", TEXTS)])
    assert [recorder.replayed for recorder in Replays.made] == before
    assert ask(served[0], [("", TEXTS)]) == alone


def test_products_are_added_before_an_activation_that_the_base_may_fuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With oneDNN's layout, which takes layers from 64 columns on."""
    monkeypatch.setattr(blocked_weights, "_is_faster", lambda: True)
    base = save("BertModel", tmp_path / "base", hidden_size=64, intermediate_size=128)
    folder = adapter(base, tmp_path / "a", AUTO["SEQ_CLS"], 1, task_type="SEQ_CLS",
                     target_modules=["query", "intermediate.dense"])  # fmt: skip
    served = loaded(base)
    layer: Any = served[0].loaded_model.model.encoder.layer[0].intermediate.dense  # type: ignore[union-attr]
    assert layer.weight.is_meta
    load("a", folder, served)
    whole = merged(base, folder, tmp_path / "merged", AUTO["SEQ_CLS"])
    answers = ask(served[0], [("a", TEXTS), ("", TEXTS)])
    assert_close(answers[0], ask(loaded(whole)[0], [("", TEXTS)])[0], 1e-4)


def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = save("BertModel", tmp_path / "base")
    served = loaded(base)
    settings: Any = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
    good = adapter(base, tmp_path / "good", AUTO["SEQ_CLS"], 1, **settings)
    cases = 0

    def changed(edit: Any, *words: str, **config: Any) -> None:
        nonlocal cases
        cases += 1
        folder = tmp_path / f"case-{cases}"
        shutil.copytree(good, folder)
        document = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**document, **config}))
        if edit is not None:
            weights = load_file(folder / "adapter_model.safetensors")
            edit(weights)
            save_file(weights, folder / "adapter_model.safetensors")
        with refused(ModelError, *words):
            load("x", folder, served)

    query = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_"
    head = "base_model.model.classifier.weight"
    changed(lambda w: w.pop(f"{query}A.weight"), "only lora_A or lora_B", "layer.0")
    changed(lambda w: [w.pop(f"{query}{side}.weight") for side in "AB"], "it lacks the weights")
    changed(lambda w: w.pop(head), "neither it nor its base has classifier.weight")
    changed(lambda w: w.update({f"{query}B.weight": torch.full((32, 4), float("nan"))}), "NaN")
    changed(lambda w: w.update({f"{query}A.weight": torch.ones(4, 31)}), r"[32, 31]")
    changed(lambda w: w.update({head: torch.ones(5, 32)}), "[5, 32]", "config.json")
    changed(lambda w: w.update({"base_model.model.other.weight": torch.ones(2)}), "no place for")
    changed(
        lambda w: w.update({"base_model.model.bert.embeddings.LayerNorm.bias": torch.ones(32)}),
        "own weights of the encoder",
    )
    changed(None, "rank 4, and adapter_config.json says 8", r=8)
    changed(None, "has use_dora 'True'", "Merge it", use_dora=True)
    changed(None, "peft_type 'IA3'", peft_type="IA3")
    changed(None, "is 'MULTIPLE'", task_type="MULTIPLE")
    (good / "adapter_model.safetensors").rename(good / "adapter_model.bin")
    with refused(ModelError, "has no adapter_model.safetensors. It has adapter_model.bin"):
        load("x", good, served)
    for other in (
        save("BertModel", tmp_path / "narrow", hidden_size=16),
        save("RobertaModel", tmp_path / "roberta"),
    ):
        folder = adapter(other, tmp_path / f"of-{other.name}", AUTO["SEQ_CLS"], 1, **settings)
        with refused(ModelError, "does not fit the served model"):
            load("x", folder, served)
        # With the configuration of its own base, the first difference is there.
        AUTO["SEQ_CLS"].from_pretrained(other).config.save_pretrained(folder)
        with refused(ModelError, "does not fit the served model"):
            load("x", folder, served)
    assert not served[0].adapters.tasks


def test_an_adapter_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    base = save("BertModel", tmp_path / "base")
    served = loaded(base)
    folder = adapter(base, tmp_path / "a", AUTO["SEQ_CLS"], 1, task_type="SEQ_CLS",
                     target_modules=["query"])  # fmt: skip
    tokenizer(16).save_pretrained(folder)
    task = load("a", folder, served)
    # It reads as many tokens as in its training.
    assert (task.max_length, served[0].max_length) == (16, 48)
    tokenizer(letters="zyxwvutsrqponmlkjihgfedcba").save_pretrained(folder)
    with refused(ModelError, "its tokenizer is another one"):
        load("b", folder, served)
