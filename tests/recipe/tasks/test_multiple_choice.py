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
from recipe.hyperparameters import Hyperparameters
from recipe.tasks.multiple_choice import data
from recipe.tasks.multiple_choice.task import Choices
from tests.support.jobs import write
from tests.support.packed_batches import PAD, make, samples_of
from tests.support.serving_kit import Handlers, assert_close, save

LABELLED = {"text": ["sat", "ran"], "label": ["1", "2"]}
STEM = {"stem": "who", "choices": [{"text": "sat", "label": "A"}, {"text": "ran", "label": "B"}]}
PAIR = ["sat", "ran"]


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

    def load(folder: Path, rows: Sequence[Mapping[str, Any]], **given: Any) -> DataSets:
        hyperparameters = Hyperparameters(task="multiple-choice", **given)
        return data.load({"train": write(folder / "data", rows)}, hyperparameters)

    ((name, values),) = answers.items()
    loaded = load(tmp_path, [{**row, name: value} for value in values * 20])
    assert set(loaded.train["query"]) == {"who"}
    assert sorted({scores.index(1.0) for scores in loaded.train["scores"]}) == positions
    assert loaded.train[0]["texts"] == ["sat", "ran"]


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
    right = (2, 0, 1)
    labels = np.stack([np.eye(3, dtype=np.float32)[[*right]], members >= 0], axis=-1)
    samples, rows = Groups.from_texts(texts, members, labels), np.arange(3)
    layout = objective.layout(ours, packs, 4, PAD, [(samples, rows)])
    objective.prepare(ours, packs)
    outputs = ours(**layout.tensors(samples, rows))
    padded_labels = torch.from_numpy(np.concatenate([labels, np.zeros((1, 3, 2), np.float32)]))
    losses = objective.losses(outputs.logits, padded_labels, 0.0)
    assert losses.isfinite().all()
    expected = []
    for group, number in zip(members, right, strict=True):
        ids = [torch.from_numpy(texts.tokens(row).astype(np.int64)) for row in group[group >= 0]]
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        given = {"input_ids": batch[None], "attention_mask": mask[None]}
        expected.append(theirs(**given, labels=torch.tensor([number])).loss)
    torch.testing.assert_close(losses[:3], torch.stack(expected), atol=1e-5, rtol=1e-5)
    losses[:3].mean().backward()
    torch.stack(expected).mean().backward()
    gradients = {n: weight.grad for n, weight in theirs.named_parameters()}
    for n, weight in ours.named_parameters():
        if gradients[n] is not None:
            torch.testing.assert_close(weight.grad, gradients[n], atol=1e-5, rtol=1e-4)


def test_a_question_with_a_context_is_served_as_transformers_computes_it(tmp_path: Path) -> None:
    """tests/contract has questions without one."""
    save("BertForMultipleChoice", tmp_path / "model")
    handlers = Handlers(tmp_path / "model")
    model = AutoModelForMultipleChoice.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    choices = ["anna", "the film", "paris"]
    body = {"context": "the film", "question": "who said", "choices": choices}
    second = [f"who said {choice}" for choice in choices]
    encoded = tokenizer(["the film"] * 3, second, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**{name: value[None] for name, value in encoded.items()}).logits[0]
    best = int(logits.argmax())
    expected = {"choice": choices[best], "index": best, "scores": logits.softmax(-1).tolist()}
    assert_close(handlers.ask({"inputs": body}), expected)
    assert handlers.ask({"inputs": {"question": "who", "choices": PAIR}})["choice"] in PAIR
    for wrong in ("a text", {"question": "who"}, {"question": "who", "choices": ["a"]}):
        with pytest.raises(Exception, match="choices"):
            handlers.ask({"inputs": wrong})
