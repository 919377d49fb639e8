"""Whether tokens of the training data are made while it is trained on, and in which portions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipe.batching.portions import Announced, FilePlan, Later, Plan
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.column_names import LABEL
from recipe.data.layout.file_portions import AHEAD, BEHIND
from recipe.data.shards import Hosts
from recipe.data.values import column
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import turns, xla
from recipe.storage import claims, number_files
from recipe.tasks.base import (
    NO_PORTION,
    PIECES,
    ROWS,
    ByMore,
    FilePortion,
    Portion,
    Streaming,
    StreamingFiles,
    Task,
    TaskClass,
)
from recipe.tokenization import store
from recipe.tokenization.portion_files import Others, PortionFiles, Window
from recipe.training import job_identity

_ROWS, _BYTES = 1 << 17, 1 << 24
"""Of a portion, where nobody says how many rows it has: some seconds of a tokenizer's work."""
_DOUBT = 1.5
_LARGE = 4
"""Data of more portions is streamed where nobody says whether it is."""
MakesSamples = Callable[[Portion], Mapping[str, Samples]]


def check(kind: TaskClass, hyperparameters: Hyperparameters) -> None:
    """See that a kind of task can read its data as it is asked to, before it reads any.

    Raises:
        HyperparameterError: it cannot.
    """
    if hyperparameters.streaming_files and not hasattr(kind, "restored"):
        raise HyperparameterError(
            f"Hyperparameter streaming_files has value {hyperparameters.streaming_files}, but "
            f"task={hyperparameters.task} takes rows of all files.",
            "Leave it out: all is then read before training, and must fit on the disk.",
        )


@contextlib.contextmanager
def samples(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    hyperparameters: Hyperparameters,
    arguments: TrainingArguments,
    hosts: Hosts,
) -> Iterator[dict[str, Samples | Later]]:
    """The samples of a task, for the block; all processes call it together.

    Those of the training data are `Announced` where they are made while it is trained on, by a
    process of the first one of each host, which ends with the block. It makes the others, too,
    which are then `Later`: whoever needs them waits for it, or makes them where it has ended.

    Raises:
        HyperparameterError: streaming is asked for, and cannot be; all reasons at once.
    """
    plan = _plan(task, tokenizer, hyperparameters, arguments, hosts)
    if plan is None:
        # torch-xla has a rendezvous of its own.
        waits = arguments.main_process_first if xla.in_use() else turns.first_of_host
        with waits():
            every = task.samples(tokenizer, max_length)
        yield {**every}
        return
    how = _how(task, tokenizer, hyperparameters, plan)
    digest = _digest(task, tokenizer, max_length, how)
    one_each = getattr(task, "streams", None) == ROWS
    digests = {
        name: store.key(split, tokenizer, max_length, "streamed", how)
        for name, split in cast(Streaming, task).others().items()
    }
    others = Others(
        name=f"others-{_hashed(digests)[:32]}",
        make=functools.cache(lambda: task.samples(tokenizer, max_length, NO_PORTION)),
    )
    samples_of = functools.partial(task.samples, tokenizer, max_length)
    if isinstance(plan, FilePlan):
        of_files = cast(StreamingFiles, task)
        files = _of_files(of_files, plan, tokenizer, digest, others, samples_of)
    else:
        reads_all = not hyperparameters.max_train_steps and hyperparameters.num_train_epochs >= 1
        files = _of_rows(plan, digest, others, samples_of, one_each, reads_all)

    def of_other(name: str) -> Samples:
        files.wait_for_others()
        made: Samples = others.make()[name]
        return made

    if isinstance(plan, Plan):
        limit = "" if one_each else f", to max_steps={hyperparameters.max_train_steps}"
        say(
            f"streamed: {plan.rows} training rows are made tokens beside training, in {plan.count} "
            f"portions of {plan.size} rows drawn at random{limit} (docs/TRAINING.md)"
        )
    # Of files nobody has all labels; the task refuses what would need them.
    labels = np.broadcast_to(np.int64(0), (max(1, plan.rows),))
    if isinstance(plan, Plan) and one_each and LABEL in task.train.column_names:
        labels = column(task.train, LABEL)
    with contextlib.ExitStack() as stack:
        # Before this process has used the tokenizer, whose threads a fork does not take along.
        if _is_first_of_host(os.environ):
            stack.enter_context(files.making())
        later = {
            name: Later(len(split), digests[name], functools.partial(of_other, name))
            for name, split in cast(Streaming, task).others().items()
        }
        yield {"train": Announced.by(labels, digest, files), **later}


