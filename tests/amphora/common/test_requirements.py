"""What requirements files say of indexes, held to pip's own reader on files drawn by chance."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, cast

import pytest
from pip._internal.req.req_file import RequirementsFileParser, get_line_parser

from amphora.common import logs, packages, requirements

SEED = 11
LINES = [
    "--index-url https://one.host/s",
    "--index-url=https://two.host/s  # ours",
    "-i https://three.host/s",
    "-ihttps://four.host/s",
    "--pypi-url https://five.host/s",
    "--extra-index-url 'https://six.host/s'",
    "--extra-index https://seven.host/s",
    "--no-index",
    "  --no-index",
    "-f wheels",
    "--find-links=./wheels --no-index",
    "-f a -f b -i https://eight.host/s",
    "-i \\\nhttps://nine.host/s",
    "--extra-index-url https://${KNOWN}@ten.host/${UNKNOWN}/s",
    "--extra-index-url https://eleven.host/s#fragment",
    "# -i https://comment.host/s",
    "# a comment that ends in \\",
    "some-package==1.0 --no-binary some-package",
    "some-package @ https://user:word@host/some.whl",
    "-e .",
    "--pre --trusted-host twelve.host",
    "--only-binary :all: -i https://thirteen.host/s",
    "",
    "-r {nested}",
    "--requirement={nested} -i https://passed.over/s",
    "-c {nested}",
]


def write(folder: Path, draw: random.Random, depth: int, name: str = "requirements.txt") -> None:
    """A file of drawn lines, and the files that they name, in folders of their own."""
    lines = []
    for number in range(draw.randint(0, 6)):
        line = draw.choice(LINES)
        if "{nested}" in line:
            if depth == 0:
                continue
            below = draw.choice(["", "more"])
            nested = str(Path(below) / f"{Path(name).stem}{number}.txt")
            write(folder / below, draw, depth - 1, Path(nested).name)
            line = line.format(nested=nested)
        lines.append(line)
    folder.mkdir(parents=True, exist_ok=True)
    text = draw.choice(["\n", "\r\n"]).join(lines)
    (folder / name).write_bytes(text.encode(draw.choice(["utf-8", "utf-8-sig", "utf-16"])))


def by_pip(path: Path) -> list[tuple[str, str]]:
    # Its session fetches what lies behind http, of which there is nothing here.
    parser = RequirementsFileParser(cast(Any, None), get_line_parser(None))
    told: list[tuple[str, str]] = []
    for line in parser.parse(str(path), constraint=False):
        given = line.opts
        if line.is_requirement:
            continue
        told += [("--index-url", each) for each in [given.index_url] if each]
        told += [("--extra-index-url", each) for each in given.extra_index_urls or []]
        told += [("--no-index", "")] if given.no_index else []
        told += [("--find-links", each) for each in given.find_links or []]
    return told


def test_the_options_are_those_that_pip_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOWN", "me:secretword")
    draw = random.Random(SEED)
    said = 0
    for case in range(300):
        folder = tmp_path / str(case)
        write(folder, draw, depth=2)
        told = requirements.read(["requirements.txt"], folder, os.environ)
        assert told.options == by_pip(folder / "requirements.txt"), folder
        said += len(told.options)
    assert said > 500


def test_what_named_files_say_is_shown_and_masked(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "-r more/base.txt\n-r https://u:remoteword@files.host/r.txt\n--no-index\n"
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text(
        "-c pins.txt\n-r ../requirements.txt\na @ https://u:lineword@own.host/a.whl\n"
    )
    (tmp_path / "more" / "pins.txt").write_text("-i https://u:nestedword@own.host/${PLACE}\n")
    environ = {"PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path), "PLACE": "simple"}
    shown = packages.described(environ, tmp_path, packages.Install(requirements="requirements.txt"))
    assert shown == (
        "no index (the requirements themselves say --index-url https://own.host/simple --no-index"
        " -r https://files.host/r.txt, which counts first)"
    )
    for secret in ("nestedword", "lineword", "remoteword"):
        assert secret not in logs.mask(secret)


def test_a_constraint_of_the_settings_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("--extra-index-url https://settingsword:@own.host/s\n")
    environ = {
        "PIP_CONFIG_FILE": os.devnull,
        "HOME": str(tmp_path),
        "PIP_CONSTRAINT": "pins.txt absent.txt",
    }
    shown = packages.described(environ, tmp_path, packages.Install())
    assert "--extra-index-url https://own.host/s" in shown
    assert "settingsword" not in logs.mask("settingsword")
