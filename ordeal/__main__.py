"""Run campaigns and print what held: `python -m ordeal --only kill,requests --short --seed 7`.

The exit code is 1 if a promise was broken or not tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

from ordeal.common import CAMPAIGNS, PLANTED, ROOT, Trial


def main() -> int:
    """Run the campaigns one after the other, each in its own folder."""
    parser = argparse.ArgumentParser(prog="python -m ordeal", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(CAMPAIGNS)}")
    parser.add_argument("--short", action="store_true", help="the form that the tests run")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="end each campaign after so many at most"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "ordeal", help="for logs and NAME.json"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(CAMPAIGNS)
    unknown = sorted(set(names) - set(CAMPAIGNS))
    if unknown:
        sys.exit(f"There is no campaign {', '.join(unknown)}: choose from {', '.join(CAMPAIGNS)}.")
    # Set before torch is imported: no campaign may depend on how many cores are free.
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **PLANTED})
    sys.path[:0] = [str(ROOT / "code"), str(ROOT / "container")]
    trials = [_run(name, arguments) for name in names]
    return 0 if all(trial.held for trial in trials) else 1


def _run(name: str, arguments: argparse.Namespace) -> Trial:
    campaign = importlib.import_module(f"ordeal.{name}")
    folder = arguments.out.resolve() / name
    left_out = getattr(campaign, "ONLY_LONG", ()) if arguments.short else ()
    promises = [promise for promise in campaign.PROMISES if promise not in left_out]
    trial = Trial.begin(name, promises, folder, arguments.seed, arguments.short)
    trial.limit_time(arguments.seconds or (240 if arguments.short else 3600))
    print(f"== {name}: {(campaign.__doc__ or '').splitlines()[0]}", flush=True)
    began = time.monotonic()
    campaign.run(trial)
    trial.figure("seconds", round(time.monotonic() - began))
    # At once, since a later campaign may run for hours, or be ended.
    (folder.parent / f"{name}.json").write_text(json.dumps(trial.summary(), indent=1) + "\n")
    print(trial.table(), flush=True)
    return trial


if __name__ == "__main__":
    sys.exit(main())
