"""What Dockerfile.neuron does to a base's packages, without Docker: its script and its locks."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.package_indexes import bare_environment, wheel

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "container" / "locks"


class Base:
    """An environment in place of a base image, and a shelf of wheels in place of the index."""

    def __init__(self, folder: Path) -> None:
        self.shelf, self.bin = folder / "shelf", bare_environment(folder / "base")
        self.kept = folder / "kept.txt"
        self.shelf.mkdir()

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "KEPT": str(self.kept),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.shelf),
        }
        return subprocess.run(list(command), env=environ, text=True, capture_output=True)

    def script(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("sh", LOCKS / "base.sh", *arguments)

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("python3", "-m", "pip", "install", *arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """torch 2.8, torch-xla and torch-neuronx are in it; on the shelf is what would move torch."""
    made = Base(tmp_path_factory.mktemp("neuron"))
    (site,) = made.bin.parent.glob("lib/python*/site-packages")
    for name, version in (("torch", "2.8.0"), ("torch_xla", "2.8.1"), ("torch_neuronx", "2.8.0.2")):
        with zipfile.ZipFile(wheel(made.shelf, name, version=version)) as archive:
            archive.extractall(site)
    wheel(made.shelf, "torch", version="2.13.0")
    wheel(made.shelf, "greedy", needs="torch>=2.9")
    wheel(made.shelf, "modest", needs="torch")
    wheel(made.shelf, "alone")
    return made


@pytest.mark.heavy
def test_a_dependency_that_would_move_torch_fails_the_build(base: Base, tmp_path: Path) -> None:
    assert base.script("keep").returncode == 0
    assert {"torch==2.8.0", "torch-xla==2.8.1", "torch-neuronx==2.8.0.2"} <= set(
        base.kept.read_text().split()
    )
    lock = tmp_path / "lock.txt"
    lock.write_text("greedy==1.0\ntorch-xla==9 ; python_version >= '3'\n")
    refused = base.script("install", lock)
    assert refused.returncode != 0, refused.stdout
    assert "==2.8.0" in refused.stdout, refused.stdout
    lock.write_text("modest==1.0\n")
    assert base.script("install", lock).returncode == 0
    # Without the constraints the check would still notice.
    assert base.pip("greedy").returncode == 0
    lock.write_text("alone==1.0\n")
    moved = base.script("install", lock)
    assert moved.returncode == 1 and "packages were replaced: torch==2.8.0." in moved.stderr


def test_torch_xla_is_told_from_its_absence(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\n# As `pip list --format=freeze`.\necho torch==2.8.0\necho torch_xla==2.8.1\n"
    )
    python.chmod(0o755)

    def errors(*arguments: str) -> str:
        done = subprocess.run(
            ["sh", LOCKS / "base.sh", *arguments, "Remedy."],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == (1 if done.stderr else 0)
        return done.stderr

    assert errors("has", "torch-xla") == errors("lacks", "torch-x") == ""
    assert errors("lacks", "torch-xla") == "The image has torch-xla. Remedy.\n"
    assert errors("has", "jax") == "The image has no jax. Remedy.\n"


def test_both_stacks_ask_for_their_own_before_and_after() -> None:
    native, xla = (ROOT / "Dockerfile.neuron").read_text().split("FROM ${BASE_IMAGE} AS xla")
    order = r"base.sh lacks torch-xla .*base.sh install .*base.sh lacks torch-xla "
    assert re.search(order, native, re.DOTALL)
    assert re.search(r"base.sh has torch-xla .*base.sh install ", xla, re.DOTALL)
    assert "USE_TORCH_XLA=0" in native and "USE_TORCH_XLA" not in xla
    # What the compiler is strict about is the base's in both.
    assert all("base.sh keep numpy scipy protobuf networkx" in script for script in (native, xla))


def chosen(lock: str, python: str) -> dict[str, str]:
    """Package to version of a lock, as pip reads it on Linux under this Python."""
    where = {"python_version": python, "python_full_version": f"{python}.1"}
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    wanted = [Requirement(line.split(" --hash=")[0]) for line in lines if "==" in line]
    applicable = [
        requirement
        for requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate(where)
    ]
    names = [requirement.name for requirement in applicable]
    assert len(set(names)) == len(names)
    return {requirement.name: str(requirement.specifier) for requirement in applicable}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_one_lock_serves_both_xla_bases(python: str) -> None:
    packages = chosen("neuron-xla", python)
    assert packages["transformers"] == "==4.57.6"
    # It wants a Python before 3.12; the base with 3.12 has none to be kept either.
    assert ("optimum-neuron" in packages) == (python != "3.12")


@pytest.mark.parametrize("python", ["3.12", "3.13", "3.14"])
def test_one_lock_serves_every_native_base(python: str) -> None:
    packages = chosen("image", python)
    assert packages["transformers"].startswith("==5.")
    assert not {"optimum-neuron", "torch-xla"} & set(packages)
