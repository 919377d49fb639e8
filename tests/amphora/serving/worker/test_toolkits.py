"""Files written for the images of AWS and Hugging Face answer here as they do there.

Each file of `toolkit_files_*` is loaded twice in this process, by the image's toolkit (see
`toolkit_oracles`) and by a worker's engine, and asked the same. What differs on purpose says so
beside the request, with what ours answers.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import runner
from tests.support import toolkit_oracles
from tests.support.paths import CODE
from tests.support.serving_kit import tokenizer
from tests.support.toolkit_files_hub import HUGGING_FACE
from tests.support.toolkit_files_torch import BASE, PYTORCH
from tests.support.toolkit_questions import CSV, NPY, File, Question
from tests.support.worker_front import ask, load_runner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Times(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's folder of each kind, without code, written once."""
    base = tmp_path_factory.mktemp("models")
    reader = tokenizer(32)
    size = {"vocab_size": len(reader), "hidden_size": 16, "num_hidden_layers": 1}
    bert = BertConfig(
        **size, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        num_labels=3,
    )  # fmt: skip
    scripts = {
        "script": ["model.pt"],
        "script-named": ["net.pth"],
        "script-twice": ["a.pt", "b.pt"],
    }

    def folder(kind: str) -> Path:
        path = base / kind
        if path.is_dir():
            return path
        path.mkdir()
        torch.manual_seed(1)
        if kind == "classifier":
            BertForSequenceClassification(bert).save_pretrained(path)
            reader.save_pretrained(path)
        for name in scripts.get(kind, []):
            script: Any = torch.jit.script
            script(Times()).save(str(path / name))
        if kind == "weights":
            torch.save({"scale": torch.tensor(5.0)}, path / "weights.pth")
        return path

    return folder


@pytest.fixture
def install_file(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[File], Path]]:
    """place(file): a model's folder with that file as its code."""
    toolkit_oracles.prepare(monkeypatch)
    # The toolkit writes HF_TASK: what was set here before is set again after the test.
    monkeypatch.setenv("HF_TASK", "")
    monkeypatch.delenv("HF_TASK")
    # As in an image, where nobody but the server knows the folder with the image's inference.py.
    monkeypatch.setattr(
        sys, "path", [element for element in sys.path if Path(element).resolve() != CODE]
    )
    monkeypatch.delitem(sys.modules, "inference", raising=False)
    before = set(sys.modules)

    def write(file: File) -> Path:
        model = tmp_path / "model"
        model.mkdir()
        for entry in folders(file.model).iterdir():
            (model / entry.name).symlink_to(entry)
        (model / "code").mkdir()
        name = file.program if file.program.endswith(".py") else f"{file.program}.py"
        if file.code is not None:
            (model / "code" / name).write_text(textwrap.dedent(file.code))
        if file.program != "inference.py":
            monkeypatch.setenv("SAGEMAKER_PROGRAM", file.program)
        return model

    yield write
    forget(before)


def forget(before: set[str]) -> None:
    """Neither side's module of the user's file is the other's."""
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if "/model/code/" in path:
            del sys.modules[name]


def answer(loaded: runner.ModelRunner, question: Question) -> tuple[int, str, bytes]:
    """Status, type and body."""
    try:
        body, kind, context = ask(loaded, question.body, question.content_type, question.accept)
    except Fault as fault:
        return fault.status, "", str(fault).encode()
    status, _ = context.get_response_status(0)
    return status, context.get_response_content_type(0) or kind, body


def decoded(body: Any, kind: str) -> Any:
    """What a client makes of an answer."""
    raw = body if isinstance(body, bytes) else str(body).encode()
    if kind == NPY:
        return np.load(io.BytesIO(raw))
    if kind == CSV:
        return [[_number(cell) for cell in row] for row in csv.reader(io.StringIO(raw.decode()))]
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.allclose(one, other, rtol=1e-4, atol=1e-5)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return bool(one == other)


FILES = [*HUGGING_FACE, *PYTORCH, *BASE]
REFUSED = "refused at start"


# Every fourth of the large sets in each run, the others in the heavy one.
CASES = [
    pytest.param(
        file,
        id=file.name,
        marks=[] if install_file % 4 == 0 or file.oracle == "base" else pytest.mark.heavy,
    )
    for install_file, file in enumerate(FILES)
]


@pytest.mark.parametrize("file", CASES)
def test_a_file_answers_as_in_the_image_it_was_written_for(
    file: File, install_file: Callable[[File], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = install_file(file)
    program = file.program if file.program != "inference.py" else None
    if not file.starts:
        with pytest.raises(Exception, match=r"."):
            load_runner(model, program)
    refused = any(question.ours == REFUSED for question in file.questions)
    if refused:
        with pytest.raises(ValueError, match="define predict_fn"):
            load_runner(model, program)
    answers = []
    if file.starts and not refused:
        loaded = load_runner(model, program)
        answers = [answer(loaded, question) for question in file.questions]

    forget({name for name in sys.modules if not name.startswith("inference")})
    sys.modules.pop(file.program.removesuffix(".py"), None)
    monkeypatch.syspath_prepend(str(model / "code"))
    if not file.starts:
        with pytest.raises(Exception, match=r"."):
            toolkit_oracles.make(file.oracle, model)
        return
    oracle = toolkit_oracles.make(file.oracle, model)
    for question, (status, kind, body) in zip(file.questions, answers, strict=False):
        compare(question, status, kind, body, oracle.answer(question))


def compare(
    question: Question, status: int, kind: str, body: bytes, image: tuple[int, Any]
) -> None:
    reported = f"{question}\nours: {status} {kind} {body[:300]!r}\nthe image's: {image}"
    if isinstance(question.ours, int) and question.ours >= 400:
        assert status == question.ours, reported
        assert image[0] >= 400 or question.why, reported
        return
    assert status == 200, reported
    answer = decoded(body, kind)
    if question.ours is not None:
        assert question.why
        assert question.ours == "json" or same(answer, _as_decoded(question.ours, kind)), reported
        assert kind in question.accept
        return
    assert image[0] == 200, reported
    assert same(answer, decoded(image[1], kind)), reported


def _as_decoded(value: Any, kind: str) -> Any:
    return [[_number(cell) for cell in row] for row in value] if kind == CSV else value


def test_the_documents_table_counts_these_files() -> None:
    text = (CODE.parent / "docs" / "SERVING.md").read_text()
    rows = re.findall(r"^\| sagemaker-[^|]*\|([ \d|]+)\|$", text, re.MULTILINE)
    reported = [tuple(map(int, row.split("|"))) for row in rows]
    counted = []
    for oracle in ("huggingface", "pytorch", "base"):
        files = [file for file in FILES if file.oracle == oracle]
        requested = [question for file in files for question in file.questions]
        same = sum(question.ours is None for question in requested)
        different = sum(bool(question.why) for question in requested)
        refused = sum(not file.starts for file in files)
        errors = len(requested) - same - different
        counted.append((len(files), refused, len(requested), same, errors, different))
    assert reported == counted
    assert sum(row[0] for row in counted) >= 60
    assert len({file.name for file in FILES}) == len(FILES)
