"""Parse hyperparameters from argv, with the names of this recipe and of other trainers."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments

from recipe import foreign_names
from recipe.errors import HyperparameterError, did_you_mean
from recipe.hyperparameters import (
    CHOICES,
    FIELDS,
    GROUPS,
    REFUSED,
    Hyperparameters,
    combine_problems,
    fields_by_topic,
)
from recipe.paths import Folders
from recipe.secret_rules import is_secret_name, mask_shapes

_TRUE, _FALSE = ("true", "1", "yes", "y", "t"), ("false", "0", "no", "n", "f")
_ALIKE = 0.85
_OFF_BY_NONE = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no")
"""The value that `none` stands for in some of the Trainer's fields; null and an empty text mean
their defaults."""
_WORDS = ("missing_labels",)
"""Hyperparameters whose values may be these words."""
_OFF_AT_0 = ("max_grad_norm", "warmup_steps")
_PEFT_CHOICES = ("use_peft", "peft", "use_lora", "peft_type", "adapter", "finetuning_type")
"""Names of other trainers that choose between LoRA and training all weights; here lora_r does."""
_FOLLOWS_SCORES = ("reduce_lr_on_plateau", "greedy")
"""Schedules for which metric_for_best_model is used."""
_KEY = re.compile(r"--?[A-Za-z]")
_LISTS = {
    **{name: mark for name, item in FIELDS.items() if (mark := item.metadata["separator"])},
    **dict.fromkeys(("report_to", "optim_target_modules"), ","),
    **dict.fromkeys(("fsdp", "debug"), " "),
}
"""Hyperparameters that take several values, and their separators in a text."""
_JSON = ("class_names", "added_tokens")
"""Those whose text may be a JSON list, for values with commas."""
_PAIRS = ("optim_args",)
"""Objects that are read as a text `key=value,...`."""
_OBJECTS = (
    *("accelerator_config", "fsdp_config", "lr_scheduler_kwargs"),
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "chat_template_kwargs"),
    "trl_args",
    "rope_scaling",
)
# Commas that no bracket or quote encloses, and are followed by `key=`.
_PART = re.compile(
    r"(\w[\w.-]*)=((?:\{.*?\}|\[.*?\]|'[^']*'|\"[^\"]*\"|[^,])*)(?:,(?=\s*\w[\w.-]*=)|$)"
)
_NOT_GIVEN = object()


def parse(argv: Sequence[str], folders: Folders | None = None) -> Hyperparameters:
    """Parse `--key value` arguments.

    A key may have `-` or `_`, and may be an alias or the name of another trainer (`foreign_names`).
    A flag without a value is True. An empty value, `None` or `null` turns off a field that can be
    turned off; for other fields it means the default. Lists and objects may be JSON, Python's repr,
    or have commas (`a,b`, `k=1,l=2`). Other fields of transformers.TrainingArguments are converted
    to their type and stored in `passed`.

    Args:
        folders: The job's folders, by which output_dir is judged.

    Raises:
        HyperparameterError: Lists all unknown keys, keys with two values, and invalid values.
    """
    values: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    notes: list[str] = []
    problems: list[str] = []
    peft_arguments: list[str] = []
    for written, text in _pairs(argv):
        try:
            name, value = _translated(written, text, notes)
            converted = _convert(name, value, notes) if name else _NOT_GIVEN
        except HyperparameterError as error:
            problems.append(str(error))
            continue
        if written.lstrip("-").replace("-", "_") in _PEFT_CHOICES:
            peft_arguments.append(f"{written}={text or '(empty)'}")
        if converted is _NOT_GIVEN:
            continue
        if name in values and values[name] != converted:
            problems.append(
                f"Hyperparameter {name} has two values, {_shown(name, values[name])} (as "
                f"{written_as[name]}) and {_shown(name, converted)} (as {written}). Give one."
            )
        values.setdefault(name, converted)
        written_as.setdefault(name, written)
    if peft_arguments and values.get("lora_r"):
        problems.append(
            f"{peft_arguments[0]} trains all weights, and lora_r={values['lora_r']} trains LoRA's "
            "adapters. Leave one of them out."
        )
    notes += _ineffective(values)
    folder = Path(values["output_dir"]).absolute() if "output_dir" in values else None
    model = folders.model_dir.absolute() if folders else None
    if folders and folder and model in (folder, *folder.parents):
        del values["output_dir"]
        notes.append(f"output_dir={folder} would be packed with the model: checkpoints are saved "
                     f"in {folders.checkpoints}")  # fmt: skip
    common = {name: values.pop(name) for name in _COMMON & {*values}}
    specific = {name: values.pop(name) for name in FIELDS.keys() & values}
    try:
        parsed = Hyperparameters(**common, task_values=specific, passed=values, notes=tuple(notes))
    except HyperparameterError as error:
        _, *several = str(error).split("\n- ")
        problems += several or [str(error)]
    if problems:
        raise combine_problems(problems)
    return parsed


def _ineffective(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each hyperparameter that has no effect because of another one."""
    steps = values.get("max_train_steps") or -1
    if steps > 0 and "num_train_epochs" in values:
        epochs = values["num_train_epochs"]
        yield f"max_train_steps={steps} overrides num_train_epochs={epochs:g}"
    metric = values.get("metric_for_best_model")
    if metric and not (
        values.get("load_best_model_at_end", values.get("early_stopping_patience"))
        or values.get("save_strategy") == "best"
        or values.get("lr_scheduler_type") in _FOLLOWS_SCORES
    ):
        yield (
            f"metric_for_best_model={metric} has no effect: the last weights are kept; "
            "load_best_model_at_end=True keeps the best"
        )
    if "early_stopping_threshold" in values and not values.get("early_stopping_patience"):
        yield "early_stopping_threshold has no effect: early_stopping_patience is not set"
    if values.get("hub_model_id") and not values.get("push_to_hub"):
        repository = values["hub_model_id"]
        yield f"hub_model_id={repository} has no effect: push_to_hub is not set"


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(argv):
        key = argv[position]
        position += 1
        if not _KEY.match(key):
            yield key, ""
            continue
        if "=" in key:
            key, _, value = key.partition("=")
        elif position < len(argv) and not argv[position].startswith("--"):
            value, position = argv[position], position + 1
        else:
            value = "True"
        yield key, value


