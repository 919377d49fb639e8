"""Each failure of docs/TROUBLESHOOTING.md is provoked here, or by the test that ELSEWHERE names."""

import ast
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from amphora.common.errors import AmphoraError, CodeError
from amphora.contract.job import Job, read_job
from amphora.serving.worker import handlers
from amphora.training.entry_point import locate
from amphora.training.failure import Ended, diagnose
from amphora.training.job_runner import read_limits
from tests.support.job_tree import Tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
QUOTED = re.findall(r"^- `([^`]+)`", PAGE, re.MULTILINE)
CODES = re.findall(r"^\| \d+ `(\w+)` \|", PAGE, re.MULTILINE)

SCRIPTS = {
    "Out of memory: lower the batch size or max_length, or take a larger instance.": "MemoryError",
    "List the package in requirements.txt, next to the script.": "ModuleNotFoundError: No module named 'x'",
    "The disk is full: raise volume_size, or keep fewer checkpoints (save_total_limit).":
        "OSError: [Errno 28] No space left on device",
    "Stopped by ...": "",
    "another rank ended first, or the hosts cannot reach each other.":
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
}  # fmt: skip
"""The last line of a script that ends so; the empty one was stopped."""
JOBS: Mapping[str, Callable[[Tree], object]] = {
    "AMPHORA_ ... is not a variable of this image.": lambda _: read_limits({"AMPHORA_QUEUE_LIMITS": "8"}),
    "is not valid JSON: ... Write one JSON object.": lambda tree: read(tree.configure("{")),
    "sagemaker_submit_directory is ... which does not exist.": lambda tree: locate(read(tree.configure(
        {"sagemaker_program": "train.py", "sagemaker_submit_directory": "/nowhere/code"})), {}, tree.base),
}  # fmt: skip
"""What refuses a job so."""


def read(tree: Tree) -> Job:
    return read_job({"SAGEMAKER_BASE_DIR": str(tree.base)})


DATA = "text,label\na good film,pos\na bad film,neg\n"
DATA_AND_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "Hyperparameter ... is not known.": (DATA, "--learning_rat 1"),
    "hyperparameters cannot be used:": (DATA, "--learning_rat 1 --epochs many"),
    "Hyperparameter model_name_or_path is not given, and no channel called": (
        DATA,
        "--eval_strategy no",
    ),
    "cannot be loaded from the Hugging Face hub": (
        DATA,
        "--model_name_or_path nobody/nothing --eval_strategy no",
    ),
    "There is no training data; the job's channels are:": ("", "MODEL"),
    "columns may be the text": (
        "title,review,label\na long film,it was good,pos\na short film,it was bad,neg\n",
        "MODEL --task text-classification",
    ),
    "Name one of them in ...": (DATA, "MODEL --text_column comment"),
    "is of none of the formats": ("a film\nanother film\n", "MODEL --task text-classification"),
    "fields where the first row has": (f"{DATA}good, but long,pos\n", "MODEL"),
    "has one class only": (DATA.replace("neg", "pos"), "MODEL"),
    "training rows, too few to hold any out.": (DATA, "MODEL"),
    "Hyperparameter num_labels has value ... but the data has": (
        DATA,
        "MODEL --num_labels 3 --eval_strategy no",
    ),
}
"""The file of the channel train, and arguments of the recipe; MODEL stands for a small model."""

LOADED: Mapping[str, Mapping[str, str]] = {
    "There is no config.json in": {},
    "has changed since it was written": {
        "config.json": "{}",
        "SHA256SUMS": f"{'0' * 64}  config.json\n",
    },
}
"""The files of a model that the image's own handlers do not load."""

SERVED: Mapping[str, tuple[str, str | None]] = {
    "it needs the module ... which is not installed": ("import not_installed\n", None),
    "if the code was written for version 4": ("from transformers import AutoModelWithLMHead", None),
    "SAGEMAKER_PROGRAM is ... has no such file.": ("", "handlers.py"),
}
"""A model's inference.py, and the program that its server is to run."""

ELSEWHERE = {
    "The loss of step ... is NaN or infinite. ... Lower learning_rate, or look at these rows.": (
        "tests/recipe/training/test_resume.py",
        "test_a_loss_that_is_no_number_names_step_and_rows",
    ),
    "cannot be resumed from, since the job has changed:": (
        "tests/recipe/training/test_resume.py",
        "test_another_job_does_not_resume",
    ),
}
"""File and name of the test that takes more than a moment to meet the failure."""


