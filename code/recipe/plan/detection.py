"""Find the task of a job by its hyperparameters, the columns of its data and its model."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe import column_words, task_table
from recipe.data import columns
from recipe.data.column_names import word_columns
from recipe.data.column_settings import (
    ColumnsError,
    PreferencesError,
    named_settings,
    sample_cells,
    show_examples,
)
from recipe.data.columns import ColumnSelection
from recipe.data.exports import exported_rows, word_rows
from recipe.data.files import formats
from recipe.data.files.part import Part, UnclearHeader
from recipe.data.files.text_files import WrongEncoding, files_encoded, first_lines
from recipe.data.labels import is_fraction
from recipe.data.layout import channels as layout
from recipe.data.layout import shards
from recipe.data.proposing import proposals
from recipe.data.reading import split_by_column, unclear_split
from recipe.errors import DataError, HyperparameterError, RecipeError, join_names
from recipe.hyperparameters import Hyperparameters, all_tasks_of
from recipe.models import pretrained
from recipe.settings import DataSettings
from recipe.spec import LABEL, Model, name_stem, normalize_name
from recipe.task_table import TASKS

_FILES = 3
_TRIED = 1000
"""Rows of which samples are made before a line is proposed."""
_PLAIN = (".txt", ".text", "")
_LINES, _REPEATED = 60, 4
"""Lines of a text that are looked at; how often the first or last words of lines repeat on average
if they are classes."""
_LABELLED = re.compile(r"^[A-Z]{2,}:\w+\s|[.?!]@\w+\s*$")
"""How a line of TREC begins, and one of the Financial PhraseBank ends."""
_TITLES = column_words.TITLES | column_words.HEADINGS
_ENDINGS = {
    Model.DECODER: ("ForCausalLM", "LMHeadModel"),
    Model.MASKED: ("ForMaskedLM", "ForPreTraining"),
    Model.CLASSIFIER: ("ForSequenceClassification",),
    Model.VISION: ("ForImageClassification",),
}
"""How the names of the classes of models end."""


def find(hyperparameters: Hyperparameters, channels: Mapping[str, Path]) -> tuple[str, str]:
    """Return the job's task and the reason.

    The hyperparameter task decides; otherwise the only task that takes all hyperparameters, or
    whose columns the data has, by names. The base model decides between several, and a decoder
    learns plain text.

    Raises:
        HyperparameterError: None or several are possible; the message has the lines to give.
        DataError: Hyperparameters name columns that do not exist, the first row may be a header, or
            the data is an export of Prodigy.
    """
    if hyperparameters.task is not None:
        return hyperparameters.task, "as given"
    tasks_by_hyperparameter = hyperparameters.tasks_by_hyperparameter
    possible = all_tasks_of(tasks_by_hyperparameter)
    # Preferences and rewards are learned only if the task is given.
    unnamed = [t for t in possible if not all(form.needs_task for form in TASKS[t].forms)]
    if len(possible) == 1 or len(unnamed) == 1:
        (task,) = unnamed or possible
        alone = [name for name, tasks in tasks_by_hyperparameter.items() if list(tasks) == [task]]
        others = [name for name in possible if name != task]
        reason = f"only this task takes {' and '.join(alone or tasks_by_hyperparameter)}"
        return task, reason + (f", unless task={', '.join(others)} is given" if others else "")
    configuration: Mapping[str, Any] = {}
    with contextlib.suppress(RecipeError):  # loading the model reports it
        source = pretrained.find(
            hyperparameters.model_name_or_path, channels, hyperparameters.hf_token
        )
        configuration = source.with_access(hyperparameters).read_settings()
    model = model_of(configuration)
    files, of_several = list[Path](), frozenset[Path]()
    with contextlib.suppress(DataError):  # loading the data raises it again
        data = layout.training_channels(channels, hyperparameters.trains)
        training = layout.find(data)
        files, of_several = training.files["train"], training.unclear
    try:
        parts = (_read(path, hyperparameters) for path in files[:_FILES])
        part = next((part for part in parts if part is not None), None)
    except WrongEncoding as wrong:
        raise _encoding_refusal(wrong, hyperparameters, channels) from wrong
    except UnclearHeader as unclear:
        if unclear.path in of_several:
            raise unclear_split(unclear.path) from unclear
        likely = _costs(possible, model)
        raise proposals.header_refusal(unclear, likely, hyperparameters, _works) from unclear
    if part is None:
        for task in possible:
            recognise = TASKS[task].recognises_files
            if recognise and (reason := task_table.resolve(recognise)(channels)) is not None:
                return task, f"{reason}; set task to choose another"
        if model is Model.DECODER and "causal-lm" in possible:
            with files_encoded(hyperparameters.encoding):
                if _is_corpus(files, channels):
                    return "causal-lm", "plain text, for a decoder; set task to choose another"
        # Reading the data says why there are no rows.
        owners = [task for task in possible if TASKS[task].owns_settings]
        return (owners or possible)[0], "the default; set task to choose another"
    samples = exported_rows.find_samples(part, hyperparameters, [])
    sentence, _ = word_columns(part.table.column_names)
    if sentence is not None and sentence not in samples.table.column_names:  # gathered words
        possible = [task for task in possible if task == word_rows.TASK] or possible
    if part.path in of_several:
        named = {*hyperparameters.named_columns, *hyperparameters.ignored_columns}
        split_by_column("", samples, is_unclear=True, named=named, notes=[])  # or refuse it
    is_known = bool(configuration.get("architectures"))
    return _choose(samples, possible, hyperparameters, model, is_known)


def _encoding_refusal(
    wrong: WrongEncoding, hyperparameters: Hyperparameters, channels: Mapping[str, Path]
) -> RecipeError:
    """Return the refusal of files that seem to be in another encoding. If that decides no task,
    each line that is proposed names the encoding, too."""
    try:
        find(dataclasses.replace(hyperparameters, encoding=wrong.likely), channels)
    except HyperparameterError as undecided:
        remedy = undecided.remedy.replace("\n- ", f"\n- encoding={wrong.likely} ")
        return HyperparameterError(f"{wrong.message} {undecided.message}", remedy)
    except DataError as unclear:
        if "task=" in unclear.remedy:  # lines for an unclear header
            lines = unclear.remedy.removeprefix("Give ").replace(
                "; or ", f"; or encoding={wrong.likely} "
            )
            return DataError(
                f"{wrong.message} {unclear.message}", f"Give encoding={wrong.likely} {lines}"
            )
    return wrong


def _is_corpus(files: Sequence[Path], channels: Mapping[str, Path]) -> bool:
    """Return whether files are prose: no lines with labels, no other formats, and no files or
    folders named after classes, sources or targets."""
    shards = {name_stem(path.stem) for path in files}
    if not files or len(shards) > 1 or {path.parent for path in files} - {*channels.values()}:
        return False
    for path in files[:_FILES]:
        if path.suffix.lower() not in _PLAIN or formats.is_structured(path):
            return False
        lines = first_lines(path, _LINES)
        if not lines or any(line[:1] in ("{", "[") or _LABELLED.search(line) for line in lines):
            return False
        for end in (0, -1):  # classes before or behind texts
            words = [line.split()[end] for line in lines if line.strip()]
            are_words = all(word.strip("@_-").isalnum() for word in words)
            if are_words and 1 < len({*words}) <= len(words) / _REPEATED:
                return False
    return True


def _choose(
    part: Part,
    possible: Sequence[str],
    hyperparameters: Hyperparameters,
    model: Model,
    is_known: bool,
) -> tuple[str, str]:
    """Return the task that the columns of a file decide, and the reason.

    Args:
        is_known: Whether the base model names its classes.

    Raises:
        HyperparameterError: None or several are possible.
    """
    selections: dict[str, ColumnSelection] = {}
    errors: dict[str, ColumnsError] = {}
    for task in possible:
        try:
            selections[task] = _select(part, task, hyperparameters)
        except ColumnsError as error:
            errors[task] = error
    fitting = [task for task in selections if model in TASKS[task].models]
    is_generator = model in (Model.DECODER, Model.SEQ2SEQ)
    known = {*map(normalize_name, LABEL.names)}
    given = {normalize_name(selections[task].get("label") or "") for task in fitting}
    if is_generator and not given & (known - ({"topic"} if "summarization" in fitting else set())):
        # language_score is no label of a corpus, nor a topic that of a dialogue that is summed up.
        fitting = [task for task in fitting if _prefers(model, task)] or fitting
    chosen = fitting if len(selections) > 1 or is_known else list(selections)
    lone = next(iter(selections.values()), None)
    has_choices = lone is not None and (
        "choices" in lone or len(lone.columns.get("endings", ())) > 1
    )
    if lone is not None and not chosen and has_choices:
        # No other task reads choices: lines would leave them out.
        raise HyperparameterError(
            f"{part.path} has choices ({lone.describe()}), and the model ({model.value}) cannot "
            f"learn {next(iter(selections))}.",
            "Name an encoder in model_name_or_path, or write prompts with choices and completions.",
        )
    read = {name for task in chosen for name in selections[task].names}
    others = [
        task
        for task, error in errors.items()
        if error.is_rival
        and _prefers(model, task)
        # One that would only leave out what another one reads is none.
        and not (model in _ENCODERS and error.unread and read.issuperset(error.unread))
    ]
    general = len(chosen) == 1 and not _prefers(model, chosen[0])
    is_plain = general and _has_plain_label(selections[chosen[0]])
    is_bare = model is Model.ENCODER and not hyperparameters.named_columns
    if len(chosen) == 1 and is_bare and _is_scored_pair(part, selections[chosen[0]]):
        chosen = []  # its texts may be embedded
    if general and (model is Model.SEQ2SEQ or (model is Model.DECODER and not is_plain)):
        likely = {task: 0.0 for task in possible if _prefers(model, task)}
        if proposals.find(part, likely, hyperparameters, _works):
            chosen = []  # its texts may be written, not classified
    if len(chosen) != 1 or (others and not _prefers(model, chosen[0])):
        raise _undecided(part, possible, hyperparameters, errors, model)
    reason = f"by its columns: {selections[chosen[0]].describe()}"
    if len(selections) > 1:
        others = [task for task in selections if task != chosen[0]]
        reason += f"; the model is {model.value}, else {' or '.join(others)} could be meant"
    return chosen[0], f"{reason}; set task to choose another"


def _select(part: Part, task: str, hyperparameters: Hyperparameters) -> ColumnSelection:
    """Return the columns that a task finds by names. Raise ColumnsError if it finds none, and
    DataError if the rows hold preference pairs, or some that no task of these can learn."""
    try:
        return columns.select_columns(part, TASKS[task], hyperparameters, is_detection=True)
    except PreferencesError as pairs:
        left_out = ",".join([*hyperparameters.ignored_columns, *pairs.unread]) or None
        pasted = dataclasses.replace(hyperparameters, ignore_columns=left_out)
        _try_rows(part, "dpo", pasted)  # what orpo and reward read
        raise


def _read(path: Path, hyperparameters: Hyperparameters) -> Part | None:
    """Return the rows of a file; None if it is plain text, has none or cannot be read.

    Raises:
        UnclearHeader: The first row may name the columns.
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    try:
        with files_encoded(hyperparameters.encoding):
            if suffix in _PLAIN and path.is_file() and not formats.is_structured(path):
                return None
            part = formats.read(path, header=hyperparameters.names_in_header)
    except UnclearHeader:
        raise
    except WrongEncoding as wrong:
        if wrong.likely is not None and hyperparameters.encoding is None:
            raise
        return None  # reading it asks for another one, or none
    except (DataError, OSError, EOFError, ValueError):
        return None  # reading it as the task's data reports the error
    formats.keep(part, hyperparameters.names_in_header)
    return part if part.table.num_rows else None


