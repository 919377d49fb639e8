"""Reading /opt/ml/input, and SM_* and argv: equal to sagemaker-training 5.1.4 but for the differences
that are listed. test_errors.py has what is refused, and tests/contract how hyperparameters are decoded."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amphora.common import devices
from amphora.common.errors import ConfigError
from amphora.contract.job import decode, read_job
from amphora.contract.sm_variables import sm_variables, to_arguments
from tests.support.job_tree import Tree, clean_environ


def read(tree: Tree, **environ: str):
    return read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})


def test_what_a_local_run_lacks_or_adds_is_no_error(tree: Tree) -> None:
    job = read(tree.configure().channel("train", **{"a.csv": "text,label\n"}))
    assert list(job.channels) == ["train"] and job.hosts == ("algo-1",)
    assert read(tree.configure('\ufeff{"a": "1"}')).hyperparameters == {"a": 1}
    tree.configure({"sagemaker_program": "a.py", "sagemaker_x_enabled": '"False"'})
    # The environment names the program first.
    job = read(tree, SAGEMAKER_PROGRAM="b.py")
    assert job.entry_point == "b.py"
    assert not job.wants("sagemaker_x_enabled") and not job.wants("sagemaker_y_enabled")
    # `docker run -v` creates a folder where the host has no such file.
    (tree.base / "input" / "config" / "resourceconfig.json").mkdir()
    with pytest.raises(ConfigError, match=r"resourceconfig\.json .*Is a directory"):
        read(tree)


@pytest.mark.parametrize("level", ["20", '"20"', " 20 ", "1" * 5000])
def test_a_log_level_is_a_number_or_the_text_of_one(tree: Tree, level: str) -> None:
    tree.configure({"sagemaker_container_log_level": level})
    if len(level) < 5000:
        assert read(tree).log_level == 20
    else:
        with pytest.raises(ConfigError, match="sagemaker_container_log_level is '1111"):
            read(tree)


CPU = devices.Devices(cpus=2, efa=False, reason="test")


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tree, Callable[..., Any]]]:
    """sagemaker-training itself, in a process of its own, asked about one tree again and again."""
    if importlib.util.find_spec("sagemaker_training") is None:
        pytest.skip("sagemaker-training is not installed here (it needs a C compiler)")
    tree = Tree(tmp_path_factory.mktemp("job") / "ml").configure()
    # Its view of jobs, a JSON line each.
    program = """
import json, logging, os, sys
from sagemaker_training import environment
logging.disable(logging.CRITICAL)
for line in sys.stdin:
    for name in ("SAGEMAKER_PROGRAM", "SAGEMAKER_SUBMIT_DIRECTORY", "TRAINING_JOB_NAME"):
        os.environ.pop(name, None)
    os.environ.update(json.loads(line))
    view = environment.Environment()
    print(json.dumps({"variables": view.to_env_vars(), "argv": view.to_cmd_args()}), flush=True)
"""
    probe = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        env=clean_environ(SAGEMAKER_BASE_DIR=str(tree.base), AWS_EC2_METADATA_DISABLED="true"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(environ: dict[str, str]) -> Any:
        assert probe.stdin and probe.stdout
        probe.stdin.write(json.dumps(environ) + "\n")
        probe.stdin.flush()
        return json.loads(probe.stdout.readline())

    yield tree, ask
    assert probe.stdin and probe.stdout
    probe.stdin.close()
    probe.wait(240)
    probe.stdout.close()


_is_text = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
_names = st.from_regex(r"(?!\.\.?\Z)[a-zA-Z0-9_.-]{1,8}", fullmatch=True)


# Each value JSON-encoded (SDK v2), or a raw string that is not JSON by itself (v3).
@settings(max_examples=60)
@given(
    sent=st.dictionaries(
        _names.map("x{}".format),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(_is_text, max_size=12)
            | st.floats(allow_nan=False, allow_infinity=False),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
        ).map(json.dumps)
        | st.text(_is_text, max_size=12).filter(lambda text: decode(text) == text),
        max_size=5,
    ),
    platform=st.fixed_dictionaries(
        {"sagemaker_program": st.sampled_from(['"train.py"', '"run.sh"', "train.py"])},
        optional={
            "sagemaker_job_name": st.just('"job"'),
            "sagemaker_container_log_level": st.sampled_from(["10", "20"]),
            "sagemaker_submit_directory": st.just('"s3://bucket/sourcedir.tar.gz"'),
            "sagemaker_region": st.just('"eu-west-1"'),
            "_tuning_objective_metric": st.just("f1"),
            **{
                f"sagemaker_{name}_enabled": st.sampled_from(["true", "false"])
                for name in ("torch_distributed", "mpi", "pytorch_ddp", "distributed_dataparallel")
            },
        },
    ),
    hosts=st.lists(
        st.integers(1, 20).map("algo-{}".format), min_size=1, max_size=4, unique=True
    ),
    network=st.fixed_dictionaries(
        {},
        optional={
            "network_interface_name": st.just("eth7"),
            "current_instance_type": st.just("ml.m5.xlarge"),
            "topology": st.just([{"hostName": "algo-1"}]),
            "current_group_name": st.just("one"),
        },
    ),
    channels=st.lists(_names, max_size=3, unique=True),
    environ=st.sampled_from([{}, {"TRAINING_JOB_NAME": "a-job"}]),
)  # fmt: skip
def test_equal_to_the_toolkit(
    toolkit: tuple[Tree, Callable[..., Any]],
    sent: dict[str, str],
    platform: dict[str, str],
    hosts: list[str],
    network: dict[str, Any],
    channels: list[str],
    environ: dict[str, str],
) -> None:
    def same_number(value: Any) -> Any:
        if isinstance(value, list):
            return [same_number(item) for item in value]
        try:
            return float(value)
        except ValueError:
            return value

    def loosely(name: str, value: str) -> Any:
        """A variable's value with the listed differences taken out."""
        if name == "SM_USER_ARGS" or name.startswith("SM_HP_"):
            return same_number(json.loads(value) if name == "SM_USER_ARGS" else value)
        if name == "SM_TRAINING_ENV":
            view = json.loads(value)
            view.pop("is_modelparallel_enabled")
            return view
        return value

    tree, ask = toolkit
    for name in channels:
        tree.channel(name)
    resources: dict[str, Any] = {"current_host": hosts[0], "hosts": sorted(hosts), **network}
    if "current_group_name" in network:
        group = {"instance_group_name": "one", "instance_type": "t", "hosts": sorted(hosts)}
        resources["instance_groups"] = [group]
    inputs = {name: {"TrainingInputMode": "File"} for name in channels}
    tree.configure(sent | platform, resourceconfig=resources, inputdataconfig=inputs)
    theirs = ask(environ)
    ours_job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})
    ours = sm_variables(ours_job, CPU, environ)
    for name, value in theirs["variables"].items():
        assert loosely(name, ours[name]) == loosely(name, value), name
    assert same_number(to_arguments(ours_job.arguments)) == same_number(theirs["argv"])


