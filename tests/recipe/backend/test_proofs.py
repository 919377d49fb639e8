"""The proof in a model's folder: what it catches at a start, and what it is silent about."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from recipe.backend import padded_rows
from recipe.backend.proofs import trained_answers
from recipe.errors import ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.inference import registry
from recipe.models import sentence_encoders
from recipe.plan.table import Table
from recipe.runtime import memory
from recipe.storage import checksums
from recipe.training import proving
from tests.support import tasks
from tests.support.paths import ROOT
from tests.support.serving_kit import TEXTS, Handlers, save

KINDS = {
    "text-classification": "BertForSequenceClassification",
    "token-classification": "BertForTokenClassification",
    "question-answering": "BertForQuestionAnswering",
    "masked-lm": "BertForMaskedLM",
    "causal-lm": "LlamaForCausalLM",
    "summarization": "T5ForConditionalGeneration",
}


@pytest.fixture(autouse=True)
def serve_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that computes in bfloat16, whose tolerance is larger."""
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")


def prove(task: str, folder: Path) -> Path:
    rows: list[Any] = []
    proving.prove(task, folder, Table(rows.append), is_partial=False, environ={})
    assert [row.level for row in rows] == ["ok"], rows
    return folder


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of each kind with their proofs."""
    base = tmp_path_factory.mktemp("proved")
    folders = {task: prove(task, save(kind, base / task)) for task, kind in KINDS.items()}
    encoder = save("BertModel", base / "encoder")
    parts = modules.Transformer(str(encoder)), modules.Pooling(32, "mean")
    SentenceTransformer(modules=[*parts, modules.Normalize()]).save(str(base / "sentences"))
    folders["sentence-embedding"] = prove("sentence-embedding", base / "sentences")
    image = tasks.JOBS["image-classification"].model(base / "images", 0.0)
    folders["image-classification"] = prove("image-classification", image)
    return folders


@pytest.fixture
def copied(proved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda task: Path(shutil.copytree(proved[task], tmp_path / "model"))


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes a JSON file of a folder."""

    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        document = change(document) or document
        (folder / name).write_text(json.dumps(document))

    return apply


def swap_tokens(folder: Path) -> None:
    def swap(document: Any) -> None:
        known = document["model"]["vocab"]
        known["a"], known["e"] = known["e"], known["a"]

    edit("tokenizer.json", swap)(folder)


def scale_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "1" in name and weights[name].ndim == 2)
    weights[name] = weights[name] * 1.01
    save_file(weights, file, {"format": "pt"})


def transpose_labels(document: Any) -> None:
    document["id2label"] = {"0": "LABEL_1", "1": "LABEL_0"}
    document["label2id"] = {"LABEL_1": 0, "LABEL_0": 1}


@pytest.mark.parametrize(
    ("task", "change", "cause"),
    [
        ("text-classification", swap_tokens, "tokenizer; .* tokenizer.json changed"),
        ("causal-lm", swap_tokens, "tokenizer; .* tokenizer.json changed"),
        ("summarization", swap_tokens, "tokenizer; .* tokenizer.json changed"),
        ("sentence-embedding", swap_tokens, "tokenizer; .* tokenizer.json changed"),
        *(
            (task, scale_weights, "weights or library; .* model.safetensors changed")
            for task in (*KINDS, "sentence-embedding")
        ),
        ("image-classification", scale_weights, "weights, settings .* model.safetensors changed"),
        (
            "sentence-embedding",
            edit("1_Pooling/config.json", lambda c: {**c, "pooling_mode": "cls"}),
            "weights or library; .* 1_Pooling/config.json changed",
        ),
        (
            "sentence-embedding",
            edit("modules.json", lambda modules: modules[:2]),
            "labels or settings; .* modules.json changed",
        ),
        (
            "text-classification",
            edit("config.json", transpose_labels),
            "labels or settings; .* config.json changed",
        ),
        (
            "image-classification",
            edit("config.json", transpose_labels),
            "labels or settings; .* config.json changed",
        ),
        (
            "image-classification",
            edit("preprocessor_config.json", lambda c: {**c, "image_mean": [0.4] * 3}),
            "weights, settings or library; .* preprocessor_config.json changed",
        ),
        (
            "token-classification",
            edit("config.json", lambda c: {**c, "hidden_act": "gelu_new"}),
            "weights or library; .* config.json changed",
        ),
        (
            "question-answering",
            edit("config.json", lambda c: {**c, "question_answering": {"max_answer_len": 1}}),
            "labels or settings; .* config.json changed",
        ),
        (
            "causal-lm",
            edit("generation_config.json", lambda c: {**c, "repetition_penalty": 9.0}),
            "settings of generation or library; .* generation_config.json changed",
        ),
        (
            "text-classification",
            edit("tokenizer_config.json", lambda c: {**c, "truncation_side": "left"}),
            "tokenizer; .* tokenizer_config.json changed",
        ),
    ],
)  # fmt: skip
def test_a_changed_file_with_a_good_checksum_is_named(
    copied: Callable[[str], Path], task: str, change: Callable[[Path], None], cause: str
) -> None:
    folder = copied(task)
    change(folder)
    checksums.write(folder)
    with pytest.raises(ModelError, match=rf"does not answer as its proof.json says: .*{cause}"):
        registry.load(str(folder), os.environ)


