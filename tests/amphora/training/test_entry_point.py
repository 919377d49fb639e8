"""The user's code: where it comes from, what is refused, what is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from amphora.common import archives
from amphora.common.errors import CodeError
from tests.support.code_archives import AWS, archive
from tests.support.job_tree import Tree
from tests.support.package_indexes import wheel

HELLO = "import os, sys; print('hello from', os.path.basename(sys.argv[0]), sys.argv[1:])"


def special(name: str, kind: bytes, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, linkname
    return info


def job_from(tree: Tree, place: Path | str, program: str = "script.py", **more: str) -> Tree:
    return tree.configure(
        {"sagemaker_program": program, "sagemaker_submit_directory": str(place), **more}
    )


def test_a_tarball(tree: Tree, tmp_path: Path) -> None:
    packed = archive(tmp_path / "sourcedir.tar.gz", ("./script.py", HELLO), ("./lib/a.py", ""))
    result = job_from(tree, packed).train()
    assert "hello from script.py" in result.stdout, result.stderr
    assert (tree.base / "code" / "lib" / "a.py").is_file()


def test_code_that_lies_there_does_not_hide_the_jobs_own(tree: Tree, tmp_path: Path) -> None:
    packed = archive(tmp_path / "s.tar.gz", ("script.py", HELLO))
    job_from(tree, packed).script("print('the old one')", "script.py")
    assert "hello from" in tree.train().stdout
    assert "old" in (tree.base / "code" / "script.py").read_text()


def test_a_folder_and_a_file_url(tree: Tree, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "script.py").write_text(HELLO)
    for place in (str(folder), f"file://{folder}"):
        assert "hello from" in job_from(tree, place).train().stdout


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (("../evil.py", ""), "'../evil.py' lies outside"),
        (("/etc/evil.py", ""), "lies outside"),
        (special("link", tarfile.SYMTYPE, "/etc/passwd"), "is a link to '/etc/passwd'"),
        (special("a/link", tarfile.SYMTYPE, "../../x"), "outside the archive"),
        (special("hard", tarfile.LNKTYPE, "../x"), "outside the archive"),
        (special("pipe", tarfile.FIFOTYPE), "is a device or a FIFO"),
    ],
)  # fmt: skip
def test_a_hostile_archive_is_refused(
    tree: Tree, tmp_path: Path, member: object, says: str
) -> None:
    packed = archive(tmp_path / "s.tar.gz", ("script.py", HELLO), member)  # type: ignore[arg-type]
    result = job_from(tree, packed).train()
    assert result.returncode == 2 and tree.failure and says in tree.failure
    assert not (tree.base / "code").exists()
    assert sorted(path.name for path in tmp_path.rglob("evil.py")) == []


LIAR = tarfile.TarInfo("c")
LIAR.size = 2**60
UP = special("a", tarfile.SYMTYPE, ".")
OUT = special("b", tarfile.SYMTYPE, "a/../evil")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        pytest.param([("zeros", "0" * 3_000_000)], "more than 1 MiB", id="a bomb"),
        pytest.param([(f"f{n}", "") for n in range(6)], "more than 5 members", id="many members"),
        pytest.param([UP, OUT, ("b", "x")], "a link", id="a file by links that lead out together"),
        pytest.param(
            [UP, OUT, special("c", tarfile.SYMTYPE, "b")],
            "a link",
            id="links that lead out together",
        ),
        pytest.param(
            [
                special("x/y/z", tarfile.SYMTYPE, "../.."),
                special("x/y/z/out", tarfile.SYMTYPE, "../../.."),
                ("x/y/z/out/evil", "x"),
            ],
            "written through a link",
            id="a link inside a link to the folder itself",
        ),
        # tarfile alone would seek through 2**60 bytes that are not there.
        pytest.param(
            [special("a", tarfile.LNKTYPE, "b"), LIAR], "not before it", id="a size that lies"
        ),
    ],
)
def test_an_archive_that_leaves_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[Any], says: str
) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1024**2)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 5)
    (tmp_path / "in").mkdir()
    packed = tmp_path / "s.tar"
    if LIAR in members:
        packed.write_bytes(b"".join(member.tobuf() for member in members) + bytes(1024))
    else:
        archive(packed, *members)
    with pytest.raises(CodeError, match=says):
        archives.unpack(packed, tmp_path / "in", "s.tar")
    assert not (tmp_path / "evil").exists()


def test_links_inside_are_kept(tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "s.tar.gz", ("a/b.py", "x = 1"), special("a/c.py", tarfile.SYMTYPE, "b.py"),
        special("d.py", tarfile.LNKTYPE, "a/b.py"),
    )  # fmt: skip
    folder = tmp_path / "in"
    folder.mkdir()
    archives.unpack(packed, folder, "s.tar.gz")
    assert (folder / "a" / "c.py").read_text() == (folder / "d.py").read_text() == "x = 1"


def test_an_archive_cut_short_leaves_no_code(tree: Tree, tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "s.tar.gz", ("script.py", HELLO + "#" + "".join(map(str, range(9999))))
    )
    packed.write_bytes(packed.read_bytes()[:500])
    result = job_from(tree, packed).train()
    assert result.returncode == 2 and tree.failure and "cannot be unpacked" in tree.failure
    assert not (tree.base / "code").exists()


def test_a_place_that_does_not_exist(tree: Tree, tmp_path: Path) -> None:
    assert job_from(tree, tmp_path / "gone").train().returncode == 2
    assert tree.failure and "sagemaker_submit_directory is" in tree.failure


def test_code_without_an_entry_point_is_not_ignored(tree: Tree, tmp_path: Path) -> None:
    packed = archive(tmp_path / "s.tar.gz", ("script.py", HELLO))
    tree.configure({"sagemaker_submit_directory": str(packed)})
    assert tree.train().returncode == 2
    assert tree.failure and "no entry point is named" in tree.failure


class TestKinds:
    def test_a_shell_script_with_windows_line_endings_is_refused(self, tree: Tree) -> None:
        tree.configure({"sagemaker_program": "run.sh"}).script(
            "set -e\r\nfalse\r\necho on", "run.sh"
        )
        assert tree.train().returncode == 2
        assert tree.failure and "run.sh has Windows line endings" in tree.failure, tree.failure

    def test_a_shell_script_gets_the_arguments_and_no_shell_reads_them(self, tree: Tree) -> None:
        tree.configure({"sagemaker_program": "run.sh", "text": "a 'b' $(touch pwned) \"c\""})
        tree.script(
            '#!/bin/bash -e\nprintf "<%s>" "$@"\necho "$SM_HP_TEXT"; false; echo no', "run.sh"
        )
        result = tree.train()
        assert result.returncode == 1
        assert (
            "<--text><a 'b' $(touch pwned) \"c\">" in result.stdout and "no\n" not in result.stdout
        )
        assert not list(tree.base.rglob("pwned"))

    @pytest.mark.heavy
    def test_a_package_runs_as_a_module_under_torchrun(self, tree: Tree) -> None:
        package(tree).configure({"sagemaker_program": "pkg/main.py"})
        result = tree.train(AMPHORA_NPROC_PER_NODE="2", **OFFLINE)
        assert result.stdout.count("pkg.main of 2") == 2, result.stderr

    def test_a_package_beside_a_script_that_is_no_module_is_installed(self, tree: Tree) -> None:
        setup = "name='amphora-test-pkg', package_dir={'': 'src'}, py_modules=['amphora_test_pkg']"
        tree.script(f"from setuptools import setup\nsetup({setup})\n", "setup.py")
        tree.script("", "src/amphora_test_pkg.py")
        tree.script("import amphora_test_pkg as it; print('imported', it.__name__)", "run-1.py")
        result = tree.configure({"sagemaker_program": "run-1.py"}).train(**OFFLINE)
        assert "imported amphora_test_pkg" in result.stdout, result.stderr

    def test_a_binary_is_started_itself(self, tree: Tree) -> None:
        tree.script("", "hello").configure({"sagemaker_program": "hello", "name": "me"})
        shutil.copy("/bin/echo", tree.base / "code" / "hello")
        assert "--name me" in tree.train().stdout

    def test_a_folder_with_a_main(self, tree: Tree) -> None:
        tree.script(HELLO, "app/__main__.py").configure({"sagemaker_program": "app"})
        assert "hello from __main__.py" in tree.train().stdout


# pip builds the package with what is installed, and reaches for no index.
OFFLINE = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}


def package(tree: Tree) -> Tree:
    tree.script(
        "from setuptools import setup\n"
        "setup(name='amphora-test-pkg', version='1', packages=['pkg'])\n",
        "setup.py",
    )
    tree.script("", "pkg/__init__.py")
    return tree.script(
        "import os, sys\nfrom . import __name__ as name\n"
        "print(f\"{name}.main of {os.environ.get('WORLD_SIZE', 1)} {sys.argv[1:]}\")",
        "pkg/main.py",
    )


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_installed() -> Iterator[None]:
    yield
    subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "-qy", "amphora-test-pkg", "amphora-test-wheel"],
        check=False, capture_output=True,
    )  # fmt: skip


class TestRequirements:
    @pytest.mark.parametrize("program", ["script.py", "run.sh"])
    def test_they_are_installed_for_every_kind(
        self, tree: Tree, tmp_path: Path, program: str
    ) -> None:
        wheel(tmp_path, "amphora_test_wheel")
        tree.script(
            f"--no-index\n--find-links {tmp_path}\namphora-test-wheel\n", "requirements.txt"
        )
        tree.script("import amphora_test_wheel; print('imported')")
        tree.script(f"exec {sys.executable} script.py", "run.sh")
        result = tree.configure({"sagemaker_program": program}).train()
        assert "imported" in result.stdout, result.stderr

    def test_a_conflict_is_quoted(self, scripted: Tree, tmp_path: Path) -> None:
        wheel(tmp_path, "amphora_test_wheel")
        needs = f"--no-index\n-f {tmp_path}\namphora-test-wheel==1\namphora-test-wheel>=2\n"
        scripted.script("").script(needs, "requirements.txt")
        assert scripted.train().returncode == 2
        assert scripted.failure
        assert "user requested amphora-test-wheel>=2" in scripted.failure[:1024]

    def test_a_package_of_the_image_that_it_breaks_is_named(
        self, scripted: Tree, tmp_path: Path
    ) -> None:
        wheel(tmp_path, "amphora_test_wheel")
        about = tmp_path / "site" / "amphora_test_victim-1.dist-info"
        about.mkdir(parents=True)
        needs = "Name: amphora-test-victim\nVersion: 1\nRequires-Dist: amphora-test-wheel>=7\n"
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{needs}")
        (tmp_path / "site" / "amphora_test_victim.py").write_text(
            "raise ImportError('no such name')"
        )
        scripted.script(f"--no-index\n-f {tmp_path}\namphora-test-wheel\n", "requirements.txt")
        scripted.script("import amphora_test_victim")
        assert scripted.train(PYTHONPATH=str(tmp_path / "site")).returncode == 1
        assert scripted.failure and scripted.failure.startswith("ImportError: no such name")
        said = (
            "amphora-test-victim 1 requires amphora-test-wheel>=7, but you have amphora-test-wheel"
        )
        assert f"replaced a package of the image: {said}" in scripted.failure[:1024]

    def test_a_stop_while_installing(self, scripted: Tree) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            scripted.script("").script("some-package\n", "requirements.txt")
            process = scripted.start(PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple")
            silent.settimeout(240)
            connection, _ = silent.accept()
            process.terminate()
            process.communicate(timeout=240)
            connection.close()
        assert process.returncode == 143
        assert scripted.failure == "Stopped by SIGTERM before the script had started.\n"


class TestS3:
    """Against moto's server: the S3 protocol over a real socket, since AWS cannot be had here."""

    def test_code_from_s3(self, tree: Tree, tmp_path: Path, bucket: Callable[[Path], str]) -> None:
        url = bucket(archive(tmp_path / "sourcedir.tar.gz", ("script.py", HELLO)))
        job_from(tree, "s3://code/job/sourcedir.tar.gz")
        result = tree.train(S3_ENDPOINT_URL=url, **AWS)
        assert "hello from script.py" in result.stdout, result.stderr

    def test_an_object_that_is_not_there(
        self, tree: Tree, tmp_path: Path, bucket: Callable[[Path], str]
    ) -> None:
        url = bucket(archive(tmp_path / "s.tar.gz"))
        result = job_from(tree, "s3://code/job/gone.tar.gz").train(S3_ENDPOINT_URL=url, **AWS)
        assert result.returncode == 2
        assert tree.failure and "s3://code/job/gone.tar.gz cannot be downloaded" in tree.failure
