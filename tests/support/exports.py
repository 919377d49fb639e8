"""Examples that train by `amphora train` in an environment of their own."""

import subprocess
import sysconfig
import tarfile
import venv
from pathlib import Path

from tests.support.job_tree import Tree
from tests.support.paths import ROOT


def environment(folder: Path) -> Path:
    """Make an environment that has the tests' packages and takes what a job installs.

    Returns:
        Its Python.
    """
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = sysconfig.get_path("purelib")
    (site / "tests.pth").write_text(f"import site; site.addsitedir({packages!r})")
    return folder / "bin/python"


def run_on_model(
    tree: Tree, python: Path, model: Path, program: str, environ: dict[str, str] | None = None,
    **hyperparameters: str,
) -> str:  # fmt: skip
    """Run a script of examples/ (`folder/name.py`) on a model's archive; return the job's output."""
    tree.channel("model")
    with tarfile.open(tree.base / "input/data/model/model.tar.gz", "w:gz") as packed:
        packed.add(model, ".")
    example = ROOT / "examples" / program
    for path in example.parent.iterdir():
        if path.is_file():
            tree.script(path.read_text(), path.name)
    tree.configure({"sagemaker_program": example.name, **hyperparameters})
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **(environ or {})}
    done = subprocess.run(
        [python, *tree.command()[1:]], text=True, capture_output=True,
        env=tree.environment(**offline),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
