"""What the three stages on a GPU share: options, a device, a time limit and a record.

A stage is a list of checks. The result of each is written to the stage's JSON file at once, so that
it is kept if the machine is taken away. A check that fails is recorded with its reason, and the
next one runs; one that would exceed the time limit is left out and named. Modules of this folder
import what is in `common` from here, since this one sets the path.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import (
    CODE,
    ROOT,
    CommandError,
    Server,
    amphora_server,
    minilm,
    parser,
    python_path,
    run,
    table,
    take_turns,
    training_arguments,
)

__all__ = ("CODE", "ROOT", "CommandError", "Server", "amphora_server", "minilm", "parser",
           "python_path", "run", "table", "take_turns", "training_arguments")  # fmt: skip

sys.path.insert(0, str(CODE))

Values = Mapping[str, Any]


class Failed(Exception):
    """A check that found something wrong; its values are recorded."""

    def __init__(self, reason: str, **values: Any) -> None:
        super().__init__(reason)
        self.values = values


class Stage:
    """A stage: its options, its device and its record."""

    def __init__(self, name: str, description: str | None, seconds: float) -> None:
        arguments = parser(description)
        arguments.add_argument("--smoke", action="store_true", help="small sizes, on any device")
        arguments.add_argument("--seconds", type=float, default=seconds, help="the time limit")
        arguments.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
        arguments.add_argument("--only", default="", help="checks whose name begins so, by commas")
        arguments.add_argument("--model", type=Path, default=None, help="a folder with MiniLM")
        self.options = arguments.parse_args()
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
        """The seconds until the time limit."""
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
        record = {"check": name, "outcome": outcome, "seconds": round(seconds, 1)}
        self._records.append({**record, **values})
        self._path.write_text(json.dumps(self._records, indent=1, default=str) + "\n")
        shown = {key: value for key, value in values.items() if key != "where"}
        print(f"{outcome:8} {name} ({seconds:.1f} s) {json.dumps(shown, default=str)}", flush=True)

    def end(self) -> None:
        """Print a table; exit 1 if something failed. In a smoke run nothing may be left out."""
        shown = [
            {key: record[key] for key in ("check", "outcome", "seconds")}
            for record in self._records
        ]
        print(f"\n{table(shown)}\n{self._path}")
        bad = {"FAILED", "ERROR"} | ({"left out"} if self.smoke else set())
        sys.exit(any(record["outcome"] in bad for record in self._records))


def find_minilm(stage: Stage) -> Path:
    """Return the folder of MiniLM: from --model, from the kit, or the package's."""
    if stage.options.model is not None:
        return Path(stage.options.model)
    kit = ROOT / "build" / "gpu-kit" / "minilm"
    return kit if kit.is_dir() else minilm()


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any], repeats: int) -> float:
    """Return the mean seconds of `repeats` calls, after one that does not count."""
    work()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - began) / repeats


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the floating-point operations per second of a square product."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / timed(device, lambda: left @ right, 10)


def relative_error(results: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of `expected`; infinite if it is NaN."""
    expected = expected.double()
    difference = (results.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(difference.nan_to_num(nan=float("inf")))
