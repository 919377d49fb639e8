"""What a user gives and cannot be used: one table of the error, the key, its value and the remedy."""

import re
from pathlib import Path
from typing import Any

import pytest

from amphora.common import packages, variables
from amphora.common.devices import Devices
from amphora.common.errors import CodeError, ConfigError
from amphora.contract.job import read_job
from amphora.serving import settings
from amphora.training import entry_point, launch
from amphora.training.entry_point import Program, ProgramKind
from amphora.training.job_runner import read_limits
from tests.support.job_tree import Tree
from tests.support.package_indexes import ARN

CPU = Devices(cpus=8, efa=False, reason="test")


def job(tree: Tree, files: Any) -> None:
    read_job({"SAGEMAKER_BASE_DIR": str(tree.configure(**files).base)})


def switch(tree: Tree, value: Any) -> None:
    """Ask a job for a distribution."""
    tree.configure({"sagemaker_mpi_enabled": value})
    read_job({"SAGEMAKER_BASE_DIR": str(tree.base)}).wants("sagemaker_mpi_enabled")


def server(tree: Tree, environ: Any) -> None:
    settings.read(tree.base, environ, CPU)


def plan(tree: Tree, environ: Any) -> None:
    """Plan a job of `program`; other keys in small letters are hyperparameters."""
    program = environ.get("program", "train.py")
    kind = ProgramKind.COMMAND if program == "run.sh" else ProgramKind.SCRIPT
    hyperparameters = {name: value for name, value in environ.items() if name.islower()}
    actual = read_job({"SAGEMAKER_BASE_DIR": str(tree.configure(hyperparameters).base)})
    source = Program(root=Path("/code"), kind=kind, name=program)
    launch.plan(actual, CPU, source, Path("/tmp/errors"), environ)


def code(tree: Tree, given: Any) -> None:
    """Find the code of a job that has these files; `given` begins with its hyperparameters."""
    hyperparameters, *files = given
    for name in files:
        tree.script("set -e\r\nfalse" if name == "windows.sh" else "", name)
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.configure(hyperparameters).base)})
    entry_point.locate(job, {}, tree.base).command  # noqa: B018


def index(tree: Tree, arn: Any) -> None:
    packages.repository({"CA_REPOSITORY_ARN": arn})


def program(name: str) -> dict[str, str]:
    return {"sagemaker_program": name}


def limits(tree: Tree, environ: Any) -> None:
    read_limits(environ)


GROUPED: dict[str, Any] = {
    "current_host": "a", "hosts": ["a"],
    "instance_groups": [{"instance_group_name": "g", "instance_type": "t", "hosts": ["a"]}],
}  # fmt: skip
WHOLE = "Give a whole number of at least 1, or leave it out."


