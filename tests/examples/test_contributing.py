"""CONTRIBUTING.md's ten changes, followed to the letter on a copy of the code."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job_tree import Tree
from tests.support.servers import RECIPE, Running

ROOT = Path(__file__).parents[2]
STEP = re.compile(
    r"^(New file|Before|After) (?:`([^\n]*)` in )?`(\S+)`:\n\n```text\n(.*?)```",
    re.DOTALL | re.MULTILINE,
)


class Copy:
    """The code after one of the changes."""

    def __init__(self, folder: Path, title: str | None = None) -> None:
        self.folder = folder
        for name in ("code", "container/amphora"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        if title is None:
            return
        text = (ROOT / "CONTRIBUTING.md").read_text()
        section = text.split(f"\n### {title}\n")[1].split("\n### ")[0]
        steps = STEP.findall(section)
        assert steps, title
        assert len(steps) == section.count("```text")
        for where, anchor, name, code in steps:
            path = folder / name
            if where == "New file":
                path.parent.mkdir(exist_ok=True)
                path.write_text(code)
                continue
            lines = path.read_text().splitlines(keepends=True)
            (offset,) = [number for number, line in enumerate(lines) if anchor in line]
            offset += where == "After"
            path.write_text("".join([*lines[:offset], code, *lines[offset:]]))

    @property
    def path(self) -> str:
        return os.pathsep.join(str(self.folder / name) for name in ("container", "code"))

    def run(self, *command: str, **variables: str) -> str:
        environ = os.environ | {
            "PYTHONPATH": self.path,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *command],
            env=environ | {"SAGEMAKER_BASE_DIR": str(self.folder / "ml")} | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(self, *arguments: str, **variables: str) -> str:
        common = ["--batch_size", "4", "--save_strategy", "no"]
        return self.run("code/train.py", *common, *arguments, **variables)


@pytest.fixture
def follow(tmp_path: Path) -> Callable[[str], Copy]:
    return lambda title: Copy(tmp_path, title)


REVIEWS = [("a good film", "good"), ("a bad film", "bad")] * 10


@pytest.mark.heavy
def test_a_hyperparameter(follow: Callable[[str], Copy], tiny_model: Path, tmp_path: Path) -> None:
    copy = follow("Add a hyperparameter")
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *(",".join(r) for r in REVIEWS)]))
    output = copy.train(
        *("--model_id", str(tiny_model), "--print_rows", "2", "--epochs", "1"),
        SM_CHANNEL_TRAIN=str(tmp_path / "train.csv"),
    )
    assert len(re.findall("^row: ", output, re.MULTILINE)) == 2


def test_a_format(follow: Callable[[str], Copy], tmp_path: Path) -> None:
    copy = follow("Add a format")
    lines = [f"{label:8}{text}" for text, label in REVIEWS]
    (tmp_path / "reviews.fix").write_text("\n".join(["#fixed", *lines]) + "\n")
    program = (
        "import pathlib\nfrom recipe.data.files import formats\n"
        f"part = formats.read(pathlib.Path({str(tmp_path / 'reviews.fix')!r}))\n"
        "print(part.table.num_rows, part.table.slice(1, 1).to_pylist(), formats.known_formats())"
    )
    output = copy.run("-c", program)
    assert output.startswith("20 [{'label': 'bad', 'text': 'a bad film'}] fixed columns, ")


@pytest.mark.heavy
def test_a_task(follow: Callable[[str], Copy], tiny_model: Path, tmp_path: Path) -> None:
    """The words' own letters tell their tags, so that it can be learned."""
    copy = follow("Add a task")
    samples = [
        {"tokens": text.split(), "tags": ["THING" if w == "film" else "O" for w in text.split()]}
        for text, _ in REVIEWS * 4
    ]
    lines = (json.dumps(sample) for sample in samples)
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    output = copy.train(
        *(
            "--task",
            "word-tags",
            "--model_id",
            str(tiny_model),
            "--lr",
            "1e-2",
            "--max_length",
            "16",
        ),
        *("--epochs", "4"),
        SM_CHANNEL_TRAIN=str(tmp_path / "train.jsonl"),
    )
    scores = [float(score) for score in re.findall(r"'eval_accuracy': ([^,}]+)", output)]
    assert scores[-1] > 0.95, output
    saved = json.loads((tmp_path / "ml" / "model" / "config.json").read_text())
    assert saved["architectures"] == ["BertForTokenClassification"]
    assert (tmp_path / "ml" / "output" / "data" / "report.html").is_file()


