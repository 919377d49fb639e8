"""The shell scripts and the locks, and what they do to a base's packages, without Docker."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.package_indexes import bare_environment, wheel

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "container" / "locks"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def run(*command: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | ({"PATH": path} if path is not None else {})
    environ.pop("DOCKER", None)
    return subprocess.run(list(command), text=True, capture_output=True, env=environ)


def fake(folder: Path, name: str, body: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def build_and_push(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with only `tools` and a shell's usual commands on PATH."""
    for name in ("bash", "sed", "dirname", "git", "cat", "env", "tail"):
        executable = shutil.which(name)
        assert executable
        if not (tools / name).exists():
            (tools / name).symlink_to(executable)
    return run(ROOT / "build_and_push.sh", *arguments, path=str(tools))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_shellcheck_clean() -> None:
    scripts = [
        "build_and_push.sh",
        ".ci/run",
        *(str(p.relative_to(ROOT)) for p in ROOT.glob("*/*.sh")),
        *(str(p.relative_to(ROOT)) for p in ROOT.glob("*/*/*.sh")),
    ]
    checked = run("shellcheck", *(ROOT / script for script in scripts))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.skipif(not HADOLINT, reason="hadolint is not installed")
@pytest.mark.parametrize("dockerfile", ["Dockerfile.gpu", "Dockerfile.neuron"])
def test_dockerfiles_are_hadolint_clean(dockerfile: str) -> None:
    assert HADOLINT
    checked = run(HADOLINT, ROOT / dockerfile)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give gpu, cpu, vllm or neuron, or --instance ml.g5.2xlarge."),
        (["tpu"], "'tpu' is not a kind of image."),
        (["gpu", "--tga", "x"], "'--tga' is not an option."),
        (["gpu", "--tag"], "--tag has no value."),
        (["gpu", "--stack", "xla"], "--stack goes with neuron only."),
        (["gpu", "--transformers", "6"], "--transformers '6' is unknown. Give 4 or 5."),
        (["vllm", "--transformers", "4"], "--transformers goes with gpu and cpu only."),
        (["neuron", "--transformers", "4"], "--transformers goes with gpu and cpu only."),
        (["neuron", "--stack", "cuda"], "--stack 'cuda' is unknown."),
        (["gpu", "--stand-in"], "--stand-in goes with --stack native only."),
        (["--no-push"], "No kind of image is given."),
        (
            ["--instance", "g5"],
            "--instance 'g5' is not an instance type. Give one as ml.g5.2xlarge.",
        ),
        (["--instance", "ml.z9.large"], "The family of ml.z9.large is not known. Give the kind"),
        (["--instance", "ml.inf1.xlarge"], "Inferentia 1 (ml.inf1.xlarge) is not supported."),
        (["--instance", "ml.p3.2xlarge"], "The GPU of ml.p3.2xlarge is too old for CUDA 13."),
        (["--instance", "ml.c7g.large"], "ml.c7g.large has an ARM processor"),
        (
            ["cpu", "--instance", "ml.g5.xlarge"],
            "The image cpu does not fit ml.g5.xlarge, since it has",
        ),
        (["vllm", "--instance", "ml.trn1.2xlarge"], "The image vllm does not fit ml.trn1.2xlarge"),
        (
            ["--instance", "ml.trn1.2xlarge", "--stack", "native"],
            "--stack native does not fit ml.trn1.2xlarge: Trainium 1 is programmed by torch-xla only.",
        ),
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
    image) printf '%b' "${DIGESTS-}" ;;
    run) case "$*" in *platform.python_version*) printf 'python=3.12.1\\ntorch=2.13.0\\n' ;; esac ;;
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
    calls_made, uri = calls_of(calls, "gpu", "--region", "eu-west-1", "--tag", "t1")
    registry = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
    assert uri == f"{registry}/amphora:t1"
    assert "ecr get-login-password --region eu-west-1" in calls_made
    steps = [
        f"docker login --username AWS --password-stdin {registry}",
        "aws ecr create-repository --region eu-west-1 --repository-name amphora",
        f"-t {uri} --label",
        f"docker run --rm {uri} --version",
        f"docker push {uri}",
    ]
    assert sorted(steps, key=calls_made.index) == steps