def _of_rows(
    plan: Plan,
    digest: str,
    others: Others,
    samples_of: MakesSamples,
    one_each: bool,
    reads_all: bool,
) -> PortionFiles:
    """The portions of rows that are there; for the arguments see `_of_files`.

    Args:
        reads_all: Whether each portion is trained on, whose tokens stay on the disk.
    """

    folder = store.tokens_folder() / f"portions-{digest}"

    def make(portion: int) -> Samples:
        made = samples_of(Portion(plan.rows_of(portion), f"{digest}-{portion}"))["train"]
        if portion == 0 and reads_all:
            # Its rows are drawn at random: those of the others take as much.
            left = plan.count - 1 - len(list(folder.glob("[1-9]*.json")))
            needed = left * sum(column.nbytes for column in _arrays(made).values())
            store.check_room(needed, plan.rows, _DOUBT)
        return made

    return PortionFiles(plan, folder, make, one_each=one_each, others=others)


def _of_files(
    task: StreamingFiles,
    plan: FilePlan,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
    others: Others,
    samples_of: MakesSamples,
) -> PortionFiles:
    """The portions of a task's files: of few of them tokens are on the disk, and of none the rows
    but while it is made tokens.

    Args:
        digest: Tells the data and how it is made tokens apart from others.
        samples_of: Makes the rows of a portion tokens.
    """
    files = task.files
    assert files is not None
    # A file of the same name and size that was written anew is another one.
    written = _hashed([files.written(each) for each in range(plan.count)])
    folder = store.tokens_folder() / f"portions-{digest}-{written[:8]}"

    def kept(portion: int) -> Path:
        return folder / f"tokens-{portion}"

    def make(portion: int) -> Samples:
        if not kept(portion).is_dir():
            folder.mkdir(exist_ok=True)
            paths = files.portions[portion]
            with store.room(folder, plan.rows_in(portion)), _scratch(f"rows-{digest}"):
                read = files.read(paths)
                rows = np.arange(len(read))
                samples = samples_of(FilePortion(rows, f"{digest}-{portion}", read))["train"]
                number_files.write(kept(portion), [_arrays(samples)])
        return task.restored(tokenizer, number_files.read(kept(portion)))

    return PortionFiles(
        plan, folder, make, one_each=task.streams == ROWS, others=others,
        window=Window(
            ahead=AHEAD,
            behind=BEHIND,
            forget=lambda portion: shutil.rmtree(kept(portion), ignore_errors=True),
        ),
        remedy="smaller files, or streaming_files=0",
    )  # fmt: skip


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _arrays(samples: Samples) -> dict[str, store.Column]:
    """The fields of some samples that are there."""
    named = {each.name: getattr(samples, each.name) for each in dataclasses.fields(samples)}
    return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}