def variables(tree: Tree, **environ: str) -> dict[str, str]:
    return sm_variables(read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ}), CPU, environ)


def test_the_differences_are_as_listed(tree: Tree) -> None:
    groups = [{"instance_group_name": "g", "instance_type": "t", "hosts": ["b", "a"]}]
    tree.configure(
        {"version": "1.10", "mp_parameters": {"partitions": 2}},
        resourceconfig={"current_host": "a", "hosts": ["b", "a"], "current_group_name": "g",
                        "instance_groups": groups},
    )  # fmt: skip
    actual = variables(
        tree,
        SAGEMAKER_SUBMIT_DIRECTORY="/my/code",
        SAGEMAKER_CONTAINER_LOG_LEVEL="30",
        AWS_REGION="eu-north-1",
    )
    # A number that came as text keeps its spelling: 1.10 is not 1.1 to a version.
    assert actual["SM_HP_VERSION"] == "1.10" and '"1.10"' in actual["SM_USER_ARGS"]
    # The toolkit reads these two variables and drops them.
    assert actual["SM_MODULE_DIR"] == "/my/code" and actual["SM_LOG_LEVEL"] == "30"
    # Sorted, so that a host's index is its rank.
    assert actual["SM_HOSTS"] == actual["SM_CURRENT_INSTANCE_GROUP_HOSTS"] == '["a","b"]'
    assert json.loads(actual["SM_INSTANCE_GROUPS_DICT"])["g"]["hosts"] == ["a", "b"]
    # The toolkit writes 'None', and asks boto3 for the region.
    assert actual["SM_MODULE_NAME"] == "" and actual["SAGEMAKER_REGION"] == "eu-north-1"
    # The toolkit reads this one from a variable that is not set yet.
    assert json.loads(actual["SM_TRAINING_ENV"])["is_modelparallel_enabled"] is True


def test_v3_names_and_channels_a_shell_can_export(tree: Tree) -> None:
    tree.channel("my-data.v1").channel("o-ther").channel("O_THER")
    tree.configure({"a_b": "1", "A.B": "2"})
    actual = variables(tree)
    assert (actual["SM_HP_A_B"], actual["SM_HP_A.B"]) == ("1", "2")
    assert Path(actual["SM_CHANNEL_O_THER"]).name == "O_THER"
    path = str(tree.base / "input" / "data" / "my-data.v1")
    assert actual["SM_CHANNEL_MY-DATA.V1"] == actual["SM_CHANNEL_MY_DATA_V1"] == path
    assert actual["SM_INPUT_DATA_DIR"] == str(tree.base / "input" / "data")
    assert actual["SM_OUTPUT_FAILURE"] == str(tree.base / "output" / "failure")
    assert (actual["SM_HOST_COUNT"], actual["SM_CURRENT_HOST_RANK"]) == ("1", "0")
    assert (actual["SM_MASTER_ADDR"], actual["SM_MASTER_PORT"]) == ("algo-1", "7777")
    assert actual["MASTER_ADDR"] == "127.0.0.1"
