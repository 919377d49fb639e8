"""Compare and combine the samples of several hosts, which are equal or sharded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedModel

from recipe.batching import samples as batching
from recipe.batching.samples import Samples
from recipe.console import say
from recipe.data.layout.shards import Hosts
from recipe.errors import DistributedError
from recipe.runtime import device

_UNEVEN = 1.1
"""Ratio of the largest to the smallest shard above which a line is logged."""


def check_same_model(model: PreTrainedModel, hosts: Hosts) -> None:
    """Raise DistributedError, with the first host that differs, if hosts have different model
    configurations, classes included."""
    config: Any = model.config
    configurations = hosts.gather(json.dumps(config.to_diff_dict(), sort_keys=True, default=str))
    for host, theirs in zip(hosts.names, configurations, strict=True):
        if theirs != configurations[0]:
            raise DistributedError(
                f"The data of {hosts.names[0]} and {host} lead to different model configurations.",
                "Set S3DataDistributionType to FullyReplicated.",
            )


def gather_hosts(
    samples: Mapping[str, Samples],
    sharded: Collection[str],
    hosts: Hosts,
    host: str,
) -> dict[str, Samples]:
    """Return the samples as all processes see them. A collective of all processes.

    All processes share one plan of row numbers. If they had read different data, they would train
    on wrong rows, and compare one host's predictions with another's labels. So raise
    DistributedError, with two processes and what they read, if a split differs between processes,
    or if its name is in `sharded`, between processes of one host.
    """
    splits_here = {name: (len(split), split.fingerprint()) for name, split in samples.items()}
    splits_of_hosts = device.gather_objects((host, splits_here))
    for rank, (their_host, theirs) in enumerate(splits_of_hosts):
        first_of_host = [name for name, _ in splits_of_hosts].index(their_host)
        for name, read in theirs.items():
            first = first_of_host if name in sharded else 0
            first_host, first_read = (
                splits_of_hosts[first][0],
                splits_of_hosts[first][1].get(name, (0, "none")),
            )
            if read != first_read:
                raise DistributedError(
                    f"The processes have read different data: rank {first} on {first_host} has "
                    f"{name} {first_read[0]} rows ({first_read[1]}); rank {rank} on {their_host} "
                    f"has {read[0]} rows ({read[1]}).",
                    "Give all hosts the same files (S3DataDistributionType FullyReplicated). To "
                    "give each host a part, set ShardedByS3Key; the recipe reads it from "
                    "SM_INPUT_DATA_CONFIG.",
                )
    whole = dict(samples)
    for name in sorted(set(sharded) & set(samples)):
        whole[name] = batching.sharded(samples[name], hosts)
        if not len(whole[name]):
            raise DistributedError(f"No host has {name} rows.", f"Add {name} data.")
    if "train" in sharded:
        shards = whole["train"].shards
        assert shards is not None
        shares = [
            len(shards.rows(index)) / len(shards.ranks(index)) for index in range(shards.hosts)
        ]
        if max(shares) > _UNEVEN * min(shares):
            say(
                f"sharded: the hosts have {min(shares):.0f} to {max(shares):.0f} training samples "
                "per process: the largest shard determines the number of steps, and smaller ones "
                "contribute fewer samples to each step (shards of equal size use all hosts best)"
            )
    return whole
