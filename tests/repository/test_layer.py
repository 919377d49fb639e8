"""container/locks/layer.py, on folders in place of an image's root."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "container" / "locks" / "layer.py"
SPEC = importlib.util.spec_from_file_location("layer", SCRIPT)
assert SPEC and SPEC.loader
layer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(layer)
SITE = "usr/lib/python3/site-packages"
# Sets, which a process orders by its own hashes, and names that several modules share.
MODULE = (
    "NAMES = {name}\ndef is_one(text):\n    return text in {{'b', 'a', None, 'c', 3.5, 'name'}}\n"
)


def image(folder: Path) -> Path:
    """A root with a base's files, of another time than the step."""
    for name in (f"{SITE}/base.py", "etc/hosts", "opt/kept/file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("base = 1\n")
        os.utime(folder / name, (1_600_000_000, 1_600_000_000))
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.utime(path, (1_600_000_000, 1_600_000_000))
    time.sleep(0.05)  # as between two steps: more than the file system's clock ticks
    return folder


def step(root: Path) -> str:
    """What pip and a copy do: files with times of their own, a link, a changed file."""
    lines = [
        f"cd {root}",
        f"mkdir -p {SITE}/package opt/amphora",
        *(
            f'printf "%s" "{MODULE.format(name=repr([n, "shared"]))}" > {SITE}/package/{n}.py'
            for n in ("one", "two")
        ),
        f"echo 'def broken(:' > {SITE}/package/template.py",
        "echo 'x = 1' > opt/amphora/train.py",
        "touch -d 2001-01-01 opt/amphora/old",
        "ln -s train.py opt/amphora/link",
        "echo more >> opt/kept/file",
    ]
    return "\n".join(lines)


def listing(root: Path) -> dict[str, tuple[int, int, str]]:
    """Of each path what a layer holds of it: mode, seconds, content."""
    told = {}
    for path in (root, *sorted(root.rglob("*"))):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        told[str(path.relative_to(root))] = (
            state.st_mode,
            int(state.st_mtime),
            hashlib.sha256(content).hexdigest(),
        )
    return told


def built(root: Path) -> dict[str, tuple[int, int, str]]:
    assert layer.run(step(root), str(root), [str(root / SITE)]) == 0
    return listing(root)


def test_what_a_step_wrote_has_one_date_and_the_rest_keeps_its_own(tmp_path: Path) -> None:
    dates = {name: seconds for name, (_, seconds, _) in built(image(tmp_path)).items()}
    base = {name for name, seconds in dates.items() if seconds != layer.DATE}
    assert base == {
        ".", "etc", "etc/hosts", "opt/kept", "usr", "usr/lib", "usr/lib/python3", f"{SITE}/base.py",
    }  # fmt: skip
    ours = {"opt/kept/file", "opt/amphora/old", "opt/amphora/link", SITE, "opt"}
    assert ours <= dates.keys() - base


def test_two_builds_are_equal(tmp_path: Path) -> None:
    roots = [image(tmp_path / name) for name in ("root", "same")]
    first = built(roots[0])
    assert any(name.endswith(f"one.{sys.implementation.cache_tag}.pyc") for name in first)
    # The path of a source stands in its compiled module: the second root takes this one's place.
    roots[0].rename(tmp_path / "before")
    roots[1].rename(roots[0])
    time.sleep(0.05)
    assert built(roots[0]) == first


def test_only_packages_are_compiled_and_an_edited_module_is_read_anew(tmp_path: Path) -> None:
    root = image(tmp_path)
    built(root)
    compiled = {path.parent.parent.name for path in root.rglob("*.pyc")}
    assert compiled == {"package"}
    for path in root.rglob("*.pyc"):
        assert int.from_bytes(path.read_bytes()[8:12], "little") == layer.DATE
    ask = [sys.executable, "-c", "import package.one as one; print(one.NAMES)"]
    told = subprocess.run(ask, cwd=root / SITE, text=True, capture_output=True, check=True).stdout
    assert told == "['one', 'shared']\n"
    (root / SITE / "package" / "one.py").write_text("NAMES = 'edited'\n")
    told = subprocess.run(ask, cwd=root / SITE, text=True, capture_output=True, check=True).stdout
    assert told == "edited\n"


@pytest.mark.parametrize("command", ["exit 7", "false; true", "cat /nowhere | cat; echo $UNSET"])
def test_a_step_that_fails_fails_the_build(tmp_path: Path, command: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, command], capture_output=True)
    assert done.returncode == (7 if "7" in command else done.returncode) != 0


def test_pip_leaves_compiling_to_it(tmp_path: Path) -> None:
    names = "$PIP_NO_COMPILE $PYTHONDONTWRITEBYTECODE $SOURCE_DATE_EPOCH"
    assert layer.run(f"echo {names} > {tmp_path}/told", str(tmp_path)) == 0
    assert (tmp_path / "told").read_text().split() == ["1", "1", str(layer.DATE)]


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+12", "Etc/GMT-14"])
def test_what_it_dates_fits_into_a_zip_archive_anywhere(tmp_path: Path, zone: str) -> None:
    (tmp_path / "module.py").write_text("")
    layer.date([str(tmp_path / "module.py")])
    code = "import zipfile; zipfile.ZipFile('it.zip', 'w').write('module.py')"
    ask = [sys.executable, "-c", code]
    done = subprocess.run(ask, cwd=tmp_path, env={**os.environ, "TZ": zone}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
