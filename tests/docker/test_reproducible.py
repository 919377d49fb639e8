"""The cpu image's own steps, run twice: equal inputs make equal layers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT, Docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
# Of the lock's 130 packages a wheel with compiled code, one without, and a source; and one of C.
PACKAGES = ("xxhash==", "tabulate==", "inotify-simple==")
SOURCE = (
    "crcmod==1.7 --hash=sha256:dc7051a0db5f2bd48665a990d3ec1cc305a466a77358ca4492826f41f283601e"
)


def checkout(folder: Path, date: int, mask: int) -> Path:
    """What an image is made of, as another machine would have checked it out."""
    for name in ("container", "code"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("Dockerfile.gpu", ".dockerignore"):
        shutil.copy(ROOT / name, folder)
    lock = folder / "container" / "locks" / "image.txt"
    lines = [line for line in lock.read_text().splitlines() if line.startswith(PACKAGES)]
    assert len(lines) == len(PACKAGES)
    lock.write_text("\n".join([*lines, SOURCE]))
    lock.with_name("gpu.txt").write_text("")
    # A cache of pip's own, lest the second build take the first one's wheels.
    dockerfile = folder / "Dockerfile.gpu"
    mount = "--mount=type=cache,"
    dockerfile.write_text(
        dockerfile.read_text().replace(mount, f"{mount}id={folder.name}-{os.getpid()},")
    )
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode & ~mask)
        os.utime(path, (date, date))
    return folder


def layers(docker: Docker, context: Path, base: str, *options: str) -> list[str]:
    """Digests of a build's layers, uncompressed: those of the base, then ours."""
    image = f"amphora:test-{context.name}"
    docker(
        "build", "-q", "-t", image, "-f", str(context / "Dockerfile.gpu"), *options,
        "--build-arg", f"BASE_IMAGE={base}", str(context), timeout=600,
    )  # fmt: skip
    told: list[str] = json.loads(docker("inspect", "-f", "{{json .RootFS.Layers}}", image).stdout)
    docker("rmi", image)
    return told


def test_equal_inputs_make_equal_layers(
    docker: Docker, torch_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_BUILDKIT", "1")
    now = checkout(tmp_path / "now", 1_790_000_000, 0o022)
    then = checkout(tmp_path / "elsewhere" / "then", 1_000_000_000, 0o077)
    first, second = (layers(docker, context, torch_base, "--no-cache") for context in (now, then))
    base = json.loads(docker("inspect", "-f", "{{json .RootFS.Layers}}", torch_base).stdout)
    assert first[: len(base)] == base and len(first) == len(base) + 4
    assert second == first
    # That it would be seen: one of our modules says something else.
    (then / "code" / "train.py").write_text("raise SystemExit\n")
    *before, code = layers(docker, then, torch_base)
    assert before == first[:-1] and code != first[-1]
