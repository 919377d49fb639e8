"""The user's code: where it comes from, what is refused, what is installed; what runs, and as what, is what
sagemaker-training makes of a folder."""

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from amphora.common import archives
from amphora.common.errors import CodeError
from tests.support.job_tree import Tree
from tests.support.package_indexes import AWS, archive, wheel

SETUP = "from setuptools import setup\nsetup(name='amphora-test-{0}', version='1', {1})\n"
HELLO = "import os, sys; print('hello from', os.path.basename(sys.argv[0]), sys.argv[1:])"


def job_from(tree: Tree, source: Path | str) -> Tree:
    return tree.configure(
        {"sagemaker_program": "script.py", "sagemaker_submit_directory": str(source)}
    )


@pytest.mark.parametrize("kind", ["archive", "folder", "file URL", "S3"])
def test_code_from_everywhere(
    tree: Tree, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """S3 by a stand-in, since AWS cannot be reached here."""
    packed = archive(tmp_path / "s.tar.gz", ("./script.py", HELLO), ("./lib/a.py", ""))
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "script.py").write_text(HELLO)
    source: Any = packed if kind == "archive" else tmp_path / "checkout"
    environ = {}
    if kind == "file URL":
        source = f"file://{source}"
    if kind == "S3":
        source = "s3://code/job/s.tar.gz"
        environ = {"S3_ENDPOINT_URL": request.getfixturevalue("bucket")(packed), **AWS}
    result = job_from(tree, source).train(**environ)
    assert "hello from script.py" in result.stdout, result.stderr
    assert (tree.base / "code" / "lib" / "a.py").is_file() == (kind in ("archive", "S3"))


def test_an_object_that_is_not_there(
    tree: Tree, tmp_path: Path, bucket: Callable[[Path], str]
) -> None:
    url = bucket(archive(tmp_path / "other.tar.gz"))
    result = job_from(tree, "s3://code/job/gone.tar.gz").train(S3_ENDPOINT_URL=url, **AWS)
    assert result.returncode == 2
    assert tree.failure and "s3://code/job/gone.tar.gz cannot be downloaded" in tree.failure


def test_code_that_lies_there_does_not_hide_the_jobs_own(tree: Tree, tmp_path: Path) -> None:
    packed = archive(tmp_path / "s.tar.gz", ("script.py", HELLO))
    job_from(tree, packed).script("print('the old one')", "script.py")
    assert "hello from" in tree.train().stdout
    assert "old" in (tree.base / "code" / "script.py").read_text()


def special(name: str, kind: bytes = tarfile.SYMTYPE, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, linkname
    return info


LIAR = tarfile.TarInfo("c")
LIAR.size = 2**60
UP, OUT = special("a", linkname="."), special("b", linkname="a/../evil")


@pytest.mark.parametrize(
    ("says", "members"),
    [
        ("'../evil.py' lies outside", [("../evil.py", "")]),
        ("lies outside", [("/etc/evil.py", "")]),
        ("is a link to '/etc/passwd'", [special("link", linkname="/etc/passwd")]),
        ("outside the archive", [special("a/link", linkname="../../x")]),
        ("outside the archive", [special("hard", tarfile.LNKTYPE, "../x")]),
        ("is a device or a FIFO", [special("pipe", tarfile.FIFOTYPE)]),
        ("more than 1 MiB", [("zeros", "0" * 3_000_000)]),
        ("more than 5 members", [(f"f{n}", "") for n in range(6)]),
        # Links that lead out together.
        ("a link", [UP, OUT, ("b", "x")]),
        ("a link", [UP, OUT, special("c", linkname="b")]),
        (
            "written through a link",
            [
                special("x/y/z", linkname="../.."),
                special("x/y/z/out", linkname="../../.."),
                ("x/y/z/out/evil", "x"),
            ],
        ),
        # tarfile alone would seek through 2**60 bytes that are not there.
        ("not before it", [special("a", tarfile.LNKTYPE, "b"), LIAR]),
    ],
)
def test_a_hostile_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, members: list[Any]
) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1024**2)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 5)
    (tmp_path / "in").mkdir()
    packed = tmp_path / "s.tar"
    if LIAR in members:
        packed.write_bytes(b"".join(member.tobuf() for member in members) + bytes(1024))
    else:
        archive(packed, *members)
    with pytest.raises(CodeError, match=f"s.tar is refused: .*{says}"):
        archives.unpack(packed, tmp_path / "in", "s.tar")
    assert not [*tmp_path.rglob("evil*")]