BASE = "public.ecr.aws/deep-learning-containers/pytorch"
DIGEST = f"sha256:{'0' * 64}"


def test_the_digest_of_a_base_is_a_label(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGESTS", f"mirror/pytorch@sha256:1\\n{BASE}@{DIGEST}\\n")
    calls_made, _ = calls_of(calls, "cpu", "--no-push", "--base-image", f"{BASE}:2.13")
    assert "docker pull" not in calls_made
    assert f"--build-arg BASE_IMAGE={BASE}:2.13 " in calls_made
    assert f"--label org.opencontainers.image.base.digest={DIGEST} " in calls_made
    calls_made, _ = calls_of(calls, "cpu", "--no-push", "--base-image", f"{BASE}@{DIGEST}")
    assert f"--label org.opencontainers.image.base.digest={DIGEST} " in calls_made


def test_a_base_that_is_not_here_is_pulled_first(tmp_path: Path, calls: Path) -> None:
    fake(tmp_path, "docker", DOCKER.replace("image)", "image|pull) exit 1 ;;\n    other)"))
    done = build_and_push(tmp_path, "cpu", "--no-push")
    assert done.returncode == 1
    assert f"The base {BASE}:2.14-cpu-amzn2023-sagemaker cannot be pulled." in done.stderr
    assert "docker build" not in calls.read_text()


def test_an_image_says_what_is_in_it(calls: Path) -> None:
    calls_made, uri = calls_of(calls, "cpu", "--no-push")
    revision = run("git", "-C", ROOT, "rev-parse", "HEAD").stdout.strip()
    assert f"--label org.opencontainers.image.revision={revision}" in calls_made
    versions = "--label amphora.version.python=3.12.1 --label amphora.version.torch=2.13.0"
    assert f"docker build -t {uri} {versions} -" in calls_made


@pytest.mark.parametrize(
    "url", ["https://me:secret@host/team/amphora.git", "https://host/team/amphora.git"]
)
def test_the_source_label_holds_no_credentials(url: str) -> None:
    script = (ROOT / "build_and_push.sh").read_text()
    function = re.search(r"^source_url\(\).*$", script, re.M)
    assert function
    shown = run("bash", "-c", f"git() {{ echo {url}; }}; {function[0]}; source_url")
    assert shown.stdout.strip() == "https://host/team/amphora.git"


def test_the_page_has_the_bases() -> None:
    named = re.findall(r"^(\w+) +\S+:(\S+)$", (ROOT / "bases.txt").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "IMAGES.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `(\S+)` \| .+ \| 20\d\d-\d\d-\d\d \|$", page, re.MULTILINE)
    assert named == rows and len(named) == 5


VLLM_BASE = r"\S+-inference-vllm-neuronx:0\.29\.0\.1\.2\.0-neuronx-py314-sdk2\.33\.0-ubuntu26\.04"
NEURON_BASE = r"\S+-training-neuronx:2\.9\.0-neuronx-py312-sdk2\.30\.0-\S+"


@pytest.mark.parametrize(
    ("options", "arguments", "suffix"),
    [
        ("cpu", r"BASE_IMAGE=\S+:[\d.]+-cpu-amzn2023-sagemaker ", "cpu"),
        ("cpu", "TRANSFORMERS=5 ", "cpu"),
        ("gpu", "TRANSFORMERS=5 ", "gpu"),
        ("cpu --transformers 4", "TRANSFORMERS=4 ", "cpu-transformers4"),
        ("gpu --transformers 4", "TRANSFORMERS=4 ", "gpu-transformers4"),
        ("neuron", f"BASE_IMAGE={NEURON_BASE} .*STACK=xla ", "neuron-xla"),
        ("neuron --stack native", f"BASE_IMAGE={VLLM_BASE} .*STAND_IN= .*STACK=native ", "neuron-native"),
        ("neuron --stack native --base-image torchneuron --stand-in",
         "BASE_IMAGE=torchneuron .*STAND_IN=1 .*STACK=native ", "neuron-native"),
        ("neuron --stack xla --base-image mine", "BASE_IMAGE=mine .*STACK=xla ", "neuron-xla"),
        ("neuron --stack xla", f"BASE_IMAGE={NEURON_BASE} .*STACK=xla ", "neuron-xla"),
        ("vllm --instance ml.trn2.48xlarge", f"BASE_IMAGE={VLLM_BASE} .*KIND=vllm ", "vllm"),
    ],
)  # fmt: skip
def test_an_image_has_the_base_the_lock_and_the_name_of_its_kind(
    calls: Path, options: str, arguments: str, suffix: str
) -> None:
    calls_made, uri = calls_of(calls, *options.split(), "--no-push")
    assert re.search(f"--build-arg {arguments}", calls_made)
    assert ("-f Dockerfile.neuron " in calls_made) == suffix.startswith("neuron")
    assert re.fullmatch(rf"amphora:\S+-{suffix}", uri)
    # Only a private base is logged in to.
    assert "aws" not in calls_made.replace(".aws", "") or "xla" in suffix


@pytest.mark.parametrize(
    ("instance", "choice"),
    [
        *((f"ml.{family}.2xlarge", "gpu") for family in ("g4dn", "g5", "gr6", "p4d")),
        ("ml.p6-b200.48xlarge", "gpu"),
        *((f"ml.{family}.large", "cpu") for family in ("m5", "m7i-flex", "t3")),
        *((f"ml.{family}.2xlarge", "neuron --stack xla") for family in ("trn1", "trn1n", "inf2")),
        *(
            (f"{family}.48xlarge", "neuron --stack native")
            for family in ("ml.trn2", "trn2u", "trn3")
        ),
    ],
)
def test_an_instance_type_chooses_the_image(calls: Path, instance: str, choice: str) -> None:
    done = build_and_push(calls.parent, "--instance", instance, "--no-push")
    reason = re.search(f"{instance}: {choice} from (\\S+), since .+", done.stderr)
    assert done.returncode == 0, done.stderr
    assert reason
    assert f"--build-arg BASE_IMAGE={reason[1]} " in calls.read_text()


def test_a_private_base_is_logged_in_to(calls: Path) -> None:
    registry = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
    calls_made, _ = calls_of(
        calls, "neuron", "--no-push", "--base-image", f"{registry}/torchneuron:1"
    )
    assert f"login --username AWS --password-stdin {registry}" in calls_made


def test_an_image_that_fails_its_try_is_not_pushed(tmp_path: Path, calls: Path) -> None:
    fake(tmp_path, "docker", DOCKER.replace('["amphora"]', '["bash"]'))
    done = build_and_push(tmp_path, "gpu", "--region", "eu-west-1")
    assert done.returncode == 1
    assert 'The image starts with ["bash"] ["train"].' in done.stderr
    assert "docker push" not in calls.read_text()
    assert not done.stdout


@pytest.mark.heavy
def test_the_bill_of_materials_lists_an_environment_and_nothing_else(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = f"{bare_environment(tmp_path / 'venv')}{os.pathsep}{os.environ['PATH']}"
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheel(tmp_path, "alone")) as archive:
        archive.extractall(site)
    made = run("sh", LOCKS / "sbom.sh", LOCKS / "sbom.txt", path=path)
    assert made.returncode == 0, made.stderr
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(made.stdout) is None
    assert [part["name"] for part in json.loads(made.stdout)["components"]] == ["alone"]


def test_torch_torchvision_and_torchaudio_of_a_base_stay(tmp_path: Path) -> None:
    """A stand-in for pip, which lists packages and shows what it is to install."""
    versions = {
        "torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0", "transformers": "5.14.1",
        "datasets": "5.0.0",
    }  # fmt: skip
    listed, kept, lock = (tmp_path / name for name in ("listed", "base.txt", "lock.txt"))
    fake(tmp_path, "python3", f'case $3 in list) cat {listed} ;; install) cat "$7" ;; esac')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    base_script = functools.partial(run, "env", f"KEPT={kept}", "sh", LOCKS / "base.sh", path=path)
    pins = [f"{name}=={number}" for name, number in versions.items()]
    listed.write_text("\n".join(pins))
    base_script("keep", "transformers")
    assert kept.read_text().split() == pins[:-1]
    # What is kept is not installed from a lock, nor what is left out by name.
    lock.write_text("torchvision==0.29.0\nabsent-package==1\nadded==2\n")
    installed = base_script("install", lock, "-absent-package")
    assert (installed.returncode, installed.stdout) == (0, "added==2\n"), installed.stderr
    listed.write_text(listed.read_text().replace("0.28.0", "0.29.0"))
    moved = base_script("install", lock, "-absent-package")
    assert moved.returncode == 1
    assert "packages were replaced: torchvision==0.28.0." in moved.stderr


@pytest.mark.heavy
def test_torch_neuronx_is_added_for_the_torch_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins of AWS's index and of torch: only their metadata."""
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(tmp_path)),
        ("CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    for number, torch in (("2.14.3.0", "2.14.*"), ("2.13.3.0", "2.13.1"), ("2.14.4.0", "2.14.*")):
        wheel(tmp_path, "torch_neuronx", needs=f"torch=={torch}", version=number)
    for name, number in (
        ("neuronx_cc", "2.30.1"),
        ("nki", "0.6"),
        *(("torch", f"2.{n}.0") for n in (12, 13, 14)),
    ):
        wheel(tmp_path, name, version=number)
    here = f"{bare_environment(tmp_path / 'venv')}{os.pathsep}{os.environ['PATH']}"

    def build(torch: str) -> subprocess.CompletedProcess[str]:
        installed = run("python3", "-m", "pip", "install", f"torch=={torch}", path=here)
        assert installed.returncode == 0, installed.stderr
        return run("sh", LOCKS / "base.sh", "neuronx", path=here)

    refused = build("2.12.0")
    assert refused.returncode == 1
    assert (
        "has no torch-neuronx, and torch 2.12.0: torch-neuronx is for 2.13 and 2.14"
        in refused.stderr
    )
    assert "github.com/aws-neuron/deep-learning-containers" in refused.stderr
    contradicted = build("2.13.0")
    assert contradicted.returncode == 1
    assert (
        "torch-neuronx==2.13.3.0 cannot be added to the base with torch 2.13.0"
        in contradicted.stderr
    )
    added = build("2.14.0")
    assert added.returncode == 0, added.stderr
    listed = run("python3", "-m", "pip", "list", "--format=freeze", path=here).stdout
    listed = listed.replace("_", "-")
    assert {"torch==2.14.0", "torch-neuronx==2.14.3.0", "neuronx-cc==2.30.1", "nki==0.6"} <= set(
        listed.split()
    )
    # Nothing is done to a base that has it.
    assert build("2.14.0").stdout.count("Collecting") == 0


def pins(*locks: str) -> set[str]:
    """`name==version` of each line."""
    texts = [(LOCKS / f"{lock}.txt").read_text() for lock in locks]
    return {pin for text in texts for pin in re.findall(r"^[\w.-]+==[^ \n]+", text, re.M)}


def test_locks_hold_the_decided_versions_and_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    decided = set(re.findall(r'^    "([\w-]+==[\w.]+)",$', project, re.M))
    assert decided
    assert decided <= pins("image", "cpu", "neuron-xla")
    alone = pins("image", "gpu", "cpu") - pins("dev")
    assert {pin.split("==")[0] for pin in alone} == {"bitsandbytes", "sagemaker-training"}


@pytest.mark.parametrize("lock", ["image", "image-transformers4", "neuron-xla", "dev"])
def test_a_lock_holds_what_the_package_needs(lock: str) -> None:
    project = (ROOT / "container" / "pyproject.toml").read_text()
    needed = set(re.findall(r'^    "([\w-]+)>=', project, re.M))
    assert {"boto3", "starlette"} <= needed
    results = dict(pin.split("==") for pin in pins(lock))
    assert needed <= results.keys()
    assert results["transformers"][0] == (
        "4" if lock in ("image-transformers4", "neuron-xla") else "5"
    )


@pytest.mark.parametrize("lock", ["image", "image-transformers4", "gpu", "cpu", "sbom"])
def test_what_an_image_installs_is_known_by_its_hashes(lock: str) -> None:
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    without = [line for line in lines if "==" in line and " --hash=sha256:" not in line]
    assert not without


@pytest.mark.parametrize("lock", sorted({path.stem for path in LOCKS.glob("*.txt")} - {"sbom"}))
def test_a_lock_names_no_torch_and_no_place(lock: str) -> None:
    text = (LOCKS / f"{lock}.txt").read_text()
    assert not re.search(r"^(torch|torch-xla|torch-neuronx|nvidia-\S+|triton|pip)==", text, re.M)
    assert not re.search(r"://|--index|--find-links|^/", text, re.M)


@pytest.mark.heavy
def test_a_dependency_that_would_move_torch_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment in place of a base image, with a shelf of wheels in place of the index."""
    shelf, kept, lock = (tmp_path / name for name in ("shelf", "kept.txt", "lock.txt"))
    path = f"{bare_environment(tmp_path / 'base')}:/usr/bin:/bin"
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", shelf), ("KEPT", kept)):
        monkeypatch.setenv(name, str(value))
    (site,) = tmp_path.glob("base/lib/python*/site-packages")
    for name, version in (("torch", "2.8.0"), ("torch_xla", "2.8.1"), ("torch_neuronx", "2.8.0.2")):
        with zipfile.ZipFile(wheel(shelf, name, version=version)) as archive:
            archive.extractall(site)
    wheel(shelf, "torch", version="2.13.0")
    for name, needs in (("greedy", "torch>=2.9"), ("modest", "torch"), ("alone", "")):
        wheel(shelf, name, needs=needs)
    script = functools.partial(run, "sh", LOCKS / "base.sh", path=path)
    assert script("keep").returncode == 0
    assert {"torch==2.8.0", "torch-xla==2.8.1", "torch-neuronx==2.8.0.2"} <= set(
        kept.read_text().split()
    )
    lock.write_text("greedy==1.0\ntorch-xla==9 ; python_version >= '3'\n")
    refused = script("install", lock)
    assert refused.returncode != 0, refused.stdout
    assert "==2.8.0" in refused.stdout, refused.stdout
    lock.write_text("modest==1.0\n")
    assert script("install", lock).returncode == 0
    # Without the constraints the check would still notice.
    assert run("python3", "-m", "pip", "install", "greedy", path=path).returncode == 0
    lock.write_text("alone==1.0\n")
    moved = script("install", lock)
    assert moved.returncode == 1 and "packages were replaced: torch==2.8.0." in moved.stderr


def test_torch_xla_is_told_from_its_absence(tmp_path: Path) -> None:
    # As `pip list --format=freeze`.
    fake(tmp_path, "python3", "echo torch==2.8.0\necho torch_xla==2.8.1")

    def errors(*arguments: str) -> str:
        path = f"{tmp_path}:/usr/bin:/bin"
        done = run("sh", LOCKS / "base.sh", *arguments, "Remedy.", path=path)
        assert done.returncode == (1 if done.stderr else 0)
        return done.stderr

    assert errors("has", "torch-xla") == errors("lacks", "torch-x") == ""
    assert errors("lacks", "torch-xla") == "The image has torch-xla. Remedy.\n"
    assert errors("has", "jax") == "The image has no jax. Remedy.\n"


@pytest.mark.parametrize(
    ("lock", "python"),
    [
        *(("neuron-xla", python) for python in ("3.10", "3.11", "3.12")),
        *(("image", python) for python in ("3.12", "3.13", "3.14")),
    ],
)
def test_one_lock_serves_every_base_of_a_stack(lock: str, python: str) -> None:
    """As pip reads it on Linux under this Python."""
    where = {"python_version": python, "python_full_version": f"{python}.1"}
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    wanted = [Requirement(line.split(" --hash=")[0]) for line in lines if "==" in line]
    applicable = [item for item in wanted if item.marker is None or item.marker.evaluate(where)]
    packages = {item.name: str(item.specifier) for item in applicable}
    assert len(packages) == len(applicable)
    if lock == "image":
        assert packages["transformers"].startswith("==5.")
        assert not {"optimum-neuron", "torch-xla"} & set(packages)
    else:
        assert packages["transformers"] == "==4.57.6"
        # It wants a Python before 3.12; the base with 3.12 has none to be kept either.
        assert ("optimum-neuron" in packages) == (python != "3.12")
