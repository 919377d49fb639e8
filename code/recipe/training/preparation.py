"""Prepare what a plan computes: the process, the model, its samples and their batches.

A training, `amphora doctor` and the quantization of a model call `prepare`, so that all of them
measure and compute the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, set_seed

from recipe.batching import samples as batching
from recipe.batching.samples import Samples
from recipe.console import Progress, is_first_process, say
from recipe.data.layout.shards import Hosts
from recipe.errors import DistributedError
from recipe.plan import batch_layout, data_report, resolution, trainer_arguments
from recipe.plan.batch_layout import BatchPlan, TrainableModel
from recipe.plan.resolution import Plan
from recipe.plan.table import Table
from recipe.reports.section import Section
from recipe.runtime import device, xla
from recipe.runtime.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A model, samples, and how they are computed."""

    loaded: TrainableModel
    """With the arguments of the Trainer: size of batches and warm-up are decided."""
    samples: Mapping[str, Samples]
    """Those of `train`, `evaluation` and maybe `test`."""
    batches: BatchPlan
    sections: Sequence[Section] = ()
    """The report's sections on the data."""


def prepare(
    plan: Plan,
    table: Table,
    watch: Stopwatch | None = None,
    *,
    choose_rows: Callable[[TrainableModel, Sequence[int]], Sequence[int]] | None = None,
    samples: Mapping[str, Samples] | None = None,
) -> PreparedTraining:
    """Set up the process, load the model, tokenize the data and lay out its batches. All processes
    of a job call it together.

    Args:
        table: Receives the decisions, and findings on the data.
        watch: Measures the phases.
        choose_rows: Returns the training rows to use, with a few of the evaluation, by the model
            and the tokens of some rows; None means all.
        samples: Samples of an earlier call for the same tokenizer, which are not made again.

    Raises:
        RecipeError: The model cannot be loaded or trained as planned, or the data cannot be used.
    """
    task, given, watch = plan.task, plan.hyperparameters, watch or Stopwatch()
    device.set_up(plan.device)
    set_seed(given.seed)  # before the model's new head is initialised
    # Under torch-xla, processes wait for each other in its own rendezvous.
    waits = plan.arguments.main_process_first if xla.is_used() else device.first_of_host
    with waits(), Progress("loading the model"):
        loaded = resolution.load(plan, table)
    watch.lap("model")
    if samples is not None:
        return lay_out(loaded, samples, table)
    lengths: Sequence[int] = ()
    sections: Sequence[Section] = ()
    # A host may have no rows of sharded channels.
    if is_first_process() and (given.trains or choose_rows) and len(task.data.train):
        with Progress("looking at the rows"):
            lengths = data_report.sampled_lengths(task, loaded.tokenizer)
            findings, sections = data_report.inspect(
                task, loaded.tokenizer, lengths, loaded.max_length
            )
        for finding in findings:
            table.append(finding)
        watch.lap("data report")
    with waits():
        if choose_rows is None:
            samples = task.samples(loaded.tokenizer, loaded.max_length)
        else:
            rows = choose_rows(loaded, lengths)
            samples = task.some_samples(
                loaded.tokenizer, loaded.max_length, rows, plan.arguments.eval_batch_size
            )
    if plan.hosts.sharded:
        check_same_model(loaded.model, plan.hosts)
    samples = gather_hosts(samples, task.data.sharded, plan.hosts, plan.host)
    stops = task.stop_tokens(loaded.tokenizer, samples, loaded.max_length)
    resolution.add_stop_tokens(stops, loaded, table)
    prepared = lay_out(loaded, samples, table)
    watch.lap("tokens")
    return replace(prepared, sections=sections)


def lay_out(
    loaded: TrainableModel, samples: Mapping[str, Samples], table: Table
) -> PreparedTraining:
    """Decide how samples make batches. Raise HyperparameterError if packing=True, and the model
    cannot be packed, and DistributedError if one process would have to use several GPUs."""
    args = loaded.arguments
    if args.n_gpu > 1:
        raise DistributedError(
            f"One process sees {args.n_gpu} GPUs.",
            "Start the script by torchrun with one process for each GPU, or select one by "
            "CUDA_VISIBLE_DEVICES.",
        )
    with Progress("making batches"):
        decided = batch_layout.decide(loaded, batch_layout.settle(args), samples, table)
    arguments = trainer_arguments.changed(
        args,
        per_device_train_batch_size=decided.cut.size,
        gradient_accumulation_steps=decided.cut.accumulation,
        **trainer_arguments.fitted_warmup(args, decided.training.steps(), table),
    )
    return PreparedTraining(
        loaded=replace(loaded, arguments=arguments), samples=samples, batches=decided
    )


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
