"""Hold all hyperparameters of a job in one frozen value, and check them together.

`recipe.arguments` parses it from argv.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recipe import value_ranges
from recipe.errors import HyperparameterError
from recipe.secret_rules import is_secret_name, mask_shapes
from recipe.settings import DataSettings, ModelSettings, documented
from recipe.task_table import TASKS


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(DataSettings, ModelSettings):
    """All that the recipe itself decides on, and `passed`."""

    augmentation: str = documented(
        "crop",
        "image-classification: none (off), crop (at least three quarters of height and width), or "
        "flip (crop, and mirror half of the images).",
    )
    class_weight: str | None = documented(
        None, "balanced: weight each class by the inverse of its frequency."
    )
    tune_thresholds: bool = documented(
        False,
        "Several labels for each text: choose the threshold of each label by its best F1 on "
        "the evaluation data, instead of 0.5.",
    )
    beta: float = documented(
        0.1,
        "preference: rewards are beta times the change of log-probabilities. A higher value "
        "keeps the model closer to the initial one.",
    )
    loss_type: str = documented(
        "sigmoid",
        "preference: sigmoid (DPO), robust (with label_smoothing), hinge, or ipo (averages "
        "over the tokens of an answer).",
    )
    label_smoothing: float = documented(
        0.0,
        "preference: probability that chosen and rejected are swapped, for loss_type sigmoid "
        "(conservative DPO) and robust.",
    )
    predict_with_generate: bool = documented(
        True, "Generate text in evaluations, and score it (ROUGE, BLEU, chrF)."
    )
    generated_rows: int = documented(
        100, "Evaluation rows for which text is generated; do_predict generates for all."
    )
    num_beams: int | None = documented(
        None,
        "Number of beams in generation. Default: the model's.",
        "generation_num_beams",
    )
    scale: float = documented(
        20.0, "sentence-embedding: factor of the cosine similarities in the loss (1 / temperature)."
    )
    mini_batch_size: int | None = documented(
        None,
        "sentence-embedding: rows of a batch to compute at once, which saves memory for 1.3 "
        "times the work. Default: the whole batch.",
    )
    matryoshka_dims: str | None = documented(
        None,
        "sentence-embedding: dimensions to which vectors can be truncated, separated by commas.",
    )
    query_prompt: str | None = documented(
        None,
        "sentence-embedding: prompt of each query. Default: the model's; none turns it off.",
    )
    document_prompt: str | None = documented(
        None,
        "sentence-embedding: prompt of each document. Default: the model's; none turns it off.",
    )
    listwise: bool = documented(
        False,
        "reranking: train on the list of each query (ListNet), not on single pairs (binary "
        "cross-entropy). batch_size then counts queries.",
    )
    num_train_epochs: float = documented(3.0, "Passes over the training data.", "epochs")
    max_train_steps: int | None = documented(
        None,
        "Stop after this many optimizer steps; overrides the epochs.",
        "max_steps",
    )
    per_device_train_batch_size: int = documented(
        32,
        "Training batch size of each process.",
        "train_batch_size",
        "batch_size",
    )
    per_device_eval_batch_size: int = documented(
        64,
        "Evaluation batch size of each process.",
        "eval_batch_size",
    )
    learning_rate: float | None = documented(
        None,
        "Peak learning rate of AdamW. Default: by the task and LoRA (docs/REFERENCE.md); the "
        "log shows it.",
        "lr",
    )
    warmup_steps: float = documented(
        0.1,
        "Steps of linear warm-up; below 1, a share of all steps (warmup_ratio). 0 turns it off.",
    )
    weight_decay: float = documented(0.0, "Weight decay of AdamW.")
    compile: bool = documented(False, "Compile the model with torch.compile.")
    mp_parameters: str | None = documented(
        None, "SageMaker model parallelism. If set, several processes shard the model (FSDP2)."
    )
    packing: bool | None = documented(
        None,
        "Pack several texts into one row instead of padding them. Default: if the model "
        "supports it.",
    )
    output_dir: str | None = documented(
        None, "Folder for checkpoints. Default: /opt/ml/checkpoints."
    )
    save_total_limit: int | None = documented(2, "Number of checkpoints to keep; none keeps all.")
    save_minutes: float | None = documented(
        15.0,
        "Also save a checkpoint if the last one is this many minutes old; none turns it off.",
    )
    early_stopping_patience: int | None = documented(
        None,
        "Stop after this many evaluations without improvement of metric_for_best_model "
        "(default: the loss), and keep the best model.",
    )
    early_stopping_threshold: float = documented(
        0.0, "Smallest improvement that counts for early stopping."
    )
    price_per_hour: float | None = documented(
        None, "Price of an instance per hour, for the cost in log and report."
    )
    max_minutes: float | None = documented(
        None,
        "Budget of the job in minutes: it trains as many of its steps as fit, with the learning "
        "rate's schedule made for them.",
    )
    max_price: float | None = documented(
        None, "The same as a price of all instances; needs price_per_hour."
    )
    push_to_hub: bool = documented(
        False, "Push the saved model to the Hugging Face hub after training."
    )
    hub_model_id: str | None = documented(
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
    hub_private_repo: bool | None = documented(
        None, "False creates a public repository. Default: private."
    )
    hub_strategy: str | None = documented(None, "When to push: end. every_save does the same.")
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for each hyperparameter that has no effect."""

    def __post_init__(self) -> None:
        """Raise HyperparameterError with all invalid values."""
        problems = [*self._out_of_range(), *self._of_other_tasks()]
        if problems:
            raise all_at_once(problems)

    def budget_seconds(self, hosts: int) -> float | None:
        """Return the seconds that max_minutes and max_price allow on so many hosts."""
        limits = [] if self.max_minutes is None else [60 * self.max_minutes]
        if self.max_price is not None and self.price_per_hour:
            limits.append(3600 * self.max_price / (self.price_per_hour * hosts))
        return min(limits, default=None)

    def as_text(self) -> dict[str, str]:
        """Return the hyperparameters that are set, as text, without secrets such as hub_token and
        those of other tasks.
        """
        values = dataclasses.asdict(self)
        of_tasks = {name: set(row.hyperparameters) for name, row in TASKS.items()}
        of_others = set().union(*of_tasks.values()) - of_tasks.get(str(self.task), set())
        passed = values.pop("passed")
        del values["notes"]
        return {
            key: mask_shapes(value if isinstance(value, str) else json.dumps(value, default=str))
            for key, value in {**values, **passed}.items()
            if value is not None and not is_secret_name(key) and key not in of_others
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
        if self.max_price is not None and not self.price_per_hour:
            yield (
                f"max_price={self.max_price:g} needs the price of an instance. Give price_per_hour."
            )
        budgets = [name for name in ("max_minutes", "max_price") if getattr(self, name) is not None]
        if budgets and not self.trains:
            yield f"{budgets[0]} limits training, and do_train is False. Leave it out."
        if self.push_to_hub and not self.hub_model_id:
            yield "push_to_hub=True needs the repository's name. Give hub_model_id=owner/name."
        if self.push_to_hub and not self.trains:
            yield "push_to_hub pushes the trained model, and do_train is False. Leave it out."
        if self.push_to_hub and self.passed.get("hub_revision"):
            yield (
                f"Hyperparameter hub_revision has value {self.passed['hub_revision']!r}, but the "
                "model is pushed to the main branch. Leave it out."
            )

    @property
    def of_tasks(self) -> Mapping[str, Sequence[str]]:
        """Return the tasks that take each hyperparameter, of those that are set and not for all."""
        values = {name: getattr(self, name, self.passed.get(name)) for name in _OF_TASKS}
        usual = {item.name: item.default for item in dataclasses.fields(Hyperparameters)}
        return {
            name: tasks
            for name, tasks in _OF_TASKS.items()
            if values[name] not in (None, 0.0, usual.get(name))
        }

    def _of_other_tasks(self) -> Iterator[str]:
        """Yield a sentence for each hyperparameter that the task would ignore."""
        for name, tasks in self.of_tasks.items():
            if self.task in TASKS and self.task not in tasks:
                listed = " or ".join(f"task={task}" for task in tasks)
                remedy = f"Leave it out, or give {listed}."
                if name == _SMOOTHING and self.task in _OF_TASKS[f"{_SMOOTHING}_factor"]:
                    remedy = f"Give {_SMOOTHING}_factor."
                if name == "long_texts" and self.task == "text-classification":
                    remedy = (
                        "Leave it out: longer texts are truncated. To classify whole texts, give a "
                        "model that reads them (ModernBERT: 8,192 tokens) and max_length."
                    )
                yield (
                    f"Hyperparameter {name} has value "
                    f"{getattr(self, name, self.passed.get(name))!r}, but belongs to {listed}, and "
                    f"the task is {self.task}. {remedy}"
                )
        if self.task is None and not any(all_tasks_of(self.of_tasks)):
            listed = "; ".join(
                f"{name} (task={' or '.join(tasks)})" for name, tasks in self.of_tasks.items()
            )
            yield f"No task takes all of these hyperparameters: {listed}. Leave some out."
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
    """Return the tasks that take every hyperparameter in `Hyperparameters.of_tasks`.

    `label_smoothing` excludes none: other trainers use its name for `label_smoothing_factor`.
    """
    narrowing = [tasks for name, tasks in of_tasks.items() if name != _SMOOTHING]
    return [task for task in TASKS if all(task in tasks for tasks in narrowing)]


def all_at_once(problems: Sequence[str]) -> HyperparameterError:
    """Return one error that lists every problem."""
    if len(problems) == 1:
        return HyperparameterError(problems[0])
    listed = "\n".join(f"- {problem}" for problem in problems)
    return HyperparameterError(f"{len(problems)} hyperparameters cannot be used:\n{listed}")


_OF_TASKS: Mapping[str, Sequence[str]] = {
    name: [task for task, spec in TASKS.items() if name in spec.hyperparameters]
    for spec in TASKS.values()
    for name in spec.hyperparameters
}
_SMOOTHING = "label_smoothing"


@functools.cache
def own_fields() -> frozenset[str]:
    """Return the names of the recipe's hyperparameters, without those in `passed`."""
    return frozenset(item.name for item in dataclasses.fields(Hyperparameters) if item.metadata)
