"""The format of metric lines, and the regexes that read it.

    python code/recipe/metrics.py [TASK]

prints the list to pass to an estimator as `metric_definitions`; of some tasks (`OF_TASKS`) another
one than of the rest. The recipe prints one line for each step that is logged:

    metric step=40 {'loss': 0.4127, 'learning_rate': 0.000025, 'epoch': 0.5}

Its dict is that of HF Trainer, so that the regexes that circulate for Hugging Face's images read
it, too. The summary at the end is that of their example scripts (`eval_loss = 0.31`). The regexes
below also read HF Trainer's own lines of transformers 4 and 5, and `metric loss=0.4127` of a user's
script. This file needs the standard library only, so that a notebook can load it by path.
"""

from __future__ import annotations

import decimal
import json
import math
import sys
from collections.abc import Mapping, Sequence

SCORES = ("accuracy", "precision", "recall", "f1_weighted", "f1_macro")
"""What evaluation computes of classes, beside the loss; precision, recall: means over labels."""
OTHER_SCORES = (
    *("f1_micro", "mse", "pearson", "spearman", "perplexity", "token_accuracy"),
    *("f1", "exact_match"),
)
"""What it computes where several labels, a number, words, entities or answers are learned."""
RANKINGS = ("ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10", "recall_at_100")
"""What it computes of queries and the texts that belong to them."""
REWARDS = (
    *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
    *("chosen_logp", "rejected_logp"),
)
"""What it computes of answers that were chosen and rejected."""
WRITING_SCORES: Sequence[str] = (
    "rouge1",
    "rouge2",
    "rougeL",
    "rougeLsum",
    "bleu",
    "chrf",
    "gen_len",
)
"""What it computes of texts that a model has written."""
_ANSWERS = ("f1", "exact_match", "answerable_f1", "answerable_exact_match", "no_answer")
_WRITING = ("loss", "perplexity", "token_accuracy", *WRITING_SCORES)
OF_TASKS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("summarization", "translation", "text2text-generation"), _WRITING),
    "question-answering": ("loss", *_ANSWERS),
    "sentence-embedding": ("loss", *RANKINGS, "spearman", "pearson"),
    "reranking": ("loss", *RANKINGS[:2]),
    "preference": ("loss", *REWARDS),
}
"""What evaluation gives of tasks with scores of their own: SageMaker takes 40 regexes for a job."""

_TRAINING = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss")
_SPEED = ("train_runtime", "train_samples_per_second", "eval_samples_per_second")
_OF_SPLITS = ("loss", *SCORES, *OTHER_SCORES)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"


def metric_line(step: int, epoch: float | None, values: Mapping[str, object]) -> str:
    """Return the line that reports what a Trainer logs at a step.

    What is not a finite number is left out. Numbers have six significant digits and no exponent,
    since regexes that circulate read 2.5 of `2.5e-05`.
    """
    reported = {**values, "epoch": epoch}
    pairs = [
        f"'{name}': {_written_out(value)}" for name, value in reported.items() if _is_finite(value)
    ]
    return f"metric step={step} {{{', '.join(pairs)}}}"


def result_lines(values: Mapping[str, float]) -> list[str]:
    """Return the lines that end a job, one for each metric, as Hugging Face's example scripts write
    them: `eval_loss = 0.31`."""
    return [f"  {name} = {_written_out(value)}" for name, value in values.items()]


def _written_out(value: object) -> str:
    text = f"{decimal.Decimal(f'{value:.6g}'):f}"
    return text if "." in text else f"{text}.0"


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def metric_names(task: str = "") -> list[str]:
    """Every name that the metric lines of a task may hold and that is worth a curve.

    Args:
        task: The hyperparameter; one that is not in OF_TASKS has the scores of the rest.
    """
    of_split = OF_TASKS.get(task, _OF_SPLITS)
    scores = [f"{split}_{name}" for split in ("eval", "test") for name in of_split]
    return [*_TRAINING, *scores, *_SPEED]


def metric_definitions(task: str = "") -> list[dict[str, str]]:
    """The estimator's `metric_definitions`: one `{"Name", "Regex"}` for each metric.

    Each reads our lines, HF Trainer's (`{'loss': 0.4127, ...}` of transformers 4,
    `{'loss': '0.4127', ...}` of transformers 5), and `metric loss=0.4127` of a script.
    """
    return [
        {
            "Name": name,
            "Regex": rf"(?:\bmetric (?:\S+ )*{name}=|\{{(?:[^{{}}]*, )?'{name}': '?)"
            rf"{_NUMBER}(?![^\s,'}}])",
        }
        for name in metric_names(task)
    ]


if __name__ == "__main__":
    print(json.dumps(metric_definitions(*sys.argv[1:2]), indent=2))