def _has_plain_label(selection: ColumnSelection) -> bool:
    """Return whether a column is called label, or has another name that means nothing else."""
    names = {*map(normalize_name, LABEL.names)} - {*LABEL.weak_names}
    return normalize_name(selection.get("label") or "") in names


def _is_scored_pair(part: Part, selection: ColumnSelection) -> bool:
    """Return whether two texts have a number with a fraction as their label, and none is the title
    of the other one."""
    if "text_pair" not in selection or "label" not in selection:
        return False
    if any(column_words.ends_in(selection[role], _TITLES) for role in ("text", "text_pair")):
        return False
    return any(is_fraction(str(cell)) for cell in sample_cells(part, selection["label"]))


def _prefers(model: Model, task: str) -> bool:
    """Return whether a task is for this kind of model, and not for every one."""
    models = TASKS[task].models
    return model in models and len(models) < len(Model)


_ENCODERS = {Model.ENCODER, Model.MASKED, Model.CLASSIFIER}


def _costs(tasks: Sequence[str], model: Model) -> dict[str, float]:
    """Return the tasks that a model can learn, and what each adds to the cost of a line."""
    costs: dict[str, float] = {}
    for task in tasks:
        models = TASKS[task].models
        if model in models:
            is_general = len(models) == len(Model) and model not in _ENCODERS
            more = 16 if model is Model.SEQ2SEQ else 11
            costs[task] = more if is_general else -3 / len(models)
        elif model in _ENCODERS and models & _ENCODERS:
            costs[task] = 3
    return costs


