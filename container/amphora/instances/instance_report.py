"""Answer `amphora doctor --instances`: which instance types fit a job and its endpoint."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError
from amphora.common.sizes import format_bytes
from amphora.instances import prices
from amphora.instances.instance_types import InstanceTable, read_table
from amphora.instances.serving_fit import (
    FRONT_MS,
    MEASURED_TOKENS,
    USED,
    ServingFit,
    ServingLoad,
    fit_serving,
)
from amphora.instances.training_fit import (
    CONTEXT,
    GB,
    NO,
    SPARE,
    TIGHT,
    UNKNOWN,
    YES,
    TrainingFit,
    TrainingNeeds,
    fit_training,
)

_KINDS = {"cuda": "GPU", "cpu": "CPU", "neuron": "Neuron"}
_ORDER = (YES, TIGHT, UNKNOWN, NO)


@dataclass(frozen=True, kw_only=True)
class InstanceQuestion:
    """What `--instances` is to answer."""

    load: ServingLoad | None = None
    """The load of an endpoint; None leaves endpoints out."""
    training_prices: Mapping[str, float] = field(default_factory=dict)
    """Price of an hour by instance type."""
    serving_prices: Mapping[str, float] = field(default_factory=dict)
    price_origin: str = "--prices FILE or --prices aws adds them"


def read_question(
    prices_from: str | None, load: ServingLoad | None, environ: Mapping[str, str] = os.environ
) -> InstanceQuestion:
    """Make a question of command-line arguments.

    Args:
        prices_from: A file, or `aws`; None for no prices.

    Raises:
        ConfigError: The prices cannot be read.
    """
    if prices_from is None:
        return InstanceQuestion(load=load)
    if prices_from != prices.AWS:
        read = prices.read_prices(Path(prices_from))
        return InstanceQuestion(
            load=load, training_prices=read, serving_prices=read, price_origin=prices_from
        )
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(
            "--prices aws needs a region, and AWS_REGION is not set.",
            "Set it, as in AWS_REGION=eu-west-1.",
        )
    return InstanceQuestion(
        load=load,
        training_prices=prices.fetch_prices("Training", region),
        serving_prices=prices.fetch_prices("Hosting", region) if load else {},
        price_origin=f"AWS's price API, {region}, on demand, US dollars",
    )


@dataclass(frozen=True)
class InstanceReport:
    """The instance types for a job and its endpoint, the recommended ones first."""

    needs: TrainingNeeds
    question: InstanceQuestion
    table: InstanceTable
    training: Sequence[TrainingFit]
    serving: Sequence[ServingFit]
    """Empty if endpoints were left out."""

    def as_dict(self) -> dict[str, Any]:
        """Return all types for JSON."""
        return {
            "training": [
                {**fit.as_dict(), "price": self.question.training_prices.get(fit.instance.name)}
                for fit in self.training
            ],
            "serving": [
                {**fit.as_dict(), "price": self.question.serving_prices.get(fit.instance.name)}
                for fit in self.serving
            ],
            "left_out": dict(self.table.left_out),
            "origins": list(self.origins()),
        }

    def lines(self) -> Iterator[str]:
        """Yield the report in lines of at most 100 characters: of each family one type."""
        yield from self._training_lines()
        if self.question.load:
            yield ""
            yield from self._serving_lines(self.question.load)
        yield ""
        grouped: dict[str, list[str]] = {}
        for family, reason in self.table.left_out.items():
            grouped.setdefault(reason, []).append(family)
        for reason, families in grouped.items():
            yield from _wrapped(f"not for the images: {', '.join(families)} ({reason})")
        for line in self.origins():
            yield from _wrapped(line)

    def _training_lines(self) -> Iterator[str]:
        yield from _wrapped(f"Training: {_recommended(self.training)}")
        yield ""
        yield _row("instance", "fits", "devices", "each needs", "RAM", "time", "an hour")
        for fit in _choose_by_family(self.training):
            instance = fit.instance
            if fit.needed is None or fit.available is None or fit.verdict in (NO, UNKNOWN):
                continue
            price = self.question.training_prices.get(instance.name)
            yield _row(
                instance.name, fit.verdict, _devices(fit), f"{fit.needed / GB:.3g} of "
                f"{fit.available / GB:.3g} GB", f"{instance.memory / GB:.0f} GB",
                _time(fit.seconds), "-" if price is None else f"{price:g}",
            )  # fmt: skip

        yield from _reasons(self.training)

    def _serving_lines(self, load: ServingLoad) -> Iterator[str]:
        tokens = load.tokens or self.needs.tokens
        length = f" of {tokens:.0f} tokens" if tokens is not None else ""
        wanted = f"Serving {load.requests:g} requests a second{length}"
        yield from _wrapped(f"{wanted}: {_recommended(self.serving)}")
        yield ""
        yield _row("instance", "fits", "instances", "CPU-ms, req/s", "RAM", "", "an hour")
        for fit in _choose_by_family(self.serving):
            instance = fit.instance
            if fit.count is None or fit.cpu_ms is None or fit.rate is None:
                continue
            price = self.question.serving_prices.get(instance.name)
            yield _row(
                instance.name, fit.verdict, f"{fit.count} of {instance.vcpus} vCPUs",
                f"{fit.cpu_ms:.1f}, {fit.rate:.0f}", f"{instance.memory / GB:.0f} GB", "",
                "-" if price is None else f"{price * fit.count:g}",
            )  # fmt: skip

        yield from _reasons(self.serving)

    def origins(self) -> Iterator[str]:
        """Yield where each kind of number comes from."""
        needs = self.needs
        for key in needs.memory:
            parts = ", ".join(
                f"{name} {'unknown' if size is None else format_bytes(size)}"
                for name, size in needs.memory[key].items()
            )
            yield f"a step, {key}: {parts} (predicted by a step of fake tensors)"
        yield (
            f"each needs: the step and {CONTEXT / GB:g} GB for CUDA (measured on an H200, "
            f"docs/GPU.md); on CPUs the step and {format_bytes(needs.host - needs.weights)} that "
            f"this check had used; tight: less than {SPARE - 1:.0%} to spare, the tested error of "
            "the prediction"
        )
        yield (
            "time: of the steps, by rates of BERT-base and MiniLM on one H200 (docs/GPU.md), by "
            "several devices without loss; `amphora doctor --steps 20` measures it on a device"
        )
        if load := self.question.load:
            given = "as given" if load.cpu_ms is not None else (
                f"MiniLM-L6's at {MEASURED_TOKENS} tokens (docs/LAB.md) in proportion to tokens "
                f"and weights, and {FRONT_MS} for the front: an assumption; --cpu-ms replaces it"
            )  # fmt: skip
            yield (
                f"CPU-ms: {given}; req/s: of one instance at {USED:.0%} of its CPUs "
                "(docs/ENDPOINTS.md), if a vCPU computes as a measured CPU did; RAM needed: that "
                "of MiniLM-L6's server (docs/LAB.md) and the weights"
            )
        yield f"instances: {self.table.origin}; sources of devices: amphora/instances/types.json"
        yield f"prices: {self.question.price_origin}"


def answer_question(question: InstanceQuestion, needs: str) -> InstanceReport:
    """Answer a question for a job whose needs the recipe printed, as JSON."""
    job_needs = TrainingNeeds(**json.loads(needs))
    table = read_table()
    training = [fit_training(instance, job_needs) for instance in table.instances]
    load = question.load
    serving = (
        [fit_serving(instance, job_needs, load) for instance in table.instances] if load else []
    )

    def cost(prices: Mapping[str, float]) -> Callable[[Any], tuple[Any, ...]]:
        def key(fit: TrainingFit | ServingFit) -> tuple[Any, ...]:
            price = prices.get(fit.instance.name)
            count = getattr(fit, "count", None) or 1
            paid = float("inf") if price is None else price * count
            return _ORDER.index(fit.verdict), paid, count, fit.instance.size, fit.instance.name

        return key

    return InstanceReport(
        job_needs, question, table, sorted(training, key=cost(question.training_prices)),
        sorted(serving, key=cost(question.serving_prices)),
    )  # fmt: skip


def _recommended(fits: Sequence[Any]) -> str:
    """Name the first type of each kind that fits."""
    first: dict[str, str] = {}
    for fit in fits:
        if fit.verdict == YES:
            first.setdefault(_KINDS[fit.instance.device.kind], fit.instance.name)
    if not first:
        return "no type is known to fit"
    return "take " + " or ".join(f"{name} ({kind})" for kind, name in first.items())


def _choose_by_family(fits: Sequence[Any]) -> Iterable[Any]:
    """Return the first type of each family that fits, else the largest one with its reason."""
    by_family = attrgetter("instance.family")
    best = []
    for _, group in groupby(sorted(fits, key=by_family), by_family):
        of_family = list(group)
        usable = [fit for fit in of_family if fit.verdict != NO]
        best.append(
            min(usable, key=fits.index)
            if usable
            else max(of_family, key=lambda fit: (fit.needed is not None, fit.instance.size))
        )
    return sorted(best, key=fits.index)


def _devices(fit: TrainingFit) -> str:
    instance = fit.instance
    if instance.devices:
        return f"{instance.devices} {instance.device.name}"
    return f"{instance.vcpus} vCPUs{', AMX' if instance.device.bf16 else ''}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _row(*cells: str) -> str:
    widths = (22, 7, 17, 18, 9, 14, 8)
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _reasons(fits: Sequence[Any]) -> Iterator[str]:
    """Yield why families do not fit, or are not known to: those with one reason together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for fit in _choose_by_family(fits):
        if fit.verdict in (NO, UNKNOWN):
            grouped.setdefault((fit.verdict, fit.why), []).append(fit.instance.name)
    if grouped:
        yield ""
    for (verdict, why), names in grouped.items():
        yield from _wrapped(f"{verdict}: {why}: {', '.join(names)}")


def _wrapped(text: str) -> list[str]:
    """Return lines of at most 100 characters, all but the first indented."""
    return textwrap.wrap(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
