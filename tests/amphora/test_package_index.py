"""Where packages for the user's code come from: CodeArtifact, a private index, wheels beside it."""

import json
import os
import stat
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

import pytest

from amphora.common import logs, packages
from amphora.common.errors import AmphoraError, CodeError
from amphora.common.packages import PACKAGE, REQUIREMENTS
from tests.support.job_tree import Tree
from tests.support.package_indexes import ABSENT, ARN, DENIED, IndexServer, served, wheel

PROBE = "amphora_index_probe"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexServer]:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, PROBE)
    with served(folder) as server:
        yield server


@pytest.fixture
def pip(tmp_path: Path, target: dict[str, str]) -> dict[str, str]:
    """pip installs into a folder of the test, and asks nobody else."""
    return {
        **target,
        # What this machine is set to does not count.
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HOME": str(tmp_path),
    }


def asking(tree: Tree, requirements: str = "amphora-index-probe==1.0\n") -> Tree:
    tree.script(requirements, "requirements.txt")
    return tree.script(f"import {PROBE}; print('imported', {PROBE}.VALUE)")


def test_a_job_installs_from_codeartifact(
    index: IndexServer, scripted: Tree, pip: dict[str, str]
) -> None:
    nowhere = "http://127.0.0.1:1/simple"
    environ = {**pip, **index.aws, "CA_REPOSITORY_ARN": ARN, "PIP_INDEX_URL": nowhere}
    result = asking(scripted).train(**environ)
    assert "imported installed" in result.stdout, result.stderr
    assert (
        "installing requirements.txt from CodeArtifact's python of team (111122223333,"
        " eu-west-1), in place of PIP_INDEX_URL" in result.stderr
    )
    assert any(path.startswith("/pypi/python/simple/") for path in index.requested_paths)
    assert index.tokens and not index.seen_in_argv
    assert not any(token in result.stdout + result.stderr for token in index.tokens)


def test_pip_gets_a_new_token_each_time_in_a_file_of_its_own(
    index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in index.aws.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "requirements.txt").write_text("some-package\n")
    environ = {**os.environ, "CA_REPOSITORY_ARN": f" {ARN} ", "HOME": str(tmp_path)}
    given = []
    for _ in range(2):
        with packages.index(environ, tmp_path, REQUIREMENTS) as pip_index:
            private = Path(pip_index.environ["NETRC"])
            assert stat.S_IMODE(private.stat().st_mode) == 0o600
            given.append(private.read_text())
            shown = {name: value for name, value in pip_index.environ.items() if name != "NETRC"}
        assert not private.exists()
        token = index.tokens[-1]
        assert f"login aws password {token}\n" in given[-1]
        assert token not in pip_index.shown + json.dumps(shown)
        assert shown["PIP_INDEX_URL"] == f"{index.address}/pypi/python/simple/"
        assert token not in logs.mask(f"what pip said: {token}")
    assert given[0] != given[1]


@pytest.mark.parametrize(
    ("arn", "change", "says"),
    [
        (DENIED, {}, "AccessDenied.*sts:GetServiceBearerToken"),
        (ABSENT, {}, "ResourceNotFound.*Check the account, the domain"),
        (
            ARN,
            {"AWS_ENDPOINT_URL_CODEARTIFACT": "http://127.0.0.1:1"},
            "CA_REPOSITORY_ARN: CodeArtifact's python of team .*Could not connect.*VPC",
        ),
    ],
)
def test_what_codeartifact_refuses_has_its_remedy(
    index: IndexServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arn: str,
    change: dict[str, str],
    says: str,
) -> None:
    for name, value in {**index.aws, **change}.items():
        monkeypatch.setenv(name, value)
    environ = {**os.environ, "CA_REPOSITORY_ARN": arn}
    with pytest.raises(CodeError, match=says), packages.index(environ, tmp_path, PACKAGE):
        pass


def test_a_job_with_a_wrong_name_fails_before_pip_and_doctor_says_so(scripted: Tree) -> None:
    asking(scripted)
    result = scripted.train(CA_REPOSITORY_ARN="team/python")
    assert result.returncode == 2 and scripted.failure
    assert scripted.failure.startswith("ConfigError: CA_REPOSITORY_ARN is 'team/python'")
    code, pip_index = scripted.doctor(CA_REPOSITORY_ARN="team/python")
    assert (code, pip_index["packages"][0]["level"]) == (1, "error")
    assert "CA_REPOSITORY_ARN" in pip_index["packages"][0]["detail"]


def test_wheels_alone_need_no_token_of_codeartifact(index: IndexServer, tmp_path: Path) -> None:
    before = len(index.tokens)
    environ = {**os.environ, "CA_REPOSITORY_ARN": ARN, "PIP_NO_INDEX": "1"}
    with packages.index(environ, tmp_path, REQUIREMENTS) as pip_index:
        assert pip_index.environ.get("NETRC") == os.environ.get("NETRC")
    assert pip_index.shown == "no index"
    assert len(index.tokens) == before


