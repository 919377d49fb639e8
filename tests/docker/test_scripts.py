"""The shell scripts and the locks, without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "container" / "locks"
ALL_LOCKS = sorted(path.stem for path in LOCKS.glob("*.txt"))
SCRIPTS = [
    "build_and_push.sh",
    ".ci/run",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob("*/*/*.sh")),
]


def run(*command: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | ({"PATH": path} if path is not None else {})
    environ.pop("DOCKER", None)
    return subprocess.run(list(command), text=True, capture_output=True, env=environ)


def fake(folder: Path, name: str, body: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def build_and_push(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with only `tools` and a shell's usual commands on PATH."""
    for name in ("bash", "sed", "dirname", "git", "cat", "env"):
        found = shutil.which(name)
        assert found
        if not (tools / name).exists():
            (tools / name).symlink_to(found)
    return run(ROOT / "build_and_push.sh", *arguments, path=str(tools))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_shellcheck_clean(script: str) -> None:
    checked = run("shellcheck", ROOT / script)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Say gpu, cpu or neuron."),
        (["tpu"], "'tpu' is no kind of image."),
        (["gpu", "--tga", "x"], "'--tga' is no option."),
        (["gpu", "--tag"], "--tag has no value."),
        (["gpu", "--stack", "xla"], "--stack goes with neuron only."),
        (["neuron", "--stack", "cuda"], "--stack 'cuda' is unknown."),
        (["neuron", "--stack", "native"], "Name a TorchNeuron training image with --base-image."),
        (["cpu", "--no-push"], "Install Docker"),
    ],
)
def test_a_wrong_call_says_what_to_do(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = build_and_push(tmp_path, *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert not done.stdout


def test_no_engine_is_told_from_no_client(tmp_path: Path) -> None:
    fake(tmp_path, "docker", 'test "$1" != info')
    done = build_and_push(tmp_path, "cpu", "--no-push")
    assert done.returncode == 1
    assert "No Docker engine answers." in done.stderr


DOCKER = """
echo "docker $*" >> "$CALLS"
case "$1" in
    --version) echo "Docker version 20.10.24" ;;
    inspect) echo '["amphora"] ["train"]' ;;
    login) cat > /dev/null ;;
esac
"""
AWS = """
echo "aws $*" >> "$CALLS"
case "$*" in
    *get-caller-identity*) echo 123456789012 ;;
    *describe-repositories*) exit 255 ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for docker and aws, and the file in which they write down their calls."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    fake(tmp_path, "docker", DOCKER)
    fake(tmp_path, "aws", AWS)
    return tmp_path / "calls"


def calls_of(calls: Path, *arguments: str) -> tuple[str, str]:
    """The docker and aws commands of one call, and its standard output."""
    done = build_and_push(calls.parent, *arguments)
    assert done.returncode == 0, done.stderr
    return calls.read_text(), done.stdout.strip()


def test_push_logs_in_makes_the_repository_builds_tries_and_pushes(calls: Path) -> None:
    told, uri = calls_of(calls, "gpu", "--region", "eu-west-1", "--tag", "t1")
    registry = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
    assert uri == f"{registry}/amphora:t1"
    assert "ecr get-login-password --region eu-west-1" in told
    steps = [
        f"docker login --username AWS --password-stdin {registry}",
        "aws ecr create-repository --region eu-west-1 --repository-name amphora",
        f"-t {uri} --label",
        f"docker run --rm {uri} --version",
        f"docker push {uri}",
    ]
    assert sorted(steps, key=told.index) == steps


def test_the_cpu_image_takes_the_cpu_base(calls: Path) -> None:
    told, uri = calls_of(calls, "cpu", "--no-push")
    assert re.search(r"BASE_IMAGE=\S+:[\d.]+-cpu-amzn2023-sagemaker ", told)
    assert "aws" not in told.replace(".aws", "")
    assert uri.startswith("amphora:")
    assert uri.endswith("-cpu")


def test_a_private_base_is_logged_in_to(calls: Path) -> None:
    told, uri = calls_of(calls, "neuron", "--no-push")
    assert re.search(r"login .*763104351884\.dkr\.ecr\.us-east-1\.amazonaws\.com", told)
    assert "--target xla" in told
    assert uri.endswith("-neuron-xla")


def test_an_image_that_fails_its_try_is_not_pushed(tmp_path: Path, calls: Path) -> None:
    fake(tmp_path, "docker", DOCKER.replace('["amphora"]', '["bash"]'))
    done = build_and_push(tmp_path, "gpu", "--region", "eu-west-1")
    assert done.returncode == 1
    assert 'The image starts with ["bash"] ["train"].' in done.stderr
    assert "docker push" not in calls.read_text()
    assert not done.stdout


def base_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """base.sh on the Python that runs these tests, as if it were a base image's."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run("sh", LOCKS / "base.sh", *arguments, path=here)


def test_base_lists_torch_and_notices_when_it_moves(tmp_path: Path) -> None:
    kept = base_script("keep", "transformers").stdout
    assert f"torch=={version('torch')}\n" in kept
    assert f"transformers=={version('transformers')}\n" in kept
    assert "datasets" not in kept
    listed = tmp_path / "base.txt"
    listed.write_text(kept)
    assert base_script("check", listed).returncode == 0
    listed.write_text(kept + "torch==1.0\n")
    moved = base_script("check", listed)
    assert moved.returncode == 1
    assert "packages were replaced: torch==1.0." in moved.stderr


def test_base_leaves_out_of_a_lock_what_it_has(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("transformers==1.0\ntyping-extensions==1.0 ; python_version < '3'\nabsent==2\n")
    assert base_script("missing", lock).stdout == "absent==2\n"


def lines(lock: str) -> set[str]:
    return {line for line in (LOCKS / f"{lock}.txt").read_text().splitlines() if "==" in line}


def test_locks_hold_the_decided_versions_and_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    decided = set(re.findall(r'^    "([\w-]+==[\w.]+)",$', project, re.M))
    locked = {line.split(" ")[0] for name in ("gpu", "neuron-xla") for line in lines(name)}
    assert decided
    assert decided <= locked
    assert lines("gpu") - lines("dev") == {
        line for line in lines("gpu") if line.startswith("sagemaker-training==")
    }


@pytest.mark.parametrize("lock", ALL_LOCKS)
def test_a_lock_holds_what_the_package_needs(lock: str) -> None:
    project = (ROOT / "container" / "pyproject.toml").read_text()
    needed = set(re.findall(r'^    "([\w-]+)>=', project, re.M))
    assert {"boto3", "starlette"} <= needed
    assert needed <= {line.split("==")[0] for line in lines(lock)}


@pytest.mark.parametrize("lock", ALL_LOCKS)
def test_a_lock_names_no_torch_and_no_place(lock: str) -> None:
    text = (LOCKS / f"{lock}.txt").read_text()
    assert not re.search(r"^(torch|torch-xla|torch-neuronx|nvidia-\S+|triton|pip)==", text, re.M)
    assert not re.search(r"://|--index|--find-links|^/", text, re.M)
