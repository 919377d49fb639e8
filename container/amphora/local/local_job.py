"""Makes a job of a command line: files and folders become channels, `--name value` hyperparameters.

The job is the one that SageMaker would run: the folder of --out receives links to the data, and
input/config/hyperparameters.json.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from amphora.common.errors import ConfigError, did_you_mean
from amphora.common.secret_rules import is_secret_name
from amphora.contract.job import DEFAULT_BASE_DIR, Paths

CHANNELS = ("train", "validation", "test")
"""Options that name data, each with a path."""
_MODEL_FILES = ("config.json", "modules.json", "adapter_config.json")
_RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job as a command line names it."""

    base: Path
    """Stands in for /opt/ml."""
    channels: Mapping[str, Sequence[Path]]
    """The files of each channel, or its folder. None: those that are in `base`."""
    hyperparameters: Mapping[str, str]

    @property
    def is_local(self) -> bool:
        """Return whether the command line has anything that SageMaker would write to files."""
        return bool(self.channels or self.hyperparameters)


def read_words(words: Sequence[str], environ: Mapping[str, str]) -> LocalJob:
    """Read the paths and options that follow `amphora train` or `amphora doctor`.

    A word that is not an option's value is a path of training data. The base folder is --out, else
    `runs/NAME` after the first path, else SAGEMAKER_BASE_DIR. Raise ConfigError with all that is
    wrong: paths that do not exist, options that are given twice, secrets.
    """
    paths, options, problems = split_words(words)
    out, model = options.pop("out", None), options.pop("model", None)
    given = {"train": paths, **{name: [value] for name in CHANNELS[1:]
                                if (value := options.pop(name, None))}}  # fmt: skip
    if train := options.pop("train", None):
        given["train"] = [*paths, train]
    channels = {name: [Path(word).expanduser() for word in words] for name, words in given.items()}
    if model and Path(model).expanduser().is_dir():
        channels["model"] = [Path(model).expanduser()]
    elif model and (Path(model).is_file() or model.startswith(("/", "./", "../", "~"))):
        problems.append(f"--model is {model!r}, which is not a folder. Give a model's folder.")
    elif model:
        options["model_name_or_path"] = model
    for name, files in channels.items():
        problems += [
            f"{file} does not exist: it was given as {name} data.{names_like(file)}"
            for file in files if not file.exists()
        ]  # fmt: skip
        if len(files) > 1 and any(file.is_dir() for file in files):
            problems.append(f"Several paths are {name} data, and a folder is one. Give one folder.")
        if len({file.name for file in files}) < len(files):
            problems.append(f"Several files of the {name} data have one name. Rename one.")
    channels = {name: files for name, files in channels.items() if files}
    for name in options:
        if is_secret_name(name):
            problems.append(
                f"--{name} is a secret, and other programs can read command lines. Set it as a "
                "variable (HF_TOKEN for the Hugging Face hub), or write it into "
                "input/config/hyperparameters.json."
            )
    if not channels and options and not out and not environ.get("SAGEMAKER_BASE_DIR") and not (
        Path(DEFAULT_BASE_DIR).is_dir()
    ):  # fmt: skip
        problems.append(
            "No data is named. Write for example: amphora train data.csv --model FOLDER_OR_NAME"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if out:
        base = Path(out).expanduser().absolute()
    elif "train" in channels:
        base = (_RUNS / channels["train"][0].resolve().name.partition(".")[0]).absolute()
    else:
        base = Paths.from_environment(environ).base
    absolute = {name: [file.absolute() for file in files] for name, files in channels.items()}
    for file in (file for files in absolute.values() for file in files if file.is_dir()):
        if base.resolve().is_relative_to(file.resolve()):
            raise ConfigError(
                f"The job's folder {base} is inside the data {file}, and would be read as data.",
                "Give another folder by --out.",
            )
    return LocalJob(base=base, channels=absolute, hyperparameters=options)


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the paths, the options by their names without dashes, and what is wrong with them."""
    paths: list[str] = []
    options: dict[str, str] = {}
    problems: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            paths.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            has_value = bool(remaining) and not remaining[0].startswith("--")
            value = remaining.pop(0) if has_value else "True"
        if options.get(name, value) != value:
            problems.append(f"--{name} is given twice. Give one value.")
        options[name] = value
        # A shell makes several words of `--test data/*.csv`: they must not become training data.
        if name in CHANNELS and remaining and not remaining[0].startswith("--"):
            problems.append(
                f"{remaining[0]!r} follows the path of --{name}. Write the training data first, "
                f"and one file or folder after --{name}."
            )
    return paths, options, problems


def write_tree(job: LocalJob) -> None:
    """Write the tree of a job below its base folder: links to its data, and its hyperparameters.

    Without data, those of the folder stay, and hyperparameters are added to its file. Raise
    ConfigError if the folder cannot be written, or holds data of its own.
    """
    paths = Paths(job.base)
    try:
        if job.channels:
            _link_channels(job, paths.data)
        file = paths.config / "hyperparameters.json"
        earlier = {}
        if not job.channels and file.is_file():
            earlier = json.loads(file.read_text(encoding="utf-8"))
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**earlier, **job.hyperparameters}, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The job cannot be written to {job.base}: {error}.", "Give another folder by --out."
        ) from error


def _link_channels(job: LocalJob, data: Path) -> None:
    for folder in data.iterdir() if data.is_dir() else ():
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir() and all(file.is_symlink() for file in folder.iterdir()):
            shutil.rmtree(folder)
        else:
            raise ConfigError(
                f"{folder} holds data that `amphora train` has not linked there.",
                "Give another folder by --out, or leave the paths out to train on what it holds.",
            )
    data.mkdir(parents=True, exist_ok=True)
    for name, files in job.channels.items():
        if files[0].is_dir():
            (data / name).symlink_to(files[0])
            continue
        (data / name).mkdir()
        for file in files:
            (data / name / file.name).symlink_to(file)


def names_like(path: Path) -> str:
    """Return a sentence with the names in a missing path's folder that are like its own, or ''."""
    with contextlib.suppress(OSError):
        return did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))
    return ""


