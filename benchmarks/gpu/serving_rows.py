"""Rows of texts end to end, by CUDA graphs, as serving computes them: are they right?

On a CPU a tape that computes again stands for the graphs (`--smoke`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import io
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage import ROOT, Failed, Stage, Values, minilm, table, wait

import numpy as np  # isort: skip
import torch  # isort: skip
from transformers import AutoModel, AutoModelForSequenceClassification

from recipe.inference import loaded_model, loading
from recipe.inference.packed import choice as packing_choice
from recipe.inference.packed.choice import examples, farthest, states_of_padded
from recipe.inference.packed.graphs import LENGTHS, CudaTape, Graphs, Shape, Tape
from recipe.inference.packed.rows import PackedRows
from recipe.inference.rows import Reading, TokenRow
from recipe.inference.saved.origin import Origin
from recipe.models import flat_attention


def truth(stage: Stage) -> Values:
    """States of rows end to end, with graphs and without, are no further from padded texts in
    float32 than twice what padded texts in bfloat16 are; they stay, in threads and streams too."""
    exact: Any = AutoModel.from_pretrained(minilm(stage.options), dtype=torch.float32)
    exact = exact.to(stage.device).eval()
    model = copy.deepcopy(exact).to(torch.bfloat16)
    longest = int(model.config.max_position_embeddings)
    packed = PackedRows.of(model, "AutoModel", frozenset({"token_type_ids"}), {})
    assert packed is not None
    flat_attention.use(model)
    tape: Tape = _tape(stage)
    graphs = Graphs(tape, model, functools.partial(packed.computed, model))
    lengths = LENGTHS[-3:] if stage.smoke else LENGTHS
    began = time.monotonic()
    shapes = [Shape.of_graph(tokens, longest, packed.takes_types) for tokens in lengths]
    why_not = graphs.record(shapes, stage.device, began + 60)
    seconds = time.monotonic() - began
    if graphs.lengths != sorted(lengths):
        raise Failed("graphs are missing", recorded=graphs.lengths, why_not=why_not)
    by_graph = replace(packed, graphs=graphs)

    @torch.inference_mode()
    def states(how: PackedRows, rows: list[TokenRow]) -> torch.Tensor:
        return how.states(model, rows)[0]

    rows_seen = []
    for tokens in sorted(lengths):
        calls = examples(tokens, longest, model.config)
        # The first call once more: a graph must not have kept the second one's numbers.
        for rows in [*calls, calls[0]]:
            expected = states_of_padded(exact, rows, longest)
            found = {
                "padded": farthest(states_of_padded(model, rows, longest), expected),
                "end to end": farthest(states(packed, rows), expected),
                "graph": farthest(states(by_graph, rows), expected),
            }
            rows_seen.append({"tokens": tokens, "texts": len(rows), **found})
            if not max(found.values()) <= 2 * found["padded"] + 0.01:
                raise Failed("states are others", row=rows_seen[-1])
    _states_stay(stage, functools.partial(states, by_graph), functools.partial(states, packed))
    print(table(rows_seen), flush=True)
    return {
        "seconds to record": round(seconds, 2),
        "MB of graphs": round(tape.taken() / 1e6),
    }


def _tape(stage: Stage) -> Any:
    if stage.device.type == "cuda":
        return CudaTape(stage.device)
    sys.path.insert(0, str(ROOT))
    from tests.support.graph_tape import Rerun

    return Rerun()


def _states_stay(stage: Stage, by_graph: Any, without: Any) -> None:
    """Nothing writes over states that were given out, from whatever thread or stream it comes."""
    random = np.random.default_rng(0)
    calls = [
        [TokenRow(random.integers(1000, 20000, n).tolist()) for n in random.integers(2, 40, 4)]
        for _ in range(16)
    ]
    expected = [without(rows) for rows in calls]
    found = [by_graph(rows) for rows in calls]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found += list(pool.map(by_graph, calls))
    expected += expected
    if stage.device.type == "cuda":
        aside = torch.cuda.Stream(stage.device)
        aside.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(aside):
            found += [by_graph(rows) for rows in calls]
        expected += expected[: len(calls)]
    wait(stage.device)
    worst = max(farthest(one, other) for one, other in zip(found, expected, strict=True))
    if not worst <= 0.25:
        raise Failed("states were written over", farthest=worst)


def choice(stage: Stage, folder: Path) -> Values:
    """What a first worker measures at start and takes, within its time; a second one takes the same
    without measuring."""
    kept, said = tempfile.tempdir, io.StringIO()
    seconds, chosen, took = [], [], {}
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch
        try:
            for _ in range(2):
                model = AutoModelForSequenceClassification.from_pretrained(
                    folder, dtype=torch.bfloat16
                )
                model = model.to(stage.device).eval()
                flat_attention.use(model)
                inputs = frozenset({"token_type_ids"})
                name = "AutoModelForSequenceClassification"
                packed = PackedRows.of(model, name, inputs, {})
                assert packed is not None
                packed = replace(packed, most=256) if stage.smoke else packed
                longest = int(model.config.max_position_embeddings)
                began = time.monotonic()
                with contextlib.redirect_stdout(said):
                    one = packing_choice.Choice(model, packed, longest, {}, _tape(stage))
                    made = one.make()
                seconds.append(round(time.monotonic() - began, 2))
                chosen.append(made and (made.graphs.lengths if made.graphs else []))
                took = took or one.took
        finally:
            tempfile.tempdir = kept
    rows = [
        {"tokens": tokens, **{f"{way}, ms": round(1000 * each, 3) for way, each in ways.items()}}
        for tokens, ways in took.items()
    ]
    print(table(rows), flush=True)
    values = {"rows": rows, "seconds to choose": seconds, "chosen": chosen, "log": said.getvalue()}
    if not took or chosen[0] != chosen[1] or "another worker" not in said.getvalue():
        raise Failed("two workers do not choose alike", **values)
    # Where a CPU stands for the device, others may take it.
    if not stage.smoke and seconds[0] > packing_choice.SECONDS + 5:
        raise Failed("the choice takes too long", **values)
    return values


def ahead(stage: Stage, folder: Path) -> Values:
    """A long list with no call ahead and with one: the same answers; seconds of each."""
    origin = Origin.find(str(folder), os.environ)
    loaded = loading.load(origin, AutoModelForSequenceClassification, os.environ)
    random = np.random.default_rng(0)
    lengths = random.integers(2, 64, 200 if stage.smoke else 20_000)
    rows = [TokenRow(random.integers(1000, 20000, length).tolist()) for length in lengths]
    calls_ahead: Any = loaded_model.CALLS_AHEAD
    kind, usual = stage.device.type, dict(calls_ahead)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    answers = {}
    for _ in range(3):
        for count in (0, 1):
            calls_ahead[kind] = count
            began = time.perf_counter()
            answers[count] = torch.stack(loaded.forward(rows, Reading.LABELS))
            seconds[count].append(time.perf_counter() - began)
    calls_ahead.clear()
    calls_ahead.update(usual)
    off = float((answers[1] - answers[0]).abs().max())
    if not off <= 1e-3 * float(answers[0].abs().max()):
        raise Failed("other answers with a call ahead", off=off)
    return {f"seconds, {count} ahead": min(took) for count, took in seconds.items()}
