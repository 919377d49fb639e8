"""Metric regexes that users copy for Hugging Face's images, by where they are published."""

import re

from recipe import metrics

_NAMES = ("loss", "learning_rate", "eval_loss", "eval_accuracy", "eval_f1", "eval_precision")
_NAMES += ("eval_recall", "eval_runtime", "eval_samples_per_second", "epoch")
REGEXES: dict[str, list[tuple[str, str]]] = {
    "docs of transformers, of optimum-neuron and of SageMaker's SDK, for run_glue's summary": [
        (name, rf"{name}.*=\D*(.*?)$")
        for name in ("train_runtime", "eval_accuracy", "eval_loss", "train_loss", "eval_recall")
    ],
    "huggingface/notebooks, sagemaker/06_sagemaker_metrics": [
        (name, rf"'{name}': ([0-9]+(.|e\-)[0-9]+),?") for name in _NAMES
    ],
    "SageMaker JumpStart's text generation": [
        ("loss", r"'loss': ([0-9]+\.[0-9]+)"),
        ("eval_loss", r"'eval_loss': ([0-9]+\.[0-9]+)"),
    ],
    "AWS samples": [
        ("loss", r"'loss': (.*?),"),
        ("eval_loss", r"'eval_loss': (.*?),"),
        ("eval_loss", r"'eval_loss': ([0-9\.]+)"),
        ("eval_loss", r"'eval_loss': '?([0-9\.]+)"),
        ("train_loss", r"'train_loss': ([0-9\.]+)"),
        ("train_runtime", r"'train_runtime': ([0-9]+(.)[0-9]+),?"),
        ("eval_loss", r"eval_loss = ([0-9\.]+)"),
    ],
}


def read(text: str, regex: str) -> list[float]:
    """Return what SageMaker would record of a log: the first group of each line that matches."""
    matches = (re.search(regex, line) for line in text.splitlines())
    return [float(match.group(1)) for match in matches if match]


def ours(text: str) -> dict[str, list[float]]:
    """Return what the recipe's regexes read, by name."""
    definitions = metrics.metric_definitions()
    return {definition["Name"]: read(text, definition["Regex"]) for definition in definitions}
