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
    arguments = _parser().parse_args(argv)
    logs.configure()
    logs.remember(logs.secret_values(os.environ))
    try:
        return int(arguments.run(arguments))
    except AmphoraError as error:
        logging.getLogger("amphora").error("%s", error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amphora",
        description="Train and serve models as Amazon SageMaker asks a container to.",
    )
    parser.add_argument("--version", action="version", version=f"amphora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run the training job under /opt/ml")
    train.add_argument(
        "--sdk-command",
        metavar="COMMAND",
        help="what SDK v3's ModelTrainer sends in place of the entry point",
    )
    train.set_defaults(run=_train)
    train.add_argument(
        "--check",
        action="store_true",
        help="look at the job as `amphora doctor` does, train nothing",
    )
    serve = commands.add_parser("serve", help="serve the model in /opt/ml/model")
    serve.set_defaults(run=_serve)
    doctor = commands.add_parser("doctor", help="tell whether the training job would run")
    doctor.add_argument("--base-dir", metavar="DIR", help="stands in for /opt/ml")
    doctor.add_argument("--json", action="store_true", help="for machines")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    if arguments.check:
        return _doctor(argparse.Namespace(base_dir=None, json=False))
    from amphora.training.job_runner import train

    return train(os.environ, arguments.sdk_command)


def _doctor(arguments: argparse.Namespace) -> int:
    from amphora.training.doctor import doctor

    base = {"SAGEMAKER_BASE_DIR": arguments.base_dir} if arguments.base_dir else {}
    return doctor({**os.environ, **base}, arguments.json)


def _serve(_arguments: argparse.Namespace) -> int:
    # The server's libraries are no part of a training job's start.
    from amphora.serving.http.server import serve

    return serve(Paths.of(os.environ).base, os.environ)


if __name__ == "__main__":
    sys.exit(main())
