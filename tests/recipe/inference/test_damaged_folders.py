"""Model folders that cannot be served as they are named, packed or requested."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.backend.requests.answers import write_answer
from recipe.backend.saved.origin import Origin
from recipe.errors import ModelError
from recipe.inference import registry
from tests.support.serving_kit import save

CLASSIFIER = "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("kind", "task", "head"),
    [
        (CLASSIFIER, "token-classification", "text-classification"),
        (CLASSIFIER, "multiple-choice", "text-classification"),
        (CLASSIFIER, "image-classification", "text-classification"),
        ("BertForTokenClassification", "text-classification", "token-classification"),
        ("BertForTokenClassification", "zero-shot-classification", "token-classification"),
        ("BertForMaskedLM", "text-generation", "fill-mask"),
        (CLASSIFIER, "zero-shot-classification", ""),
        (CLASSIFIER, "feature-extraction", ""),
        (CLASSIFIER, "ner", "text-classification"),
        ("T5ForConditionalGeneration", "translation_en_to_de", ""),
        ("LlamaForCausalLM", "text-generation", ""),
    ],
)
def test_a_task_of_another_head_is_refused(kind: str, task: str, head: str, tmp_path: Path) -> None:
    environ = {"HF_TASK": task}
    origin = Origin.find(str(save(kind, tmp_path / "m")), environ)
    if not head:
        assert registry.chosen(origin, environ)
        return
    with pytest.raises(ModelError, match=f"names {kind}, the head of {head}. Leave HF_TASK out"):
        registry.chosen(origin, environ)


def add_label(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    config["label2id"] = {"a": 0, "b": 1, "c": 2}
    (folder / "config.json").write_text(json.dumps(config))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def add_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


def add_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("class MyConfig: pass")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (add_label, "config.json .id2label.* contradicts the shapes"),
        (cut, "weights are cut off or damaged"),
        (add_pointer, "pointers of Git LFS instead of files: model.safetensors.*git lfs pull"),
        (add_code, "Set HF_TRUST_REMOTE_CODE=true"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_with_a_folder_is_named(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = save(CLASSIFIER, tmp_path / "m")
    damage(folder)
    with pytest.raises(ModelError, match=words):
        registry.load(str(folder), {})


def test_a_stream_that_fails_at_once_gets_an_error_status() -> None:
    def pieces() -> object:
        raise RuntimeError("no memory")
        yield {}

    with pytest.raises(RuntimeError, match="no memory"):
        write_answer(pieces(), "text/event-stream")
