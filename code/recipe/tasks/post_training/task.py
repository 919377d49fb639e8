"""Post-training by TRL's trainers, which get the recipe's model, data and arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from recipe.batching.batches import Batch, Layout, Samples
from recipe.batching.packing import Rows
from recipe.data.column_names import COMPLETION, LABEL, PROMPT
from recipe.errors import HyperparameterError, ModelError, RowError
from recipe.hyperparameters import Hyperparameters
from recipe.models import pretrained
from recipe.models.sources.origin import Origin
from recipe.reports import figures
from recipe.reports.model_card import About
from recipe.reports.section import Section
from recipe.settings import split_values
from recipe.task_table import TASKS
from recipe.tasks.base import (
    Batches,
    LibraryTraining,
    Model,
    Objective,
    Task,
    Tokenizer,
    named_splits,
)
from recipe.tasks.completion_judges import CheckedJudge
from recipe.tasks.post_training import data, rewards
from recipe.tasks.post_training.data import CHOSEN, REJECTED
from recipe.tasks.post_training.trainers import KINDS, check_library, make_arguments

_LONGEST, _GENERATED, _MOST = 1024, 256, 1 << 20
_TEACHER = "teacher"
_REFERENCE = "ref"
"""TRL's name of the adapter that is its reference."""


class _DynamicPadding(Layout):
    """TRL's batches: padded to their longest row."""

    balanced = False

    def tensors(self, samples: Samples, rows: Rows) -> Batch:
        """Raise NotImplementedError: TRL's collator makes the tensors."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the shapes, for the log."""
        return "padded by TRL to the longest of a batch"

    def computed_tokens(self, samples: Samples, rows: Rows) -> int:
        """Return the tokens of the longest answers, padding included."""
        return len(rows) * int(samples.lengths[rows].max(initial=1))


class _ByTrl(Objective):
    """The objective of a task, which TRL's trainer computes."""

    couples_samples = True

    def __init__(self, task: PostTraining) -> None:
        self._task = task

    def layout(
        self, model: PreTrainedModel, packed: bool, size: int, pad_id: int, batches: Batches
    ) -> Layout:
        return _DynamicPadding()

    def losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        raise NotImplementedError

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        raise NotImplementedError

    def library_trainer(
        self, model: Any, tokenizer: Tokenizer, arguments: TrainingArguments, max_length: int
    ) -> LibraryTraining:
        return self._task.trainer(model, tokenizer, arguments, max_length)


