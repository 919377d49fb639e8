"""examples/export, run by `amphora train` in an environment of its own."""

from __future__ import annotations

import subprocess
import sysconfig
import tarfile
import venv
from pathlib import Path

from tests.support.job_tree import Tree

EXAMPLE = Path(__file__).parents[2] / "examples/export"


def environment(folder: Path) -> Path:
    """Make an environment that has the tests' own packages, and takes what a job installs.

    Returns:
        Its Python.
    """
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    own = sysconfig.get_path("purelib")
    (site / "own.pth").write_text(f"import site; site.addsitedir({own!r})")
    return folder / "bin/python"


def export(tree: Tree, python: Path, model: Path, program: str, **hyperparameters: str) -> str:
    """Run one of the scripts on a model's folder. Returns the job's output; its model is in the
    tree."""
    tree.channel("model")
    with tarfile.open(tree.base / "input/data/model/model.tar.gz", "w:gz") as packed:
        packed.add(model, ".")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            tree.script(path.read_text(), path.name)
    tree.configure({"sagemaker_program": program, **hyperparameters})
    done = subprocess.run(
        [python, "-m", "amphora", "train"], text=True, capture_output=True,
        env=tree.environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