@pytest.mark.parametrize(("read", "given", "words"), [
    pytest.param(*row, id=f"{row[0].__name__} {row[2][0]}") for row in [
    (job, {"hyperparameters": "{"}, ("hyperparameters.json", "not valid JSON")),
    (job, {"hyperparameters": "[1]"}, ("hyperparameters.json", "'[1]'", "not a JSON object")),
    (job, {"hyperparameters": "[" * 100_000}, ("hyperparameters.json", "not valid JSON")),
    *((job, {"hyperparameters": {key: "1"}}, (repr(key), "usable name", "'='")) for key in ("", "a=b")),
    (job, {"hyperparameters": {"a": "x\0y"}}, ("'a'", "NUL")),
    (job, {"hyperparameters": {"sagemaker_job_name": "\ud800"}}, ("'sagemaker_job_name'", "surrogate")),
    (job, {"hyperparameters": {"sagemaker_container_log_level": "loud"}}, ("log_level", "loud")),
    (job, {"inputdataconfig": {"train": {}}}, ("'train'", "does not exist", "Mount")),
    *((job, {"inputdataconfig": {name: {}}}, (f"a channel {name!r}", "1 to 64")) for name in ("../x", "..", "", "a=b", "a/b")),
    *((job, {"resourceconfig": {"current_host": "a", "hosts": hosts}}, (f"'hosts' is {hosts!r}", "algo-1"))
      for hosts in ([], None, ["a", 2], ["a", ["b"]])),
    *((job, {"resourceconfig": {**GROUPED, "instance_groups": groups}}, (f"'instance_groups' is {groups!r}", "instance_type"))
      for groups in (1, "g", [1], [{"hosts": ["a"]}], [{"instance_group_name": "g"}],
                     [{"instance_group_name": "g", "hosts": ["other"]}])),
    (job, {"resourceconfig": {"current_host": "a", "hosts": ["b"]}}, ("'current_host'", "'a'")),
    (job, {"resourceconfig": {**GROUPED, "instance_groups": GROUPED["instance_groups"] * 2}}, ("['g', 'g']", "instance_count")),
    (switch, "yes", ("sagemaker_mpi_enabled is 'yes'. Give true or false.",)),
    *((plan, {"AMPHORA_NPROC_PER_NODE": value}, (f"AMPHORA_NPROC_PER_NODE is '{value}'", "processes"))
      for value in ("0", "-1", "two", "1.5")),
    (plan, {"program": "run.sh", "sagemaker_torch_distributed_enabled": "true"}, ("'run.sh' is not a Python program",)),
    (plan, {"hf_token": "x" * 140_000}, ("one argument: hf_token (140,000 bytes)",)),
    (plan, {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": "true", "PATH": "/nowhere"}, ("sagemaker_mpi_enabled", "torch_distributed")),
    (code, [program("train.py"), "project/train.py", "script.py"],
     ("'train.py'", "existing files: project/train.py, script.py")),
    (code, [program("package"), "package/__init__.py"], ("package is a folder without __main__.py",)),
    (code, [program("train.ipynb"), "train.ipynb"], ("jupyter nbconvert --to script train.ipynb",)),
    *((code, [program(name), "script.py"], (f"sagemaker_program is '{name}'", "train.py")) for name in ("../script.py", "-c")),
    (code, [program("windows.sh"), "windows.sh"], ("windows.sh has Windows line endings", "sed -i")),
    (code, [program("a.py") | {"sagemaker_submit_directory": "/gone"}], ("sagemaker_submit_directory is '/gone'", "mount")),
    (code, [{"sagemaker_submit_directory": "/code"}], ("no entry point is named", "sagemaker_program")),
    *((index, arn, (f"CA_REPOSITORY_ARN is {arn!r}", "repository/DOMAIN")) for arn in (
        "team/python", "arn:aws:codeartifact:eu-west-1:111122223333:domain/team", "arn:aws:s3:::team/python",
        "arn:aws:codeartifact:eu-west-1:1111:repository/team/python", f"{ARN}/pypi")),
    *((limits, {"AMPHORA_STOP_SECONDS": value}, (f"AMPHORA_STOP_SECONDS is '{value}'", "Give a number of at least 0.001, or leave it out."))
      for value in ("0", "-1", "nan", "inf", "soon", "1e999")),
    (limits, {"AMPHORA_STOP_SECOND": "1", "AMPHORA_HOST_WAIT_SECONDS": "many"},
     ("many", "AMPHORA_STOP_SECOND is not a variable", "Did you mean AMPHORA_STOP_SECONDS")),
    (server, {"AMPHORA_DTYP": "1"}, ("AMPHORA_DTYP is not a variable", "Did you mean AMPHORA_DTYPE")),
    *((server, {name: value}, (f"{name} is ", value)) for name, value in (
        ("SAGEMAKER_BIND_TO_PORT", "70000"), ("SAGEMAKER_BIND_TO_PORT", "http"),
        ("SAGEMAKER_TS_BATCH_SIZE", "0"), ("SAGEMAKER_TS_BATCH_SIZE", "1.5"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "-1"), ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "nan"),
        ("SAGEMAKER_MODEL_SERVER_TIMEOUT", "inf"), ("OMP_NUM_THREADS", "all"),
        ("AMPHORA_QUEUE_LIMIT", "nan"))),
    (server, {"SAGEMAKER_TS_BATCH_SIZE": "many", "SAGEMAKER_MULTI_MODEL": "maybe", "AMPHORA_QUEUE_LIMIT": "0"},
     (f"SAGEMAKER_TS_BATCH_SIZE is 'many'. {WHOLE}", f"AMPHORA_QUEUE_LIMIT is '0'. {WHOLE}",
      "SAGEMAKER_MULTI_MODEL is 'maybe'. Give true or false, or leave it out.")),
]
])  # fmt: skip
def test_an_error_has_the_key_its_value_and_the_remedy(
    tree: Tree, read: Any, given: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(CodeError if read is code else ConfigError) as raised:
        read(tree, given)
    for part in words:
        assert part in str(raised.value)


def test_all_that_the_sources_read_is_known_and_names_near_ours_are_no_errors() -> None:
    assert read_limits({"AMPHORA_STOP_SECONDS": " 2.5 ", "AMPHORAX": "a user's"}) == (2.5, 300)
    root = Path(__file__).parents[3]
    sources = [*(root / "container").rglob("*.py"), *(root / "code").rglob("*.py")]
    sources += root.glob("Dockerfile.*")
    known = variables.SETTINGS.keys() | variables._INTERNAL
    for source in sources:
        # AMPHORA_ARGUMENT_... are made up for one start.
        read = set(re.findall(r"\bAMPHORA_(?!ARGUMENT)[A-Z]\w*", source.read_text()))
        assert read <= known, f"{source}: list it in amphora.common.variables"