def model_of(config: Mapping[str, Any]) -> Model:
    """Return what a base model is, by its config.json."""
    if config.get("is_encoder_decoder"):
        return Model.SEQ2SEQ
    if "image_size" in config and "vocab_size" not in config:
        return Model.VISION
    names = config.get("architectures") or ()
    for model, endings in _ENDINGS.items():
        if any(name.endswith(endings) for name in names):
            return model
    return Model.ENCODER


def _try_rows(part: Part, task: str, settings: DataSettings) -> None:
    """Make samples of some rows of a file, as the job would. Raise RecipeError, which names the
    file, if it would."""
    if Model.VISION in TASKS[task].models and len(TASKS[task].models) == 1:
        return  # the images are in other files
    rows = part.table.num_rows
    if rows > _TRIED:
        part = part.select(np.linspace(0, rows - 1, _TRIED).astype(int))
    given = dataclasses.replace(settings, task=task)
    with tempfile.TemporaryDirectory() as folder, shards.alone():
        path = Path(folder) / "train.parquet"
        path.write_bytes(b"PAR1")
        formats.keep(dataclasses.replace(part, path=path), given.names_in_header)
        try:
            task_table.load(task)({"train": path.parent}, given)
        except RecipeError as error:
            message = error.message.replace(str(path), str(part.path))
            raise DataError(message, error.remedy) from error


