"""What a job on Neuron cores is started with; a stand-in for neuron-ls.

No Neuron device was here: that the variables do what AWS's documents say of them is not tested.
"""

import os
from pathlib import Path

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError
from amphora.contract.job import read_job
from amphora.training import launch
from amphora.training.entry_point import ProgramKind, Source
from tests.support.job_tree import Tree
from tests.support.neuron_devices import printing, trn1

SCRIPT = Path("/opt/amphora/code/train.py")
SOURCE = Source(root=SCRIPT.parent, kind=ProgramKind.SCRIPT, name="train.py")
FLAGS = "NEURON_CC_FLAGS"
URL = "NEURON_COMPILE_CACHE_URL"
NEFF = "TORCH_NEURONX_NEFF_CACHE_DIR"
STACK = {"AMPHORA_NEURON_STACK": "xla"}
EFA = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE")


def plan(tree: Tree, cores: int = 2, efa: bool = False, **environ: str) -> launch.Launch:
    kind = "neuron" if cores else "cpu"
    devices = Devices(kind=kind, accelerators=cores, cpus=4, efa=efa, reason="test")
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})
    return launch.plan(job, devices, SOURCE, Path("/tmp/errors"), environ)


def xla(tree: Tree, **more: str) -> launch.Launch:
    return plan(tree.configure(), AMPHORA_NEURON_STACK="xla", **more)


def test_a_process_for_each_core_and_a_cache_that_outlives_the_job(tree: Tree) -> None:
    for stack, index, other in (("xla", URL, NEFF), ("native", NEFF, URL)):
        started = plan(tree.configure(), AMPHORA_NEURON_STACK=stack)
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


def test_what_the_user_sets_is_never_overridden(tree: Tree) -> None:
    ours = xla(tree, NEURON_COMPILE_CACHE_URL="s3://bucket/cache", NEURON_CC_FLAGS="-O1")
    assert (ours.environ[URL], ours.environ[FLAGS]) == ("s3://bucket/cache", "-O1")
    assert ours.cache is None and "compiled programs are kept in s3://bucket/cache" in ours.notes
    local = xla(tree, NEURON_COMPILE_CACHE_URL="file:///tmp/c", NEURON_CC_FLAGS="-O1")
    assert local.cache == Path("/tmp/c")
    # The compiler's own option beats the variable.
    assert xla(tree, NEURON_CC_FLAGS="-O1 --cache_dir=/tmp/c").cache == Path("/tmp/c")
    native = plan(
        tree, AMPHORA_NEURON_STACK="native", TORCH_NEURONX_NEFF_CACHE_DIR="/c", USE_TORCH_XLA="1"
    )
    assert (native.environ[NEFF], native.environ["USE_TORCH_XLA"]) == ("/c", "1")


def test_the_stack_is_what_the_image_declares(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch_xla", "torch_neuronx"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for stack in ("", "jax"):
        with pytest.raises(ConfigError, match=f"AMPHORA_NEURON_STACK is '{stack}'.*build_and_push"):
            plan(tree.configure(), AMPHORA_NEURON_STACK=stack)
    script = plan(tree.configure({"sagemaker_program": "s.py"}))
    assert "AMPHORA_NEURON_STACK is not set" in " ".join(script.notes)
    assert not {URL, NEFF, FLAGS} & set(script.environ)


def test_other_devices_get_nothing_of_it(tree: Tree) -> None:
    started = plan(tree.configure(), cores=0, AMPHORA_NEURON_STACK="xla")
    assert not {URL, NEFF, FLAGS} & set(started.environ) and started.cache is None


def test_efa_between_hosts_that_have_it(tree: Tree) -> None:
    two = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}
    assert not set(EFA) & set(plan(tree.configure(), efa=True, **STACK).environ)
    tree.configure(resourceconfig=two)
    assert not set(EFA) & set(plan(tree, efa=False, **STACK).environ)
    for ours, provider in (({}, "efa"), ({"FI_PROVIDER": "tcp"}, "tcp")):
        environ = plan(tree, efa=True, **STACK, **ours).environ
        assert [environ[name] for name in EFA] == [provider, "1", "1"]


def test_cores_that_each_process_would_take_are_refused(tree: Tree) -> None:
    native = {"AMPHORA_NEURON_STACK": "native", "NEURON_RT_VISIBLE_CORES": "2-3"}
    with pytest.raises(ConfigError, match="Give NEURON_RT_NUM_CORES=2"):
        plan(tree.configure(), **native)


def test_named_cores_are_kept_where_each_process_gets_one(tree: Tree) -> None:
    # libneuronxla gives each process its place in the list.
    assert xla(tree, NEURON_RT_VISIBLE_CORES="2-3").environ["NEURON_RT_VISIBLE_CORES"] == "2-3"
    one = plan(tree, cores=1, AMPHORA_NEURON_STACK="native", NEURON_RT_VISIBLE_CORES="3")
    assert one.environ["NEURON_RT_VISIBLE_CORES"] == "3"


def image(folder: Path, script: str) -> dict[str, str]:
    """A code folder as the image's, whose recipe is `script`; two Neuron cores seem to be there."""
    printing(folder.parent, trn1(1))
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "inference.py").write_text("")
    path = f"{folder.parent}:{os.environ['PATH']}"
    return {"AMPHORA_CODE_DIR": str(folder), "PATH": path}


def test_a_cache_that_cannot_be_made_is_only_warned_of(tree: Tree, tmp_path: Path) -> None:
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
