"""A user's script for Trainium, written to torch-xla, as `amphora train` starts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SCRIPT = Path(__file__).with_name("walk_through.py")
Reviews = Callable[[int], list[tuple[str, str]]]


def write_input(base: Path, model: Path, reviews: Reviews) -> None:
    """The /opt/ml tree of the job: hyperparameters, code and a DatasetDict as IMDB is one."""
    from datasets import Dataset, DatasetDict

    rows = [{"text": text, "label": int(label == "pos")} for text, label in reviews(96)]
    splits = {"train": Dataset.from_list(rows[:80]), "test": Dataset.from_list(rows[80:])}
    DatasetDict(splits).save_to_disk(base / "input/data/train")
    (base / "input/config").mkdir(parents=True)
    (base / "code").mkdir()
    with tarfile.open(base / "sourcedir.tar.gz", "w:gz") as archive:
        archive.add(SCRIPT, SCRIPT.name)
    hyperparameters = {
        "sagemaker_program": SCRIPT.name,
        "sagemaker_submit_directory": str(base / "sourcedir.tar.gz"),
        "sagemaker_torch_distributed_enabled": True,
        "model_name": str(model),
        "epochs": 10,
        "learning_rate": 2e-3,
    }
    encoded = {key: json.dumps(value) for key, value in hyperparameters.items()}
    (base / "input/config/hyperparameters.json").write_text(json.dumps(encoded))


def test_the_walk_through_trains_under_amphora(
    tmp_path: Path, tiny_model: Path, reviews: Reviews
) -> None:
    from transformers import AutoModelForSequenceClassification

    base = tmp_path / "ml"
    write_input(base, tiny_model, reviews)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SAGEMAKER_"))}
    done = subprocess.run(
        [sys.executable, "-m", "amphora", "train"],
        env={**kept, "SAGEMAKER_BASE_DIR": str(base)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "by torchrun" in output
    (found,) = re.findall(r"accuracy (\S+) on CPU, 1 process", output)
    assert float(found) > 0.9
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert not (base / "output/failure").exists()
    trained = AutoModelForSequenceClassification.from_pretrained(base / "model")
    start = AutoModelForSequenceClassification.from_pretrained(tiny_model)
    name = "bert.embeddings.word_embeddings.weight"
    assert float((trained.state_dict()[name] - start.state_dict()[name]).abs().max()) > 1e-3
    shutil.rmtree(base)