def _works(part: Part, task: str, settings: DataSettings) -> bool:
    """Return whether rows of a file make samples of a task."""
    try:
        _try_rows(part, task, settings)
    except RecipeError:
        return False
    return True


def _undecided(
    part: Part,
    possible: Sequence[str],
    hyperparameters: Hyperparameters,
    errors: Mapping[str, ColumnsError],
    model: Model,
) -> HyperparameterError:
    """Return the refusal that has the lines to give, at most three, the likeliest first."""
    likely = _costs(possible, model)
    for task, error in errors.items():  # what no hyperparameter solves
        if error.is_final and _prefers(model, task):
            raise error
    if not hyperparameters.named_columns and model in _ENCODERS:
        proposals.check_lone_words(part)
    proposed = proposals.find(part, likely, hyperparameters, _works)
    shown = []
    for proposal in proposed:
        names = proposal.selection.names
        unread = join_names([name for name in part.table.column_names if name not in names])
        rest = f"; not read: {unread}" if unread else ""
        shown.append(f"\n- {proposal.line(True)} ({proposal.selection.describe()}{rest})")
    first = errors.get(proposed[0].task) if proposed else None
    why = f"The columns are {show_examples(part, part.table.column_names)}."
    if first is not None and first.is_rival:
        why = first.message
    if not proposed and hyperparameters.named_columns:
        why = (
            "No task has data with all the columns that are named: "
            f"{named_settings(hyperparameters)}."
        )
    remedy = f"Give one of these lines:{''.join(shown)}" if shown else proposals.why_none(part)
    by_hand = "Name the columns by task, text_column, label_column and others (docs/DATA.md)."
    return HyperparameterError(
        f"Hyperparameter task is not given, and the columns of {part.path} and the model "
        f"({model.value}) do not decide it. {why}",
        remedy or by_hand,
    )
