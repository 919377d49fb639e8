"""Hyperparameters: one frozen value, checked as a whole. `recipe.arguments` reads it from argv."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe import value_ranges
from recipe.errors import HyperparameterError
from recipe.task_table import TASKS


def _documented(default: Any, text: str, *aliases: str) -> Any:
    metadata = {"help": text, "aliases": [f"--{alias}" for alias in aliases]}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the recipe itself decides on. `passed` goes to transformers.TrainingArguments."""

    task: str | None = _documented(
        None,
        "text-classification (classes, sets of them, or numbers); token-classification: tags of "
        "words; question-answering: spans of contexts; sentence-embedding; reranking; causal-lm: "
        "to go on with texts, prompts or conversations; preference: to prefer chosen answers to "
        "rejected ones (DPO); masked-lm: to fill masks in texts; summarization, translation, "
        "text2text-generation: to write texts from texts; image-classification. Default: found "
        "from the data and the model where nothing else could be meant.",
    )
    model_name_or_path: str | None = _documented(
        None,
        "Model to start from: a folder, the name of a channel that holds it, or a name on the "
        "Hugging Face hub. Default: the channel called model or pretrained.",
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
        "Column to read, or two (a,b) that are read as a pair. Default: found by name.",
        "source_column",
    )
    text_pair_column: str | None = _documented(
        None, "Column of the second text of each pair; the same as text_column=a,b."
    )
    label_column: str | None = _documented(
        None,
        "Column to predict, or of the texts to write. Default: found by its name.",
        "summary_column",
    )
    image_column: str | None = _documented(
        None, "task=image-classification: column of pictures, or of their files' names."
    )
    augmentation: str = _documented(
        "crop",
        "task=image-classification: how training pictures differ from epoch to epoch: none; crop: "
        "three quarters or more of their height and width; flip: cropped, and half of them "
        "mirrored.",
    )
    problem_type: str | None = _documented(
        None,
        "single_label_classification, multi_label_classification or regression. Default: lists "
        "are several labels, fractions are numbers, all else is one label.",
    )
    label_separator: str | None = _documented(
        None, "What stands between the labels of a text, where one cell holds several."
    )
    num_labels: int | None = _documented(
        None, "How many labels the data must have. Default: as many as are found."
    )
    class_names: str | None = _documented(
        None,
        "task=text-classification, token-classification: names of labels that are numbers, from 0 "
        "on, with commas or as a JSON list.",
    )
    class_weight: str | None = _documented(
        None, "balanced: rare labels weigh as much in the loss as frequent ones."
    )
    tune_thresholds: bool = _documented(
        False,
        "Several labels for each text: from which probability a label counts as given is found on "
        "the evaluation data, for each label where its F1 is highest, instead of 0.5.",
    )
    prompt_column: str | None = _documented(
        None,
        "task=causal-lm, preference: column of prompts, which are read, not learned. Found by its "
        "name.",
    )
    completion_column: str | None = _documented(
        None, "task=causal-lm: column of what follows a prompt, and is learned. Found by its name."
    )
    messages_column: str | None = _documented(
        None,
        "task=causal-lm: column of conversations, lists of {role, content}, of which the "
        "assistant's turns are learned. Found by its name.",
    )
    chosen_column: str | None = _documented(
        None,
        "task=preference: column of the answers that were chosen, texts or lists of messages. "
        "Found by its name.",
    )
    rejected_column: str | None = _documented(
        None, "task=preference: column of the answers that were not. Found by its name."
    )
    beta: float = _documented(
        0.1,
        "task=preference: how strongly the model is held to what it was before: rewards are beta "
        "times the change of log-probabilities. The higher, the less it changes.",
    )
    loss_type: str = _documented(
        "sigmoid",
        "task=preference: sigmoid (DPO), robust (with label_smoothing), hinge, or ipo, of which "
        "log-probabilities are means over an answer's tokens.",
    )
    label_smoothing: float = _documented(
        0.0,
        "task=preference: how likely it is that chosen and rejected were mistaken for each other; "
        "for loss_type=sigmoid (conservative DPO) and robust.",
    )
    sample_by: str = _documented(
        "line",
        "task=causal-lm, masked-lm: what is a text in a .txt file: line, paragraph or document.",
    )
    doc_stride: int | None = _documented(
        None,
        "task=question-answering: tokens that two windows of a context share. Default: 128, at "
        "most half of max_length.",
    )
    label_all_tokens: bool = _documented(
        False,
        "task=token-classification: learn a tag for each piece of a word, not its first one only.",
    )
    long_texts: str | None = _documented(
        None,
        "task=causal-lm, masked-lm, token-classification, text-classification: what becomes of "
        "texts of more than max_length tokens: split or truncate. Default: texts are split, "
        "completions, conversations and texts to classify truncated. A classifier's answer for a "
        "split text is the mean of its windows' logits.",
    )
    mlm_probability: float = _documented(
        0.15, "task=masked-lm: share of tokens (or words) that are masked."
    )
    whole_word_masking: bool = _documented(
        False,
        "task=masked-lm: mask all tokens of a word, not tokens one by one.",
        "whole_word_mask",
        "wwm",
    )
    source_prefix: str | None = _documented(
        None,
        "task=summarization, translation, text2text-generation: what stands before each text that "
        "is read, in training and in serving, such as 'summarize: '.",
        "prefix",
    )
    source_lang: str | None = _documented(
        None, "task=translation: the language that is read, such as en or en_XX.", "src_lang"
    )
    target_lang: str | None = _documented(
        None, "task=translation: the language that is written.", "tgt_lang"
    )
    max_target_length: int | None = _documented(
        None,
        "Tokens at which texts to write are cut, in training and in serving. Default: 128, or what "
        "the model takes.",
    )
    predict_with_generate: bool = _documented(
        True, "Whether evaluations let the model write, and score it (ROUGE, BLEU, chrF)."
    )
    generated_rows: int = _documented(
        100, "Rows of the evaluation data that the model writes for; do_predict: all of them."
    )
    num_beams: int | None = _documented(
        None, "Beams that texts are written with. Default: the model's.", "generation_num_beams"
    )
    negative_columns: str | None = _documented(
        None,
        "task=sentence-embedding, reranking: columns of texts that do not belong to a row's query, "
        "with commas. Default: found by their names (negative, negative_1, hard_negatives ...).",
    )
    scale: float = _documented(
        20.0,
        "task=sentence-embedding: what cosines are multiplied by in the loss; 1 / temperature.",
    )
    mini_batch_size: int | None = _documented(
        None,
        "task=sentence-embedding: rows of a batch that are computed at once. The batch may be as "
        "large as is wanted, for 1.3 times the work. Default: all of it.",
    )
    matryoshka_dims: str | None = _documented(
        None,
        "task=sentence-embedding: sizes to which vectors may be cut, with commas; they are learned "
        "beside the whole vectors.",
    )
    query_prompt: str | None = _documented(
        None, "task=sentence-embedding: what stands before each query. Default: the model's own."
    )
    document_prompt: str | None = _documented(
        None, "task=sentence-embedding: what stands before each text. Default: the model's own."
    )
    listwise: bool = _documented(
        False,
        "task=reranking: learn each query's list as a whole (ListNet), not each pair by itself "
        "(binary cross-entropy). A batch is then so many queries.",
    )
    num_train_epochs: float = _documented(3.0, "Passes over the training data.", "epochs")
    max_train_steps: int | None = _documented(
        None, "Stop after this many optimizer steps, whatever the epochs.", "max_steps"
    )
    per_device_train_batch_size: int = _documented(
        32, "Texts in a training step, for each process.", "train_batch_size", "batch_size"
    )
    per_device_eval_batch_size: int = _documented(
        64, "Texts in an evaluation step, for each process.", "eval_batch_size"
    )
    learning_rate: float | None = _documented(
        None,
        "Peak learning rate of AdamW. Default: by the task, and by whether lora_r is given "
        "(docs/TRAINING.md); a line says which.",
        "lr",
    )
    warmup_steps: float = _documented(
        0.1, "Steps of linear warm-up; below 1, their share of all steps (warmup_ratio)."
    )
    weight_decay: float = _documented(0.0, "Weight decay of AdamW.")
    max_length: int | None = _documented(
        None,
        "Longest text in tokens; what exceeds it is cut. Default: what the model takes, at most "
        "512 (task=causal-lm: 1024, and long_texts).",
        "max_seq_length",
    )
    seed: int = _documented(42, "Seed of the head's weights, the order of texts and the hold-out.")
    bf16: bool | None = _documented(
        None, "Compute in bfloat16. Default: where the device is faster with it."
    )
    lora_r: int | None = _documented(
        None, "Rank of LoRA adapters. Given, they are trained instead of all weights."
    )
    lora_alpha: int | None = _documented(None, "Scale of LoRA. Default: twice lora_r.")
    lora_dropout: float = _documented(0.0, "Dropout on the input of LoRA's adapters.")
    lora_target_modules: str = _documented(
        "all-linear", "Names of the layers to adapt, separated by commas."
    )
    lora_save: str = _documented(
        "merged", "What is saved of a LoRA training: a merged model, or the adapter alone."
    )
    load_in_4bit: bool = _documented(
        False,
        "task=causal-lm, preference: keep the weights under LoRA's adapters in 4 bits (QLoRA, by "
        "bitsandbytes): an NVIDIA GPU, lora_r and lora_save=adapter.",
        "use_4bit",
    )
    compile: bool = _documented(False, "Compile the model with torch.compile.")
    mp_parameters: str | None = _documented(
        None,
        "SageMaker model parallelism: given, and with several processes, the model is sharded "
        "(FSDP2).",
    )
    packing: bool | None = _documented(
        None,
        "Lay several texts into one row instead of padding each. Default: where the model can.",
    )
    output_dir: str | None = _documented(
        None, "Folder of checkpoints. Default: /opt/ml/checkpoints."
    )
    save_total_limit: int | None = _documented(2, "Checkpoints to keep.")
    save_minutes: float | None = _documented(
        15.0, "Save a checkpoint when the last one is so many minutes old, too."
    )
    early_stopping_patience: int | None = _documented(
        None,
        "Stop after so many evaluations without a better one, and keep the best model. What is "
        "better, metric_for_best_model says (default: the loss).",
    )
    early_stopping_threshold: float = _documented(
        0.0, "How much better an evaluation must be to count for early stopping."
    )
    price_per_hour: float | None = _documented(
        None, "Price of a host, to estimate the cost of the run in its report."
    )
    profile_steps: str | None = _documented(
        None, "Steps to record by torch.profiler, 10-12: a trace and a table go to the output."
    )
    push_to_hub: bool = _documented(
        False, "Push the model to the Hugging Face hub when the training has ended and it is saved."
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
        None, "False makes a new repository on the hub public. Default: private."
    )
    hub_strategy: str | None = _documented(
        None, "When the model is pushed: end. every_save means the same here."
    )
    passed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was given and changes nothing, one line each."""

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
        """Whether the job trains: unless it is told not to."""
        return self.passed.get("do_train") is not False

    @property
    def predicts(self) -> bool:
        """Whether predictions are to be written."""
        return bool(self.passed.get("do_predict"))

    @property
    def profiled(self) -> range:
        """The steps to record, counted from 1; none if `profile_steps` is not given, or wrong."""
        match = _STEPS.fullmatch(self.profile_steps or "")
        if match is None:
            return range(0)
        first = int(match["first"])
        steps = range(first, int(match["last"] or first) + 1)
        return steps if first >= 1 and len(steps) <= _MOST_PROFILED else range(0)

    def _out_of_range(self) -> Iterator[str]:
        values = {name: getattr(self, name) for name in own_fields()}
        yield from value_ranges.problems({**self.passed, **values})
        if self.profile_steps is not None and not self.profiled:
            yield (
                f"Hyperparameter profile_steps has value {self.profile_steps!r}. Give one step of "
                f"the training, 10, or up to {_MOST_PROFILED} in a row, 10-12."
            )
        if self.load_in_4bit and self.lora_r is None:
            yield (
                "load_in_4bit=True keeps the model's weights as they are, and needs adapters to "
                "train. Give lora_r, such as 16."
            )
        if self.load_in_4bit and self.lora_save != "adapter":
            yield (
                "load_in_4bit=True trains an adapter for weights of 4 bits, and what is saved "
                "cannot be merged into these. Give lora_save=adapter."
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
        if self.profile_steps is not None and not self.trains:
            yield "profile_steps records steps of a training, and do_train is False. Leave it out."

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
                    remedy = f"Give {_SMOOTHING}_factor, as it is called there."
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
_STEPS = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_MOST_PROFILED = 50


@functools.cache
def own_fields() -> frozenset[str]:
    """Names of the hyperparameters that the recipe itself decides on."""
    return frozenset(item.name for item in dataclasses.fields(Hyperparameters) if item.metadata)
