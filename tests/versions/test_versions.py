"""The recipe, and users' inference files, under the transformers versions that images' bases bring
(`make test-versions`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions import old_files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ \n]+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["neuron-xla", "image-transformers4"])
def test_the_versions_of_images_with_transformers_4_are_their_locks(name: str) -> None:
    lock = pins(ROOT / "container" / "locks" / f"{name}.txt")
    here = pins(HERE / "4.57.txt")
    shared = here.keys() & lock.keys()
    assert {name: here[name] for name in shared} == {name: lock[name] for name in shared}
    assert here.keys() - shared == {"lightning", "lightning-utilities", "torchmetrics", "setfit"}


@pytest.mark.versions
@pytest.mark.parametrize("version", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_imports_a_training_a_resume_and_a_prediction(version: Path, tmp_path: Path) -> None:
    python = ROOT / "build" / "versions" / version.stem / "bin" / "python"
    done = subprocess.run(
        [python, HERE / "one_step.py", tmp_path], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert actual["transformers"] == pins(version)["transformers"]
    assert "learning_rat" in actual["refusal"] and "learning_rate" in actual["refusal"]
    assert "packed into" in actual["log"] and "metric step=1 " in actual["log"]
    assert actual["kind"] == "application/json"
    (answer,) = actual["answer"]
    assert answer["label"] in ("good", "bad") and 0.5 <= answer["score"] <= 1
    assert actual["missing"] == []
    assert actual["same"], "a resumed training ends with other weights"
    assert "checkpoint-5" in actual["resumed"] and "metric step=4 " not in actual["resumed"]
    assert re.search(r"metric step=5 \{'eval_loss': ", actual["resumed"]), "the due evaluation"


@pytest.mark.versions
def test_version_4_writes_in_groups_what_each_prompt_alone_gives() -> None:
    python = ROOT / "build/versions/4.57/bin/python"
    file = "tests/recipe/backend/test_prompt_groups.py"
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", "alone"],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def outcomes(python: Path | str, folder: Path) -> tuple[str, list[str]]:
    done = subprocess.run(
        [python, HERE / "old_files.py", folder], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    return actual["transformers"], actual["outcomes"]


@pytest.mark.versions
def test_version_4_serves_each_file(tmp_path: Path) -> None:
    python_4 = HERE.parents[1] / "build" / "versions" / "4.57" / "bin" / "python"
    version, actual = outcomes(python_4, tmp_path)
    assert version.startswith("4.") and len(actual) == len(old_files.FILES) >= 30
    assert [line for line in actual if not line.startswith("answer: ")] == []


@pytest.mark.versions
def test_version_5_serves_each_file_or_names_the_line_and_both_remedies(tmp_path: Path) -> None:
    version, actual = outcomes(sys.executable, tmp_path)
    assert version.startswith("5.")
    for (_, code, words), outcome in zip(old_files.FILES, actual, strict=True):
        if words:
            assert words in outcome and "--transformers 4" in outcome, code
            assert "inference.py, line " in outcome, code
        else:
            assert outcome.startswith("answer: "), code