def is_hub_name(path: Path) -> bool:
    """Return whether a path is a name such as BAAI/bge-small-en-v1.5. If its first part is a
    folder here, it is a misspelled path."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path))) and not path.parent.exists()


def check_model(path: Path) -> None:
    """Raise ConfigError for what is neither a run's folder nor a model's."""
    if (path / "model").is_dir() or (path / "code").is_dir():
        return
    if not any((path / name).is_file() for name in _MODEL_FILES):
        raise ConfigError(
            f"{path} has neither model/ nor config.json."
            if path.exists()
            else f"{path} does not exist.{names_like(path)}",
            "Give the folder of a run (its --out), or that of a model.",
        )


@contextlib.contextmanager
def model_base(path: Path, scratch: Path) -> Iterator[Path]:
    """Yield the base folder to serve: a run's folder, or one in `scratch` that links to a model's.

    Raise ConfigError if the path is neither.
    """
    check_model(path)
    if (path / "model").is_dir():
        yield path.absolute()
    else:
        (scratch / "model").symlink_to(path.absolute())
        yield scratch


def sdk_snippet(job: LocalJob) -> str:
    """Return the same job as Python code for SageMaker's SDK v3."""

    def quote_uri(path: str) -> str:
        return json.dumps(f"s3://BUCKET/{job.base.name}/{path}", ensure_ascii=False)

    names = [name for name in job.channels if name in (*CHANNELS, "model")] or ["train"]
    inputs = "\n".join(
        f'        InputData(channel_name="{name}", data_source={quote_uri(f"{name}/")}),'
        for name in names
    )
    values = "\n".join(
        f"        {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)},"
        for name, value in job.hyperparameters.items()
    )
    return f"""\
from sagemaker.core.training.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    StoppingCondition,
)
from sagemaker.train.model_trainer import ModelTrainer

trainer = ModelTrainer(
    training_image="ACCOUNT.dkr.ecr.REGION.amazonaws.com/amphora:gpu",
    role="arn:aws:iam::ACCOUNT:role/SageMakerRole",
    compute=Compute(instance_type="ml.g5.2xlarge", instance_count=1),
    hyperparameters={{
{values}
    }},
    checkpoint_config=CheckpointConfig(s3_uri={quote_uri("checkpoints")}),
    stopping_condition=StoppingCondition(max_runtime_in_seconds=86400),  # the default is an hour
)
trainer.train(
    [
{inputs}
    ]
)"""
