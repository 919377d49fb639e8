"""Compiled programs beside a model: which model, versions and settings they are used for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from recipe.errors import ModelError
from recipe.inference.static import kept
from recipe.storage import checksums

VARIABLE = "TORCH_NEURONX_NEFF_CACHE_DIR"
COMPILE = (sys.executable, "-m", "amphora", "compile")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with programs, on a host that computes by TorchNeuron."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        "recipe.inference.precision.chosen", lambda _: ("neuron", "bfloat16", torch.bfloat16)
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    environ = {"AMPHORA_BUCKETS": "1x8"}
    kept.write(folder, environ, lambda: (Path(environ[VARIABLE]) / "a.neff").write_text("program"))
    return folder


def test_programs_are_found_again(model: Path) -> None:
    environ: dict[str, str] = {}
    kept.use(model, environ)
    assert (Path(environ[VARIABLE]) / "a.neff").read_text() == "program"
    assert model not in Path(environ[VARIABLE]).parents
    assert environ["AMPHORA_BUCKETS"] == "1x8"
    again: dict[str, str] = {"AMPHORA_BUCKETS": "4x8"}
    kept.use(model, again)
    assert again == {VARIABLE: environ[VARIABLE], "AMPHORA_BUCKETS": "4x8"}


def test_those_of_another_model_are_not_used(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "README.md").write_text("a card changes nothing")
    environ: dict[str, str] = {}
    kept.use(model, environ)
    assert VARIABLE in environ
    (model / "model.safetensors").write_bytes(b"trained on")
    environ.clear()
    kept.use(model, environ)
    assert not environ
    assert "are not used: they are another model's, or its files" in capsys.readouterr().out


def test_the_models_own_sums_tell_it(model: Path) -> None:
    checksums.write(model)
    environ: dict[str, str] = {}
    kept.use(model, environ)
    assert not environ


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("precision", "float32", "the precision is bfloat16, and was float32"),
        ("device", "xla NEURON", "the device is neuron, and was xla NEURON"),
        ("settings", {"HF_TASK": "fill-mask"}, "HF_TASK is not there, and was fill-mask"),
        (
            "versions",
            {"torch": "1.0"},
            f"torch is {importlib.metadata.version('torch')}, and was 1.0",
        ),
        ("buckets", None, "manifest.json is not one that amphora compile wrote"),
    ],
)
def test_those_of_another_host_are_not_used(
    key: str, value: object, why: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model / kept.FOLDER / kept.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    environ: dict[str, str] = {}
    kept.use(model, environ)
    assert not environ
    assert f"programs: those beside the model are not used: {why}" in capsys.readouterr().out


def test_a_place_that_is_named_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {VARIABLE: "s3://bucket/programs"}
    kept.use(model, environ)
    assert environ == {VARIABLE: "s3://bucket/programs"}
    assert f"not used: {VARIABLE} names another place" in capsys.readouterr().out
    with pytest.raises(ModelError, match=f"{VARIABLE} names a place"):
        kept.write(model, environ, lambda: None)


def test_a_compiler_that_leaves_nothing_and_one_that_fails_are_told(model: Path) -> None:
    with pytest.raises(ModelError, match="has left no program"):
        kept.write(model, {}, lambda: None)
    assert not (model / kept.FOLDER).exists()

    def fails() -> None:
        raise ModelError("cannot be served on neuron")

    with pytest.raises(ModelError, match="cannot be served"):
        kept.write(model, {}, fails)
    assert not (model / kept.FOLDER).exists()


def test_a_host_without_such_a_device_has_nothing_to_compile(tmp_path: Path) -> None:
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path), "USE_TORCH_XLA": "0"}
    missing = subprocess.run(COMPILE, env=environ, capture_output=True, text=True, timeout=120)
    assert missing.returncode == 2
    assert f"There is no model in {tmp_path}/model. Name a folder or" in missing.stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    refused = subprocess.run(COMPILE, env=environ, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "There is nothing to compile: models are computed on cpu here" in refused.stderr
