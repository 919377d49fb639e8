"""Runs the commands `amphora train`, `serve`, `predict`, `doctor`, `quantize`, `report` and
`verify`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amphora import __version__
from amphora.common import logs
from amphora.common.errors import AmphoraError, ConfigError
from amphora.contract.job import Paths

if TYPE_CHECKING:
    from amphora.instances.instance_report import InstanceQuestion

_TRAIN_HELP = """\
Without words, the job under /opt/ml runs: hyperparameters are read from
/opt/ml/input/config/hyperparameters.json, and SAGEMAKER_BASE_DIR replaces /opt/ml.

  amphora train tickets.csv --model BAAI/bge-small-en-v1.5 --label_column queue --epochs 3

trains on a file or folder, in the folder of --out (default: runs/tickets). The log ends with the
same job for SageMaker's SDK v3. `--help NAME` explains one hyperparameter.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the container's entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="amphora", description="Train and serve models in an Amazon SageMaker container."
    )
    parser.add_argument("--version", action="version", version=f"amphora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_job_commands(commands)
    _add_model_commands(commands)
    # Those of a job, which argparse does not know.
    arguments, words = parser.parse_known_args(argv)
    if words and arguments.command not in ("train", "doctor", "quantize"):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    arguments.words = words
    if getattr(arguments, "help", None) == "":
        arguments.parser.print_help()
    steps = getattr(arguments, "steps", None)
    if steps is not None and steps < 4:
        arguments.parser.error("argument --steps: give 4 or more: the first two are not measured")
    _check_question(arguments)
    logs.configure()
    logs.remember(logs.secret_values(os.environ))
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except AmphoraError as error:
        logging.getLogger("amphora").error("%s", error)
        return 2
    except KeyboardInterrupt:
        logging.getLogger("amphora").error("stopped; the same command continues")
        return 130
    except BrokenPipeError:  # `amphora ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _add_job_commands(commands: Any) -> None:
    """Add the commands whose further words are a job's paths and hyperparameters."""
    train = commands.add_parser(
        "train",
        usage="amphora train [PATH ...] [--validation PATH] [--test PATH] [--model FOLDER_OR_NAME] "
        "[--out FOLDER] [--HYPERPARAMETER VALUE ...]",
        help="run a training job: the one under /opt/ml, or of files",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_TRAIN_HELP,
    )
    train.add_argument("--sdk-command", metavar="COMMAND", help=argparse.SUPPRESS)
    train.add_argument("--help", "-h", metavar="NAME", nargs="?", const="", default=None,
                       help="show this and the hyperparameters, or one of them")  # fmt: skip
    train.set_defaults(parser=train)
    doctor = commands.add_parser(
        "doctor",
        help="check the training job without running it",
        allow_abbrev=False,
        epilog="Checks the configuration, the data, the model and the memory of the job under "
        "/opt/ml, or of the paths and hyperparameters that `amphora train` takes. The exit code is "
        "1 if there are errors.",
    )
    doctor.add_argument("--base-dir", metavar="DIR", help="the folder to use instead of /opt/ml")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    trial = "also train N steps, 4 or more, without leaving anything behind, and print the job's"
    doctor.add_argument("--steps", metavar="N", type=int, help=f"{trial} time, price and memory")
    asks = doctor.add_argument_group("instance types")
    asks.add_argument(
        "--instances",
        action="store_true",
        help="also print which SageMaker instance types fit, and why others do not",
    )
    asks.add_argument(
        "--prices", metavar="FILE", help=".csv (type,price an hour) or .json; aws: AWS's price API"
    )
    asks.add_argument(
        "--requests",
        metavar="N",
        type=float,
        help="also those for an endpoint of the model with N requests a second",
    )
    asks.add_argument(
        "--cpu-ms",
        metavar="MS",
        type=float,
        help="its CPU time a request, as benchmarks/bench_serve.py measures it",
    )
    asks.add_argument(
        "--tokens",
        metavar="N",
        type=float,
        help="tokens of a request; default: as the training data",
    )
    doctor.set_defaults(parser=doctor)


def _add_model_commands(commands: Any) -> None:
    """Add the commands on the model of a run or of a folder."""
    serve = commands.add_parser(
        "serve",
        help="serve the model in /opt/ml/model, of a folder, or of the Hugging Face hub",
        epilog="SAGEMAKER_BASE_DIR replaces /opt/ml. Settings are environment variables, such as "
        "SAGEMAKER_BIND_TO_PORT; docs/SERVING.md and docs/REFERENCE.md list them.",
    )
    serve.add_argument("folder", metavar="FOLDER", nargs="?", type=Path,
                       help="a run, a model, or a name on the hub")  # fmt: skip
    serve.add_argument("--port", metavar="N", help="the port, 8080 by default")
    predict = commands.add_parser(
        "predict",
        help="answer each row of a file by a model, as a batch transform does",
        epilog="Reads .csv, .tsv, .jsonl, .txt, also with .gz. The answers keep the file's rows "
        "and columns. Stopped and started again, it continues.",
    )
    predict.add_argument("folder", metavar="FOLDER", type=Path, help="a run or a model")
    predict.add_argument("data", metavar="FILE", type=Path)
    what = "ends in .csv or .jsonl"
    predict.add_argument("--out", metavar="FILE", type=Path, required=True, help=what)
    what = "one column or two (a,b). Default: those of the training"
    predict.add_argument("--text_column", "--text-column", metavar="NAMES", help=what)
    quantize = commands.add_parser(
        "quantize",
        usage="amphora quantize FOLDER DATA [--NAME VALUE ...]",
        help="add an int8 encoder, for CPUs, to a finished model",
        allow_abbrev=False,
        epilog="Evaluates both on the rows of --data, and writes FOLDER/int8 if it is within "
        "max_score_loss and max_flips (docs/SERVING.md): also NAME=VALUE, as in max_flips=0.02.",
    )
    quantize.add_argument("--model", metavar="FOLDER", help="a run or a model; also the first path")
    quantize.add_argument("--data", metavar="PATH", help="rows to judge by; also the second path")
    report = commands.add_parser(
        "report",
        help="compare two runs: scores, hyperparameters, rows that one of them gets right",
        epilog="output/data/report.html of a run is its own report.",
    )
    report.add_argument("runs", metavar="FOLDER", nargs=2, type=Path, help="the folder of a run")
    verify = commands.add_parser(
        "verify",
        help="compare a model's answers with its proof.json",
        epilog="Prints the difference of each probe, in the precision of a server or of "
        "AMPHORA_DTYPE. The exit code is 1 if one is too large.",
    )
    verify.add_argument("--model", metavar="FOLDER", type=Path, required=True, help="or a run")


def _check_question(arguments: argparse.Namespace) -> None:
    """Exit with a line if the arguments of `--instances` do not fit each other."""
    given = vars(arguments)
    numbers = {name: given.get(name) for name in ("requests", "cpu_ms", "tokens")}
    named = [name for name in ("prices", *numbers) if given.get(name) is not None]
    for name in named:
        flag = f"--{name.replace('_', '-')}"
        if not arguments.instances:
            arguments.parser.error(f"argument {flag}: it goes with --instances")
        if name in ("cpu_ms", "tokens") and arguments.requests is None:
            arguments.parser.error(f"argument {flag}: it goes with --requests")
        if name in numbers and not 0 < given[name] < float("inf"):
            arguments.parser.error(f"argument {flag}: give a number above 0, not {given[name]:g}")
    if given.get("instances") and arguments.steps is not None:
        arguments.parser.error("argument --steps: it measures this device; leave out --instances")


def _question(arguments: argparse.Namespace) -> InstanceQuestion | None:
    """Return the question of `--instances`, or None."""
    if not arguments.instances:
        return None
    from amphora.instances.instance_report import read_question
    from amphora.instances.serving_fit import ServingLoad

    load = None
    if arguments.requests is not None:
        load = ServingLoad(
            requests=arguments.requests, cpu_ms=arguments.cpu_ms, tokens=arguments.tokens
        )
    return read_question(arguments.prices, load)


def run(arguments: argparse.Namespace) -> int:
    """Run a parsed command. Each imports only what it needs, so that jobs start fast."""
    command, words = arguments.command, arguments.words
    if command == "serve" and arguments.folder is None:
        from amphora.serving.http.server import serve

        port = {"SAGEMAKER_BIND_TO_PORT": arguments.port} if arguments.port else {}
        return serve(Paths.from_environment(os.environ).base, {**os.environ, **port})
    if command == "doctor" and not words:
        from amphora.training.doctor import doctor

        base = {"SAGEMAKER_BASE_DIR": arguments.base_dir} if arguments.base_dir else {}
        return doctor({**os.environ, **base}, arguments.json, arguments.steps or 0,
                      _question(arguments))  # fmt: skip
    if command == "train" and arguments.help is None and not words:
        from amphora.training.job_runner import train

        return train(os.environ, arguments.sdk_command)
    from amphora.local import commands

    if command == "train" and arguments.help is not None:
        return commands.show_hyperparameters(arguments.help, os.environ)
    if command == "train":
        if arguments.sdk_command:
            raise ConfigError(f"--sdk-command stands with {words[0]!r}.", "Give one of both.")
        return commands.train(words, os.environ)
    if command == "report":
        return commands.compare_runs(arguments.runs, os.environ)
    if command == "serve":
        return commands.serve(arguments.folder, arguments.port, os.environ)
    if command == "doctor":
        named = ["--out", arguments.base_dir] if arguments.base_dir else []
        steps, question = arguments.steps or 0, _question(arguments)
        return commands.doctor([*words, *named], os.environ, arguments.json, steps, question)
    if command == "quantize":
        return commands.quantize(arguments.model, arguments.data, words, os.environ)
    if command == "verify":
        return commands.verify(arguments.model, os.environ)
    from amphora.local.file_answers import predict

    return predict(arguments.folder, arguments.data, arguments.out, arguments.text_column)
