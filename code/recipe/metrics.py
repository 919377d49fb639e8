"""The format of metric lines, and the regexes that read it.

    python code/recipe/metrics.py [TASK [SCORE ...]]

prints the list to pass to an estimator as `metric_definitions`. Some tasks (`OF_TASKS`) have their
own list; scores of a user's functions are named after it. The recipe prints one line for
each logged step:

    metric step=40 {'loss': 0.4127, 'learning_rate': 0.000025, 'epoch': 0.5}

The dict has HF Trainer's format, so regexes written for Hugging Face's images match it. The summary
at the end has the format of their example scripts (`eval_loss = 0.31`). The regexes below also
match HF Trainer's lines of transformers 4 and 5, and `metric loss=0.4127` of a user's script. This
file needs the standard library only, so that a notebook can load it by path.
"""

from __future__ import annotations

import decimal
import json
import math
import sys
from collections.abc import Mapping, Sequence

SCORES = ("accuracy", "precision", "recall", "f1_weighted", "f1_macro")
"""Scores of classes, in addition to the loss; precision and recall are means over labels."""
OTHER_SCORES = (
    *("f1_micro", "mse", "pearson", "spearman", "perplexity", "token_accuracy"),
    *("f1", "exact_match"),
)
"""Scores of multiple labels, numbers, tokens, entities and answers."""
LOWER_IS_BETTER = ("loss", "perplexity", "mse")
"""The ends of the names of scores of which the lower one is better."""
RANKINGS = ("ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10", "recall_at_100")
"""Scores of rankings."""
WRITING_SCORES: Sequence[str] = (
    *("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "gen_len"),
)
"""Scores of generated text."""
ANSWERS = ("f1", "exact_match", "answerable_f1", "answerable_exact_match", "no_answer")
_WRITING = ("loss", "perplexity", "token_accuracy", *WRITING_SCORES)
_PAIRS = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected")
OF_STEPS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("dpo", "orpo", "kto"), _PAIRS),
    "reward": ("accuracy", "margin", "mean_reward"),
    "grpo": ("reward", "reward_std", "kl", "entropy", "completions/mean_length"),
    "distillation": ("entropy", "completions/mean_length"),
}
"""What post-training logs with the loss of steps, too."""
OF_TASKS: Mapping[str, Sequence[str]] = {
    **{task: ("loss", *names) for task, names in OF_STEPS.items()},
    **dict.fromkeys(("summarization", "translation", "text2text-generation"), _WRITING),
    "question-answering": ("loss", *ANSWERS),
    "sentence-embedding": ("loss", *RANKINGS, "spearman", "pearson"),
    "reranking": ("loss", *RANKINGS[:2]),
    "causal-lm": (
        *("loss", "perplexity", "token_accuracy", "exact_match", "exact_answer", "valid_json"),
        *("tool_calls", "rouge1", "rouge2", "rougeL", "rougeLsum"),
    ),
}
"""Scores of tasks with their own list, since SageMaker accepts 40 regexes for a job."""

_TRAINING = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss")
_SPEED = ("train_runtime", "train_samples_per_second", "eval_samples_per_second")
_OF_SPLITS = ("loss", *SCORES, *OTHER_SCORES)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"


def metric_line(step: int, epoch: float | None, values: Mapping[str, object]) -> str:
    """Return the line that reports what a Trainer logs at a step.

    Values that are not finite numbers are omitted. Numbers have six significant digits and no
    exponent, since common regexes read 2.5 from `2.5e-05`.
    """
    reported = {**values, "epoch": epoch}
    pairs = [
        f"'{name}': {_written_out(value)}"
        for name, value in reported.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    return f"metric step={step} {{{', '.join(pairs)}}}"


def result_lines(values: Mapping[str, float]) -> list[str]:
    """Return the final lines of a job, one for each metric, in the format of Hugging Face's example
    scripts: `eval_loss = 0.31`."""
    return [f"  {name} = {_written_out(value)}" for name, value in values.items()]


def _written_out(value: object) -> str:
    text = f"{decimal.Decimal(f'{value:.6g}'):f}"
    return text if "." in text else f"{text}.0"


def metric_names(task: str = "", *more: str) -> list[str]:
    """Return the names of a task's metrics that are useful as curves.

    Args:
        task: The hyperparameter. Tasks that are not in OF_TASKS share a list.
        more: Further scores.
    """
    of_split = (*OF_TASKS.get(task, _OF_SPLITS), *more)
    scores = [f"{split}_{name}" for split in ("eval", "test") for name in of_split]
    return [*_TRAINING, *OF_STEPS.get(task, ()), *scores, *_SPEED]


def metric_definitions(task: str = "", *more: str) -> list[dict[str, str]]:
    """Return the estimator's `metric_definitions`: one `{"Name", "Regex"}` for each metric.

    The regexes match the recipe's lines, HF Trainer's (`{'loss': 0.4127, ...}` of transformers 4,
    `{'loss': '0.4127', ...}` of transformers 5), and `metric loss=0.4127` of a script.
    """
    return [
        {
            "Name": name,
            "Regex": rf"(?:\bmetric (?:\S+ )*{name}=|\{{(?:[^{{}}]*, )?'{name}': '?)"
            rf"{_NUMBER}(?![^\s,'}}])",
        }
        for name in metric_names(task, *more)
    ]


if __name__ == "__main__":
    print(json.dumps(metric_definitions(*sys.argv[1:]), indent=2))
