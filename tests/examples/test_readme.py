"""What README.md, TRAINING.md and SERVING.md show is run, or says before it why not; then stand-ins are called."""

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from amphora.local import local_job
from tests.support.ports import free_port
from tests.support.preloading import PRELOADED

from .aws import ACCOUNT, Aws
from .conftest import ROOT, Run

README = "\n".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/TRAINING.md", "docs/SERVING.md")
)
BLOCK = r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"


class Block(NamedTuple):
    language: str
    text: str
    why_not_run: str | None

    def __str__(self) -> str:
        return self.text.splitlines()[0][:40]


BLOCKS = [
    Block(m["language"], m["text"], m["why"]) for m in re.finditer(BLOCK, README, re.M | re.S)
]
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
        return re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", re.sub(r"/\S*/(ml/|reviews[/.])", r"\1", text))

    port = str(free_port())
    text = block.text.replace("8080", port)
    variables = {"SAGEMAKER_BIND_TO_PORT": port, "HF_HUB_OFFLINE": "1"}
    if "amphora" in text:
        # Without the seconds in which a job and a model worker import torch.
        variables |= {**request.getfixturevalue("preloaded"), "PYTHONPATH": str(PRELOADED)}
        stand_in = variables.pop("AMPHORA_CODE_DIR")
        text = re.sub(r"^(?=amphora train)", f"AMPHORA_CODE_DIR={stand_in} ", text, flags=re.M)
    on_port = block._replace(text=text)
    done = shell(on_port, tmp_path, Path(sys.executable).parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    # The output that the page shows below it.
    shown = "".join(
        following.text
        for before, following in itertools.pairwise(BLOCKS)
        if before == block and following.language == "text"
    )
    for line in shown.strip().splitlines():
        if line != "...":
            assert normalized_output(line) in normalized_output(done.stdout), done.stdout
    assert done.stdout


def test_shell_blocks_that_are_not_run_call_what_exists() -> None:
    text = "\n".join(block.text for block in SHELL if block.why_not_run).replace("\\\n", " ")
    usage = (ROOT / "build_and_push.sh").read_text()
    builds = re.findall(r"build_and_push\.sh (\w+)(.*)", text)
    assert {kind for kind, _ in builds} <= {"gpu", "cpu", "neuron", "vllm"}
    options = [option for _, rest in builds for option in re.findall(r"--[\w-]+", rest)]
    assert options and all(f"#   {option} " in usage for option in options)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= set(targets)
    mounts = re.findall(r'-v "\S+?/(\w+):/opt/ml/(\w+)(?::ro)?"', text)
    assert len(mounts) == text.count(":/opt/ml") > 0
    known = {"input", "model", "output", "checkpoints"}
    assert all(host == inside and inside in known for host, inside in mounts)
    runs = re.findall(r"^docker run .*? (amphora:\S+) (\w+)", text, re.MULTILINE)
    assert len(runs) == len(re.findall(r"^docker run ", text, re.MULTILINE))
    assert runs and all(re.fullmatch("amphora:(cpu|vllm)", image) for image, _ in runs)
    assert {command for _, command in runs} <= {"train", "serve", "doctor"}


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
def test_the_job_that_a_laptop_prints_starts_on_sagemaker(
    aws: Aws, run: Run, sdk3: Mapping[str, str], tmp_path: Path
) -> None:
    data, held = tmp_path / "tickets.csv", tmp_path / "held.csv"
    for file in (data, held):
        file.write_text("text,queue\na,b\n")
    (tmp_path / "bert").mkdir()
    words = [str(data), "--test", str(held), "--model", str(tmp_path / "bert"), "--epochs", "2",
             "--label_column", 'the "queue" ü', "--out", str(tmp_path / "my run")]  # fmt: skip
    snippet = local_job.sdk_snippet(local_job.read_words(words, {}))
    for placeholder, value in {"ACCOUNT": ACCOUNT, "REGION": "eu-west-1", "BUCKET": "mine"}.items():
        assert placeholder in snippet
        snippet = snippet.replace(placeholder, value)
    (tmp_path / "pasted.py").write_text(snippet)
    done = run(tmp_path / "pasted.py", preloaded=sdk3)
    assert done.returncode == 0, done.stderr
    job = aws.request_of("CreateTrainingJob")
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in job["InputDataConfig"]
    }
    assert channels == {name: f"s3://mine/my run/{name}/" for name in ("train", "test", "model")}
    assert (
        job["HyperParameters"].items() >= {"epochs": "2", "label_column": 'the "queue" ü'}.items()
    )
    assert job["CheckpointConfig"]["S3Uri"] == "s3://mine/my run/checkpoints"
    assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == 86400


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


def test_the_readme_names_every_task_and_its_commands_are_words_of_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "code"))
    from recipe.task_table import TASKS

    page = (ROOT / "README.md").read_text()
    assert not [task for task in TASKS if not re.search(rf"[`=]{task}`", page)]
    for command in re.findall(r"`((?:python|make|amphora|docker) [^`]+)`", README):
        assert shlex.split(command)


def test_what_the_page_on_troubleshooting_quotes_is_what_the_code_writes() -> None:
    """tests/amphora and tests/recipe provoke the failures."""
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    texts = []
    for path in [*(ROOT / "container").rglob("*.py"), *(ROOT / "code").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                texts += map(str, parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    quoted = re.findall(r"^- `([^`]+)`", page, re.MULTILINE)
    assert len(quoted) >= 25
    absent = [
        (part, quote)
        for quote in quoted
        for part in map(str.strip, quote.split("..."))
        if not any(part in text for text in texts)
    ]
    assert absent == []
    codes = re.findall(r"^\| \d+ `(\w+)` \|", page, re.MULTILINE)
    assert len(codes) >= 8
    assert set(codes) <= set(texts)
