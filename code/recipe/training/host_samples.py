"""The samples of a job with several hosts: all have the same, or each its own part of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from recipe.batching import samples as batching
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.layout import channels as layout
from recipe.data.shards import Hosts
from recipe.errors import DataError, DistributedError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import device

_UNEVEN = 1.1
"""Parts of which one is so many times another are worth a line."""


def same_task(
    hyperparameters: Hyperparameters, channels: Mapping[str, Path], hosts: Hosts
) -> Hyperparameters:
    """With the task that hosts with training data have told by it, and its learning rate; others
    had nothing to tell by.

    Raises:
        DistributedError: their data tells different tasks.
    """
    try:
        requested = hyperparameters.dataset_config_name
        has_data = bool(layout.find(channels, requested, hosts.sharded).files.get("train"))
    except DataError:
        has_data = False  # what reads it says what is wrong
    tasks = hosts.each((hyperparameters.task, has_data, hyperparameters.learning_rate))
    rates_of_tasks = {task: rate for task, has, rate in tasks if has}
    if len(rates_of_tasks) > 1:
        each = [f"{name}: {task}" for name, (task, *_) in zip(hosts.names, tasks, strict=True)]
        raise DistributedError(
            f"The hosts' parts of the data are told to be for different tasks: {', '.join(each)}.",
            "Give the hyperparameter task.",
        )
    unchanged = hyperparameters.task, hyperparameters.learning_rate
    task, rate = next(iter(rates_of_tasks.items()), unchanged)
    return dataclasses.replace(hyperparameters, task=task, learning_rate=rate)


def check_same_model(model: PreTrainedModel, hosts: Hosts) -> None:
    """See that all hosts have made the same model, with the same classes.

    Raises:
        DistributedError: names the first host that has another one.
    """
    config: Any = model.config
    configurations = hosts.each(json.dumps(config.to_diff_dict(), sort_keys=True, default=str))
    for host, theirs in zip(hosts.names, configurations, strict=True):
        if theirs != configurations[0]:
            raise DistributedError(
                f"The data of {hosts.names[0]} and {host} give models of different configurations.",
                "Set S3DataDistributionType to FullyReplicated.",
            )


def of_all_hosts(
    samples: Mapping[str, Samples],
    sharded: Collection[str],
    hosts: Hosts,
    environ: Mapping[str, str],
) -> dict[str, Samples]:
    """The samples as all processes see them; the processes call it together.

    Each looks up row numbers of one plan in its own data: with different data they would train on
    rows that nobody chose, and score one host's answers against another's labels. So all have read
    the same, or of a sharded data set the same as the other processes of their host.

    Args:
        sharded: Which of `samples` are those of this host only.

    Raises:
        DistributedError: names two processes and what each has read.
    """
    splits_here = {name: (len(split), split.fingerprint()) for name, split in samples.items()}
    splits_of_hosts = device.everyones((environ.get("SM_CURRENT_HOST", "this host"), splits_here))
    for rank, (host, theirs) in enumerate(splits_of_hosts):
        first_of_host = [each_host for each_host, _ in splits_of_hosts].index(host)
        for name, read in theirs.items():
            first = first_of_host if name in sharded else 0
            first_host, first_read = (
                splits_of_hosts[first][0],
                splits_of_hosts[first][1].get(name, (0, "none")),
            )
            if read != first_read:
                raise DistributedError(
                    f"The processes have read different data: rank {first} on {first_host} has "
                    f"{name} {first_read[0]} rows ({first_read[1]}); rank {rank} on {host} has "
                    f"{read[0]} rows ({read[1]}).",
                    "Give every host all of a channel (S3DataDistributionType FullyReplicated, "
                    "and the same files on hosts of your own), or each its own part: "
                    "ShardedByS3Key, of which SM_INPUT_DATA_CONFIG tells.",
                )
    whole = dict(samples)
    for name in sorted(set(sharded) & set(samples)):
        whole[name], rows = batching.sharded(
            samples[name], hosts.of_processes, hosts.rank, device.everyones
        )
        if not sum(rows):
            raise DistributedError(f"No host has {name} rows.", "Give some.")
    if "train" in sharded:
        shards = whole["train"].shards
        assert shards is not None
        for_each = [len(shards.rows(at)) / len(shards.ranks(at)) for at in range(shards.hosts)]
        if max(for_each) > _UNEVEN * min(for_each):
            say(
                f"sharded: {min(for_each):.0f} to {max(for_each):.0f} training samples for each "
                "process: the host with most decides on the number of steps, and hosts with fewer "
                "give each step fewer (shards of one size make the best use of all)"
            )
    return whole
