"""Multiple choice: public formats, transformers' own losses and answers."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from recipe.batching.groups import Groups
from recipe.data.held_out import DataSets
from recipe.errors import DataError
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.multiple_choice import data
from recipe.tasks.multiple_choice.data import ANSWER, CHOICES, CONTEXT, QUESTION
from recipe.tasks.multiple_choice.task import Choices
from tests.support.jobs import write
from tests.support.packed_batches import PAD, make, samples_of
from tests.support.serving_kit import Handlers, assert_close, save

LABELLED = {"text": ["sat", "ran"], "label": ["1", "2"]}
STEM = {"stem": "who", "choices": [{"text": "sat", "label": "A"}, {"text": "ran", "label": "B"}]}
PAIR = ["sat", "ran"]


def load(folder: Path, rows: Sequence[Mapping[str, Any]], **given: Any) -> DataSets:
    hyperparameters = Hyperparameters(task="multiple-choice", **given)
    return data.load({"train": write(folder / "data", rows)}, hyperparameters)


@pytest.mark.parametrize(
    ("row", "answers", "positions"),
    [
        ({"question": "who", "choices": PAIR}, {"answer": [1, 2]}, [0, 1]),
        ({"question": "who", "choices": PAIR}, {"answer": ["B", "a"]}, [0, 1]),
        ({"question": "who", "choices": PAIR}, {"answer": ["ran", "sat"]}, [0, 1]),
        ({"question": "who", "choices": LABELLED}, {"answerKey": ["1", "1"]}, [0]),
        ({"question": STEM}, {"answerKey": ["B", "A"]}, [0, 1]),
    ],
    ids=["from 1", "letters", "texts", "arc", "commonsense_qa"],
)
def test_answers_of_every_spelling_are_positions(
    row: Mapping[str, Any], answers: Mapping[str, list[Any]], positions: list[int], tmp_path: Path
) -> None:
    """tests/recipe/data/test_shapes.py has the columns of public data sets."""
    ((name, values),) = answers.items()
    loaded = load(tmp_path, [{**row, name: value} for value in values * 20])
    assert set(loaded.train[QUESTION]) == {"who"}
    assert sorted(set(loaded.train[ANSWER])) == positions
    assert loaded.train[0][CHOICES] == ["sat", "ran"]


def test_a_csv_file_has_a_column_for_each_choice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,a,b,answer\n" + "who,sat,ran,b\n" * 20)
    loaded = data.load({"train": tmp_path}, Hyperparameters(task="multiple-choice"))
    assert loaded.train[0] == {CONTEXT: "", QUESTION: "who", CHOICES: PAIR, ANSWER: 1}


def test_other_data_has_the_columns_of_the_training_data(tmp_path: Path) -> None:
    rows = [
        {"question": "who", "q": "he", "choices": PAIR, "answer": "AB"[n % 2]} for n in range(9)
    ]
    others = [{name: row[name] for name in ("q", "choices")} for row in rows]
    channels = {"train": write(tmp_path / "train", rows), "test": write(tmp_path / "test", others)}
    given = Hyperparameters(task="multiple-choice", text_column="q")
    loaded = data.load(channels, given)
    assert set(loaded.train[QUESTION]) == {"he"}
    assert any("no value in 'answer'" in line for line in loaded.notes)
    renamed = [{"q": "he", "options": PAIR, "answer": "A"}]
    channels["validation"] = write(tmp_path / "validation", renamed)
    with pytest.raises(DataError, match="lacks 'choices', read in the training data"):
        data.load(channels, given)


@pytest.mark.parametrize(
    ("kind", "packs"),
    [
        *itertools.product(("bert", "distilbert", "modernbert"), (True, False)),
        *((kind, False) for kind in ("roberta", "electra")),
    ],
)
def test_the_loss_of_a_batch_is_that_of_transformers(kind: str, packs: bool) -> None:
    objective, base = Choices(), make(kind)
    torch.manual_seed(0)
    ours = AutoModelForMultipleChoice.from_config(base.config).eval()
    assert objective.packs(ours) or not packs
    theirs = AutoModelForMultipleChoice.from_config(base.config).eval()
    theirs.load_state_dict(ours.state_dict())
    texts = samples_of([9, 5, 7, 12, 3, 4, 8])
    members = np.array([[0, 1, 2], [3, 4, -1], [5, 6, -1]])
    labels = np.array([[2, 3], [0, 2], [1, 2]])
    samples, rows = Groups.from_texts(texts, members, labels), np.arange(3)
    layout = objective.layout(ours, packs, 4, PAD, [(samples, rows)])
    objective.prepare(ours, packs)
    outputs = ours(**layout.tensors(samples, rows))
    padded_labels = torch.from_numpy(np.concatenate([labels, [[0, 0]]]))
    losses = objective.losses(outputs.logits, padded_labels, 0.0)
    assert losses.isfinite().all()
    expected = []
    for group, (right, count) in zip(members, labels, strict=True):
        ids = [torch.from_numpy(texts.tokens(row).astype(np.int64)) for row in group[:count]]
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        given = {"input_ids": batch[None], "attention_mask": mask[None]}
        expected.append(theirs(**given, labels=torch.tensor([right])).loss)
    torch.testing.assert_close(losses[:3], torch.stack(expected), atol=1e-5, rtol=1e-5)
    losses[:3].mean().backward()
    torch.stack(expected).mean().backward()
    gradients = {n: weight.grad for n, weight in theirs.named_parameters()}
    for n, weight in ours.named_parameters():
        if gradients[n] is not None:
            torch.testing.assert_close(weight.grad, gradients[n], atol=1e-5, rtol=1e-4)


def test_a_question_with_a_context_is_served_as_transformers_computes_it(tmp_path: Path) -> None:
    save("BertForMultipleChoice", tmp_path / "model")
    handlers = Handlers(tmp_path / "model")
    model = AutoModelForMultipleChoice.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    requests: list[dict[str, Any]] = [
        {"question": "who said", "choices": ["anna", "the film", "paris"]},
        {"question": "the film was", "choices": ["good again .", "bad"]},
    ]
    requests.append({"context": "the film", **requests[0]})
    answers = handlers.ask({"inputs": requests})
    assert_close([handlers.ask({"inputs": one}) for one in requests], answers)
    for one, answer in zip(requests, answers, strict=True):
        first = [one.get("context", one["question"])] * len(one["choices"])
        second = [
            f"{one['question']} {choice}" if "context" in one else choice
            for choice in one["choices"]
        ]
        encoded = tokenizer(first, second, padding=True, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**{name: value[None] for name, value in encoded.items()}).logits[0]
        best = int(logits.argmax())
        expected = {"choice": one["choices"][best], "index": best, "scores": logits.softmax(-1)}
        assert_close(answer, {**expected, "scores": expected["scores"].tolist()})
    for wrong in ("a text", {"question": "who"}, {"question": "who", "choices": ["a"]}):
        with pytest.raises(Exception, match="choices"):
            handlers.ask({"inputs": wrong})