class PostTraining(Task):
    """Learns preferences, rewards, or a teacher."""

    data: data.Preferences

    def __init__(self, channels: Mapping[str, Path], hyperparameters: Hyperparameters) -> None:
        self.name = str(hyperparameters.task)
        self.kind, self._channels = KINDS[self.name], channels
        self._teacher: Any = None
        super().__init__(
            {name: path for name, path in channels.items() if name != _TEACHER}, hyperparameters
        )

    @property
    def generates(self) -> bool:
        return self.name != "kto"  # which learns labels

    def read(self, channels: Mapping[str, Path]) -> None:
        settings = self.data_settings
        check_library(self.name)
        if not self.generates:
            self.targets = frozenset({LABEL})
        if settings.passed.get("label_smoothing_factor"):
            raise HyperparameterError(
                f"Hyperparameter label_smoothing_factor has no effect in task={self.name}.",
                'TRL smooths preferences by trl_args={"label_smoothing": 0.1}.',
            )
        if self.model_settings.use_vllm and importlib.util.find_spec("vllm") is None:
            raise HyperparameterError(
                "Hyperparameter use_vllm has value True, but vllm is not installed.",
                "Leave it out: transformers generates; or list vllm in requirements.txt.",
            )
        if self.kind.generates and settings.max_length:
            raise HyperparameterError(
                f"Hyperparameter max_length has value {settings.max_length}, and task={self.name} "
                "cuts no prompts.",
                "Leave it out; max_completion_length limits what is generated.",
            )
        names = [*self.kind.curves, *self.kind.about.headline]
        self.check_best([name for name in names if name != "loss"])
        self.objective = _ByTrl(self)
        self.data = data.load(channels, settings, TASKS[self.name])
        self._rewards: Sequence[CheckedJudge] = ()
        if self.name == "grpo":
            generated = self.model_settings.max_completion_length or _GENERATED
            names = split_values(self.options.reward_funcs)
            code = self._channels.get("code")
            self._rewards = rewards.find_rewards(names, self.data, generated, code)
            if settings.trains:
                rewards.try_out(self._rewards, self.data.train)
        self.data.notes.append(
            f"trainer: TRL's {self.kind.trainer}Trainer {importlib.metadata.version('trl')}; a "
            "stopped job resumes with weights, optimizer, random states and the order of rows"
            + "; the last batch of an epoch is left out unless it is full"
            * self.kind.generates
        )

    def load(self, source: Origin) -> Model:
        if self.name == "reward":
            what = "a reward model"
            return pretrained.load_head(
                AutoModelForSequenceClassification, source, self.model_settings, what, ("reward",),
                problem_type="regression",
            )  # fmt: skip
        model, tokenizer = pretrained.load_causal(source, self.model_settings)
        if self.name == "distillation":
            self._teacher = self._load_teacher(tokenizer)
        return model, tokenizer

    def _load_teacher(self, tokenizer: Tokenizer) -> Any:
        name = self.options.teacher_model or _TEACHER
        if name == _TEACHER and name not in self._channels:
            raise HyperparameterError(
                "task=distillation needs a teacher: teacher_model is not given, and there is no "
                "channel called teacher.",
                "Give a folder, a channel's name, or a name on the Hugging Face hub.",
            )
        origin = pretrained.find(name, self._channels)
        plain = dataclasses.replace(self.model_settings, **_WITHOUT_CHANGES)
        teacher, others, new = pretrained.read(AutoModelForCausalLM, origin, plain)
        pretrained.check_head(origin, new, "a causal language model")
        if (mine := tokenizer.get_vocab()) != (theirs := others.get_vocab()):
            differing = len(mine.items() ^ theirs.items())
            raise ModelError(
                f"The teacher {origin.location} has another vocabulary: {len(theirs)} tokens "
                f"instead of {len(mine)}, and {differing} differ.",
                "Give a teacher of the same family, whose distributions can be compared.",
            )
        return teacher.requires_grad_(False)

    def longest(self, model: PreTrainedModel, tokenizer: Tokenizer) -> int:
        """Return at how many tokens prompt and answer together are cut, or how many the model
        reads if it generates the answer."""
        usual = _MOST if self.kind.generates else _LONGEST
        return pretrained.longest_input(model, tokenizer, self.data_settings.max_length, usual)

    def tokenize_split(
        self, name: str, split: Dataset, tokenizer: Tokenizer, max_length: int
    ) -> Samples:
        """Return samples of the tokens of the longer answers, which are only counted: TRL's
        trainer tokenizes the rows itself."""
        rows = []
        for number, row in enumerate(split):
            answers = list(_tokens(tokenizer, row))
            if not self.kind.generates:
                self._check_answers(number, row, answers, tokenizer, max_length)
            rows.append(max(answers, key=len)[:max_length])
        generated = self.model_settings.max_completion_length or _GENERATED
        for number, row in enumerate(rows if self.kind.generates else ()):
            if len(row) + generated > max_length:
                raise RowError(
                    number,
                    f"{{row}} has a prompt of {len(row)} tokens, and max_completion_length is "
                    f"{generated}: the model reads {max_length} together.",
                    "Lower max_completion_length, or leave the row out.",
                )
        digests = [hashlib.sha256(repr(row).encode()).digest()[:8] for row in split]
        labels = np.frombuffer(b"".join(digests), np.int64)
        if self.name == "grpo" and name == "train":
            count = self.options.num_generations or 8
            rows, labels = [row for row in rows for _ in range(count)], np.repeat(labels, count)
        starts = np.cumsum([0, *map(len, rows)])
        return Samples(np.concatenate([np.array(row, np.int64) for row in rows]), starts, labels)

    def _check_answers(
        self, number: int, row: Mapping[str, Any], answers: list[list[int]], tokenizer: Tokenizer,
        max_length: int,
    ) -> None:  # fmt: skip
        """Raise RowError for a row that TRL would leave out, or from which nothing is learned."""
        names, others = f"{CHOSEN} and {REJECTED}", answers[-1]
        if len(answers) == 1:
            names = f"{PROMPT} and {COMPLETION}"
            others = next(_tokens(tokenizer, {PROMPT: row[PROMPT]}))
        read = max_length - (self.name == "orpo")  # whose trainer may add a token to the beginning
        if answers[0][:read] == others[:read]:
            raise RowError(
                number,
                f"{{row}} has equal tokens as {names}, of which max_length={max_length} are read.",
                "Raise max_length, correct the row, or give a chat template that writes answers.",
            )
        # Texts get an end token.
        longest = max(map(len, answers)) + isinstance(row.get(CHOSEN), str)
        if self.name == "reward" and longest > max_length:
            raise RowError(
                number,
                f"{{row}} has {longest} tokens, and max_length={max_length} are read: a cut answer "
                "has another reward.",
                "Raise max_length, or leave the row out.",
            )

    def lengths(self, tokenizer: Tokenizer, rows: Sequence[int]) -> list[int]:
        return [max(map(len, _tokens(tokenizer, row))) for row in self.train.select(rows)]

    def some_texts(self) -> list[str]:
        return [text for row in self.train.select(range(min(32, len(self.train))))
                for text in data.texts_of(row)]  # fmt: skip

    def stop_tokens(
        self, tokenizer: Tokenizer, samples: Mapping[str, Samples], max_length: int
    ) -> set[int] | None:
        """Return the end token, which TRL appends to texts; chat templates write it."""
        end = tokenizer.eos_token_id
        return None if self.name == "reward" or not isinstance(end, int) else {end}

    def about(self) -> About:
        return self.kind.about

    def sections(self, trainer: Trainer, samples: Mapping[str, Any]) -> Sequence[Section]:
        history = trainer.state.log_history
        names = [name for name in self.kind.curves if any(name in entry for entry in history)]
        labels = {name: name.removeprefix("rewards/").replace("_", " ") for name in names}
        draw = functools.partial(figures.curves, history, labels, "reward")
        return [Section(title="Rewards", figure=draw)] if names else []

    def save(
        self, model: Any, weights: Mapping[str, Any] | None, tokenizer: Tokenizer, folder: Path
    ) -> None:
        if _REFERENCE in getattr(model, "peft_config", {}):
            model.delete_adapter(_REFERENCE)
        super().save(model, weights, tokenizer, folder)

    def trainer(
        self, model: Any, tokenizer: Tokenizer, args: TrainingArguments, max_length: int
    ) -> LibraryTraining:
        """Return TRL's trainer and what it is made of."""
        if args.fsdp:
            raise HyperparameterError(
                f"Hyperparameter fsdp has value True, and task={self.name} keeps whole models on "
                "each device.",
                "Give lora_r, which trains with little memory, or load_in_4bit=True, too.",
            )
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        library = importlib.import_module(self.kind.module)
        config = make_arguments(
            getattr(library, f"{self.kind.trainer}Config"), args, self.model_settings,
            self.options, max_length,
        )  # fmt: skip
        others: dict[str, Any] = {}
        if self.kind.has_reference and not hasattr(model, "peft_config"):
            others["ref_model"] = copy.deepcopy(model)
        if self.name == "grpo":
            others["reward_funcs"] = self._rewards
        if self._teacher is not None:
            others["teacher_model"] = self._teacher
        splits = named_splits(self.data)
        return LibraryTraining(
            kind=getattr(library, f"{self.kind.trainer}Trainer"),
            arguments=config,
            options={
                "model": model, "processing_class": tokenizer, "train_dataset": splits.pop("train"),
                "eval_dataset": DatasetDict(splits), **others,
            },
        )  # fmt: skip


_WITHOUT_CHANGES: Mapping[str, Any] = {
    "lora_r": None, "load_in_4bit": False, "rope_scaling": None, "merge_adapter": True,
}  # fmt: skip
"""What belongs to the model that learns, not to its teacher."""


def _tokens(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the tokens of a row's prompt with each of its answers."""
    answers = [row[name] for name in (CHOSEN, REJECTED, COMPLETION) if name in row] or [None]
    prompt = row.get(PROMPT)
    for answer in answers:
        parts = [part for part in (prompt, answer) if part is not None]
        if isinstance(parts[0], str):
            yield list(tokenizer("".join(parts))["input_ids"])
            continue
        if not tokenizer.chat_template:
            raise ModelError(
                "The rows are conversations, and the model's tokenizer has no chat template.",
                "Give a model with one, or prompts and answers as texts.",
            )
        messages = [message for part in parts for message in part]
        written = tokenizer.apply_chat_template(messages, tokenize=False)
        yield list(tokenizer(written, add_special_tokens=False)["input_ids"])


TASK = PostTraining
