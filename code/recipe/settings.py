"""Hyperparameters by topic. A function of `data` or `models` takes the settings of its topic.

A command line gives one `recipe.hyperparameters.Hyperparameters`, which has all of them. What only
one task takes is declared in its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe.errors import DataError
from recipe.option_fields import ABOVE_0, AT_LEAST_1, BUDGET, NOT_BELOW_0, SHARE, Effect, option
from recipe.task_table import TASKS

PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
"""Values of `problem_type`, as in a model's configuration."""
SPLIT, TRUNCATE = "split", "truncate"
"""Values of `long_texts`."""


def split_values(values: str | None) -> list[str]:
    """Return the values of a hyperparameter, which commas separate."""
    return [value.strip() for value in (values or "").split(",") if value.strip()]


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a job does, and how it trains. `passed` goes to transformers.TrainingArguments."""

    task: str | None = option(
        None,
        f"{', '.join(TASKS)}. Default: detected from data and model, if only one task fits.",
        choices=tuple(TASKS),
    )
    seed: int = option(
        42,
        "Seed of new weights, the order of samples and the held-out rows.",
        valid=(lambda value: 0 <= value < 2**32, "a whole number from 0 to 2**32 - 1"),
    )
    class_weight: str | None = option(
        None,
        "balanced: weight each class by the inverse of its frequency. Or the weights of classes, "
        "1 for others: spam:5,ham:1, or JSON.",
        separator=",",
    )
    num_train_epochs: float = option(3.0, "Passes over the training data.", "epochs", valid=ABOVE_0)
    max_train_steps: int | None = option(
        None,
        "Stop after this many optimizer steps; overrides the epochs.",
        "max_steps",
        valid=(lambda value: value == -1 or value > 0, "1 or more"),
    )
    per_device_train_batch_size: int = option(
        32,
        "Training batch size of each process.",
        "train_batch_size",
        "batch_size",
        valid=AT_LEAST_1,
        effect=Effect.SAMPLES,
    )
    per_device_eval_batch_size: int = option(
        64,
        "Evaluation batch size of each process.",
        "eval_batch_size",
        valid=AT_LEAST_1,
        effect=Effect.NONE,
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate of AdamW. Default: by the task and LoRA (docs/REFERENCE.md, Tasks); "
        "the log shows it.",
        "lr",
        valid=(lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    )
    warmup_steps: float = option(
        0.1,
        "Steps of linear warm-up; below 1, a share of all steps (warmup_ratio). 0 turns it off.",
        valid=NOT_BELOW_0,
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW.", valid=NOT_BELOW_0)
    compile: bool = option(False, "Compile the model with torch.compile.")
    packing: bool | None = option(
        None,
        "Pack several texts into one row instead of padding them. Default: if the model "
        "supports it.",
        effect=Effect.SAMPLES,
    )
    output_dir: str | None = option(
        None, "Folder for checkpoints. Default: /opt/ml/checkpoints.", effect=Effect.NONE
    )
    save_total_limit: int | None = option(
        2,
        "Number of checkpoints to keep; none keeps all.",
        valid=AT_LEAST_1,
        off=None,
        effect=Effect.NONE,
    )
    save_minutes: float | None = option(
        15.0,
        "Also save a checkpoint if the last one is this many minutes old; none turns it off.",
        valid=ABOVE_0,
        off=None,
        effect=Effect.NONE,
    )
    early_stopping_patience: int | None = option(
        None,
        "Stop after this many evaluations without improvement of metric_for_best_model "
        "(default: the loss), and keep the best model.",
        valid=AT_LEAST_1,
    )
    early_stopping_threshold: float = option(
        0.0, "Smallest improvement that counts for early stopping.", valid=NOT_BELOW_0
    )
    generated_rows: int = option(
        100,
        "Evaluation rows for which text is generated; do_predict generates for all.",
        valid=AT_LEAST_1,
        effect=Effect.BEST,
    )
    price_per_hour: float | None = option(
        None,
        "Price of an instance per hour, for the cost in log and report.",
        valid=NOT_BELOW_0,
        effect=Effect.NONE,
    )
    max_minutes: float | None = option(
        None,
        "Budget of the job in minutes: it trains as many of its steps as fit, with the learning "
        "rate's schedule made for them.",
        valid=BUDGET,
    )
    max_price: float | None = option(
        None, "The same as a price of all instances; needs price_per_hour.", valid=BUDGET
    )
    push_to_hub: bool = option(
        False, "Push the saved model to the Hugging Face hub after training.", effect=Effect.NONE
    )
    hub_model_id: str | None = option(
        None,
        "Repository on the hub to push to: owner/name.",
        "push_to_hub_model_id",
        effect=Effect.NONE,
    )
    hub_token: str | None = option(
        None,
        "Access token of the hub, for pushing. Default: hf_token, else HF_TOKEN.",
        "push_to_hub_token",
        is_secret=True,
        effect=Effect.NONE,
    )
    hub_private_repo: bool | None = option(
        None, "False creates a public repository. Default: private.", effect=Effect.NONE
    )
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

    model_name_or_path: str | None = option(
        None,
        "Model to start from: a folder, a channel that holds it, or a name on the Hugging "
        "Face hub. Default: the channel model or pretrained.",
        "model_id",
        "model_name",
        effect=Effect.SAMPLES,
    )
    trust_remote_code: bool = option(
        False, "Run code that comes with the model.", effect=Effect.SAMPLES
    )
    hf_token: str | None = option(
        None,
        "Access token of the Hugging Face hub, for a model that needs one.",
        "huggingface_token",
        is_secret=True,
        effect=Effect.SAMPLES,
    )
    bf16: bool | None = option(
        None, "Compute in bfloat16. Default: if the device is faster with it."
    )
    bf16_weights: bool = option(
        False, "Train with bfloat16 copies of the float32 weights, without autocast."
    )
    cuda_graphs: bool = option(
        False, "Compute forward and backward passes by CUDA graphs; not measured on a GPU."
    )
    lora_r: int | None = option(
        None,
        "Rank of LoRA adapters. If set, adapters are trained instead of all weights.",
        valid=AT_LEAST_1,
    )
    lora_alpha: int | None = option(None, "Alpha of LoRA. Default: twice lora_r.", valid=AT_LEAST_1)
    lora_dropout: float = option(0.0, "Dropout of the adapters' inputs.", valid=SHARE)
    lora_target_modules: str = option(
        "all-linear", "Names of the layers with adapters, separated by commas.", separator=","
    )
    modules_to_save: str | None = option(
        None,
        "Names of modules that are trained in full, in addition to adapters, and saved with them.",
        "lora_modules_to_save",
        "additional_target",
        separator=",",
    )
    init_lora_weights: str | None = option(
        None,
        "How adapters start; pissa, olora and loftq also change the base. loftq needs a GPU. "
        "Default: without effect.",
        "peft_init_lora_weights",
        choices=("gaussian", "orthogonal", "olora", "pissa", "pissa_niter_16", "loftq"),
    )
    use_rslora: bool = option(False, "Scale adapters by lora_alpha / sqrt(lora_r) (rsLoRA).")
    use_dora: bool = option(False, "Also learn the lengths of the adapted weights (DoRA).")
    lora_save: str = option(
        "merged",
        "merged saves the merged model, adapter only the adapter.",
        choices=("merged", "adapter"),
        effect=Effect.NONE,
    )
    merge_adapter: bool | None = option(
        None,
        "If the model to start from is an adapter: True merges it into its base and trains a new "
        "one, or all weights. Default: the adapter is trained further.",
    )
    freeze_layers: int | None = option(
        None,
        "Keep the embeddings and this many layers from the first one as they are.",
        valid=NOT_BELOW_0,
    )
    freeze_modules: str | None = option(
        None,
        "Keep modules or weights of these names as they are; * stands for any characters.",
        separator=",",
    )
    added_tokens: str | None = option(
        None,
        "Tokens to add to the vocabulary, separated by commas or as a JSON list.",
        separator=",",
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        'Read longer texts by scaled rotary positions: {"rope_type": "yarn", "factor": 4}.',
    )
    load_in_4bit: bool = option(
        False,
        "causal-lm: quantize the base weights to 4 bits (QLoRA). Needs an NVIDIA GPU, lora_r and "
        "lora_save=adapter.",
        "use_4bit",
    )

    beta: float | None = option(
        None,
        "Post-training: how strongly the model is held to the reference (dpo, kto: 0.1; grpo: 0), "
        "the weight of the odds ratio (orpo: 0.1), or which divergence is learned (distillation: "
        "1). Default: TRL's.",
        "dpo_beta",
        "pref_beta",
        "orpo_beta",
        valid=NOT_BELOW_0,
    )
    loss_type: str | None = option(
        None, "dpo, kto, grpo: the loss, by TRL's name. Default: TRL's.", "pref_loss"
    )
    temperature: float | None = option(
        None, "grpo, distillation: of sampled completions. Default: 1.", valid=ABOVE_0
    )
    max_completion_length: int | None = option(
        None,
        "grpo, distillation, do_generate: most tokens of a completion. Default: 256.",
        valid=AT_LEAST_1,
    )
    use_vllm: bool = option(
        False, "grpo, distillation: generate by vLLM on the same GPU, if it is installed."
    )
    trl_args: Mapping[str, Any] | None = option(
        None,
        'Post-training: other arguments of TRL\'s trainer, such as {"label_smoothing": 0.1}.',
    )

    quantize: str | None = option(
        None,
        "Classification, entities, question answering, choices, vectors, rankings: also save the "
        "encoder in int8 for CPUs, if it is within max_score_loss and max_flips.",
        choices=("int8",),
        effect=Effect.NONE,
    )
    max_score_loss: float = option(
        0.005,
        "quantize: how much worse the task's main metric may be on the evaluation data.",
        valid=NOT_BELOW_0,
        effect=Effect.NONE,
    )
    max_flips: float = option(
        0.01,
        "quantize: the share of the evaluation data's answers that may differ; of vectors and "
        "numbers, 1 - cosine or correlation.",
        valid=NOT_BELOW_0,
        effect=Effect.NONE,
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(JobSettings):
    """Which samples are made of the data: columns, labels and lengths.

    All of these determine the samples, so a resume compares only the hash of the samples.
    """

    text_column: str | None = option(
        None,
        "Text column, or two (a,b) for pairs of texts. Default: detected by name.",
        "source_column",
        separator=",",
    )
    text_pair_column: str | None = option(
        None, "Second column of pairs of texts; the same as text_column=a,b."
    )
    label_column: str | None = option(
        None,
        "Column of labels or target texts; several of labels: food,staff. "
        "Default: detected by name.",
        "summary_column",
        separator=",",
    )
    image_column: str | None = option(
        None, "image-classification: column of images, or of their file names."
    )
    negative_columns: str | None = option(
        None,
        "sentence-embedding, reranking: columns of negatives, separated by commas. Default: "
        "detected by name (negative, negative_1, hard_negatives ...).",
        separator=",",
    )
    prompt_column: str | None = option(
        None,
        "causal-lm: column of prompts, which the loss leaves out. Default: detected by name.",
    )
    completion_column: str | None = option(
        None, "causal-lm: column of completions. Default: detected by name."
    )
    messages_column: str | None = option(
        None,
        "causal-lm: column of conversations, lists of {role, content}; the loss covers the "
        "assistant's turns. Default: detected by name.",
    )
    columns: str | None = option(
        None,
        "Columns by their roles, for roles that no other hyperparameter names, such as "
        "question:frage,context:kontext; a role with several columns is repeated. "
        "docs/REFERENCE.md lists the roles of each task.",
    )
    ignore_columns: str | None = option(
        None,
        "Columns to leave out, separated by commas, although their names say that they belong to "
        "a sample.",
    )
    header: bool | None = option(
        None, "Whether the first row of delimited text names the columns. Default: by known names."
    )
    encoding: str | None = option(
        None,
        "Encoding of text files without a byte order mark, such as windows-1252 or gb18030. "
        "Default: UTF-8.",
    )
    problem_type: str | None = option(
        None,
        "single_label_classification, multi_label_classification or regression. Default: "
        "several labels for lists, regression for fractions, otherwise one label.",
        choices=PROBLEMS,
    )
    label_separator: str | None = option(None, "Separator of several labels in one cell.")
    missing_labels: str | None = option(
        None,
        "text-classification, image-classification: values of the label column that are no label, "
        "separated by commas, such as NA or -1; empty stands for empty cells. Their rows are "
        "left out.",
    )
    num_labels: int | None = option(
        None, "Number of labels; the job ends if the data has another number.", valid=AT_LEAST_1
    )
    class_names: str | None = option(
        None,
        "text-classification, token-classification: names of integer labels, starting at 0, "
        "separated by commas or as a JSON list.",
        separator=",",
    )
    validation_split: float = option(
        0.1,
        "Share of the training rows that is held out if there is no other data to evaluate on.",
        "test_size",
        valid=(lambda value: 0 < value < 1, "a share above 0 and below 1 (eval_strategy=no: none)"),
    )
    validation_group: str | None = option(
        None,
        "Column whose values (customers, documents) are held out with all their rows.",
        "group_column",
    )
    validation_date: str | None = option(
        None, "Column of dates or numbers: the newest rows are held out.", "date_column"
    )
    drop_duplicates: bool = option(
        False, "Leave out training rows that repeat another one, before rows are held out."
    )
    sample_by: str = option(
        "line",
        "causal-lm, masked-lm: a sample of a .txt file is a line, paragraph or document.",
        choices=("line", "paragraph", "document"),
    )
    max_length: int | None = option(
        None,
        "Maximum length of a text in tokens. Default: the model's limit, at most 512 "
        "(causal-lm: 1024).",
        "max_seq_length",
        valid=(lambda value: value >= 4, "4 or more"),
    )
    long_texts: str | None = option(
        None,
        "split or truncate texts longer than max_length. Default: split texts; truncate "
        "completions and conversations.",
        choices=(SPLIT, TRUNCATE),
    )
    source_lang: str | None = option(
        None, "translation: language of the sources, such as en or en_XX.", "src_lang"
    )
    target_lang: str | None = option(None, "translation: language of the targets.", "tgt_lang")

    @property
    def ignored_columns(self) -> list[str]:
        """Return the columns that ignore_columns names."""
        return split_values(self.ignore_columns)

    @property
    def columns_by_role(self) -> dict[str, list[str]]:
        """Return the columns that the hyperparameter `columns` names, by their roles.

        Raises:
            DataError: its value is not `role:column,role:column`.
        """
        pairs = [pair.partition(":") for pair in split_values(self.columns)]
        if any(not (role.strip() and column.strip()) for role, _, column in pairs):
            raise DataError(
                f"Hyperparameter columns has value {self.columns!r}.",
                "Give roles and their columns, such as columns=question:frage,context:kontext.",
            )
        by_role: dict[str, list[str]] = {}
        for role, _, column in pairs:
            by_role.setdefault(role.strip(), []).append(column.strip())
        return by_role

    @property
    def named_columns(self) -> set[str]:
        """Return the columns to which hyperparameters give a role."""
        values = [getattr(self, setting) for setting in COLUMN_SETTINGS]
        names = {name for value in values if value for name in (value, *split_values(value))}
        return names.union(*self.columns_by_role.values())

    @property
    def names_in_header(self) -> bool | frozenset[str]:
        """Return the hyperparameter `header` or, without it, all columns that the user names: the
        first row of delimited text is the header if it has one of these."""
        if self.header is not None:
            return self.header
        languages = {self.source_lang, self.target_lang} - {None}
        return frozenset({*self.named_columns, *self.ignored_columns, *map(str, languages)})


COLUMN_SETTINGS = (
    *("text_column", "text_pair_column", "label_column", "image_column", "negative_columns"),
    *("prompt_column", "completion_column", "messages_column"),
)
"""The hyperparameters that name the column of a role."""
