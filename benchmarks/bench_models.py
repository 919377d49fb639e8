"""CPU time and memory of published model sizes, served by this image: docs/MODELS.md.

    OMP_NUM_THREADS=1 python benchmarks/bench_models.py [--rounds 3]

Models have the shapes of the published ones and random weights, so nothing is downloaded. Each is
computed as `amphora serve` does, in the precision that this CPU is faster in. All are loaded (4 GB)
and take turns. Prints a Markdown table: medians of the CPU-ms of a text of 28 tokens, alone and
among 32, and of one of 256 tokens; these by the first model's; the memory of the weights as served.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import CODE, minilm, parser, table, take_turns

sys.path.insert(0, str(CODE))

import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipe.backend import loading
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.rows import Reading, TokenRow
from recipe.models.sources.origin import Origin

WAYS = ((28, 1), (28, 32), (256, 1))
"""Tokens of a text, and texts of a request."""
_TOKENS = 448
"""Tokens that a turn computes, at least."""
_BASE = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072}
_SMALL = {"num_hidden_layers": 12, "hidden_size": 384, "intermediate_size": 1536}
_ROBERTA = {
    **_BASE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
}  # fmt: skip
_XLMR = {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sentence-transformers/all-MiniLM-L6-v2": (
        "Bert",
        {**_SMALL, "num_hidden_layers": 6, "num_attention_heads": 12},
    ),
    "BAAI/bge-small-en-v1.5": ("Bert", {**_SMALL, "num_attention_heads": 12}),
    "intfloat/multilingual-e5-small": (
        "Bert",
        {**_SMALL, "num_attention_heads": 12, "vocab_size": 250037},
    ),
    "distilbert/distilroberta-base": ("Roberta", {**_ROBERTA, "num_hidden_layers": 6}),
    "google-bert/bert-base-uncased": ("Bert", _BASE),
    "FacebookAI/roberta-base": ("Roberta", _ROBERTA),
    "answerdotai/ModernBERT-base": ("ModernBert", {}),
    "FacebookAI/xlm-roberta-base": ("XLMRoberta", {**_BASE, **_XLMR}),
    "microsoft/deberta-v3-base": (
        "DebertaV2",
        {
            **_BASE, "vocab_size": 128100, "relative_attention": True, "position_buckets": 256,
            "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
            "type_vocab_size": 0, "num_attention_heads": 12, "position_biased_input": False,
        },
    ),
    "BAAI/bge-m3": (
        "XLMRoberta",
        {
            **_XLMR, "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096,
            "num_attention_heads": 16, "max_position_embeddings": 8194,
        },
    ),
}  # fmt: skip
"""Families and the fields of config.json in which published models differ from their defaults."""


def main() -> None:
    """Measure and print a table."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--only", default="", help="models whose names contain this")
    options = command.parse_args()
    names = [name for name in SHAPES if options.only in name]
    models = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            models[name] = load(name, Path(folder))
    ways = {(name, *way): partial(cpu_ms, models[name][0], *way) for name in names for way in WAYS}
    medians = {
        way: statistics.median(turns) for way, turns in take_turns(ways, options.rounds).items()
    }
    lines = []
    for name, (loaded, parameters) in models.items():
        weights = sum(weight.nbytes for weight in loaded.model.parameters())
        line = {
            "model": name, "parameters": f"{parameters / 1e6:.0f} M",
            "precision": str(loaded.model.dtype).removeprefix("torch."),
            "memory": f"{weights / 1e6:.0f} MB",
        }  # fmt: skip
        for length, count in WAYS:
            what = f"{length} tokens, {count} a request"
            line[what] = f"{medians[name, length, count]:.1f}"
            line[f"{what}, ratio"] = (
                f"{medians[name, length, count] / medians[names[0], length, count]:.1f}"
            )
        lines.append(line)
    print(table(lines))


def load(name: str, folder: Path) -> tuple[LoadedModel, int]:
    """Save a random model of a published shape, and load it as a server does."""
    family, fields = SHAPES[name]
    library: Any = transformers
    config = getattr(library, f"{family}Config")(**fields)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    model.save_pretrained(folder)
    del model
    # Rows of random tokens are computed: the tokenizer only has to be there.
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)
    origin = Origin(str(folder), {})
    return loading.load(origin, AutoModelForSequenceClassification), parameters


def cpu_ms(loaded: LoadedModel, length: int, count: int) -> float:
    """Return the CPU-ms of a text of a number of tokens, among as many in a call."""
    ids = torch.randint(1000, 20000, (length,), generator=torch.Generator().manual_seed(0))
    rows = [TokenRow(ids.tolist())] * count
    calls = max(1, _TOKENS // (count * length))
    loaded.forward(rows, Reading.LABELS)
    started = time.process_time()
    for _ in range(calls):
        loaded.forward(rows, Reading.LABELS)
    return 1000 * (time.process_time() - started) / (calls * count)


if __name__ == "__main__":
    main()
