"""CONTRIBUTING.md's ten changes, followed to the letter on a copy of the code."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.job_tree import Tree
from tests.support.preloading import run_script
from tests.support.servers import RECIPE, Running

ROOT = Path(__file__).parents[2]
STEP = r"^(New file|Before|After) (?:`([^\n]*)` in )?`(\S+)`:\n\n```text\n(.*?)```"


class Copy:
    """The code after one of the changes; its programs run in forks of a process with the libraries."""

    def __init__(self, folder: Path, preloaded: Mapping[str, str], *titles: str) -> None:
        self.folder, self.preloaded = folder, preloaded
        self.path = f"{folder}/container:{folder}/code"
        for name in ("code", "container/amphora"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        text = (ROOT / "CONTRIBUTING.md").read_text()
        for title in titles:
            self._change(text.split(f"\n### {title}\n")[1].split("\n### ")[0])

    def _change(self, section: str) -> None:
        steps = re.findall(STEP, section, re.DOTALL | re.MULTILINE)
        assert len(steps) == section.count("```text") > 0, section
        for where, anchor, name, code in steps:
            path = self.folder / name
            if where == "New file":
                path.parent.mkdir(exist_ok=True)
                path.write_text(code)
                continue
            lines = path.read_text().splitlines(keepends=True)
            (offset,) = [number for number, line in enumerate(lines) if anchor in line]
            offset += where == "After"
            path.write_text("".join([*lines[:offset], code, *lines[offset:]]))

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        script = self.folder / "run_changed.py"
        # The process that forks has the modules without the changes.
        script.write_text(
            "import runpy, sys\nfor name in [*sys.modules]:\n"
            "    if name.partition('.')[0] in ('recipe', 'amphora'): del sys.modules[name]\n"
            "del sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        )
        environ = {"PYTHONPATH": self.path, "SAGEMAKER_BASE_DIR": str(self.folder / "ml")}
        environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/nowhere", **variables}
        argv = [str(script), str(self.folder / program), *arguments]
        done = run_script(self.preloaded, argv, environ, self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(self, *arguments: str, **variables: str) -> str:
        common = ["--batch_size", "4", "--save_strategy", "no"]
        return self.run("code/train.py", *common, *arguments, **variables)


REVIEWS = [("a good film", "good"), ("a bad film", "bad")] * 10


@pytest.mark.heavy
def test_a_hyperparameter(tiny_model: Path, tmp_path: Path, preloaded: Mapping[str, str]) -> None:
    copy = Copy(tmp_path, preloaded, "Add a hyperparameter")
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *(",".join(r) for r in REVIEWS)]))
    output = copy.train(
        *("--model_id", str(tiny_model), "--print_rows", "2", "--epochs", "1"),
        SM_CHANNEL_TRAIN=str(tmp_path / "train.csv"),
    )
    assert len(re.findall("^row: ", output, re.MULTILINE)) == 2


@pytest.mark.heavy
def test_a_task_is_detected_trained_and_served(
    tiny_model: Path, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    """Summaries by sentences: the word `film` tells which are chosen."""
    copy = Copy(tmp_path, preloaded)
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n### Add a task\n")[1]
    (command,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["sh", "-euc", command], cwd=tmp_path, check=True)
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
    with Running(tmp_path / "ml", RECIPE | environ) as server:
        server.ready()
        body = {"inputs": {"sentences": [*others, film]}, "parameters": {"top_k": 1}}
        assert server.http.post("/invocations", json=body).json()["summary"] == [film]
        wrong = server.http.post("/invocations", json={"inputs": film})
        assert wrong.status_code == 400
        assert '"sentences"' in wrong.json()["error"]["message"]


def test_a_quick_change_does_what_it_says(tmp_path: Path, preloaded: Mapping[str, str]) -> None:
    """All on one copy, in one process."""
    # A change, a program that uses it, and what that prints among others.
    changes = {
        "Add a format": (
            "from recipe.data.files import formats\n"
            "part = formats.read(pathlib.Path('reviews.fix'))\n"
            "print(part.table.num_rows, part.table.slice(1, 1).to_pylist(), formats.known_formats())",
            "20 [{'label': 'bad', 'text': 'a bad film'}] fixed columns, ",
        ),
        "Add a metric": (
            "from recipe import metrics\nfrom recipe.tasks import evaluation\n"
            "ids = np.array([0, 1, 1, 0])\nprint(evaluation.score_classes(ids, ids)['mcc'])\n"
            "print(len(metrics.metric_definitions()), 'eval_mcc' in metrics.metric_names())",
            "1.0\n38 True\n",
        ),
        "Add a device": (
            "from recipe.runtime import device\n"
            "found = devices.detect({**os.environ, 'ABACI': '3'})\n"
            "print(found.kind, found.accelerators, found.reason, device.kind_of('abacus').bf16())",
            "abacus 3 by ABACI (False, 'beads are whole numbers')\n",
        ),
        "Add a route": (
            "import asyncio, httpx\nfrom amphora.serving import settings\n"
            "from amphora.serving.http.server import Front\n"
            "async def ask():\n"
            "    read = settings.read(pathlib.Path('ml'), {}, devices.detect(os.environ))\n"
            "    transport = httpx.ASGITransport(Front(read, {}).application())\n"
            "    async with httpx.AsyncClient(transport=transport, base_url='http://front') as client:\n"
            "        print((await client.get('/version')).text)\n"
            "asyncio.run(ask())",
            "amphora 0.",
        ),
        "Change a default": (
            "from recipe import task_table as t; print(t.TASKS['token-classification'].learning_rates[0])",
            "3e-05\n",
        ),
        # Two samples share the first block, and one is in the second.
        "Add a pooling": (
            "import torch\nfrom recipe.models import sentence_encoders\n"
            "hidden = torch.arange(16.0).reshape(2, 4, 2)\n"
            "segments = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 0]])\n"
            "pool = sentence_encoders._POOLS['max']\n"
            "print(pool(hidden, segments, torch.tensor([0, 2, 4])).tolist())",
            "[[2.0, 3.0], [4.0, 5.0], [12.0, 13.0]]\n",
        ),
        "Add a launcher": (
            "from amphora.contract.job import read_job\nfrom amphora.training import launch\n"
            "from amphora.training.entry_point import Program, ProgramKind\n"
            "script = Program(root=pathlib.Path('/code'), kind=ProgramKind.SCRIPT, name='own.py')\n"
            "planned = launch.plan(read_job(os.environ), devices.detect(os.environ), script,\n"
            "                      pathlib.Path('errors'), os.environ)\n"
            "print(*planned.argv[1:])",
            "-m accelerate.commands.launch --num_processes=2 --num_machines=2 --machine_rank=1 "
            "--main_process_ip=algo-1 --main_process_port=7777 /code/own.py\n",
        ),
        "Add a section to a report": (
            "from recipe.data.labels import SINGLE, Labels\n"
            "from recipe.reports.predictions import Predictions\n"
            "outputs, true = np.array([[9, 0], [9, 0], [0, 0.1]]), np.array([0, 1, 1])\n"
            "made = Predictions(split='test', labels=Labels(('a', 'b'), SINGLE), outputs=outputs,\n"
            "                   true=true, rows=[{'text': one} for one in 'xyz'], columns=['text'])\n"
            "print(*[(each.title, each.note) for each in made.sections()])",
            "('Sure answers, test data', '2 of 3 are surer than 90%; 50% are right.')",
        ),
    }
    copy = Copy(tmp_path, preloaded, *changes)
    lines = [f"{label:8}{text}" for text, label in REVIEWS]
    (tmp_path / "reviews.fix").write_text("\n".join(["#fixed", *lines]) + "\n")
    Tree(tmp_path / "ml").configure(
        {"sagemaker_accelerate_enabled": "true"},
        resourceconfig={"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]},
    )
    script = tmp_path / "run_all.py"
    script.write_text("""
import contextlib, io, json, os, pathlib, sys, traceback
import numpy as np
from amphora.common import devices
for title, program in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(program, globals())
        except Exception:
            traceback.print_exc(file=output)
    print(json.dumps([title, output.getvalue()]))
""")
    programs = json.dumps({title: program for title, (program, _) in changes.items()})
    printed = dict(map(json.loads, copy.run(script.name, programs).splitlines()))
    wrong = {
        title: printed[title]
        for title, (_, words) in changes.items()
        if words not in printed[title]
    }
    assert wrong == {}