def compute_in_memory(task: str, folder: Path) -> Any:
    """Return the answers of a model as a training holds it in memory."""
    if task == "sentence-embedding":
        sentences: Any = SentenceTransformer(str(folder), device="cpu")
        settings = Hyperparameters(task=task)
        model = sentence_encoders.trained_as_one(sentences, settings, "as saved")
        sentence_encoders.patch_forward_for_texts(model)
        return trained_answers.compute(model, sentences.tokenizer, 0, "")
    is_image = task == "image-classification"
    reader = transformers.AutoImageProcessor if is_image else transformers.AutoTokenizer
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder)
    return trained_answers.compute(model, reader.from_pretrained(folder), 0, "")


@pytest.mark.parametrize(
    ("task", "change", "why"),
    [
        *((task, scale_weights, "raw values differ") for task in (*KINDS, "sentence-embedding")),
        ("image-classification", scale_weights, "raw values differ"),
        ("masked-lm", edit("config.json", lambda c: {**c, "layer_norm_eps": 1e-2}), "raw values"),
        ("question-answering", edit("config.json", lambda c: {**c, "hidden_act": "gelu_new"}), "raw"),
        ("causal-lm", edit("config.json", lambda c: {**c, "rms_norm_eps": 1e-2}), "raw values"),
        (
            "sentence-embedding",
            edit("1_Pooling/config.json", lambda c: {**c, "pooling_mode": "cls"}),
            "raw values differ",
        ),
        ("causal-lm", swap_tokens, "its tokenizer gives the tokens"),
        ("sentence-embedding", swap_tokens, "its tokenizer gives the tokens"),
        ("token-classification", edit("config.json", transpose_labels), "its labels are .*1"),
    ],
)  # fmt: skip
def test_a_saved_model_that_is_not_the_trained_one_has_no_proof(
    copied: Callable[[str], Path],
    proved: dict[str, Path],
    task: str,
    change: Callable[[Path], None],
    why: str,
) -> None:
    trained, folder = compute_in_memory(task, proved[task]), copied(task)
    (folder / "proof.json").unlink()
    change(folder)
    rows: list[Any] = []
    fault = proving.prove(task, folder, Table(rows.append), False, {}, trained)
    assert re.search(why, fault)
    assert [row.level for row in rows] == ["warning"]
    assert "the saved model does not answer as the trained one" in rows[0].detail
    assert not (folder / "proof.json").exists()


