"""Classifiers of texts that are longer than a model reads: windows, and one answer for each text."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipe import arguments
from recipe.batching import samples as batching
from recipe.batching.samples import Samples
from recipe.errors import HyperparameterError
from recipe.tasks.text_classification.task import TextClassification
from recipe.tokenization import encoding
from tests.support import worlds
from tests.support.serving_kit import Handlers
from tests.support.worlds import Training

MOST = 16
ROOM = MOST - 2


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return made


@pytest.mark.parametrize("room", [1, 2, 7, 8, 14, 62, 510])
def test_windows_hold_all_of_a_text_are_few_and_alike(room: int) -> None:
    for count in {*range(4 * room + 3), 1000}:
        windows = encoding.spans(count, room)
        assert {at for window in windows for at in window} == set(range(count))
        assert max(map(len, windows)) <= room
        assert max(map(len, windows)) == min(map(len, windows))
        if count <= room:
            assert windows == [range(count)]
            continue
        shared = room // 8
        assert all(
            len({*first} & {*second}) >= shared for first, second in itertools.pairwise(windows)
        )
        assert (len(windows) - 1) * (room - shared) + shared < count, "one less would not do"


def test_a_text_that_fits_is_one_window_as_it_is_tokenised_whole(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    texts = ["the film was good", "", " ".join(str(n) for n in range(1000, 1030))]
    rows, types = encoding.windows_of(tokenizer, texts, MOST)
    assert [of_text[0] for of_text in rows[:2]] == encoding.encode(tokenizer, texts[:2], MOST)
    assert [len(of_text) for of_text in rows[:2]] == [1, 1]
    whole = tokenizer(texts[2])["input_ids"]
    for window in rows[2]:
        assert (window[0], window[-1]) == (whole[0], whole[-1])
        assert len(window) <= MOST
    inner = [window[1:-1] for window in rows[2]]
    assert inner[0] == whole[1 : 1 + len(inner[0])]
    assert inner[-1] == whole[-1 - len(inner[-1]) : -1]
    assert types is not None
    assert [list(map(len, of_text)) for of_text in types] == [
        list(map(len, of_text)) for of_text in rows
    ]


def windowed(texts: list[int], labels: list[int], first_token: int = 0) -> Samples:
    """Samples of one token each, windows of these texts."""
    tokens = np.arange(first_token, first_token + len(texts), dtype=np.int32)
    numbers = np.array(texts, dtype=np.int64)
    return Samples(tokens, np.arange(len(texts) + 1), np.array(labels)[numbers], text_of=numbers)


def test_answers_are_the_means_of_each_texts_windows() -> None:
    samples = windowed([0, 0, 0, 1, 2, 2], [1, 0, 1])
    logits = np.array([[0, 3], [0, 0], [0, 0], [2, 1], [1, 0], [0, 3]], dtype=np.float32)
    pooled, labels = samples.pooled(logits)
    assert pooled.tolist() == [[0, 1], [2, 1], [0.5, 1.5]]
    assert labels.tolist() == [1, 0, 1]
    assert samples.text_lengths.tolist() == [3, 1, 2]
    # As the normalised mean of log-probabilities.
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    mean = np.exp(logs[:3].mean(axis=0))
    expected = np.exp(pooled[0]) / np.exp(pooled[0]).sum()
    assert mean / mean.sum() == pytest.approx(expected)
    assert samples.fingerprint() != windowed([0, 1, 1, 2, 3, 3], [1, 1, 0, 1]).fingerprint()


def test_texts_of_several_hosts_are_numbered_through() -> None:
    parts = [windowed([0, 0, 1], [1, 0]), windowed([], []), windowed([0, 1, 1], [0, 1], 3)]
    wholes = []
    for rank, part in enumerate(parts):
        told = [
            (np.diff(each.starts), each.labels, each.fingerprint(), each.text_of) for each in parts
        ]
        whole, rows = batching.sharded(part, ["a", "b", "c"], rank, lambda value, told=told: told)
        assert rows == [3, 0, 3]
        wholes.append(whole)
    for whole in wholes:
        pooled, labels = whole.pooled(np.arange(6, dtype=np.float32)[:, None])
        assert labels.tolist() == [1, 0, 0, 1]
        assert pooled[:, 0].tolist() == [0.5, 2, 3, 4.5]


@pytest.mark.parametrize(
    ("row", "more", "said"),
    [
        ({"text": "a", "text_pair": "b", "label": 1}, [], "are pairs of texts"),
        ({"input_ids": [1, 2], "label": 1}, [], "came tokenised"),
    ],
)
def test_what_has_no_windows_is_refused(
    tmp_path: Path, row: dict[str, Any], more: list[str], said: str
) -> None:
    lines = [json.dumps({**row, "label": number % 2}) for number in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    argv = ["--model_id", "any", "--task", "text-classification", "--long_texts", "split", *more]
    with pytest.raises(HyperparameterError, match=said):
        TextClassification({"train": tmp_path}, arguments.parse(argv))


def stories(count: int, seed: int) -> list[dict[str, str]]:
    """Of one to five windows; the word that decides lies behind the first window of most."""
    numbers = random.Random(seed)
    rows = []
    for number in range(count):
        words = [numbers.choice(["the", "film", "was", ","]) for _ in range(numbers.randint(3, 50))]
        word, label = [("good", "pos"), ("bad", "neg")][number % 2]
        words[min(len(words) - 1, numbers.randint(ROOM, 60))] = word
        rows.append({"text": " ".join(words), "label": label})
    return rows


def channel(folder: Path, rows: list[dict[str, str]]) -> str:
    folder.mkdir()
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


@pytest.mark.heavy
def test_what_decides_may_lie_anywhere_in_a_text(tmp_path: Path, tiny_model: Path) -> None:
    test = stories(80, 2)
    data = channel(tmp_path / "train", stories(300, 1))
    channels = {"SM_CHANNEL_TEST": channel(tmp_path / "test", test)}
    usual = ["--max_length", str(MOST), "--do_predict", "True", "--bf16", "False"]
    learn = ["--model_id", str(tiny_model), *usual, "--lr", "3e-3", "--batch_size", "8"]
    learn += ["--eval_strategy", "no"]
    saving = ["--save_strategy", "steps", "--save_steps", "75", "--save_total_limit", "9"]
    judge = ["--model_id", str(tmp_path / "split" / "model"), *usual, "--do_train", "False"]

    def training(name: str, *argv: str, **more: Any) -> Training:
        base = str(tmp_path / name)
        return Training(base=base, data=data, argv=[*argv], environment=channels, **more)

    cut = training("cut", *learn, "--epochs", "1", "--save_strategy", "no")
    windows = [*learn, "--epochs", "3", "--long_texts", "split", *saving]
    split = training("split", *windows)
    two = training("two", *judge, processes=2)
    resumed = training("resumed", *windows, checkpoint=split.path(225))
    assert worlds.run(cut, split, two, resumed) == [[0], [0], [0, 0], [0]], split.log()

    def scores(training: Training) -> dict[str, float]:
        path = Path(training.base) / "output" / "data" / "metrics.json"
        metrics: dict[str, float] = json.loads(path.read_text())
        return metrics

    assert scores(cut)["eval_accuracy"] < 0.8
    assert scores(split)["eval_accuracy"] > 0.97
    assert "evaluation: 80 texts in" in split.log()
    assert split.weights() == resumed.weights()
    written = (tmp_path / "split" / "output" / "data" / "predictions.jsonl").read_text()
    answers = [json.loads(line) for line in written.splitlines()]
    assert [answer["row"] for answer in answers] == list(range(80))
    assert [answer["true"] for answer in answers] == [row["label"] for row in test]
    # Judged by the model alone, which says how it reads, and by two processes.
    assert scores(two)["eval_accuracy"] == scores(split)["eval_accuracy"]
    assert scores(two)["eval_loss"] == pytest.approx(scores(split)["eval_loss"], abs=1e-6)

    served = Handlers(tmp_path / "split" / "model")

    def ask(texts: Any, **parameters: Any) -> Any:
        return served.ask({"inputs": texts, "parameters": parameters})

    told = ask([row["text"] for row in test])
    assert [each["label"] for each in told] == [answer["label"] for answer in answers]
    assert [each["score"] for each in told] == pytest.approx(
        [answer["score"] for answer in answers], abs=1e-5
    )
    loss = -np.log(
        [
            answer["score"] if answer["label"] == answer["true"] else 1 - answer["score"]
            for answer in answers
        ]
    ).mean()
    assert scores(split)["eval_loss"] == pytest.approx(loss, abs=1e-4)
    late = "the film was , " * 12 + "bad"
    assert ask(late)[0]["label"] == ask([late, "good"])[0]["label"] == "neg"
    first = " ".join(late.split()[:ROOM])
    (cut_one,), (alone,) = ask(late, truncation=True), ask(first)
    assert cut_one["score"] == pytest.approx(alone["score"], abs=1e-5)
    with pytest.raises(ValueError, match="pair of texts"):
        ask([{"text": late, "text_pair": "good"}])
    with pytest.raises(ValueError, match="max_length is 2"):
        ask(late, max_length=2)
