"""Whether tokens of the training data are made while it is trained on, and in which portions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipe.batching.portions import Announced, Later, Plan
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.column_names import LABEL
from recipe.data.shards import Hosts
from recipe.data.values import column
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import turns, xla
from recipe.tasks.base import NO_PORTION, PIECES, ROWS, Portion, Streaming, Task
from recipe.tokenization import store
from recipe.tokenization.portion_files import Others, PortionFiles
from recipe.training import job_identity

_ROWS, _BYTES = 1 << 17, 1 << 24
"""Of a portion, where nobody says how many rows it has: some seconds of a tokenizer's work."""
_LARGE = 4
"""Data of more portions is streamed where nobody says whether it is."""


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

    def make(portion: int) -> Samples:
        rows = Portion(plan.rows_of(portion), f"{digest}-{portion}")
        return task.samples(tokenizer, max_length, rows)["train"]

    one_each = getattr(task, "streams", None) == ROWS
    digests = {
        name: store.key(split, tokenizer, max_length, "streamed", how)
        for name, split in cast(Streaming, task).others().items()
    }
    others = Others(
        name=f"others-{hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]}",
        make=functools.cache(lambda: task.samples(tokenizer, max_length, NO_PORTION)),
    )
    folder = store.tokens_folder() / f"portions-{digest}"
    files = PortionFiles(plan, folder, make, one_each=one_each, others=others)

    def of_other(name: str) -> Samples:
        files.wait_for_others()
        made: Samples = others.make()[name]
        return made

    limit = "" if one_each else f", to max_steps={hyperparameters.max_train_steps}"
    say(
        f"streamed: {plan.rows} training rows are made tokens beside training, in {plan.count} "
        f"portions of {plan.size} rows drawn at random{limit} (docs/TRAINING.md)"
    )
    has_labels = one_each and LABEL in task.train.column_names
    labels = column(task.train, LABEL) if has_labels else np.zeros(plan.rows, np.int64)
    with contextlib.ExitStack() as stack:
        # Before this process has used the tokenizer, whose threads a fork does not take along.
        if _is_first_of_host(os.environ):
            stack.enter_context(files.making())
        later = {
            name: Later(len(split), digests[name], functools.partial(of_other, name))
            for name, split in cast(Streaming, task).others().items()
        }
        yield {"train": Announced.by(labels, digest, files), **later}


def _plan(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    hyperparameters: Hyperparameters,
    arguments: TrainingArguments,
    hosts: Hosts,
) -> Plan | None:
    """The portions of the training data; None where it is made tokens before training."""
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
    task: Task, tokenizer: PreTrainedTokenizerBase, hyperparameters: Hyperparameters, plan: Plan
) -> str:
    """Tells how rows are made tokens, and in which portions, apart from other ways."""
    ways: dict[str, Any] = {
        name: getattr(hyperparameters, name) for name in sorted(job_identity.IN_THE_DATA)
    }
    ways |= {"task": hyperparameters.task, "template": str(tokenizer.chat_template)}
    ways |= {"portions": [plan.rows, plan.size, plan.seed]}
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
