"""Dockerfile.neuron's two stacks on stand-in bases; no Neuron device is needed, or used."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.docker.conftest import Docker, stand_in

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def native_image(docker: Docker, torch_base: str) -> str:
    return docker.image("neuron", "--tag", "test-native", "--base-image", torch_base)


@pytest.fixture(scope="module")
def xla_image(docker: Docker) -> str:
    free = shutil.disk_usage("/var/lib").free / 1e9
    if free < 25 and not os.environ.get("AMPHORA_TEST_XLA"):
        pytest.skip(
            f"the XLA base and image want 25 GB, and {free:.0f} are free: see docs/IMAGES.md"
        )
    base = stand_in(docker, "xla")
    return docker.image("neuron", "--stack", "xla", "--tag", "test-xla", "--base-image", base)


def run_python(docker: Docker, image: str, command: str) -> str:
    return docker("run", "--rm", "--entrypoint", "python3", image, "-c", command).stdout.strip()


def test_native_looks_for_no_xla(docker: Docker, native_image: str) -> None:
    ask = (
        "import importlib.util as util, os; "
        "print(os.environ['USE_TORCH_XLA'], util.find_spec('torch_xla'))"
    )
    assert run_python(docker, native_image, ask) == "0 None"


def test_xla_computes_with_the_bases_own_torch(docker: Docker, xla_image: str) -> None:
    ask = (
        "import os; os.environ['PJRT_DEVICE'] = 'CPU'; import torch, torch_xla; "
        "print(torch.__version__.split('+')[0], torch.ones(2, device=torch_xla.device()).sum().item())"
    )
    assert run_python(docker, xla_image, ask).splitlines()[-1] == "2.9.0 2.0"


def test_the_stack_xla_wants_an_xla_base(docker: Docker, torch_base: str) -> None:
    built = docker.build("neuron", "--stack", "xla", "--base-image", torch_base, "--no-push")
    assert built.returncode != 0
    assert "has no torch-xla. Give an XLA image" in built.stderr
    assert not built.stdout
