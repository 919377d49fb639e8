"""A small job of every task: its model, its data and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support import causal_kit, ranking_jobs, texts_and_pictures
from tests.support.words import WORDS

LORA = ("--lora_r", "4", "--lora_alpha", "8")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A training: its task, the kind of its model, and its rows."""

    task: str
    model: str
    make: Callable[[], Rows] | None = None
    more: tuple[str, ...] = ()


def texts(count: int = 64) -> Rows:
    return [{"text": f"the film number {at} was {WORDS[3 + at % 4]}", "label": "np"[at % 4 < 2]}
            for at in range(count)]  # fmt: skip


def pairs(count: int = 64) -> Rows:
    return [{"premise": f"the film number {at}", "hypothesis": f"film number {at + at % 2}",
             "label": "yn"[at % 2]} for at in range(count)]  # fmt: skip


def marks(count: int = 64) -> Rows:
    return [{"text": f"the film number {at} was good", "label": at % 7 / 2} for at in range(count)]


def tagged(count: int = 64) -> Rows:
    kinds = [("good", "B-PER"), ("bad", "B-LOC"), ("the", "O"), ("was", "O")]
    rows = []
    for at in range(count):
        words = [kinds[(at * 7 + place) % 4] for place in range(2 + at % 6)]
        rows.append({"tokens": [word for word, _ in words], "ner_tags": [tag for _, tag in words]})
    return rows


def asked(count: int = 64) -> Rows:
    rows = []
    for at in range(count):
        context = " ".join([*["the film was"] * (at % 5), f"number {at % 10}", "good great"])
        answers = {"text": [str(at % 10)], "answer_start": [context.index("number") + 7]}
        rows.append({"id": str(at), "question": "the number", "context": context,
                     "answers": answers})  # fmt: skip
    return rows


def preferred(count: int = 64) -> Rows:
    """Conversations of which the last turn differs, as UltraFeedback has them."""
    rows = []
    for at in range(count):
        prompt = {"role": "user", "content": f"say {'abc'[at % 3]} {at}"}
        good, bad = ({"role": "assistant", "content": text} for text in ("yes yes", "no"))
        rows.append({"chosen": [prompt, good], "rejected": [prompt, bad]})
    return rows


def choices(count: int = 64, first: int = 0) -> Rows:
    """The good film is right, among two, three or four choices."""
    rows = []
    for at in range(first, first + count):
        texts = [f"the film was bad {at + place}" for place in range(2 + at % 3)]
        right = at * 7 % len(texts)
        texts[right] = f"the film was good {at}"
        rows.append({"question": f"film number {at}", "choices": texts, "answer": "ABCD"[right]})
    return rows


CASES = {
    "classes": Case("text-classification", "bert", texts),
    "pairs": Case("text-classification", "bert", pairs),
    "numbers": Case("text-classification", "bert", marks, ("--problem_type", "regression")),
    "classes, LoRA": Case("text-classification", "bert", texts, LORA),
    "tags": Case("token-classification", "bert", tagged),
    "questions": Case("question-answering", "bert", asked),
    "choices": Case("multiple-choice", "bert", choices),
    "embeddings": Case("sentence-embedding", "bert", lambda: ranking_jobs.triplets(64)),
    "embeddings in parts": Case(
        "sentence-embedding", "bert", lambda: ranking_jobs.triplets(64), ("--mini_batch_size", "2")
    ),
    "ranks": Case(
        "reranking", "bert", lambda: ranking_jobs.rows_of(ranking_jobs.lists(40)),
    ),
    "ranks of lists": Case(
        "reranking", "bert", lambda: ranking_jobs.lists(64), ("--listwise", "True")
    ),
    "completions of gpt2": Case("causal-lm", "gpt2", lambda: causal_kit.pairs(72)),
    "completions of llama": Case("causal-lm", "llama", lambda: causal_kit.pairs(72)),
    "completions, LoRA": Case("causal-lm", "llama", lambda: causal_kit.pairs(72), LORA),
    "completions, an adapter": Case(
        "causal-lm", "llama", lambda: causal_kit.pairs(72), (*LORA, "--lora_save", "adapter")
    ),
    "preferences": Case("preference", "llama", preferred),
    "masked words": Case("masked-lm", "made"),
    "summaries": Case("summarization", "made"),
    "summaries, LoRA": Case("summarization", "made", None, LORA),
    "pictures": Case("image-classification", "made"),
    "pictures, LoRA": Case("image-classification", "made", None, LORA),
}  # fmt: skip


def make(case: Case, folder: Path, tiny_model: Path) -> tuple[Path, str, dict[str, str], list[str]]:
    """Make a job's files; return model (without dropout), data, other channels' variables, arguments."""
    if case.make is None:
        kind = texts_and_pictures.make(case.task, folder / "kind")
        test = {"SM_CHANNEL_TEST": str(kind.channels["test"])}
        return kind.model, str(kind.channels["train"]), test, kind.arguments
    data = ranking_jobs.write(folder / "data", case.make())
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    start, kind_of_model, length = tiny_model, AutoModel, "40"
    if case.model != "bert":
        start = causal_kit.make_model(case.model, folder / "start")
        kind_of_model, length = AutoModelForCausalLM, "64"
    # The head is initialised as large as the rest, so that the losses of samples differ.
    large: Any = {"initializer_range": 0.3}
    if case.model == "bert":
        large |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = kind_of_model.from_pretrained(start, **large)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim > 1 else 1
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(start).save_pretrained(folder / "model")
    return folder / "model", str(data), {}, ["--max_length", length]
