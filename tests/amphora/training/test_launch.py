"""From a job and its devices to a command: pure, so tested without starting anything."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from amphora.common.devices import Devices
from amphora.contract.job import read_job
from amphora.training import launch
from amphora.training.entry_point import ProgramKind, Source
from tests.support.job_tree import Tree

SCRIPT = Path("/opt/amphora/code/train.py")
SOURCE = Source(root=SCRIPT.parent, kind=ProgramKind.SCRIPT, name="train.py")
SHELL = Source(root=SCRIPT.parent, kind=ProgramKind.COMMAND, name="run.sh")


def devices(gpus: int = 0, cores: int = 0, cpus: int = 8, efa: bool = False) -> Devices:
    kind = "cuda" if gpus else "neuron" if cores else "cpu"
    return Devices(kind=kind, accelerators=gpus or cores, cpus=cpus, efa=efa, reason="test")


def plan(tree: Tree, detected: Devices, source: Source = SOURCE, **environ: str) -> launch.Launch:
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})
    return launch.plan(job, detected, source, Path("/tmp/errors"), environ)


def two_hosts(tree: Tree, current: str, **hyperparameters: str) -> Tree:
    return tree.configure(
        hyperparameters, resourceconfig={"current_host": current, "hosts": ["algo-1", "algo-2"]}
    )


def test_one_cpu_process_is_plain_python(tree: Tree) -> None:
    started = plan(tree.configure({"epochs": "2", "x": "true"}), devices())
    assert list(started.argv) == [sys.executable, str(SCRIPT), "--epochs", "2", "-x", "True"]
    assert started.environ["OMP_NUM_THREADS"] == "8"


def test_accelerate_is_told_of_cpus_unless_something_else_may_be_there(tree: Tree) -> None:
    name, tree = "ACCELERATE_USE_CPU", tree.configure({"sagemaker_program": "script.py"})
    on_cpus = plan(tree, devices(), AMPHORA_NEURON_STACK="xla").environ
    assert (on_cpus[name], on_cpus["USE_TORCH_XLA"]) == ("true", "0")
    assert plan(tree, devices(), **{name: "false"}).environ[name] == "false"
    for detected in (devices(gpus=1), devices(cores=2), replace(devices(), has_other=True)):
        started = plan(tree, detected, AMPHORA_NEURON_STACK="xla").environ
        assert not {name, "USE_TORCH_XLA"} & set(started)


def test_several_accelerators_mean_torchrun(tree: Tree) -> None:
    for detected in (devices(gpus=4), devices(cores=4)):
        started = plan(tree.configure(), detected, AMPHORA_NEURON_STACK="xla")
        assert started.argv[1:7] == (
            "-m", "torch.distributed.run", "--nproc_per_node=4", "--nnodes=1", "--standalone",
            "--local_addr=127.0.0.1",
        )  # fmt: skip
        assert started.environ["OMP_NUM_THREADS"] == "2"


def test_the_process_count_can_be_set(tree: Tree) -> None:
    started = plan(tree.configure(), devices(), AMPHORA_NPROC_PER_NODE="2")
    assert "--nproc_per_node=2" in started.argv and started.environ["OMP_NUM_THREADS"] == "4"
    alone = plan(tree, devices(gpus=4), AMPHORA_NPROC_PER_NODE="1")
    assert alone.argv == (sys.executable, str(SCRIPT))
    tree.configure({"sagemaker_torch_distributed_enabled": "true"})
    assert "--nproc_per_node=1" in plan(tree, devices()).argv


def test_the_recipe_trains_on_every_host(tree: Tree) -> None:
    argv = plan(two_hosts(tree, "algo-2"), devices()).argv
    assert {"--nnodes=2", "--node_rank=1", "--master_addr=algo-1", "--master_port=7777"} <= set(
        argv
    )


def test_a_script_trains_alone_unless_asked(tree: Tree) -> None:
    started = plan(two_hosts(tree, "algo-1", sagemaker_program="s.py"), devices())
    assert started.argv == (sys.executable, str(SCRIPT))


def test_what_the_user_sets_wins(tree: Tree) -> None:
    started = plan(
        two_hosts(tree, "algo-1"),
        devices(efa=True),
        OMP_NUM_THREADS="3",
        FI_PROVIDER="tcp",
        PYTHONPATH="/mine",
    )
    assert (started.environ["OMP_NUM_THREADS"], started.environ["FI_PROVIDER"]) == ("3", "tcp")
    assert started.environ["PYTHONPATH"].endswith(":/mine")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_token", "hf_verysecretvalue"),
        ("dbPassword", "correct horse"),
        ("GH_TOKENS", "one,two"),
        ("repository", "https://user:verysecret@host/a.git"),
        ("repository", "https://verysecrettoken@host/a.git"),
        ("webhook", "https://hooks.slack.com/services/" + "T0/B0/verysecret"),
    ],
)
def test_a_secret_never_stands_in_argv(tree: Tree, name: str, value: str) -> None:
    started = plan(tree.configure({name: json.dumps(value), "lr": "1"}), devices())
    assert value not in " ".join(started.argv)
    assert f"amphora-secret:SM_HP_{name.upper()}" in started.argv
    assert started.environ[f"SM_HP_{name.upper()}"] == value


@pytest.mark.parametrize("option", ["--NCCL_DEBUG WARN", "--NCCL_DEBUG=WARN"])
def test_an_option_of_the_toolkit_is_not_mpiruns(tree: Tree, tmp_path: Path, option: str) -> None:
    """AWS's notebooks have it."""
    (tmp_path / "mpirun").touch(mode=0o755)
    chosen = {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": "true"}
    tree.configure({**chosen, "sagemaker_mpi_custom_mpi_options": f"-x A=1 {option} -x B=2"})
    argv = " ".join(plan(tree, devices(), PATH=str(tmp_path)).argv)
    assert "-x A=1 -x NCCL_DEBUG=WARN -x B=2" in argv


def test_only_the_chosen_instance_groups_train_together(tree: Tree) -> None:
    groups = [
        {"instance_group_name": "cpu", "instance_type": "ml.m5.large", "hosts": ["algo-3"]},
        {
            "instance_group_name": "gpu",
            "instance_type": "ml.g5.2xlarge",
            "hosts": ["algo-2", "algo-1"],
        },
    ]
    for current, group in (("algo-2", "gpu"), ("algo-3", "cpu")):
        tree.configure(
            {
                "sagemaker_program": "train.py",
                "sagemaker_torch_distributed_enabled": "true",
                "sagemaker_distribution_instance_groups": '["gpu"]',
            },
            resourceconfig={
                "current_host": current,
                "hosts": ["algo-1", "algo-2", "algo-3"],
                "current_group_name": group,
                "instance_groups": groups,
            },
        )
        started = plan(tree, devices())
        if group == "gpu":
            assert {"--nnodes=2", "--node_rank=1", "--master_addr=algo-1"} <= set(started.argv)
        else:
            assert started.argv == (sys.executable, str(SCRIPT))
            assert "in no instance group" in started.notes[0]


@pytest.mark.parametrize(
    "key", ["sagemaker_pytorch_ddp_enabled", "sagemaker_distributed_dataparallel_enabled"]
)
def test_requests_for_other_data_parallel_run_on_torchrun_and_say_so(tree: Tree, key: str) -> None:
    started = plan(tree.configure({"sagemaker_program": "s.py", key: "true"}), devices(gpus=2))
    assert "--nproc_per_node=2" in started.argv
    assert sum("torchrun" in note for note in started.notes) == 2


def test_an_interface_is_used_only_where_it_exists(tree: Tree) -> None:
    for interfaces, expected in ((("eth0", "lo"), "eth0"), (("lo",), None)):
        detected = Devices(cpus=2, efa=False, reason="test", interfaces=interfaces)
        environ = plan(two_hosts(tree, "algo-1"), detected).environ
        assert environ.get("GLOO_SOCKET_IFNAME") == environ.get("NCCL_SOCKET_IFNAME") == expected
    detected = Devices(cpus=2, efa=False, reason="test", interfaces=("eth0",))
    assert plan(tree, detected, NCCL_SOCKET_IFNAME="ib0").environ["NCCL_SOCKET_IFNAME"] == "ib0"
