"""A small job of every task: its model, its rows, its hyperparameters.

The columns have the first names of docs/DATA.md. The contract (tests/contract) runs its cases for
each row of `JOBS`; a new task joins by a row.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import causal_kit, plain_answers, plain_scores, serving_kit
from tests.support.plain_answers import Row
from tests.support.plain_scores import Judged
from tests.support.serving_kit import WORDS

FILE = "rows.jsonl"
BATCH = 8
TRAIN_ROWS, TEST_ROWS = 44, 24
"""Six steps an epoch, of which the last has fewer samples."""


@dataclass(frozen=True, kw_only=True)
class SmallJob:
    """A task, the model that learns it, and its rows."""

    task: str
    model: Callable[[Path, float], Path]
    """Writes a model with this dropout into a folder."""
    row: Callable[[random.Random], Row]
    """Draws a row of the data."""
    answer: Callable[[Path, Sequence[Row]], tuple[Any, Any]]
    """Returns a request for some rows, and its answer by the plain libraries."""
    scores: Callable[[Judged], Mapping[str, float]] | None
    """Returns scores by the plain libraries."""
    bad: Mapping[str, Any] = field(default_factory=dict)
    """Values that make a row wrong; without any, its line is cut."""
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    packs: bool = True
    tolerance: float = 1e-3
    """Relative, of losses, gradients and how far some steps move the weights, when float32 adds up in
    another order: in another layout of batches, or over processes. A sample or a token too many or
    too few changes them by percents."""

    def rows(self, count: int, seed: int = 0) -> list[Row]:
        """Draw rows."""
        drawn = random.Random(seed)
        return [self.row(drawn) for _ in range(count)]

    @property
    def arguments(self) -> list[str]:
        """The task and its hyperparameters, but for how long it learns."""
        others = ("do_predict", "epochs", "lr")
        given = {name: value for name, value in self.hyperparameters.items() if name not in others}
        return [
            word
            for name, value in {"task": self.task, **given}.items()
            for word in (f"--{name}", value)
        ]


def _encoder(kind: str) -> Callable[[Path, float], Path]:
    def save(folder: Path, dropout: float) -> Path:
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return serving_kit.save(kind, folder, **rates)

    return save


def _decoder(folder: Path, dropout: float) -> Path:
    causal_kit.make_model("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": dropout}))
    return folder


def _gpt2(folder: Path, dropout: float) -> Path:
    return causal_kit.make_model("gpt2", folder)


def _encoder_decoder(folder: Path, dropout: float) -> Path:
    return serving_kit.save("T5ForConditionalGeneration", folder, dropout_rate=dropout)


def _vision(folder: Path, dropout: float) -> Path:
    import torch
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, initializer_range=0.1, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16},
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _words(drawn: random.Random, least: int = 2, most: int = 12) -> list[str]:
    return drawn.choices(WORDS, k=drawn.randint(least, most))


def _text(drawn: random.Random, *others: str) -> str:
    words = [*_words(drawn), *others]
    drawn.shuffle(words)
    return " ".join(words)


def _labelled(drawn: random.Random) -> Row:
    label = drawn.choice(["good", "bad", "film"])
    return {"text": _text(drawn, label, label), "label": label}


def _paired(drawn: random.Random) -> Row:
    return {"premise": _text(drawn), "hypothesis": _text(drawn), "label": drawn.choice("yn")}


def _marked(drawn: random.Random) -> Row:
    return {"text": _text(drawn), "label": drawn.randrange(7) / 2}


def _rated(drawn: random.Random) -> Row:
    return {"text": _text(drawn), "valence": drawn.randrange(7) / 2, "arousal": drawn.randrange(9)}


def _tagged(drawn: random.Random) -> Row:
    tags = {"paris": "B-LOC", "anna": "B-PER", "film": "B-MISC"}
    words = [*_words(drawn), "paris"]
    return {"tokens": words, "ner_tags": [tags.get(word, "O") for word in words]}


def _question_row(drawn: random.Random) -> Row:
    before, after = (" ".join(_words(drawn, 1, 6)) for _ in range(2))
    answer = drawn.choice(["paris", "anna", "the film"])
    answers = {"text": [answer], "answer_start": [len(before) + 1]}
    return {"question": "who was", "context": f"{before} {answer} {after}", "answers": answers}


def _chosen(drawn: random.Random) -> Row:
    choices = [f"the film was bad {_text(drawn)}" for _ in range(drawn.randint(2, 4))]
    right = drawn.randrange(len(choices))
    choices[right] = f"the film was good {_text(drawn)}"
    return {"question": _text(drawn), "choices": choices, "answer": "ABCD"[right]}


def _similar(drawn: random.Random) -> Row:
    name = "".join(drawn.choices("abcdefgh", k=3))
    return {
        "anchor": f"who was {name}", "positive": _text(drawn, name), "negative": _text(drawn),
    }  # fmt: skip


def _ranked(drawn: random.Random) -> Row:
    name = "".join(drawn.choices("abcdefgh", k=3))
    count = drawn.randint(2, 4)
    right = drawn.randrange(count)
    texts = [_text(drawn, *[name] * (number == right)) for number in range(count)]
    labels = [int(number == right) for number in range(count)]
    return {"query": f"who was {name}", "documents": texts, "labels": labels}


def _summarized(drawn: random.Random) -> Row:
    words = _words(drawn)
    return {"document": " ".join(words), "summary": " ".join(words[:2])}


def _translated(drawn: random.Random) -> Row:
    words = _words(drawn)
    return {"translation": {"en": " ".join(words), "de": " ".join(reversed(words))}}


def _rewritten(drawn: random.Random) -> Row:
    words = _words(drawn)
    return {"prompt": " ".join(words), "completion": " ".join(words[-2:])}


def _written(drawn: random.Random) -> Row:
    return {"text": _text(drawn)}


def _completed(drawn: random.Random) -> Row:
    (row,) = drawn.sample(causal_kit.pairs(72), 1)
    return dict(row)


def _seen(drawn: random.Random) -> Row:
    """Draw an image [16, 16, 3] with a bright left or right half, and its class."""
    import numpy as np

    pixels = np.random.default_rng(drawn.getrandbits(32)).integers(0, 90, (16, 16, 3))
    name = drawn.choice(["left", "right"])
    pixels[:, slice(0, 8) if name == "left" else slice(8, 16)] += 150
    return {"image": pixels.astype(np.uint8), "label": name}


_BERT = _encoder("BertForMaskedLM")
_COMPLETED = plain_answers.completions(lambda row: row["prompt"])
_PREDICTS = {"do_predict": "True"}
_LEARNS = {**_PREDICTS, "epochs": "6", "lr": "1e-2"}
JOBS = {
    "text-classification": SmallJob(
        task="text-classification",
        scores=plain_scores.classes, answer=plain_answers.classes,
        model=_BERT, row=_labelled, bad={"label": None},
        hyperparameters=_PREDICTS,
    ),
    "token-classification": SmallJob(
        task="token-classification",
        scores=plain_scores.tags, answer=plain_answers.tags,
        model=_BERT, row=_tagged, bad={"ner_tags": ["O"]},
        hyperparameters=_LEARNS,
    ),
    "question-answering": SmallJob(
        task="question-answering",
        scores=plain_scores.spans, answer=plain_answers.spans,
        model=_BERT, row=_question_row,
        bad={"answers": {"text": ["nowhere"], "answer_start": [3]}}, hyperparameters=_PREDICTS,
    ),
    "multiple-choice": SmallJob(
        task="multiple-choice",
        scores=plain_scores.choices, answer=plain_answers.choices,
        model=_BERT, row=_chosen, bad={"answer": "Q"},
        hyperparameters=_PREDICTS,
    ),
    "sentence-embedding": SmallJob(
        task="sentence-embedding",
        scores=plain_scores.vectors, answer=plain_answers.vectors,
        model=_BERT, row=_similar,
    ),
    "reranking": SmallJob(
        task="reranking",
        scores=plain_scores.ranks, answer=plain_answers.ranks,
        model=_encoder("BertForSequenceClassification"), row=_ranked,
        bad={"labels": [1]},
    ),
    "summarization": SmallJob(
        task="summarization",
        scores=plain_scores.written(lambda row: row["summary"]),
        answer=plain_answers.written(lambda row: row["document"], "summary_text"),
        packs=False, model=_encoder_decoder, row=_summarized, bad={"document": ["a"]},
        hyperparameters={**_LEARNS, "source_prefix": "who ", "max_target_length": "6"},
    ),
    "translation": SmallJob(
        task="translation",
        scores=plain_scores.written(lambda row: row["translation"]["de"]),
        answer=plain_answers.written(lambda row: row["translation"]["en"], "translation_text"),
        packs=False, model=_encoder_decoder, row=_translated,
        hyperparameters={
            **_LEARNS, "source_lang": "en", "target_lang": "de", "max_target_length": "20",
        },
    ),
    "text2text-generation": SmallJob(
        task="text2text-generation",
        scores=plain_scores.written(lambda row: row["completion"]),
        answer=plain_answers.written(lambda row: row["prompt"]),
        packs=False, model=_encoder_decoder, row=_rewritten,
        bad={"completion": ["a"]}, hyperparameters=_LEARNS,
    ),
    "masked-lm": SmallJob(
        task="masked-lm", scores=None,  # its evaluation draws what is masked
        answer=plain_answers.masks,
        model=_BERT, row=_written, bad={"text": ["a"]},
        hyperparameters={"mlm_probability": "0.3"},
    ),
    "causal-lm": SmallJob(
        task="causal-lm",
        scores=plain_scores.completions, answer=_COMPLETED,
        model=_decoder, row=_completed,
    ),
    "causal-lm, an adapter": SmallJob(
        task="causal-lm",
        scores=plain_scores.completions, answer=_COMPLETED,
        model=_decoder, row=_completed,
        hyperparameters={"lora_r": "4", "lora_save": "adapter"},
    ),
    "image-classification": SmallJob(
        task="image-classification",
        scores=plain_scores.images, answer=plain_answers.images,
        packs=False, model=_vision, row=_seen, bad={"image": b"no picture"},
        hyperparameters=_PREDICTS,
    ),
}  # fmt: skip

_LORA = {"lora_r": "4", "lora_alpha": "8"}
_CLASSES, _TEXTS = JOBS["text-classification"], JOBS["causal-lm"]
CASES = {
    **JOBS,
    "pairs": replace(_CLASSES, row=_paired),
    "numbers": replace(_CLASSES, row=_marked, hyperparameters={"problem_type": "regression"}),
    "several numbers": replace(
        _CLASSES, row=_rated, hyperparameters={"label_column": "valence,arousal"}
    ),
    "ranks of lists": replace(JOBS["reranking"], hyperparameters={"listwise": "True"}),
    "completions of gpt2": replace(_TEXTS, model=_gpt2),
    **{
        f"{name}, LoRA": replace(
            JOBS[name], hyperparameters={**JOBS[name].hyperparameters, **_LORA}
        )
        for name in ("text-classification", "causal-lm", "summarization", "image-classification")
    },
    "text-classification, frozen": replace(
        _CLASSES, hyperparameters={**_CLASSES.hyperparameters, "freeze_layers": "1"}
    ),
    "causal-lm, new tokens": replace(
        _TEXTS, hyperparameters={**_LORA, "added_tokens": "<a>,<b>", "modules_to_save": "norm"}
    ),
}
"""The jobs of the contract, and more for tests of what they are made of."""


def make(name: str, folder: Path) -> tuple[Path, list[str]]:
    """Write a case's channel and its model, without dropout; return the channel and arguments."""
    case = CASES[name]
    channel = write(folder / "train", case.rows(TRAIN_ROWS))
    return channel, ["--model_id", str(case.model(folder / "start", 0.0)), *case.arguments]


def write(folder: Path, rows: Sequence[Row]) -> Path:
    """Write a channel: JSON Lines, or a folder of images for each class."""
    folder.mkdir(parents=True)
    if "image" not in rows[0]:
        (folder / FILE).write_text("\n".join(map(json.dumps, rows)))
        return folder
    from PIL import Image

    for number, row in enumerate(rows):
        path = folder / row["label"] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(row["image"]).save(path)
    return folder


def spoil(job: SmallJob, folder: Path, number: int) -> str:
    """Make a row of a channel wrong, counted from 0; return what names it: a file, maybe a line."""
    if "image" in job.bad:
        (file,) = folder.glob(f"*/{number}.png")
        file.write_bytes(job.bad["image"])
        return str(file)
    file = folder / FILE
    lines = file.read_text().splitlines()
    line = json.dumps({**json.loads(lines[number]), **job.bad})
    lines[number] = line if job.bad else line[:-3]
    file.write_text("\n".join(lines))
    return f"{file} line {number + 1}"
