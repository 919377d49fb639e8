"""Reranking: reading, losses and scores; tests/contract trains and serves."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe import arguments, task_table
from recipe.data import values
from recipe.data.files import json_rows, part
from recipe.hyperparameters import Hyperparameters
from recipe.models.sources.origin import Origin
from recipe.tasks import ranking_scores
from recipe.tasks.ranking_scores import JudgedLists
from recipe.tasks.reranking import task as reranking
from recipe.tasks.reranking.task import Reranking
from tests.support.jobs import write
from tests.support.serving_kit import save, tokenizer
from tests.support.words import triplets

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TASK = ("--task", "reranking")


def test_a_list_is_learned_as_a_whole(tmp_path: Path) -> None:
    """Packed and padded: ListNet of the logits that the model gives the pairs by themselves."""

    def lists(count: int, texts: int = 4) -> list[dict[str, Any]]:
        """Return lists of texts, of which the one with the number of the query is relevant."""
        return [
            {
                "query": f"film number {index}",
                "documents": [f"the film was number {index + n * 11} , {'good' * (n % 2)}" for n in range(texts - index % 2)],
                "labels": [int(n == 0) for n in range(texts - index % 2)],
            }
            for index in range(count)
        ]  # fmt: skip

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = save("BertForSequenceClassification", tmp_path / "start", num_labels=1)
    rows = lists(6)
    argv = [*TASK, "--listwise", "True", "--eval_strategy", "no"]
    task = Reranking({"train": write(tmp_path / "rows", rows)}, arguments.parse(argv))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chosen, expected = np.arange(5), []
    for row in rows[:5]:
        queries = [row["query"]] * len(row["documents"])
        with torch.no_grad():
            inputs = tokenizer(queries, row["documents"], padding=True, return_tensors="pt")
            chances = plain(**inputs).logits[:, 0].log_softmax(0)
        wanted = torch.tensor(row["labels"]).float().softmax(0)
        expected.append(-(wanted * chances).sum())
    for packed in (True, False):
        model, _ = task.load(Origin(str(folder)))
        # The logits are no probabilities.
        activation = model.config.sentence_transformers["activation_fn"]
        assert activation == "torch.nn.modules.linear.Identity"
        samples = task.samples(tokenizer, 40)["train"]
        layout = task.objective.layout(model, packed, 7, 0, [(samples, chosen)])
        task.objective.prepare(model, packed)
        labels = torch.zeros(7, *samples.labels.shape[1:])
        labels[:5] = torch.from_numpy(samples.labels[chosen])
        logits = model.eval()(**layout.tensors(samples, chosen)).logits
        ours = task.objective.losses(logits, labels, 0.0)
        torch.testing.assert_close(ours[:5], torch.stack(expected), rtol=1e-5, atol=1e-5)
        assert ours[5:].abs().max() == 0
        # Every list at once needs more places than this batch has.
        more = np.asarray([0, 2, 4, 0, 2, 4, 0])
        assert layout.tensors(samples, more)["slots"].max() == 27


def test_equal_scores_rank_nothing() -> None:
    judged = JudgedLists(starts=np.asarray([0, 3, 5, 6]), labels=np.asarray([1.0, 0, 0, 1, 1, 1]))
    actual = ranking_scores.rank(np.ones(6), judged)
    assert judged.judged() == [0]
    assert ranking_scores.list_scores(np.ones(6), judged, actual)["mrr_at_10"] == pytest.approx(
        1 / 3
    )
    alike = JudgedLists(starts=np.asarray([0, 2]), labels=np.zeros(2))
    actual = ranking_scores.rank(np.ones(2), alike)
    assert ranking_scores.list_scores(np.ones(2), alike, actual) == {}


def test_graded_labels_and_triplets_are_lists(tmp_path: Path) -> None:
    graded = [{"query": f"q {n // 4}", "text": f"t {n}", "label": n % 4} for n in range(80)]
    task = Reranking({"train": write(tmp_path / "a", graded)}, arguments.parse([*TASK]))
    assert {round(score * 3) for row in task.data.train["scores"] for score in row} == {0, 1, 2, 3}
    assert any("divided by 3" in line for line in task.data.notes)
    assert len(task.train) == 4 * len(task.data.train) == 72
    task.samples(tokenizer(), 40)
    assert list(task.objective.lists["evaluation"].starts) == [0, 4, 8]
    more = triplets(20) + [{**row, "negative": "another"} for row in triplets(20)]
    channels = {"train": write(tmp_path / "b", more)}
    task = Reranking(channels, arguments.parse([*TASK, "--eval_strategy", "no"]))
    assert [len(row) for row in task.data.train["texts"]] == [3] * 20
    assert task.data.train["scores"][0] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("hashes", ["own", "all alike"])
def test_the_texts_of_a_query_come_together_wherever_its_rows_are(
    hashes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time, and where queries cannot be told apart by their hashes."""

    draw = np.random.default_rng(0)
    rows = [
        {"query": f"q {query}", "text": f"t {text}", "label": int(label)}
        for query, text, label in draw.integers(0, (40, 12, 4), (400, 3))
    ]
    expected: dict[str, dict[str, int]] = {}
    for row in rows:
        texts = expected.setdefault(row["query"], {})
        texts[row["text"]] = max(row["label"], texts.get(row["text"], 0))
    assert sum(map(len, expected.values())) < 350, "pairs come several times"
    monkeypatch.setattr(part, "_CHUNK_ROWS", 7)
    monkeypatch.setattr(values, "CHUNK_ROWS", 9)
    if hashes == "all alike":
        monkeypatch.setattr(
            reranking.pd.util, "hash_array", lambda texts: np.zeros(len(texts), np.uint64)
        )
    channels = {"train": write(tmp_path, rows)}
    task = Reranking(channels, arguments.parse([*TASK, "--eval_strategy", "no"]))
    read = task.data.train[:]
    assert read["query"] == list(expected)
    assert read["texts"] == [list(texts) for texts in expected.values()]
    wanted = [[label / 3 for label in texts.values()] for texts in expected.values()]
    for scores, query_scores in zip(read["scores"], wanted, strict=True):
        assert scores == pytest.approx(query_scores)


@pytest.mark.parametrize("task", ["reranking", "sentence-embedding"])
def test_texts_are_never_all_objects_of_python(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twice as many rows a process holds no more texts, but for some numbers."""

    monkeypatch.setattr(part, "_CHUNK_ROWS", 50)
    monkeypatch.setattr(values, "CHUNK_ROWS", 50)
    monkeypatch.setattr(json_rows, "_CHUNK_ROWS", 50)
    monkeypatch.setattr(json_rows, "_CHUNK_CHARACTERS", 200_000)

    def most(count: int) -> int:
        rows = [
            {**row, "positive": f"{row['positive']} {'word ' * 800}"} for row in triplets(count)
        ]
        channels = {"train": write(tmp_path / f"{task} {count}", rows)}
        kind, job = task_table.load(task), Hyperparameters(task=task)
        tracemalloc.start()  # which does not see what Arrow keeps
        kind(channels, job)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    most(10)  # imports
    assert most(2_500) - most(1_250) < 1_250 * 1_000, "of which a row has 4,000 characters"
