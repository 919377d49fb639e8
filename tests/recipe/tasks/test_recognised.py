"""A job of each task, looked at as `amphora doctor` does: found without a word, and fit to run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipe.task_table import TASKS
from recipe.tasks.base import ERROR
from recipe.training import preflight
from tests.support import causal_kit, ranking_jobs, serving_kit, task_cases, texts_and_pictures

ROWS = 64


@dataclass(frozen=True)
class Job:
    """Rows, and the class of the model that learns them."""

    model: str
    rows: Sequence[Any] = ()
    """Empty where `texts_and_pictures` makes model and data."""
    argv: tuple[str, ...] = ()


def answered(number: int, said: str) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"film {number}"}
    return [asked, {"role": "assistant", "content": said}]


JOBS = {
    "text-classification": Job("BertForMaskedLM", task_cases.texts()),
    "token-classification": Job("BertForMaskedLM", task_cases.tagged()),
    "question-answering": Job("BertForMaskedLM", task_cases.asked()),
    "multiple-choice": Job("BertForMaskedLM", task_cases.choices()),
    "sentence-embedding": Job("BertForMaskedLM", ranking_jobs.triplets(ROWS)),
    "reranking": Job("BertForSequenceClassification", ranking_jobs.lists(ROWS)),
    "masked-lm": Job("BertForMaskedLM", [{"text": f"the film number {n}"} for n in range(ROWS)]),
    "causal-lm": Job(
        "llama", [{"prompt": f"film {n}", "completion": f"the film {n}"} for n in range(ROWS)]
    ),
    "preference": Job(
        "llama",
        [{"chosen": answered(n, "yes"), "rejected": answered(n, "no")} for n in range(ROWS)],
    ),
    "summarization": Job(
        "T5ForConditionalGeneration",
        [{"document": f"the film number {n} was good", "summary": "good"} for n in range(ROWS)],
    ),
    "translation": Job(
        "T5ForConditionalGeneration",
        [{"translation": {"en": f"film {n}", "de": f"the film {n}"}} for n in range(ROWS)],
        ("--source_lang", "en", "--target_lang", "de"),
    ),
    "text2text-generation": Job(
        "T5ForConditionalGeneration",
        [{"input_text": f"film {n}", "target_text": f"the film {n}"} for n in range(ROWS)],
    ),
    "image-classification": Job("pictures"),
}


def test_there_is_a_job_of_each_task() -> None:
    assert JOBS.keys() == TASKS.keys()


@pytest.mark.parametrize("task", JOBS)
def test_the_task_is_told_by_its_data(task: str, tmp_path: Path) -> None:
    job = JOBS[task]
    if job.model == "pictures":
        kind = texts_and_pictures.make(task, tmp_path / "kind")
        model, channels = kind.model, kind.channels
    else:
        data = tmp_path / "data"
        data.mkdir()
        (data / "rows.jsonl").write_text("\n".join(map(json.dumps, job.rows)))
        model, channels = tmp_path / "model", {"train": data}
        make = causal_kit.make_model if job.model == "llama" else serving_kit.save
        make(job.model, model)
    places = ranking_jobs.places_of(tmp_path, {**channels, "model": model})
    findings = list(preflight.inspect(["--batch_size", "4", *job.argv], places, 1))
    assert [each.detail for each in findings if each.level == ERROR] == []
    (decided,) = [finding for finding in findings if finding.what == "task"]
    assert decided.detail == task
    assert "as given" not in decided.reason
    assert {"data", "model", "steps", "memory"} <= {each.what for each in findings}
