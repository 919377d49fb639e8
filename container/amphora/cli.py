"""Runs the commands `amphora train`, `serve`, `doctor` and `quantize`."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from amphora import __version__
from amphora.common import logs
from amphora.common.errors import AmphoraError
from amphora.contract.job import Paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the container's entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="amphora", description="Train and serve models in an Amazon SageMaker container."
    )
    parser.add_argument("--version", action="version", version=f"amphora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    train = commands.add_parser(
        "train",
        help="run the training job under /opt/ml",
        epilog="Hyperparameters are read from /opt/ml/input/config/hyperparameters.json; "
        "SAGEMAKER_BASE_DIR replaces /opt/ml. `python /opt/amphora/code/train.py --help` lists "
        "those of the recipe (in a checkout: `python code/train.py --help`).",
    )
    train.add_argument(
        "--sdk-command",
        metavar="COMMAND",
        help="the command that SDK v3's ModelTrainer sends instead of the entry point",
    )
    commands.add_parser(
        "serve",
        help="serve the model in /opt/ml/model",
        epilog="SAGEMAKER_BASE_DIR replaces /opt/ml. Settings are environment variables, such as "
        "SAGEMAKER_BIND_TO_PORT; docs/SERVING.md and docs/REFERENCE.md list them.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="check the training job without running it",
        epilog="Checks the configuration, the data, the model and the memory of the job under "
        "/opt/ml. The exit code is 1 if there are errors.",
    )
    doctor.add_argument("--base-dir", metavar="DIR", help="the folder to use instead of /opt/ml")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    trial = "also train N steps, 4 or more, without leaving anything behind, and print the job's"
    doctor.add_argument("--steps", metavar="N", type=int, help=f"{trial} time, price and memory")
    quantize = commands.add_parser(
        "quantize",
        help="add an int8 encoder, for CPUs, to a finished model",
        epilog="Evaluates both on the rows of --data, and writes FOLDER/int8 if it is within "
        "max_score_loss and max_flips (docs/SERVING.md).",
    )
    quantize.add_argument("--model", metavar="FOLDER", type=Path, required=True)
    quantize.add_argument(
        "--data", metavar="PATH", type=Path, required=True, help="rows to judge by"
    )
    quantize.add_argument(
        "settings", metavar="NAME=VALUE", nargs="*", help="more hyperparameters: max_flips=0.02"
    )
    arguments = parser.parse_args(argv)
    steps = getattr(arguments, "steps", None)
    if steps is not None and steps < 4:
        doctor.error("argument --steps: give 4 or more: the first two are not measured")
    logs.configure()
    logs.remember(logs.secret_values(os.environ))
    try:
        return run(arguments)
    except AmphoraError as error:
        logging.getLogger("amphora").error("%s", error)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Run a parsed command. Each imports only what it needs, so that jobs start fast."""
    if arguments.command == "serve":
        from amphora.serving.http.server import serve

        return serve(Paths.from_environment(os.environ).base, os.environ)
    if arguments.command == "doctor":
        from amphora.training.doctor import doctor

        base = {"SAGEMAKER_BASE_DIR": arguments.base_dir} if arguments.base_dir else {}
        return doctor({**os.environ, **base}, arguments.json, arguments.steps or 0)
    if arguments.command == "quantize":
        from amphora.training.quantize import quantize

        return quantize(arguments.model, arguments.data, arguments.settings, os.environ)
    from amphora.training.job_runner import train

    return train(os.environ, arguments.sdk_command)
