"""From a job and its devices to a command. No Neuron device was here: that its variables do what AWS's
documents say is not tested."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError
from amphora.contract.job import read_job
from amphora.training import launch
from amphora.training.entry_point import Program, ProgramKind
from tests.support.job_tree import Tree
from tests.support.neuron_devices import printing, trn1

SCRIPT = Path("/opt/amphora/code/train.py")
SOURCE = Program(root=SCRIPT.parent, kind=ProgramKind.SCRIPT, name="train.py")


def devices(gpus: int = 0, cores: int = 0, cpus: int = 8, efa: bool = False) -> Devices:
    kind = "cuda" if gpus else "neuron" if cores else "cpu"
    return Devices(kind=kind, accelerators=gpus or cores, cpus=cpus, efa=efa, reason="test")


def plan(tree: Tree, detected: Devices, source: Program = SOURCE, **environ: str) -> launch.Launch:
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})
    return launch.plan(job, detected, source, Path("/tmp/errors"), environ)


def two_hosts(tree: Tree, current: str, **hyperparameters: str) -> Tree:
    return tree.configure(
        hyperparameters, resourceconfig={"current_host": current, "hosts": ["algo-1", "algo-2"]}
    )


def test_one_process_is_plain_python_and_several_mean_torchrun(tree: Tree) -> None:
    started = plan(tree.configure({"epochs": "2", "x": "true"}), devices())
    assert list(started.argv) == [sys.executable, str(SCRIPT), "--epochs", "2", "-x", "True"]
    assert started.environ["OMP_NUM_THREADS"] == "8"
    for detected in (devices(gpus=4), devices(cores=4)):
        started = plan(tree.configure(), detected, AMPHORA_NEURON_STACK="xla")
        assert started.argv[1:7] == (
            "-m", "torch.distributed.run", "--nproc_per_node=4", "--nnodes=1", "--standalone",
            "--local_addr=127.0.0.1",
        )  # fmt: skip
        assert started.environ["OMP_NUM_THREADS"] == "2"
    started = plan(tree.configure(), devices(), AMPHORA_NPROC_PER_NODE="2")
    assert "--nproc_per_node=2" in started.argv and started.environ["OMP_NUM_THREADS"] == "4"
    alone = plan(tree, devices(gpus=4), AMPHORA_NPROC_PER_NODE="1")
    assert alone.argv == (sys.executable, str(SCRIPT))
    tree.configure({"sagemaker_torch_distributed_enabled": "true"})
    assert "--nproc_per_node=1" in plan(tree, devices()).argv


def test_accelerate_is_told_of_cpus_unless_something_else_may_be_there(tree: Tree) -> None:
    name, tree = "ACCELERATE_USE_CPU", tree.configure({"sagemaker_program": "script.py"})
    on_cpus = plan(tree, devices(), AMPHORA_NEURON_STACK="xla").environ
    assert (on_cpus[name], on_cpus["USE_TORCH_XLA"]) == ("true", "0")
    assert plan(tree, devices(), **{name: "false"}).environ[name] == "false"
    for detected in (devices(gpus=1), devices(cores=2), replace(devices(), has_other=True)):
        started = plan(tree, detected, AMPHORA_NEURON_STACK="xla").environ
        assert not {name, "USE_TORCH_XLA"} & set(started)


def test_the_recipe_trains_on_every_host_a_script_alone_and_the_users_variables_win(
    tree: Tree,
) -> None:
    argv = plan(two_hosts(tree, "algo-2"), devices()).argv
    assert {"--nnodes=2", "--node_rank=1", "--master_addr=algo-1", "--master_port=7777"} <= set(
        argv
    )
    started = plan(two_hosts(tree, "algo-1", sagemaker_program="s.py"), devices())
    assert started.argv == (sys.executable, str(SCRIPT))
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
        ("repository", "https://user:verysecret@host/a.git"),
        ("repository", "https://verysecrettoken@host/a.git"),
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


FLAGS = "NEURON_CC_FLAGS"
URL = "NEURON_COMPILE_CACHE_URL"
NEFF = "TORCH_NEURONX_NEFF_CACHE_DIR"
STACK = {"AMPHORA_NEURON_STACK": "xla"}
EFA = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE")


def xla(tree: Tree, **more: str) -> launch.Launch:
    return plan(tree.configure(), devices(cores=2), **STACK, **more)


def test_a_process_for_each_core_and_a_cache_that_outlives_the_job(tree: Tree) -> None:
    for stack, index, other in (("xla", URL, NEFF), ("native", NEFF, URL)):
        started = plan(tree.configure(), devices(cores=2), AMPHORA_NEURON_STACK=stack)
        assert "--nproc_per_node=2" in started.argv
        cache = tree.base / "checkpoints" / "neuron-compile-cache"
        assert started.environ[index] == str(cache) == str(started.cache)
        assert other not in started.environ
        assert f"Neuron stack: {stack}" in started.notes
        assert f"compiled programs are kept in {cache}" in started.notes
    assert started.environ["USE_TORCH_XLA"] == "0" and FLAGS not in started.environ
    assert xla(tree).environ[FLAGS] == f"--model-type=transformer --cache_dir={cache}"
    # A bucket is no folder to NeuronTrainer, and no cache is none.
    bucket = xla(tree, NEURON_COMPILE_CACHE_URL="s3://bucket/cache")
    assert bucket.environ[FLAGS] == "--model-type=transformer"
    assert xla(tree, NEURON_CC_FLAGS="--no-cache").environ[FLAGS] == "--no-cache"
    assert "USE_TORCH_XLA" not in xla(tree).environ


def test_variables_of_neuron_keep_to_the_user_and_the_devices(tree: Tree) -> None:
    ours = xla(tree, NEURON_COMPILE_CACHE_URL="s3://bucket/cache", NEURON_CC_FLAGS="-O1")
    assert (ours.environ[URL], ours.environ[FLAGS]) == ("s3://bucket/cache", "-O1")
    assert ours.cache is None and "compiled programs are kept in s3://bucket/cache" in ours.notes
    local = xla(tree, NEURON_COMPILE_CACHE_URL="file:///tmp/c", NEURON_CC_FLAGS="-O1")
    assert local.cache == Path("/tmp/c")
    # The compiler's own option beats the variable.
    assert xla(tree, NEURON_CC_FLAGS="-O1 --cache_dir=/tmp/c").cache == Path("/tmp/c")
    native = plan(
        tree,
        devices(cores=2),
        AMPHORA_NEURON_STACK="native",
        TORCH_NEURONX_NEFF_CACHE_DIR="/c",
        USE_TORCH_XLA="1",
    )
    assert (native.environ[NEFF], native.environ["USE_TORCH_XLA"]) == ("/c", "1")
    started = plan(tree.configure(), devices(), AMPHORA_NEURON_STACK="xla")
    assert not {URL, NEFF, FLAGS} & set(started.environ) and started.cache is None
    two = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}
    assert not set(EFA) & set(plan(tree.configure(), devices(cores=2, efa=True), **STACK).environ)
    tree.configure(resourceconfig=two)
    assert not set(EFA) & set(plan(tree, devices(cores=2, efa=False), **STACK).environ)
    for ours, provider in (({}, "efa"), ({"FI_PROVIDER": "tcp"}, "tcp")):
        environ = plan(tree, devices(cores=2, efa=True), **STACK, **ours).environ
        assert [environ[name] for name in EFA] == [provider, "1", "1"]


def test_the_stack_is_what_the_image_declares(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch_xla", "torch_neuronx"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for stack in ("", "jax"):
        with pytest.raises(ConfigError, match=f"AMPHORA_NEURON_STACK is '{stack}'.*build_and_push"):
            plan(tree.configure(), devices(cores=2), AMPHORA_NEURON_STACK=stack)
    script = plan(tree.configure({"sagemaker_program": "s.py"}), devices(cores=2))
    assert "AMPHORA_NEURON_STACK is not set" in " ".join(script.notes)
    assert not {URL, NEFF, FLAGS} & set(script.environ)


def test_named_cores_are_kept_where_each_process_gets_one_and_refused_else(tree: Tree) -> None:
    native = {"AMPHORA_NEURON_STACK": "native", "NEURON_RT_VISIBLE_CORES": "2-3"}
    with pytest.raises(ConfigError, match="Give NEURON_RT_NUM_CORES=2"):
        plan(tree.configure(), devices(cores=2), **native)
    # libneuronxla gives each process its place in the list.
    assert xla(tree, NEURON_RT_VISIBLE_CORES="2-3").environ["NEURON_RT_VISIBLE_CORES"] == "2-3"
    one = plan(tree, devices(cores=1), AMPHORA_NEURON_STACK="native", NEURON_RT_VISIBLE_CORES="3")
    assert one.environ["NEURON_RT_VISIBLE_CORES"] == "3"


def test_a_cache_that_cannot_be_made_is_only_warned_of(tree: Tree, tmp_path: Path) -> None:
    def image(folder: Path, script: str) -> dict[str, str]:
        """A code folder as the image's, whose recipe is `script`; two Neuron cores seem to be there."""
        printing(folder.parent, trn1(1))
        folder.mkdir()
        (folder / "train.py").write_text(script)
        (folder / "inference.py").write_text("")
        path = f"{folder.parent}:{os.environ['PATH']}"
        return {"AMPHORA_CODE_DIR": str(folder), "PATH": path}

    (tree.configure().base / "checkpoints").write_text("in the way")
    results = {**STACK, **image(tmp_path / "code", "")}
    done = tree.train(AMPHORA_NPROC_PER_NODE="1", **results)
    assert done.returncode == 0 and "compiled programs cannot be kept in" in done.stderr

    listing = [{**trn1(1)[0], "nc_count": 4, "logical_neuroncore_config": 2, "neuroncore_ids": []}]
    printing(tmp_path, listing)
    tree.script("import json\n").configure({"sagemaker_program": "script.py"})
    path = f"{tmp_path}:{os.environ['PATH']}"
    _, findings = tree.doctor(PATH=path, AMPHORA_NEURON_STACK="native")
    detected = "neuron: neuron-ls lists 4 logical Neuron cores at LNC 2"
    assert findings["device"][0]["detail"] == detected
    cache = tree.base / "checkpoints" / "neuron-compile-cache"
    details = {finding["detail"] for finding in findings["start"]}
    assert {"Neuron stack: native", f"compiled programs are kept in {cache}"} <= details
    assert not cache.exists()
