"""Code that is fetched and requirements that are installed before the model is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.code_archives import AWS, archive
from tests.support.package_indexes import wheel
from tests.support.servers import ECHO, Start


def test_requirements_are_installed_before_the_model_is_loaded(
    start: Start, tmp_path: Path, target: dict[str, str]
) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    wheel(code, "amphora_probe")
    server = start(
        "import amphora_probe\n"
        + ECHO.replace("42", "amphora_probe.VALUE").replace("\n    ", "\n"),
        files={"requirements.txt": "--no-index\n--find-links .\namphora-probe==1.0\n"},
        **target,
    ).ready()
    assert server.invoke(1).json()["answer"] == "installed"


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        ("not-there-at-all==9", ["cannot be installed (pip's exit code 1)", "not-there-at-all==9"]),
        (
            "transformers==1.0",
            ["replaced transformers 5.", "by 1.0", "Leave transformers out, or build the image"],
        ),
    ],
)
def test_requirements_that_cannot_be_end_the_server_with_the_reason(
    start: Start, tmp_path: Path, target: dict[str, str], requirements: str, words: list[str]
) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    wheel(code, "transformers")
    files = {"requirements.txt": f"--no-index\n--find-links .\n{requirements}\n"}
    server = start(files=files, **target)
    assert server.process.wait(240) == 2
    last = server.log.splitlines()[-1]
    for word in words:
        assert word in last


@pytest.mark.heavy
def test_code_is_fetched_from_s3(
    start: Start, tmp_path: Path, bucket: Callable[[Path], str]
) -> None:
    code = ECHO.replace("\n    ", "\n").replace("42", "'from S3'")
    url = bucket(archive(tmp_path / "sourcedir.tar.gz", ("mine.py", code)))
    server = start(
        SAGEMAKER_SUBMIT_DIRECTORY="s3://code/job/sourcedir.tar.gz",
        SAGEMAKER_PROGRAM="mine.py",
        S3_ENDPOINT_URL=url,
        **AWS,
    ).ready()
    assert server.invoke(1).json()["answer"] == "from S3"