@pytest.mark.heavy
def test_a_folder_is_a_task_that_is_detected_trained_and_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Summaries by sentences (extractive_summary): the word `film` tells which are chosen."""
    copy, name = Copy(tmp_path), "extractive_summary"
    shutil.copytree(Path(__file__).parent / name, tmp_path / "code" / "recipe" / "tasks" / name)
    others, film = ["a good day", "a bad day", "the end"], "a good film"
    documents = [[*others[:offset], film, *others[offset:]] for offset in range(4)] * 10
    rows = [{"sentences": d, "in_summary": [int(s == film) for s in d]} for d in documents]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = copy.train(
        *("--model_id", str(tiny_model), "--neighbours", "0", "--epochs", "3", "--lr", "1e-2"),
        SM_CHANNEL_TRAIN=str(tmp_path / "train.jsonl"),
    )
    assert re.search(
        "task +extractive-summarization.*by its columns: sentences 'sentences'", output
    )
    assert float(re.findall(r"'eval_accuracy': ([^,}]+)", output)[-1]) > 0.95, output
    assert "--neighbours  (default 1)" in copy.run("code/train.py", "--help")
    environ = {"AMPHORA_CODE_DIR": str(tmp_path / "code"), "PYTHONPATH": copy.path}
    environ["HF_TASK"] = "extractive-summarization"
    with Running(tmp_path / "ml", RECIPE | environ) as server:
        server.ready()
        body = {"inputs": {"sentences": [*others, film]}, "parameters": {"top_k": 1}}
        assert server.http.post("/invocations", json=body).json()["summary"] == [film]
        wrong = server.http.post("/invocations", json={"inputs": film})
        assert wrong.status_code == 400
        assert '"sentences"' in wrong.json()["error"]["message"]


def test_a_metric(follow: Callable[[str], Copy]) -> None:
    copy = follow("Add a metric")
    program = (
        "import numpy as np\nfrom recipe import metrics\nfrom recipe.tasks import evaluation\n"
        "ids = np.array([0, 1, 1, 0])\nprint(evaluation.score_classes(ids, ids)['mcc'])\n"
        "print(len(metrics.metric_definitions()), 'eval_mcc' in metrics.metric_names())"
    )
    assert copy.run("-c", program).splitlines() == ["1.0", "38 True"]


def test_a_device(follow: Callable[[str], Copy]) -> None:
    copy = follow("Add a device")
    program = (
        "import os\nfrom amphora.common import devices\nfrom recipe.runtime import device\n"
        "found = devices.detect(os.environ)\n"
        "print(found.kind, found.accelerators, found.reason, device.kind_of('abacus').bf16())"
    )
    environ = {"ABACI": "3", "PATH": "/nowhere"}
    assert copy.run("-c", program, **environ) == (
        "abacus 3 by ABACI (False, 'beads are whole numbers')\n"
    )


def test_a_route(follow: Callable[[str], Copy]) -> None:
    copy = follow("Add a route")
    program = (
        "import asyncio, os, pathlib, httpx\n"
        "from amphora.common import devices\nfrom amphora.serving import settings\n"
        "from amphora.serving.http.server import Front\n"
        "async def ask():\n"
        "    read = settings.read(pathlib.Path('ml'), {}, devices.detect(os.environ))\n"
        "    transport = httpx.ASGITransport(Front(read, {}).application())\n"
        "    async with httpx.AsyncClient(transport=transport, base_url='http://front') as client:\n"
        "        print((await client.get('/version')).text)\n"
        "asyncio.run(ask())"
    )
    assert "amphora 0." in copy.run("-c", program)


def test_a_default(follow: Callable[[str], Copy]) -> None:
    program = (
        "from recipe import task_table as t; print(t.learning_rate('token-classification', 0))"
    )
    assert follow("Change a default").run("-c", program) == "3e-05\n"


def test_a_pooling(follow: Callable[[str], Copy]) -> None:
    """Two samples share the first block, and one is in the second."""
    program = (
        "import torch\nfrom recipe.models import packed_encoders\n"
        "from recipe.tasks.sentence_embedding import model\n"
        "hidden = torch.arange(16.0).reshape(2, 4, 2)\n"
        "segments = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 0]])\n"
        "pool = model._POOLS['max']\n"
        "print(pool(hidden, segments, torch.tensor([0, 2, 4])).tolist())"
    )
    output = follow("Add a pooling").run("-c", program)
    assert output == "[[2.0, 3.0], [4.0, 5.0], [12.0, 13.0]]\n"


def test_a_launcher(follow: Callable[[str], Copy], tmp_path: Path) -> None:
    copy = follow("Add a launcher")
    hosts = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}
    job = {"sagemaker_accelerate_enabled": "true"}
    tree = Tree(tmp_path / "ml").configure(job, resourceconfig=hosts)
    program = (
        "import os, pathlib\nfrom amphora.common import devices\n"
        "from amphora.contract.job import read_job\nfrom amphora.training import launch\n"
        "from amphora.training.entry_point import ProgramKind, Source\n"
        "script = Source(root=pathlib.Path('/code'), kind=ProgramKind.SCRIPT, name='own.py')\n"
        "planned = launch.plan(read_job(os.environ), devices.detect(os.environ), script,\n"
        "                      pathlib.Path('errors'), os.environ)\n"
        "print(planned.is_launcher, *planned.argv[1:])"
    )
    output = copy.run("-c", program, SAGEMAKER_BASE_DIR=str(tree.base), PATH="/nowhere")
    assert output.split() == [
        *("True", "-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=2"),
        *("--machine_rank=1", "--main_process_ip=algo-1", "--main_process_port=7777"),
        "/code/own.py",
    ]


def test_a_section_of_a_report(follow: Callable[[str], Copy]) -> None:
    program = (
        "import numpy as np\nfrom recipe.data.labels import SINGLE, Labels\n"
        "from recipe.reports.predictions import Predictions\n"
        "outputs, true = np.array([[9, 0], [9, 0], [0, 0.1]]), np.array([0, 1, 1])\n"
        "made = Predictions(split='test', labels=Labels(('a', 'b'), SINGLE), outputs=outputs,\n"
        "                   true=true, texts=['x', 'y', 'z'])\n"
        "print(*[(each.title, each.note) for each in made.sections()], sep='\\n')"
    )
    output = follow("Add a section to a report").run("-c", program)
    assert "('Sure answers, test data', '2 of 3 are surer than 90%; 50% are right.')" in output