def assert_contains(message: str, quoted: str) -> None:
    """Check that the parts of a quoted text stand in a message, in this order."""
    pattern = r"[\s\S]*?".join(re.escape(part.strip()) for part in quoted.split("..."))
    assert re.search(pattern, " ".join(message.split())), message


def test_every_failure_is_met_by_a_test() -> None:
    assert len(QUOTED) >= 25
    assert sorted(QUOTED) == sorted(
        [*SCRIPTS, *JOBS, *DATA_AND_ARGUMENTS, *LOADED, *SERVED, *ELSEWHERE]
    )


@pytest.mark.parametrize("quoted", SCRIPTS)
def test_a_script_fails_so(quoted: str, tmp_path: Path) -> None:
    """That a job writes it is tested in tests/amphora/training/test_failures.py."""
    line = SCRIPTS[quoted]
    ended = Ended(
        pid=1, is_script=True, exit_code=1 if line else -15, tail=[line],
        stop_signal=None if line else 15,
    )  # fmt: skip
    assert_contains(diagnose(ended, tmp_path).head, quoted)


@pytest.mark.parametrize("quoted", JOBS)
def test_a_job_is_refused_so(quoted: str, tmp_path: Path) -> None:
    with pytest.raises(AmphoraError) as raised:
        JOBS[quoted](Tree(tmp_path))
    assert_contains(str(raised.value), quoted)


@pytest.mark.parametrize("quoted", DATA_AND_ARGUMENTS)
def test_data_and_hyperparameters_fail_so(
    quoted: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(str(ROOT / "code"))
    from recipe.arguments import parse  # not before: it takes seconds
    from recipe.errors import RecipeError
    from recipe.paths import Folders
    from recipe.plan import resolution
    from recipe.plan.table import Table

    file, arguments = DATA_AND_ARGUMENTS[quoted]
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "train.csv").write_text(file)
    given = arguments.replace("MODEL", f"--model_name_or_path {tiny_model}").split()
    folders = Folders(
        channels={"train": folder} if file else {},
        model_dir=tmp_path,
        output_data_dir=tmp_path,
        checkpoints=tmp_path,
        tensorboard=tmp_path,
    )
    with pytest.raises(RecipeError) as raised:
        resolution.load(resolution.resolve(parse(given, folders), folders, {}, Table(), 1), Table())
    assert_contains(str(raised.value), quoted)


def write_model(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("quoted", LOADED)
def test_a_model_is_not_loaded_so(
    quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a server ends with the reason is tested in tests/amphora/serving."""
    monkeypatch.syspath_prepend(str(ROOT / "code"))
    from recipe.errors import RecipeError
    from recipe.inference import registry

    model = write_model(tmp_path / "model", LOADED[quoted])
    with pytest.raises(RecipeError) as raised:
        registry.load(str(model), {})
    assert_contains(str(raised.value), quoted)


@pytest.mark.parametrize("quoted", SERVED)
def test_handlers_are_refused_so(
    quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a server ends with the reason is tested in tests/amphora/serving."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the model's code is put first
    monkeypatch.setitem(sys.modules, "inference", sys)  # so that what is here now comes back
    del sys.modules["inference"]
    code, program = SERVED[quoted]
    model = write_model(tmp_path / "model", {"code/inference.py": code})
    with pytest.raises(CodeError) as raised:
        handlers.resolve(model / "code", program, ROOT / "code", model)
    assert_contains(str(raised.value), quoted)


@pytest.mark.parametrize("quoted", ELSEWHERE)
def test_the_test_of_another_failure_exists_and_quotes_it(quoted: str) -> None:
    file, name = ELSEWHERE[quoted]
    (test,) = [
        node
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    strings = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
    assert_contains(" ".join(text for text in strings if isinstance(text, str)), quoted)


def test_every_code_of_an_answer_exists() -> None:
    sources = [path.read_text() for path in (ROOT / "container" / "amphora").rglob("*.py")]
    sources += [path.read_text() for path in (ROOT / "code").rglob("*.py")]
    assert len(CODES) >= 8
    assert all(any(f'"{code}"' in text for text in sources) for code in CODES)
