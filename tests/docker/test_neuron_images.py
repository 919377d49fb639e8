"""Dockerfile.neuron's two stacks on stand-in bases; no Neuron device is needed, or used."""

import os
import shutil

import pytest

from tests.docker.conftest import Docker, stand_in

NATIVE = ("neuron", "--stack", "native", "--stand-in")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


def test_native_wants_torch_neuronx(docker: Docker, torch_base: str) -> None:
    # No index has torch-neuronx of this version here, and a CPU's torch alone is not enough.
    options = ["neuron", "--stack", "native", "--base-image", torch_base, "--no-push"]
    built = docker.build(*options, "--tag", "test-refused")
    assert built.returncode == 1
    assert "torch-neuronx==2.13.3.0 cannot be added to the base" in built.stderr.splitlines()[-1]
    assert not built.stdout


def large_stand_in(docker: Docker, kind: str) -> str:
    free = shutil.disk_usage("/var/lib").free / 1e9
    if free < 25 and not os.environ.get("AMPHORA_TEST_NEURON_BASES"):
        pytest.skip(
            f"the base {kind} and its image want 25 GB, and {free:.0f} are free: see docs/IMAGES.md"
        )
    return stand_in(docker, kind)


def run_python(docker: Docker, image: str, command: str) -> str:
    return docker("run", "--rm", "--entrypoint", "python3", image, "-c", command).stdout.strip()


PYTHON = "import platform; print(platform.python_version().rsplit('.', 1)[0])"


def test_native_looks_for_no_xla(docker: Docker, torch_base: str) -> None:
    image = docker.image(*NATIVE, "--tag", "test-native", "--base-image", torch_base)
    ask = (
        "import importlib.util as util, os; print(os.environ['USE_TORCH_XLA'], "
        "os.environ['AMPHORA_NEURON_STACK'], util.find_spec('torch_xla'))"
    )
    assert run_python(docker, image, ask) == "0 native None"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "python"), [("native", "3.14"), ("native-3.12", "3.12")])
def test_native_builds_on_the_pythons_of_its_real_bases(
    docker: Docker, kind: str, python: str
) -> None:
    base = large_stand_in(docker, kind)
    image = docker.image(*NATIVE, "--tag", f"test-native-{python}", "--base-image", base)
    assert run_python(docker, image, PYTHON) == python


@pytest.mark.long
def test_xla_computes_with_the_bases_own_torch(docker: Docker) -> None:
    base = large_stand_in(docker, "xla")
    image = docker.image("neuron", "--stack", "xla", "--tag", "test-xla", "--base-image", base)
    assert run_python(docker, image, PYTHON) == "3.12"
    ask = (
        "import os; os.environ['PJRT_DEVICE'] = 'CPU'; import torch, torch_xla; "
        "print(torch.__version__.split('+')[0], torch.ones(2, device=torch_xla.device()).sum().item())"
    )
    assert run_python(docker, image, ask).splitlines()[-1] == "2.9.0 2.0"


def test_the_stack_xla_wants_an_xla_base(docker: Docker, torch_base: str) -> None:
    built = docker.build("neuron", "--stack", "xla", "--base-image", torch_base, "--no-push")
    assert built.returncode != 0
    assert "has no torch-xla. Give an XLA image" in built.stderr
    assert not built.stdout