def test_links_inside_are_kept(tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "s.tar.gz", ("a/b.py", "x = 1"), special("a/c.py", linkname="b.py"),
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


@pytest.mark.parametrize(
    ("program", "printed", "files"),
    [
        pytest.param(
            "pkg/main.py", "pkg.main of 2",
            {"setup.py": SETUP.format("pkg", "packages=['pkg']"), "pkg/__init__.py": "", "pkg/main.py": "import os, sys\nfrom . import __name__ as name\n"
    "print(f\"{name}.main of {os.environ.get('WORLD_SIZE', 1)} {sys.argv[1:]}\")"},
            marks=pytest.mark.heavy, id="package under torchrun",
        ),
        pytest.param(
            "run-1.py", "imported amphora_test_pkg",
            {"setup.py": SETUP.format("pkg", "package_dir={'': 'src'}, py_modules=['amphora_test_pkg']"),
             "src/amphora_test_pkg.py": "",
             "run-1.py": "import amphora_test_pkg as it; print('imported', it.__name__)"},
            id="package beside a script that is no module",
        ),
        pytest.param("train.PY", "1 in caps", {"train.PY": "import sys; print(len(sys.argv) // 2, 'in caps')"}, id="train.PY"),
        pytest.param("app", "hello from __main__.py", {"app/__main__.py": HELLO}, id="folder"),
        pytest.param("hello", "--name me", {}, id="binary"),
    ],
)  # fmt: skip
def test_a_program_of_each_kind(
    tree: Tree, target: Mapping[str, str], program: str, printed: str, files: Mapping[str, str]
) -> None:
    # pip builds the package with what is installed, and reaches for no index.
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    for name, text in files.items():
        tree.script(text, name)
    if not files:
        shutil.copy("/bin/echo", tree.script("", program).code / program)
    tree.configure({"sagemaker_program": program, "name": "me"})
    processes = "2" if "of 2" in printed else "1"
    result = tree.train(AMPHORA_NPROC_PER_NODE=processes, **offline, **target)
    assert result.stdout.count(printed) == int(processes), result.stderr


def test_a_shell_script_gets_the_arguments_and_no_shell_reads_them(tree: Tree) -> None:
    tree.configure({"sagemaker_program": "run.sh", "text": "a 'b' $(touch pwned) \"c\""})
    tree.script('#!/bin/bash -e\nprintf "<%s>" "$@"\necho "$SM_HP_TEXT"; false; echo no', "run.sh")
    result = tree.train()
    assert result.returncode == 1
    assert "<--text><a 'b' $(touch pwned) \"c\">" in result.stdout and "no\n" not in result.stdout
    assert not list(tree.base.rglob("pwned"))


def test_a_script_that_no_setting_names_ends_the_job(tree: Tree) -> None:
    code, channel = tree.code, tree.base / "input" / "data" / "code"
    tree.configure({"epochs": "2"}).channel("train", **{"data.csv": "text,label\na,b\n"})
    for folder, name, line in (
        (code, "train.py", "Set sagemaker_program=train.py (hyperparameters) to run it"),
        (code, "train.sh", "Set sagemaker_program=train.sh (hyperparameters)"),
        (channel, "train.py", f"train.py and sagemaker_submit_directory={channel} (hyper"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("print('mine')")
        assert tree.train().returncode == 2
        assert tree.failure and f"{folder / name} is in the job, but no entry" in tree.failure
        assert line in tree.failure
        (folder / name).unlink()


def test_a_file_in_place_of_a_channel_ends_the_job(tree: Tree) -> None:
    data = tree.base / "input" / "data"
    tree.channel("other")
    for name, folder in (("train.csv", "train"), ("train", "training")):
        (data / name).write_text("text,label\na,b\n")
        assert tree.configure({}).train().returncode == 2
        line = f"Move it into one: mkdir {data / folder} && mv {data / name} {data / folder}/"
        assert tree.failure and line in tree.failure
        (data / name).unlink()


def test_a_module_that_hides_an_installed_one_is_named(scripted: Tree) -> None:
    for name in ("yaml.py", "packaging/__init__.py", "setup.py.txt", "test.py", "helper.py"):
        scripted.script("", name)
    result = scripted.script("import yaml\nyaml.safe_load('1')").train()
    hides = [line for line in result.stderr.splitlines() if "WARNING" in line and " hides " in line]
    assert [line.partition(" hides ")[0].rpartition("/")[2] for line in hides] == [
        "packaging",
        "yaml.py",
    ]
    assert (
        scripted.failure
        and f"{scripted.code}/yaml.py hides the installed module yaml: rename" in scripted.failure
    )


def test_a_conflict_is_quoted(scripted: Tree, tmp_path: Path) -> None:
    wheel(tmp_path, "amphora_test_wheel")
    needs = f"--no-index\n-f {tmp_path}\namphora-test-wheel==1\namphora-test-wheel>=2\n"
    assert scripted.script("").script(needs, "requirements.txt").train().returncode == 2
    assert scripted.failure
    assert "user requested amphora-test-wheel>=2" in scripted.failure[:1024]


def test_a_stop_while_installing(scripted: Tree) -> None:
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


REPORT = """
import json, os, sys
import importlib.metadata as metadata
installed = sorted(d.name for d in metadata.distributions() if d.name.startswith("amphora-test"))
print("REPORT", json.dumps([__name__, __package__, sys.argv[1:], os.getcwd() == CODE, installed]))
""".replace("CODE", "os.environ['SM_MODULE_DIR']")
SHELL = 'echo "REPORT [\\"shell\\", $(printf "\\"%s\\"," "$@")\\"$(basename "$PWD")\\"]"\n'
POETRY = (
    '[tool.poetry]\nname = "amphora-test-poetry"\nversion = "1"\ndescription = ""\nauthors = []\n'
    '[tool.poetry.dependencies]\npython = "^3.99"\ntorch = "1.0"\n'
    '[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'
)
PYPROJECT = (
    '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    '[project]\nname = "amphora-test-project"\nversion = "1"\n'
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("program", "files"),
    [
        pytest.param(*layout, id=name)
        for name, layout in {
            "nested script with a sibling": (
                "scripts/train.py",
                {"scripts/train.py": "import helper" + REPORT, "scripts/helper.py": ""},
            ),
            "setup.py": (
                "pkg.train",
                {
                    "setup.py": SETUP.format("pkg", "packages=['pkg']"),
                    "pkg/__init__.py": "",
                    "pkg/train.py": "from . import __name__ as name" + REPORT,
                },
            ),
            "setup.py beside a script": (
                "train.py",
                {"setup.py": SETUP.format("flat", "py_modules=['train']"), "train.py": REPORT},
            ),
            "poetry": ("train.py", {"pyproject.toml": POETRY, "train.py": REPORT}),
            "two top-level packages": (
                "one/train.py",
                {
                    "pyproject.toml": PYPROJECT,
                    "one/__init__.py": "",
                    "two/__init__.py": "",
                    "one/train.py": "import two" + REPORT,
                },
            ),
            "shell script": ("run.sh", {"run.sh": SHELL}),
            "requirements.txt": (
                "train.py",
                {
                    "requirements.txt": "./dependency\n",
                    "dependency/setup.py": SETUP.format("dependency", "py_modules=['dependency']"),
                    "dependency/dependency.py": "",
                    "train.py": "import dependency" + REPORT,
                },
            ),
            "requirements.txt in a sub-folder": (
                "src/train.py",
                {"src/requirements.txt": "no-such-thing==9\n", "src/train.py": REPORT},
            ),
        }.items()
    ],
)
def test_a_layout_is_run_as_the_toolkit_runs_it(
    program: str, files: dict[str, str], tmp_path: Path
) -> None:
    def ran(command: list[str], tree: Tree, packages: Path) -> tuple[bool, list[str], bool]:
        """Whether the job went well, what the script reported, and whether there is a success file."""
        environ = tree.environment(
            PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", PIP_NO_DEPS="1", PIP_TARGET=str(packages),
            SM_STUDIO_LOCAL_MODE="true", AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
            PYTHONPATH=str(packages),
        )  # fmt: skip
        result = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        reports = re.findall(r"^REPORT .*", result.stdout, re.MULTILINE)
        assert reports, result.stdout + result.stderr
        return result.returncode == 0, reports, (tree.base / "output" / "success").is_file()

    if importlib.util.find_spec("sagemaker_training") is None:
        pytest.skip("sagemaker-training is not installed here (it needs a C compiler)")
    toolkit = [sys.executable, "-c", "from sagemaker_training import trainer; trainer.train()"]
    outcomes = []
    for runner in ("toolkit", "ours"):
        tree = Tree(tmp_path / runner)
        for file, text in files.items():
            tree.script(text, file)
        tree.configure(
            {"sagemaker_program": program, "sagemaker_submit_directory": str(tree.base / "code"),
             "text": "a b", "n": "1"},
            resourceconfig={"current_host": "localhost", "hosts": ["localhost"]},
            inputdataconfig={},
        )  # fmt: skip
        (tree.base / "output").mkdir()
        command = toolkit if runner == "toolkit" else tree.command()
        outcomes.append(ran(command, tree, tmp_path / f"{runner}-packages"))
        shutil.rmtree(tree.base)
    theirs, ours = outcomes
    assert ours == theirs and ours[0]