def test_a_password_reaches_the_index_and_no_log(
    index: IndexServer, scripted: Tree, pip: dict[str, str]
) -> None:
    password = quote(index.password, safe="")
    url = index.address.replace("//", f"//{index.user}:{password}@") + "/private/simple/"
    result = asking(scripted).train(**pip, PIP_INDEX_URL=url)
    assert "imported installed" in result.stdout, result.stderr
    assert f"from {index.address}/private/simple/" in result.stderr
    for secret in (password, index.password):
        assert secret not in result.stdout + result.stderr


def test_a_wrong_password_is_named_as_that_and_not_shown(
    index: IndexServer, scripted: Tree, pip: dict[str, str]
) -> None:
    # pip itself shows what stands before an empty password.
    url = index.address.replace("//", "//token-of-an-account:@") + "/private/simple/"
    result = asking(scripted).train(**pip, PIP_INDEX_URL=url)
    assert result.returncode == 2 and scripted.failure
    assert "The index refuses the credentials" in scripted.failure[:1024]
    assert f"{index.address}/private/simple/" in scripted.failure
    assert "token-of-an-account" not in result.stdout + result.stderr + scripted.failure


def test_torch_stays_as_the_image_has_it(scripted: Tree, pip: dict[str, str]) -> None:
    """By stand-ins: an empty `torch` 1.0, and a package that needs it."""
    wheels = scripted.base / "code" / "wheels"
    wheel(wheels, "torch")
    wheel(wheels, PROBE, needs="torch==1.0")
    requirements = "--no-index\n--find-links wheels\namphora-index-probe\n"
    del pip["PIP_TARGET"], pip["PIP_NO_DEPS"]
    # Were it not refused, the torch that runs this test would not be replaced either.
    result = asking(scripted, requirements).train(**pip, PIP_DRY_RUN="1")
    assert result.returncode != 0, result.stdout
    failure = (scripted.base / "output" / "failure").read_text()
    assert f"(constraint) torch=={version('torch')}" in failure
    assert "The image's torch stays" in failure and "--base-image" in failure


def test_asking_for_the_torch_that_is_there_installs_nothing(
    scripted: Tree, pip: dict[str, str]
) -> None:
    del pip["PIP_TARGET"]
    there = version("torch").partition("+")[0]
    scripted.script(f"--no-index\ntorch>=2\ntorch=={there}\n", "requirements.txt")
    result = scripted.script("print('started')").train(**pip)
    assert "started" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "pip's default index"),
        ({"PIP_NO_INDEX": "true", "PIP_INDEX_URL": "https://a.host/s"}, "no index"),
        ({"PIP_INDEX_URL": "https://u:pass@one.host/simple?x=1"}, "https://one.host/simple"),
    ],
)
def test_the_index_is_named_without_credentials(environ: dict[str, str], shown: str) -> None:
    assert packages.described(environ) == shown


def test_credentials_of_every_source_are_masked(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("--extra-index-url https://u:hidden@a.host/s\n")
    environ = {
        "PIP_EXTRA_INDEX_URL": "https://two.host/s https://tokenoftwo@three.host/s",
        "HTTPS_PROXY": "http://me:proxypass@proxy.host:3128",
    }
    with packages.index(environ, tmp_path, REQUIREMENTS):
        pass
    for secret in ("tokenoftwo", "proxypass", "hidden"):
        assert secret not in logs.mask(secret)


@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        (["ERROR: No matching distribution found for a"], "Check the names and versions"),
        (["WARNING: Retrying after connection broken by 'X'", "ERROR: a"], "cannot be reached"),
        (["SSLError(CERTIFICATE_VERIFY_FAILED)", "ERROR: a"], "PIP_CERT"),
        (
            [
                "The conflict is caused by:",
                *(f"torchvision 0.{minor} depends on torch==2.{minor}" for minor in range(9)),
                "The user requested (constraint) torch==2.13.0a0+nv25.6",
                "To fix this you could try to:",
                "ERROR: ResolutionImpossible: see pip's pages",
            ],
            "Leave torch out of the requirements, request the version",
        ),
        (["ERROR: HTTP error 403 while", "403 Client Error: Forbidden"], "refuses the credentials"),
    ],
)
def test_what_pip_says_decides_on_the_remedy(lines: list[str], remedy: str) -> None:
    pip_index = packages.Index(argv=(), environ={}, shown="somewhere", log=Path("/nowhere"))
    error: AmphoraError = packages.failed(REQUIREMENTS, Path("/code"), 1, lines, pip_index)
    assert remedy in str(error)
    assert str(error).startswith(
        "requirements.txt of /code cannot be installed (pip's exit code 1)"
    )
    assert all(line in str(error) for line in lines[-1:])
