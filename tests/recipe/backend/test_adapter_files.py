"""Adapters that are merged when their folder is served, beside what peft computes with them."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin
from recipe.errors import ModelError
from recipe.inference import registry
from recipe.tasks.causal_lm.serve import Generator
from tests.support.adapter_kit import adapter, merged
from tests.support.serving_kit import Handlers, save, tokenizer

CAUSAL = {"auto": AutoModelForCausalLM, "seed": 0, "task_type": "CAUSAL_LM"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save("LlamaForCausalLM", tmp_path / "base")


def served(folder: Path, auto: Any = AutoModelForCausalLM) -> Any:
    (folder / "config.json").write_bytes((folder.parent / "base" / "config.json").read_bytes())
    return weights.read(Origin(str(folder), {}), auto, torch.float32).eval()


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
    auto = AutoModelForSequenceClassification
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
            logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(
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
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    task = registry.load(str(folder), environ)
    assert isinstance(task, Generator)
    with torch.inference_mode():
        logits = task.loaded.model(input_ids=ids).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    assert "is merged into its base" in capsys.readouterr().out


def test_an_adapter_whose_base_cannot_be_had_names_both(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "model", target_modules=["q_proj"], **CAUSAL)
    base.rename(tmp_path / "gone")
    with pytest.raises(ModelError, match="the base model") as caught:
        Origin.find(str(folder), {})
    for word in (str(folder), str(base), "HF_MODEL_ID"):
        assert word in str(caught.value)


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
            AutoModelForSequenceClassification.from_pretrained,
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