def _translated(written: str, value: str, notes: list[str]) -> tuple[str, str]:
    """Return this recipe's name and value for an argument; an empty name if it has no effect.

    Raises:
        HyperparameterError: The name is unknown, or the recipe does not support what it requests.
    """
    if not _KEY.match(written):
        raise HyperparameterError(
            f"Argument {written!r} does not belong to a hyperparameter.", "Write --key value."
        )
    written = written.lstrip("-")
    name = written.replace("-", "_")
    name = _aliases().get(name, name)
    if name in FIELDS:
        return name, value
    what = f"Hyperparameter {written} (value {_shown(name, value)})"
    if name in foreign_names.REWRITTEN and value.lower() not in foreign_names.UNSET:
        rewritten = foreign_names.rewritten(name, value)
        if isinstance(rewritten, str):
            raise HyperparameterError(f"{what} cannot be used.", rewritten)
        return rewritten
    if name in foreign_names.KNOWN:
        note, remedy = foreign_names.note_and_remedy(name, value)
        if remedy:
            raise HyperparameterError(f"{what} is not a hyperparameter of this recipe.", remedy)
        notes.append(note)
        return "", ""
    if name not in _training_fields():
        # Less similar names have other meanings, such as val_set_size and eval_batch_size.
        accepted = {*FIELDS, *_aliases(), *_training_fields()} - {*REFUSED}
        remedy = did_you_mean(name, accepted, _ALIKE)
        if "." in name and not remedy:  # a key of HyperPod's recipes: model.peft.rank
            try:
                known, _ = _translated(f"--{name.rpartition('.')[2]}", value, [])
                remedy = f"Give {known}." if known else "Leave it out."
            except HyperparameterError as error:
                remedy = error.remedy
        raise HyperparameterError(
            f"{what} is not known.", remedy or "python code/train.py --help lists the names."
        )
    return name, value


def _convert(name: str, value: str, notes: list[str]) -> Any:
    """Convert the value to the type of its field; return _NOT_GIVEN for no value.

    Args:
        notes: Receives a note if an empty value means a default that has an effect.
    """
    if value == "none":
        value = _OFF_BY_NONE.get(name, value)
    if value and name in _WORDS:
        return value
    item = FIELDS.get(name) or _training_fields()[name]
    if value.lower() in foreign_names.UNSET and value.lower() not in CHOICES.get(name, ()):
        if "off" in item.metadata:
            return item.metadata["off"]
        if isinstance(item.default, (int, float)) and item.default is not False:
            off = "; 0 turns it off" if name in _OFF_AT_0 else ""
            notes.append(f"{name}={value or '(empty)'} means its default, {item.default}{off}")
        return _NOT_GIVEN
    if name == "fsdp" and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE  # a string would be parsed as a list of options
    structured = _structured(name, value)
    if not isinstance(structured, str):
        return structured
    value = structured
    try:
        return getattr(_parser().parse_args([f"--{name}={value}"]), name)
    except ValueError as error:
        if name in REFUSED:
            return value  # the refusal has the reason
        reason = str(error).partition(": ")[2] or str(error)
        raise HyperparameterError(
            f"Hyperparameter {name} has value {_shown(name, value)}: {reason}."
        ) from error