def test_a_library_that_computes_another_activation_is_named(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gelu(self: Any, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(states, approximate="tanh")

    folder = copied("text-classification")
    edit("proof.json", lambda c: {**c, "versions": {"transformers": "4.57.3"}})(folder)
    checksums.write(folder)
    registry.load(str(folder), os.environ)
    monkeypatch.setattr(transformers.activations.GELUActivation, "forward", gelu)
    with pytest.raises(
        ModelError, match=r"weights or library; transformers .* instead of 4\.57\.3"
    ):
        registry.load(str(folder), os.environ)


def test_half_precision_that_overflows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("BertForSequenceClassification", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.0.intermediate.dense.weight"] *= 3e4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    prove("text-classification", folder)
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")
    registry.load(str(folder), os.environ)
    monkeypatch.setenv("AMPHORA_DTYPE", "float16")
    with pytest.raises(ModelError, match=r"precision: float32 .* set AMPHORA_DTYPE=float32"):
        registry.load(str(folder), os.environ)


def test_padding_on_the_wrong_side_is_left_out(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Positions count from the left."""
    folder = copied("text-classification")
    expected = Handlers(folder).ask({"inputs": TEXTS})
    right = padded_rows.pad_rows

    def pad_on_the_left(*arguments: Any) -> dict[str, torch.Tensor]:
        batch = right(*arguments)
        for index, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            for tensor in batch.values():
                tensor[index] = tensor[index].roll(-length)
        return batch

    monkeypatch.setattr(padded_rows, "pad_rows", pad_on_the_left)
    served = Handlers(folder, AMPHORA_PACKING="0")
    assert served.model.loaded.padded.merging != padded_rows.PADDED  # type: ignore[attr-defined]
    assert "not calls of texts of any length, since the answer to probe" in capsys.readouterr().out
    assert [answer["label"] for answer in served.ask({"inputs": TEXTS})] == [
        answer["label"] for answer in expected
    ]


@pytest.mark.parametrize("task", [*KINDS, "sentence-embedding", "image-classification"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_it_is_silent_in_each_precision(
    proved: dict[str, Path], task: str, precision: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("AMPHORA_DTYPE", precision)
    registry.load(str(proved[task]), os.environ)
    assert "probes are those of the training" in capsys.readouterr().out


@pytest.mark.heavy
@pytest.mark.parametrize(("task", "threads"), [("text-classification", "4"), ("causal-lm", "1")])
def test_amphora_verify_is_silent_with_other_kernels_and_threads(
    proved: dict[str, Path], task: str, threads: str
) -> None:
    environ = {"AMPHORA_CODE_DIR": str(ROOT / "code"), "ATEN_CPU_CAPABILITY": "default",
               "ONEDNN_MAX_CPU_ISA": "avx2", "OMP_NUM_THREADS": threads}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "amphora", "verify", "--model", str(proved[task])],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^verified: \d+ probes, on cpu in float32 when trained$", done.stdout, re.M)


def test_the_table_has_each_probe_and_the_last_line_the_cause(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import verify

    monkeypatch.setenv("AMPHORA_PROOF", "on")
    folder = copied("token-classification")
    assert verify.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["probe", "tokens", "difference", "allowed", "answer"]
    assert (
        len([line for line in lines if re.match(r"probe \d+ +same +\S+ +\S+ +same$", line)]) == 16
    )
    swap_tokens(folder)
    checksums.write(folder)
    assert verify.main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match(r"probe 1 +differ ", line)]
    assert re.search("differs: .* Cause: tokenizer; .* tokenizer.json changed", lines[-1])
    (folder / "SHA256SUMS").unlink()
    (folder / "proof.json").unlink()
    with pytest.raises(ModelError, match=r"has no proof\.json"):
        verify.main([str(folder)])


def test_off_serves_anyway_with_a_warning(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = copied("text-classification")
    scale_weights(folder)
    checksums.write(folder)
    monkeypatch.setenv("AMPHORA_PROOF", "off")
    registry.load(str(folder), os.environ)
    assert "WARNING: AMPHORA_PROOF=off: answers are not compared" in capsys.readouterr().out
    monkeypatch.setenv("AMPHORA_PROOF", "no")
    with pytest.raises(ValueError, match=r"AMPHORA_PROOF is 'no'\. Set on"):
        registry.load(str(folder), os.environ)


def test_a_proof_of_another_format_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("text-classification")
    (folder / "SHA256SUMS").unlink()
    edit("proof.json", lambda c: {**c, "amphora_proof": 2})(folder)
    with pytest.raises(ModelError, match="has the format 2, and this image reads 1"):
        registry.load(str(folder), os.environ)
    edit("proof.json", lambda c: {"amphora_proof": 1})(folder)
    with pytest.raises(ModelError, match="incomplete"):
        registry.load(str(folder), os.environ)
    (folder / "proof.json").write_text("{}")
    registry.load(str(folder), os.environ)


def test_a_chat_template_that_writes_the_date_is_not_proved(tmp_path: Path) -> None:
    """Its prompts are other ones on the next day; a chat without it is."""
    folder = save("LlamaForCausalLM", tmp_path / "model")
    template = "{{ %s }} {%% for m in messages %%}{{ m['content'] }}{%% endfor %%}"
    for written, count in (("strftime_now('%H %M %S')", 2), ("'chat'", 3)):
        (folder / "chat_template.jinja").write_text(template % written)
        (folder / "proof.json").unlink(missing_ok=True)
        prove("causal-lm", folder)
        proof = json.loads((folder / "proof.json").read_text())
        assert [type(probe["prompt"]) for probe in proof["probes"]] == [str, str, list][:count]
        registry.load(str(folder), os.environ)


def test_without_memory_for_float32_the_reference_is_in_bfloat16_or_there_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("LlamaForCausalLM", tmp_path / "model")
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(memory, "available", lambda: 2 * size)
    prove("causal-lm", folder)
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["precision"] == "bfloat16"
    assert proof["tolerances"]["float32"] == proof["tolerances"]["bfloat16"]
    registry.load(str(folder), os.environ)
    (folder / "proof.json").unlink()
    monkeypatch.setattr(memory, "available", lambda: size)
    rows: list[Any] = []
    proving.prove("causal-lm", folder, Table(rows.append), is_partial=False, environ={})
    assert rows[0].level == "warning" and "are free" in rows[0].detail
    assert not (folder / "proof.json").exists() and (folder / "SHA256SUMS").is_file()
