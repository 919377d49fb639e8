"""The commands `amphora train`, `amphora serve` and `amphora doctor`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from amphora import __version__
from amphora.common import logs
from amphora.common.errors import AmphoraError
from amphora.contract.job import Paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the container's entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="amphora",
        description="Train and serve models as Amazon SageMaker asks a container to.",
    )
    parser.add_argument("--version", action="version", version=f"amphora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    train = commands.add_parser(
        "train",
        help="run the training job under /opt/ml",
        epilog="Hyperparameters stand in /opt/ml/input/config/hyperparameters.json (another folder "
        "than /opt/ml: SAGEMAKER_BASE_DIR). `python /opt/amphora/code/train.py --help`, in a "
        "checkout `python code/train.py --help`, lists those of the recipe.",
    )
    train.add_argument(
        "--sdk-command",
        metavar="COMMAND",
        help="what SDK v3's ModelTrainer sends in place of the entry point",
    )
    train.add_argument(
        "--check",
        action="store_true",
        help="look at the job as `amphora doctor` does, train nothing",
    )
    commands.add_parser("serve", help="serve the model in /opt/ml/model")
    doctor = commands.add_parser("doctor", help="tell whether the training job would run")
    doctor.add_argument("--base-dir", metavar="DIR", help="stands in for /opt/ml")
    doctor.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args(argv)
    logs.configure()
    logs.remember(logs.secret_values(os.environ))
    try:
        return run(arguments)
    except AmphoraError as error:
        logging.getLogger("amphora").error("%s", error)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Run a command that was read. Each imports what it needs: a job waits for no server's code."""
    if arguments.command == "serve":
        from amphora.serving.http.server import serve

        return serve(Paths.of(os.environ).base, os.environ)
    if arguments.command == "doctor" or arguments.check:
        from amphora.training.doctor import doctor

        base_dir = getattr(arguments, "base_dir", None)
        base = {"SAGEMAKER_BASE_DIR": base_dir} if base_dir else {}
        return doctor({**os.environ, **base}, getattr(arguments, "json", False))
    from amphora.training.job_runner import train

    return train(os.environ, arguments.sdk_command)


if __name__ == "__main__":
    sys.exit(main())