def _structured(name: str, text: str) -> Any:
    """Return an object as a dict, a list in the form that its field reads, and others unchanged.

    The SDKs send JSON. On the way to argv, SageMaker's toolkits write lists as Python does, and
    objects as `key=value` with commas.

    Raises:
        HyperparameterError: The value must be an object, and is none.
    """
    if name in _LISTS and text.startswith(("[", "(")):
        listed = _literal(text)
        if isinstance(listed, (list, tuple)) and all(
            isinstance(one, (str, int, float)) for one in listed
        ):
            items = [str(item) for item in listed]
            if name in _JSON and any("," in item for item in items):
                return json.dumps(items)
            return _LISTS[name].join(items)
    if name in _PAIRS and text.startswith("{") and isinstance(pairs := _literal(text), dict):
        return ",".join(f"{key}={value}" for key, value in pairs.items())
    if name not in _OBJECTS:
        return text
    value = _literal(text)
    pairs = {match[1]: _literal(match[2].strip()) for match in _PART.finditer(text)}
    if pairs and not text.startswith("{") and not _PART.sub("", text).strip():
        value = pairs
    if isinstance(value, dict):
        return value
    if name == "fsdp_config" and text.endswith(".json"):
        return text
    raise HyperparameterError(
        f"Hyperparameter {name} has value {text!r}, which is not an object.",
        'Give JSON, such as {"key": 1}, or key=1,other=2.',
    )


def _literal(text: str) -> Any:
    """Return the value of JSON, or of a literal of Python; the text itself if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def describe(name: str = "") -> str:
    """Return the recipe's hyperparameters by group, a line each; or all that is known of one.

    Raise HyperparameterError if there is no hyperparameter `name`.
    """
    if name:
        written = name.lstrip("-").replace("-", "_")
        name = _aliases().get(written, written)
        if name in FIELDS:
            item = FIELDS[name]
            names = ", ".join(f"--{key}" for key in (name, *item.metadata["aliases"]))
            return f"{names}  (default {item.default})\n    {item.metadata['help']}"
        if name not in _training_fields():
            remedy = did_you_mean(name, {*FIELDS, *_aliases(), *_training_fields()}, _ALIKE)
            raise HyperparameterError(
                f"Hyperparameter {written} is not known.", remedy or "--help lists the names."
            )
        item = _training_fields()[name]
        text = " ".join(str(item.metadata.get("help", "")).split())
        return f"--{name}  (default {item.default}), of transformers.TrainingArguments\n    {text}"
    lines = []
    for (title, example), fields in fields_by_topic().items():
        lines += ["", f"{title}, such as {example}:" if example else f"{title}:"]
        for item in fields:
            first, _, _ = item.metadata["help"].partition(". ")
            lines.append(f"  --{item.name}  (default {item.default})  {first.rstrip('.')}")
    return "\n".join([*lines, "", "Others are those of transformers.TrainingArguments."])


def _shown(name: str, value: object) -> str:
    return "(a secret)" if is_secret_name(name) else mask_shapes(repr(value))


_COMMON = {item.name for item in dataclasses.fields(Hyperparameters) if item.metadata}


@functools.cache
def _training_fields() -> Mapping[str, dataclasses.Field[Any]]:
    return {item.name: item for item in dataclasses.fields(TrainingArguments) if item.init}


@functools.cache
def _type_hints(group: type) -> Mapping[str, Any]:
    return typing.get_type_hints(group)


@functools.cache
def _aliases() -> dict[str, str]:
    aliases = {alias: name for name, item in FIELDS.items() for alias in item.metadata["aliases"]}
    return {**foreign_names.RENAMED, **aliases}


class _Parser(HfArgumentParser):
    """Converts strings to the types of fields; raises an exception instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> _Parser:
    """Return a parser of all hyperparameters, whose values are converted to the types of their
    fields."""
    typed: list[tuple[str, Any, Any]] = []
    for name, item in {**_training_fields(), **FIELDS}.items():
        kinds = (kind for kind in GROUPS if name in kind.__annotations__)
        metadata = {} if name in FIELDS else item.metadata  # the parser rejects unknown keys
        default: Any = dataclasses.field(
            default=item.default, default_factory=item.default_factory, metadata=metadata
        )
        typed.append((name, _type_hints(next(kinds, TrainingArguments))[name], default))
    values: Any = dataclasses.make_dataclass("Values", typed, kw_only=True)
    return _Parser(values)
