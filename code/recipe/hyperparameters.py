"""Hyperparameters: one frozen value, checked as a whole. `recipe.arguments` reads it from argv."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe import value_ranges
from recipe.errors import HyperparameterError
from recipe.secret_rules import is_secret_name, mask_shapes
from recipe.task_table import TASKS


def _documented(default: Any, text: str, *aliases: str) -> Any:
    metadata = {"help": text, "aliases": [f"--{alias}" for alias in aliases]}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the recipe itself decides on. `passed` goes to transformers.TrainingArguments."""

    task: str | None = _documented(
        None,
        f"{', '.join(TASKS)}. Default: chosen from data and model if nothing else could be meant.",
    )
    model_name_or_path: str | None = _documented(
        None,
        "Model to start from: a folder, a channel that holds it, or a name on the Hugging "
        "Face hub. Default: the channel model or pretrained.",
        "model_id",
        "model_name",
    )
    trust_remote_code: bool = _documented(False, "Run code that comes with the model.")
    hf_token: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "Access token of the Hugging Face hub, for a model that needs one.",
            "aliases": ["--huggingface_token"],
        },
    )
    dataset_config_name: str | None = _documented(
        None,
        "Configuration of the data: a folder with its own splits; several with commas.",
        "dataset_config",
    )
    text_column: str | None = _documented(
        None,
        "Column to read, or two (a,b) to read as a pair. Default: found by name.",
        "source_column",
    )
    text_pair_column: str | None = _documented(
        None, "Column of the second text of a pair; the same as text_column=a,b."
    )
    label_column: str | None = _documented(
        None,
        "Column to predict, or of the target texts. Default: found by name.",
        "summary_column",
    )
    image_column: str | None = _documented(
        None, "image-classification: column of images, or of their file names."
    )
    augmentation: str = _documented(
        "crop",
        "image-classification: none; crop (at least three quarters of height and width); flip "
        "(crop, and mirror half of the images).",
    )
    problem_type: str | None = _documented(
        None,
        "single_label_classification, multi_label_classification or regression. Default: "
        "lists are several labels, fractions are numbers, anything else is one label.",
    )
    label_separator: str | None = _documented(None, "What separates several labels in one cell.")
    num_labels: int | None = _documented(
        None, "How many labels the data must have. Default: as many as it has."
    )
    class_names: str | None = _documented(
        None,
        "task=text-classification, token-classification: names of labels that are numbers, from 0 "
        "on, with commas or as a JSON list.",
    )
    class_weight: str | None = _documented(
        None, "balanced: weight each class by the inverse of its frequency."
    )
    tune_thresholds: bool = _documented(
        False,
        "Several labels for each text: choose each label's threshold by its best F1 on the "
        "evaluation data, instead of 0.5.",
    )
    prompt_column: str | None = _documented(
        None,
        "causal-lm, preference: column of prompts, which are not learned. Default: found by name.",
    )
    completion_column: str | None = _documented(
        None, "causal-lm: column of the completions, which are learned. Default: found by name."
    )
    messages_column: str | None = _documented(
        None,
        "causal-lm: column of conversations, lists of {role, content}; the assistant's turns "
        "are learned. Default: found by name.",
    )
    chosen_column: str | None = _documented(
        None,
        "preference: column of the chosen answers, texts or lists of messages. Default: found "
        "by name.",
    )
    rejected_column: str | None = _documented(
        None, "preference: column of the rejected answers. Default: found by name."
    )
    beta: float = _documented(
        0.1,
        "preference: rewards are beta times the change of log-probabilities. A higher value "
        "keeps the model closer to the initial one.",
    )
    loss_type: str = _documented(
        "sigmoid",
        "preference: sigmoid (DPO), robust (with label_smoothing), hinge, or ipo (means over "
        "an answer's tokens).",
    )
    label_smoothing: float = _documented(
        0.0,
        "preference: probability that chosen and rejected are swapped, for loss_type sigmoid "
        "(conservative DPO) and robust.",
    )
    sample_by: str = _documented(
        "line",
        "causal-lm, masked-lm: a sample of a .txt file: line, paragraph or document.",
    )
    doc_stride: int | None = _documented(
        None,
        "question-answering: tokens shared by two windows of a context. Default: 128, at most "
        "half of max_length.",
    )
    label_all_tokens: bool = _documented(
        False,
        "token-classification: learn the tag on every token of a word, not only the first.",
    )
    long_texts: str | None = _documented(
        None,
        "split or truncate texts longer than max_length. Default: split texts; truncate "
        "completions, conversations and texts to classify.",
    )
    mlm_probability: float = _documented(
        0.15, "masked-lm: share of tokens (or words) that are masked."
    )
    whole_word_masking: bool = _documented(
        False,
        "masked-lm: mask all tokens of a word.",
        "whole_word_mask",
        "wwm",
    )
    source_prefix: str | None = _documented(
        None,
        "summarization, translation, text2text-generation: text before each source, in "
        "training and in serving, such as 'summarize: '.",
        "prefix",
    )
    source_lang: str | None = _documented(
        None, "translation: language of the sources, such as en or en_XX.", "src_lang"
    )
    target_lang: str | None = _documented(None, "translation: language of the targets.", "tgt_lang")
    max_target_length: int | None = _documented(
        None,
        "Longest target in tokens, in training and in serving. Default: 128, or the model's limit.",
    )
    predict_with_generate: bool = _documented(
        True, "Generate text in evaluations, and score it (ROUGE, BLEU, chrF)."
    )
    generated_rows: int = _documented(
        100, "Evaluation rows to generate text for; do_predict generates for all."
    )
    num_beams: int | None = _documented(
        None, "Beams of the generation. Default: the model's.", "generation_num_beams"
    )
    negative_columns: str | None = _documented(
        None,
        "sentence-embedding, reranking: columns of negatives, with commas. Default: found by "
        "name (negative, negative_1, hard_negatives ...).",
    )
    scale: float = _documented(
        20.0,
        "sentence-embedding: factor of the cosines in the loss; 1 / temperature.",
    )
    mini_batch_size: int | None = _documented(
        None,
        "sentence-embedding: rows of a batch to compute at once, for 1.3 times the work. "
        "Default: the whole batch.",
    )
    matryoshka_dims: str | None = _documented(
        None,
        "sentence-embedding: sizes to which vectors may be truncated, with commas.",
    )
    query_prompt: str | None = _documented(
        None, "sentence-embedding: text before each query. Default: the model's own."
    )
    document_prompt: str | None = _documented(
        None, "sentence-embedding: text before each document. Default: the model's own."
    )
    listwise: bool = _documented(
        False,
        "reranking: train each query's list (ListNet), not each pair (binary cross-entropy). "
        "batch_size then counts queries.",
    )
    num_train_epochs: float = _documented(3.0, "Passes over the training data.", "epochs")
    max_train_steps: int | None = _documented(
        None, "Stop after this many optimizer steps; wins over the epochs.", "max_steps"
    )
    per_device_train_batch_size: int = _documented(
        32, "Samples in a training step, for each process.", "train_batch_size", "batch_size"
    )
    per_device_eval_batch_size: int = _documented(
        64, "Samples in an evaluation step, for each process.", "eval_batch_size"
    )
    learning_rate: float | None = _documented(
        None,
        "Peak learning rate of AdamW. Default: by the task and LoRA (docs/REFERENCE.md); the "
        "log names it.",
        "lr",
    )
    warmup_steps: float = _documented(
        0.1, "Steps of linear warm-up; below 1, a share of all steps (warmup_ratio)."
    )
    weight_decay: float = _documented(0.0, "Weight decay of AdamW.")
    max_length: int | None = _documented(
        None,
        "Longest text in tokens; longer ones are cut. Default: the model's limit, at most 512 "
        "(causal-lm: 1024).",
        "max_seq_length",
    )
    seed: int = _documented(42, "Seed of new weights, the order of samples and the held-out rows.")
    bf16: bool | None = _documented(
        None, "Compute in bfloat16. Default: if the device is faster with it."
    )
    lora_r: int | None = _documented(
        None, "Rank of LoRA adapters. If given, adapters are trained instead of all weights."
    )
    lora_alpha: int | None = _documented(None, "Scale of LoRA. Default: twice lora_r.")
    lora_dropout: float = _documented(0.0, "Dropout on the input of the adapters.")
    lora_target_modules: str = _documented(
        "all-linear", "Names of the layers to adapt, with commas."
    )
    lora_save: str = _documented(
        "merged", "merged saves the merged model, adapter the adapter alone."
    )
    load_in_4bit: bool = _documented(
        False,
        "causal-lm, preference: keep the base weights in 4 bits (QLoRA). Needs an NVIDIA GPU, "
        "lora_r and lora_save=adapter.",
        "use_4bit",
    )
    compile: bool = _documented(False, "Compile the model with torch.compile.")
    mp_parameters: str | None = _documented(
        None,
        "SageMaker model parallelism. If given, and with several processes, the model is "
        "sharded (FSDP2).",
    )
    packing: bool | None = _documented(
        None,
        "Put several texts into one row instead of padding each. Default: if the model can.",
    )
    output_dir: str | None = _documented(
        None, "Folder of checkpoints. Default: /opt/ml/checkpoints."
    )
    save_total_limit: int | None = _documented(2, "Checkpoints to keep.")
    save_minutes: float | None = _documented(
        15.0, "Also save a checkpoint when the last one is this old."
    )
    early_stopping_patience: int | None = _documented(
        None,
        "Stop after this many evaluations without an improvement of metric_for_best_model "
        "(default: the loss), and keep the best model.",
    )
    early_stopping_threshold: float = _documented(
        0.0, "Smallest improvement that counts for early stopping."
    )
    price_per_hour: float | None = _documented(
        None, "Price of an instance, for the cost in the report."
    )
    push_to_hub: bool = _documented(
        False, "Push the saved model to the Hugging Face hub after training."
    )
    hub_model_id: str | None = _documented(
        None, "Repository on the hub to push to: owner/name.", "push_to_hub_model_id"
    )
    hub_token: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "Access token of the hub, for pushing. Default: hf_token, else HF_TOKEN.",
            "aliases": ["--push_to_hub_token"],
        },
    )
    hub_private_repo: bool | None = _documented(
        None, "False makes a new repository public. Default: private."
    )
    hub_strategy: str | None = _documented(
        None, "When to push: end. every_save means the same here."
    )
    passed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for each hyperparameter that was given and has no effect."""

    def __post_init__(self) -> None:
        """Raises HyperparameterError, which names all values that cannot be."""
        problems = [*self._out_of_range(), *self._of_other_tasks()]
        if problems:
            raise all_at_once(problems)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation was asked for, or not declined: as in the Trainer, do_eval counts
        where eval_strategy is not given, or is no."""
        strategy, do_eval = self.passed.get("eval_strategy"), self.passed.get("do_eval")
        return (
            bool(do_eval) or strategy not in ("no", None) or (strategy is None and do_eval is None)
        )

    @property
    def trains(self) -> bool:
        """Whether the job trains; only do_train=False prevents it."""
        return self.passed.get("do_train") is not False

    @property
    def predicts(self) -> bool:
        """Whether the job writes predictions."""
        return bool(self.passed.get("do_predict"))

    def as_text(self) -> dict[str, str]:
        """Return the hyperparameters that are set, as text, without secrets such as hub_token."""
        values = dataclasses.asdict(self)
        passed = values.pop("passed")
        del values["notes"]
        return {
            key: mask_shapes(value if isinstance(value, str) else json.dumps(value, default=str))
            for key, value in {**values, **passed}.items()
            if value is not None and not is_secret_name(key)
        }

    def _out_of_range(self) -> Iterator[str]:
        values = {name: getattr(self, name) for name in own_fields()}
        yield from value_ranges.problems({**self.passed, **values})
        if self.load_in_4bit and self.lora_r is None:
            yield (
                "load_in_4bit=True freezes the model's weights, and needs adapters to train. Give "
                "lora_r, such as 16."
            )
        if self.load_in_4bit and self.lora_save != "adapter":
            yield (
                "load_in_4bit=True trains an adapter that cannot be merged into weights of 4 bits. "
                "Give lora_save=adapter."
            )
        if self.load_in_4bit and not self.trains:
            yield "load_in_4bit is for training, and do_train is False. Leave it out."
        if self.push_to_hub and not self.hub_model_id:
            yield "push_to_hub=True needs the repository's name. Give hub_model_id=owner/name."
        if self.push_to_hub and not self.trains:
            yield "push_to_hub pushes what is trained, and do_train is False. Leave it out."
        if self.push_to_hub and self.passed.get("hub_revision"):
            yield (
                f"Hyperparameter hub_revision has value {self.passed['hub_revision']!r}, but the "
                "model is pushed to the main branch. Leave it out."
            )

    @property
    def of_tasks(self) -> Mapping[str, Sequence[str]]:
        """Of what is given and not every task takes: the tasks that do."""
        values = {name: getattr(self, name, self.passed.get(name)) for name in _OF_TASKS}
        usual = {item.name: item.default for item in dataclasses.fields(Hyperparameters)}
        return {
            name: tasks
            for name, tasks in _OF_TASKS.items()
            if values[name] not in (None, 0.0, usual.get(name))
        }

    def _of_other_tasks(self) -> Iterator[str]:
        """What is given that the task would pass over."""
        for name, tasks in self.of_tasks.items():
            if self.task in TASKS and self.task not in tasks:
                listed = " or ".join(f"task={task}" for task in tasks)
                remedy = f"Leave it out, or give {listed}."
                if name == _SMOOTHING and self.task in _OF_TASKS[f"{_SMOOTHING}_factor"]:
                    remedy = f"Give {_SMOOTHING}_factor."
                yield (
                    f"Hyperparameter {name} has value "
                    f"{getattr(self, name, self.passed.get(name))!r}, but belongs to {listed}, and "
                    f"the task is {self.task}. {remedy}"
                )
        if self.task is None and not any(all_tasks_of(self.of_tasks)):
            listed = "; ".join(
                f"{name} to task={' or '.join(tasks)}" for name, tasks in self.of_tasks.items()
            )
            yield f"These hyperparameters belong to no one task: {listed}. Leave some out."
        if not (self.trains or self.passed.get("do_eval") or self.predicts):
            yield "do_train=False leaves nothing to do. Give do_eval=True or do_predict=True, too."
        kinds = {"text_column": "text", "prompt_column": "prompt", "completion_column": "prompt"}
        kinds["messages_column"] = "messages"
        names_set = [name for name in kinds if getattr(self, name) is not None]
        if len({kinds[name] for name in names_set}) > 1:
            listed = ", ".join(f"{name}={getattr(self, name)}" for name in names_set)
            yield (
                f"These hyperparameters name columns of several kinds of data: {listed}. "
                "Name texts, or prompts and completions, or messages."
            )


def all_tasks_of(of_tasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks that take every hyperparameter in `Hyperparameters.of_tasks`.

    `label_smoothing` excludes none: others call what it does to their labels by the same name.
    """
    narrowing = [tasks for name, tasks in of_tasks.items() if name != _SMOOTHING]
    return [task for task in TASKS if all(task in tasks for tasks in narrowing)]


def all_at_once(problems: Sequence[str]) -> HyperparameterError:
    """One error that names every problem."""
    if len(problems) == 1:
        return HyperparameterError(problems[0])
    listed = "\n".join(f"- {problem}" for problem in problems)
    return HyperparameterError(f"{len(problems)} hyperparameters cannot be used:\n{listed}")


_OF_TASKS: Mapping[str, Sequence[str]] = {
    name: [task for task, row in TASKS.items() if name in row.hyperparameters]
    for each in TASKS.values()
    for name in each.hyperparameters
}
_SMOOTHING = "label_smoothing"


@functools.cache
def own_fields() -> frozenset[str]:
    """Names of the hyperparameters that the recipe itself decides on."""
    return frozenset(item.name for item in dataclasses.fields(Hyperparameters) if item.metadata)