@contextlib.contextmanager
def _scratch(name: str) -> Iterator[None]:
    """A block whose rows, and whatever else is kept in the cache of data sets, go with it."""
    before = datasets.config.HF_DATASETS_CACHE
    with claims.claimed(store.tokens_folder(), name) as folder:
        datasets.config.HF_DATASETS_CACHE = str(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = before


def _plan(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    hyperparameters: Hyperparameters,
    arguments: TrainingArguments,
    hosts: Hosts,
) -> Plan | FilePlan | None:
    """The portions of the training data; None where it is made tokens before training.

    Raises:
        HyperparameterError: it is read in portions of files, or was asked to be streamed, and
            cannot be.
    """
    if (of_files := getattr(task, "files", None)) is not None:
        if reasons := list(_why_not(task, tokenizer, hyperparameters, arguments, hosts)):
            raise HyperparameterError(
                "The training data is read in portions, a file or some at a time, but "
                f"{'; and '.join(reasons)}.",
                "Give streaming_files=0: all is then read before training, and must fit on the "
                "disk.",
            )
        names = [[name for name, _ in portion] for portion in of_files.identity()]
        sizes = of_files.rows or [0] * len(names)
        return FilePlan(files=names, sizes=sizes, seed=hyperparameters.seed)
    if hyperparameters.streaming is False or not hyperparameters.trains:
        return None
    rows, size = len(task.train), hyperparameters.streaming_rows
    if size is None:
        table = task.train.data
        bytes_of_row = max(1.0, table.nbytes / max(1, table.num_rows))
        # A power of two, so that what Arrow adds to a table seldom changes it.
        size = min(_ROWS, 1 << max(0, int(_BYTES / bytes_of_row).bit_length() - 1))
    plan = Plan(rows=rows, size=size, seed=hyperparameters.seed) if rows else None
    if not hyperparameters.streaming and (plan is None or plan.count <= _LARGE):
        return None
    reasons = list(_why_not(task, tokenizer, hyperparameters, arguments, hosts))
    if not reasons:
        return plan
    if hyperparameters.streaming:
        raise HyperparameterError(
            f"Hyperparameter streaming has value True, but {'; and '.join(reasons)}.",
            "Leave it out: tokens are then made before training.",
        )
    say(
        f"{rows} training rows are made tokens before the first step, not beside training: "
        f"{'; '.join(reasons)}"
    )
    return None


def _why_not(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    hyperparameters: Hyperparameters,
    arguments: TrainingArguments,
    hosts: Hosts,
) -> Iterator[str]:
    """Why tokens cannot be made beside training."""
    streams = getattr(task, "streams", None)
    if streams is None:
        yield f"task={hyperparameters.task} needs all tokens first, as it is set here"
    if streams == PIECES and not hyperparameters.max_train_steps:
        yield (
            "a text may be several samples or none, so that the steps of an epoch are not known: "
            "give max_steps"
        )
    if hosts.sharded:
        yield f"the channels {', '.join(sorted(hosts.sharded))} are sharded (ShardedByS3Key)"
    if not tokenizer.is_fast:
        yield f"the tokenizer ({type(tokenizer).__name__}) is in Python alone, and slow"
    if xla.in_use():
        yield "torch-xla would compile graphs anew for texts that are longer than those before"
    context = str(arguments.__dict__.get("dataloader_multiprocessing_context") or "")
    started = context or multiprocessing.get_start_method()
    if arguments.dataloader_num_workers and started != "fork":
        yield f"the loaders of batches (dataloader_num_workers) are started by {started}, not fork"


def _how(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    hyperparameters: Hyperparameters,
    plan: Plan | FilePlan,
) -> str:
    """Tells how rows are made tokens, and in which portions, apart from other ways."""
    ways: dict[str, Any] = {
        name: getattr(hyperparameters, name) for name in sorted(job_identity.IN_THE_DATA)
    }
    ways |= {"task": hyperparameters.task, "template": str(tokenizer.chat_template)}
    ways |= {"portions": plan.key()}
    if isinstance(plan, FilePlan):
        ways |= {"files": cast(Any, task).files.identity()}
    if isinstance(task, ByMore):
        ways |= {"more": [*task.ways(tokenizer)]}
    return json.dumps(ways, sort_keys=True, default=str)


def _digest(task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int, how: str) -> str:
    """Tells the rows, how they are made tokens, and their portions apart from others."""
    # All rows as they lie, and which of them train: to gather these takes ten times as long.
    lying = datasets.Dataset(task.train.data, fingerprint="all rows")
    digest = hashlib.sha256(store.key(lying, tokenizer, max_length, "streamed", how).encode())
    if (chosen := task.train._indices) is not None:
        for chunk in chosen.column(0).chunks:
            digest.update(np.ascontiguousarray(chunk.to_numpy()).data)
    return digest.hexdigest()[:32]


def _is_first_of_host(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_RANK", environ.get("RANK", "0")) == "0"
