"""Hyperparameters by topic. A function of `data` or `models` takes the settings of its topic.

A command line gives one `recipe.hyperparameters.Hyperparameters`, which has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from recipe.task_table import TASKS


def documented(default: Any, text: str, *aliases: str) -> Any:
    """Return a field of a hyperparameter with its help text and its other names."""
    metadata = {"help": text, "aliases": [f"--{alias}" for alias in aliases]}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a job does. `passed` goes to transformers.TrainingArguments."""

    task: str | None = documented(
        None,
        f"{', '.join(TASKS)}. Default: detected from data and model, if only one task fits.",
    )
    seed: int = documented(42, "Seed of new weights, the order of samples and the held-out rows.")
    passed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def evaluates(self) -> bool:
        """Return whether the job evaluates: by default it does.

        As in the Trainer, do_eval counts if eval_strategy is not set, or is no.
        """
        strategy, do_eval = self.passed.get("eval_strategy"), self.passed.get("do_eval")
        return (
            bool(do_eval) or strategy not in ("no", None) or (strategy is None and do_eval is None)
        )

    @property
    def trains(self) -> bool:
        """Return whether the job trains; only do_train=False prevents it."""
        return self.passed.get("do_train") is not False

    @property
    def predicts(self) -> bool:
        """Return whether the job writes predictions."""
        return bool(self.passed.get("do_predict"))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(JobSettings):
    """Which model is loaded, how, and the adapters around it."""

    model_name_or_path: str | None = documented(
        None,
        "Model to start from: a folder, a channel that holds it, or a name on the Hugging "
        "Face hub. Default: the channel model or pretrained.",
        "model_id",
        "model_name",
    )
    trust_remote_code: bool = documented(False, "Run code that comes with the model.")
    hf_token: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "Access token of the Hugging Face hub, for a model that needs one.",
            "aliases": ["--huggingface_token"],
        },
    )
    bf16: bool | None = documented(
        None, "Compute in bfloat16. Default: if the device is faster with it."
    )
    lora_r: int | None = documented(
        None, "Rank of LoRA adapters. If set, adapters are trained instead of all weights."
    )
    lora_alpha: int | None = documented(None, "Alpha of LoRA. Default: twice lora_r.")
    lora_dropout: float = documented(0.0, "Dropout of the adapters' inputs.")
    lora_target_modules: str = documented(
        "all-linear", "Names of the layers with adapters, separated by commas."
    )
    lora_save: str = documented(
        "merged", "merged saves the merged model, adapter only the adapter."
    )
    load_in_4bit: bool = documented(
        False,
        "causal-lm, preference: quantize the base weights to 4 bits (QLoRA). Needs an NVIDIA "
        "GPU, lora_r and lora_save=adapter.",
        "use_4bit",
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(JobSettings):
    """Which samples are made of the data: columns, labels and lengths.

    All of these determine the samples, so a resume compares only the hash of the samples.
    """

    dataset_config_name: str | None = documented(
        None,
        "Configuration of the data set: a folder with its own splits. Separate several by commas.",
        "dataset_config",
    )
    text_column: str | None = documented(
        None,
        "Text column, or two (a,b) for pairs of texts. Default: detected by name.",
        "source_column",
    )
    text_pair_column: str | None = documented(
        None, "Second column of pairs of texts; the same as text_column=a,b."
    )
    label_column: str | None = documented(
        None,
        "Column of labels or target texts. Default: detected by name.",
        "summary_column",
    )
    image_column: str | None = documented(
        None, "image-classification: column of images, or of their file names."
    )
    negative_columns: str | None = documented(
        None,
        "sentence-embedding, reranking: columns of negatives, separated by commas. Default: "
        "detected by name (negative, negative_1, hard_negatives ...).",
    )
    prompt_column: str | None = documented(
        None,
        "causal-lm, preference: column of prompts, which the loss leaves out. Default: "
        "detected by name.",
    )
    completion_column: str | None = documented(
        None, "causal-lm: column of completions. Default: detected by name."
    )
    messages_column: str | None = documented(
        None,
        "causal-lm: column of conversations, lists of {role, content}; the loss covers the "
        "assistant's turns. Default: detected by name.",
    )
    chosen_column: str | None = documented(
        None,
        "preference: column of chosen answers, as text or lists of messages. Default: detected "
        "by name.",
    )
    rejected_column: str | None = documented(
        None, "preference: column of rejected answers. Default: detected by name."
    )
    columns: str | None = documented(
        None,
        "Columns by their roles, for roles that no other hyperparameter names, such as "
        "question:frage,context:kontext. docs/DATA.md lists the roles of each task.",
    )
    ignore_columns: str | None = documented(
        None,
        "Columns to leave out, separated by commas, although their names say that they belong to "
        "a sample.",
    )
    problem_type: str | None = documented(
        None,
        "single_label_classification, multi_label_classification or regression. Default: "
        "several labels for lists, regression for fractions, otherwise one label.",
    )
    label_separator: str | None = documented(None, "Separator of several labels in one cell.")
    missing_labels: str | None = documented(
        None,
        "text-classification, image-classification: values of the label column that are no label, "
        "separated by commas, such as NA or -1. Their rows are left out.",
    )
    header: bool | None = documented(
        None,
        "Whether the first row of delimited text names the columns. Default: by known names.",
    )
    num_labels: int | None = documented(
        None, "Number of labels; the job ends if the data has another number."
    )
    class_names: str | None = documented(
        None,
        "text-classification, token-classification: names of integer labels, starting at 0, "
        "separated by commas or as a JSON list.",
    )
    sample_by: str = documented(
        "line", "causal-lm, masked-lm: a sample of a .txt file is a line, paragraph or document."
    )
    max_length: int | None = documented(
        None,
        "Maximum length of a text in tokens. Default: the model's limit, at most 512 "
        "(causal-lm: 1024).",
        "max_seq_length",
    )
    long_texts: str | None = documented(
        None,
        "split or truncate texts longer than max_length. Default: split texts; truncate "
        "completions and conversations.",
    )
    doc_stride: int | None = documented(
        None,
        "question-answering: tokens by which two windows of a context overlap. Default: 128, "
        "at most half of max_length.",
    )
    label_all_tokens: bool = documented(
        False,
        "token-classification: learn the tag on every token of a word, not only on the first.",
    )
    mlm_probability: float = documented(0.15, "masked-lm: share of tokens (or words) to mask.")
    whole_word_masking: bool = documented(
        False,
        "masked-lm: mask all tokens of a word.",
        "whole_word_mask",
        "wwm",
    )
    source_prefix: str | None = documented(
        None,
        "summarization, translation, text2text-generation: prefix of each source text in "
        "training and serving, such as 'summarize: '.",
        "prefix",
    )
    source_lang: str | None = documented(
        None, "translation: language of the sources, such as en or en_XX.", "src_lang"
    )
    target_lang: str | None = documented(None, "translation: language of the targets.", "tgt_lang")
    max_target_length: int | None = documented(
        None,
        "Maximum length of a target text in tokens, in training and serving. Default: 128, or "
        "the model's limit.",
    )

    @property
    def names_in_header(self) -> bool | frozenset[str]:
        """Return whether the first row of delimited text names the columns, as far as the user says
        so: the hyperparameter `header`, or columns that are named and then stand in that row."""
        if self.header is not None:
            return self.header
        values = [
            value
            for item in fields(self)
            if item.name.endswith(("_column", "_columns"))
            and isinstance(value := getattr(self, item.name), str)
        ]
        pairs = [pair.partition(":")[2] for pair in (self.columns or "").split(",")]
        names = [name.strip() for value in values for name in value.split(",")] + pairs
        return frozenset(filter(None, (*values, *names)))
