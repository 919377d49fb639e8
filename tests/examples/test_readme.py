"""What README.md, TRAINING.md and SERVING.md show is run, or says before it why not; then stand-ins are called."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.ports import free_port
from tests.support.preloading import PRELOADED

from .aws import Aws
from .conftest import ROOT, Run

README = "\n".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/TRAINING.md", "docs/SERVING.md")
)
NOT_RUN = r"<!-- not run: (?P<why>.+?) -->\n"
BLOCK = re.compile(
    rf"(?:{NOT_RUN})?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    why_not_run: str | None

    def __str__(self) -> str:
        return self.text.splitlines()[0][:40]


BLOCKS = [Block(match["language"], match["text"], match["why"]) for match in BLOCK.finditer(README)]
SHELL = [block for block in BLOCKS if block.language == "bash"]


def shell(
    block: Block, folder: Path, path: Path | str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a block in `folder`, where the checkout's files are links."""
    for entry in ROOT.iterdir():
        if entry.name not in ("build", "ml", "reviews", "script", "served", "handlers"):
            (folder / entry.name).symlink_to(entry)
    return subprocess.run(
        ["bash", "-euc", block.text],
        cwd=folder,
        env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"} | variables,
        text=True,
        capture_output=True,
    )


def test_every_block_is_found_and_has_a_language() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```\w", README, re.MULTILINE)) > 5
    assert 2 * len(BLOCKS) == len(re.findall(r"^```", README, re.MULTILINE))
    assert {block.language for block in BLOCKS} <= {"bash", "python", "text", "dockerfile"}


FOLLOWING = {
    block: following.text.strip()
    for block, following in itertools.pairwise(BLOCKS)
    if following.language == "text"
}
"""The output that a page shows below a block."""


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, marks=pytest.mark.heavy if "amphora" in b.text else (), id=str(b))
        for b in [b for b in SHELL if not b.why_not_run]
    ],
)
def test_a_shell_block_runs(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def normalized_output(text: str) -> str:
        """Numbers differ from machine to machine, and a page shortens paths."""
        return re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", re.sub(r"/\S*/(ml|reviews)/", r"\1/", text))

    port = str(free_port())
    text = block.text.replace("8080", port)
    variables = {"SAGEMAKER_BIND_TO_PORT": port, "HF_HUB_OFFLINE": "1"}
    if "amphora" in text:
        # Without the seconds in which a job and a model worker import torch.
        variables |= {**request.getfixturevalue("preloaded"), "PYTHONPATH": str(PRELOADED)}
        stand_in = variables.pop("AMPHORA_CODE_DIR")
        text = re.sub(r"^(?=amphora train)", f"AMPHORA_CODE_DIR={stand_in} ", text, flags=re.M)
    on_port = dataclasses.replace(block, text=text)
    done = shell(on_port, tmp_path, Path(sys.executable).parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in FOLLOWING.get(block, "").splitlines():
        if line != "...":
            assert normalized_output(line) in normalized_output(done.stdout), done.stdout
    assert done.stdout


@pytest.mark.parametrize("block", [b for b in SHELL if b.why_not_run], ids=str)
def test_a_shell_block_that_is_not_run_calls_what_exists(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_or_serves(arguments: list[str]) -> None:
        assert arguments in (["train"], ["serve"])

    def asks(arguments: list[str]) -> None:
        assert "localhost:8080/invocations" in arguments

    def runs_a_container(arguments: list[str]) -> None:
        assert arguments[:2] == ["run", "--rm"]
        image, command = arguments[-2:]
        assert image in ("amphora:cpu", "amphora:vllm")
        assert command in ("train", "serve", "doctor")
        mounts = [arguments[index + 1] for index, word in enumerate(arguments) if word == "-v"]
        assert mounts
        for mount in mounts:
            host, inside, *mode = mount.split(":")
            assert inside in (
                "/opt/ml/input",
                "/opt/ml/model",
                "/opt/ml/output",
                "/opt/ml/checkpoints",
            )
            assert Path(host).name == Path(inside).name
            assert mode in ([], ["ro"])

    def builds(arguments: list[str]) -> None:
        usage = (ROOT / "build_and_push.sh").read_text()
        assert arguments[0] in ("gpu", "cpu", "neuron")
        for option in (word for word in arguments if word.startswith("--")):
            assert f"#   {option} " in usage

    def makes(arguments: list[str]) -> None:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)

    checks: dict[str, Any] = {
        "amphora": runs_or_serves,
        "make": makes,
        "build_and_push.sh": builds,
        "docker": runs_a_container,
        "curl": asks,
    }
    stand_in = '#!/bin/sh\nfor word in {name} "$@"; do printf \'%s\\037\' "$word"; done >> "$CALLS"; echo >> "$CALLS"; echo step=2\n'
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in checks:
        (tools / name).write_text(stand_in.format(name=name))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    folder = tmp_path / "checkout"
    folder.mkdir()
    stood_in = Block(
        block.language, block.text.replace("./build_and_push.sh", "build_and_push.sh"), ""
    )
    done = shell(stood_in, folder, tools)
    assert done.returncode == 0, done.stderr
    calls = [
        line.rstrip("\x1f").split("\x1f") for line in (tmp_path / "calls").read_text().splitlines()
    ]
    assert calls
    for name, *arguments in calls:
        checks[name](arguments)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_block_is_shellcheck_clean(block: Block) -> None:
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=block.text, text=True, capture_output=True
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.heavy
def test_the_trainer_starts_the_job_it_shows(
    aws: Aws, run: Run, sdk3: Mapping[str, str], tmp_path: Path
) -> None:
    (block,) = [b.text for b in BLOCKS if "sagemaker.train" in b.text]
    (tmp_path / "shown.py").write_text(block)
    done = run(tmp_path / "shown.py", preloaded=sdk3)
    assert done.returncode == 0, done.stderr
    job = aws.request_of("CreateTrainingJob")
    assert job["HyperParameters"]["model_name_or_path"] == "bert-base-uncased"
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/checkpoints/tweets"
    assert [channel["ChannelName"] for channel in job["InputDataConfig"]] == ["train", "test"]
    known(job["HyperParameters"])


@pytest.mark.heavy
def test_other_python_blocks_show_hyperparameters_that_exist() -> None:
    shown = [b.text for b in BLOCKS if b.language == "python" and "hyperparameters = " in b.text]
    assert shown
    for text in shown:
        results: dict[str, Any] = {}
        exec(text, results)
        known(results["hyperparameters"])


def known(hyperparameters: dict[str, object]) -> None:
    """Every name and value is taken by the recipe."""
    words = [word for name, value in hyperparameters.items() for word in (f"--{name}", str(value))]
    with mock.patch.object(sys, "path", [str(ROOT / "code"), *sys.path]):
        from recipe.arguments import parse  # not before: it takes seconds

        parse(words)


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/*.md")), ids=lambda p: p.name
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = set(
        re.findall(
            r"\b(?:docs|examples|tests|code/recipe|container|benchmarks)/[\w/.-]+\.\w+", text
        )
    )
    for name in named - set(re.findall(r"^New file `(\S+)`:", text, re.M)):
        if not name.endswith((".log", ".egg-info")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_readme_names_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "code"))
    from recipe.task_table import TASKS

    rows = re.findall(r"^\| .*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert not [task for task in TASKS if not re.search(rf"[`=]{task}`", "\n".join(rows))]


def test_commands_in_the_text_are_words_of_a_shell() -> None:
    for command in re.findall(r"`((?:python|make|amphora|docker) [^`]+)`", README):
        assert shlex.split(command)
