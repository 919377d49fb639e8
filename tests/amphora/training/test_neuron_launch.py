"""What a job on Neuron cores is started with; stand-ins for neuron-ls and neuron_parallel_compile.

No Neuron device was here: that the variables do what AWS's documents say of them is not tested.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError
from amphora.contract.job import read_job
from amphora.training import launch
from amphora.training.entry_point import ProgramKind, Source
from tests.support.job_tree import Tree
from tests.support.neuron_devices import printing, trn1
from tests.support.until import until

SCRIPT = Path("/opt/amphora/code/train.py")
SOURCE = Source(root=SCRIPT.parent, kind=ProgramKind.SCRIPT, name="train.py")
FLAGS = "NEURON_CC_FLAGS"
URL = "NEURON_COMPILE_CACHE_URL"
NEFF = "TORCH_NEURONX_NEFF_CACHE_DIR"
STACK = {"AMPHORA_NEURON_STACK": "xla"}
EFA = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE")


def plan(tree: Tree, cores: int = 2, efa: bool = False, **environ: str) -> launch.Launch:
    found = Devices(gpus=0, neuron_cores=cores, cpus=4, efa=efa, reason="test")
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})
    return launch.plan(job, found, SOURCE, Path("/tmp/errors"), environ)


def xla(tree: Tree, **more: str) -> launch.Launch:
    return plan(tree.configure(), AMPHORA_NEURON_STACK="xla", **more)


def test_a_process_for_each_core_and_a_cache_that_outlives_the_job(tree: Tree) -> None:
    for stack, place, other in (("xla", URL, NEFF), ("native", NEFF, URL)):
        started = plan(tree.configure(), AMPHORA_NEURON_STACK=stack)
        assert "--nproc_per_node=2" in started.argv
        cache = tree.base / "checkpoints" / "neuron-compile-cache"
        assert started.environ[place] == str(cache) == str(started.cache)
        assert other not in started.environ
        assert f"Neuron stack: {stack}, by AMPHORA_NEURON_STACK" in started.notes
        assert f"compiled programs are kept in {cache}" in started.notes
    assert started.environ["USE_TORCH_XLA"] == "0" and FLAGS not in started.environ
    assert xla(tree).environ[FLAGS] == f"--model-type=transformer --cache_dir={cache}"
    # A bucket is no folder to NeuronTrainer, and no cache is none.
    bucket = xla(tree, NEURON_COMPILE_CACHE_URL="s3://bucket/cache")
    assert bucket.environ[FLAGS] == "--model-type=transformer"
    assert xla(tree, NEURON_CC_FLAGS="--no-cache").environ[FLAGS] == "--no-cache"
    assert "USE_TORCH_XLA" not in xla(tree).environ


def test_what_the_user_sets_is_never_overridden(tree: Tree) -> None:
    own = xla(tree, NEURON_COMPILE_CACHE_URL="s3://bucket/cache", NEURON_CC_FLAGS="-O1")
    assert (own.environ[URL], own.environ[FLAGS]) == ("s3://bucket/cache", "-O1")
    assert own.cache is None and "compiled programs are kept in s3://bucket/cache" in own.notes
    local = xla(tree, NEURON_COMPILE_CACHE_URL="file:///tmp/c", NEURON_CC_FLAGS="-O1")
    assert local.cache == Path("/tmp/c")
    # The compiler's own option beats the variable.
    assert xla(tree, NEURON_CC_FLAGS="-O1 --cache_dir=/tmp/c").cache == Path("/tmp/c")
    native = plan(
        tree, AMPHORA_NEURON_STACK="native", TORCH_NEURONX_NEFF_CACHE_DIR="/c", USE_TORCH_XLA="1"
    )
    assert (native.environ[NEFF], native.environ["USE_TORCH_XLA"]) == ("/c", "1")


@pytest.mark.parametrize(
    ("packages", "stack"),
    [(("torch_xla", "torch_neuronx"), "xla"), (("torch_neuronx",), "native"), ((), "")],
)
def test_the_stack_is_what_is_installed(
    tree: Tree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages: tuple[str, ...],
    stack: str,
) -> None:
    for name in packages:
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    script = plan(tree.configure({"sagemaker_program": "s.py"}))
    assert f"Neuron stack: {stack or 'none'}" in " ".join(script.notes)
    if not stack:
        assert URL not in script.environ and NEFF not in script.environ
        with pytest.raises(ConfigError, match="neither torch-xla nor torch-neuronx"):
            plan(tree.configure())


def test_an_unknown_stack_is_named(tree: Tree) -> None:
    with pytest.raises(ConfigError, match="AMPHORA_NEURON_STACK is 'jax'"):
        plan(tree.configure(), AMPHORA_NEURON_STACK="jax")


def test_other_devices_get_nothing_of_it(tree: Tree) -> None:
    started = plan(tree.configure(), cores=0, AMPHORA_NEURON_STACK="xla")
    assert not {URL, NEFF, FLAGS} & set(started.environ) and started.cache is None


def test_efa_between_hosts_that_have_it(tree: Tree) -> None:
    two = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}
    assert not set(EFA) & set(plan(tree.configure(), efa=True, **STACK).environ)
    tree.configure(resourceconfig=two)
    assert not set(EFA) & set(plan(tree, efa=False, **STACK).environ)
    given = plan(tree, efa=True, FI_PROVIDER="tcp", **STACK).environ
    assert [given[name] for name in EFA] == ["tcp", "1", "1"]


RUN = {"RUN_NEURON_PARALLEL_COMPILE": "1", **STACK}
# What the tool does: the trial run in graph extraction mode, then the compilation.
TOOL = f"""#!{sys.executable}
import os, subprocess, sys
print("tool:", len(sys.argv) - 1, flush=True)
if os.environ.get("FAIL"):
    sys.exit("neuronx-cc: internal error 70")
environ = {{**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}}
code = subprocess.run(sys.argv[1:], env=environ).returncode
sys.exit(code if code >= 0 else 128 - code)
"""
SHOWN = """
import json, os, pathlib, sys, time
mode = os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0")
with open(os.environ["SM_OUTPUT_DIR"] + "/runs", "a") as file:
    print(mode, os.environ.get("RANK", "-"), file=file)
"""


def tools(folder: Path, with_compiler: bool = True) -> dict[str, str]:
    """An environment in which two Neuron cores seem to be there."""
    printing(folder, trn1(1))
    if with_compiler:
        (folder / "neuron_parallel_compile").write_text(TOOL)
        (folder / "neuron_parallel_compile").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def image(folder: Path, script: str) -> dict[str, str]:
    """A code folder as the image's, whose recipe is `script`."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "inference.py").write_text("")
    return {"AMPHORA_CODE_DIR": str(folder)}


def runs(tree: Tree) -> list[str]:
    return sorted((tree.base / "output" / "runs").read_text().splitlines())


def test_the_recipe_compiles_first_and_trains_then(tree: Tree, tmp_path: Path) -> None:
    done = tree.configure().train(**RUN, **tools(tmp_path), **image(tmp_path / "code", SHOWN))
    assert done.returncode == 0, done.stderr
    assert runs(tree) == ["0 0", "0 1", "1 0", "1 1"]
    assert "graphs are compiled first, then the recipe trains" in done.stderr
    assert (tree.base / "checkpoints" / "neuron-compile-cache").is_dir()


def test_a_script_is_compiled_only_as_in_sagemakers_own_images(
    scripted: Tree, tmp_path: Path
) -> None:
    done = scripted.script(SHOWN).train(**RUN, **tools(tmp_path), AMPHORA_NPROC_PER_NODE="1")
    assert done.returncode == 0, done.stderr
    assert runs(scripted) == ["1 -"] and "what it writes is invalid" in done.stderr


def test_a_failed_compilation_is_the_jobs_failure(tree: Tree, tmp_path: Path) -> None:
    environ = {**RUN, **tools(tmp_path), **image(tmp_path / "code", SHOWN)}
    done = tree.configure().train(FAIL="1", **environ)
    assert done.returncode == 2 and not (tree.base / "output" / "runs").exists()
    failed = tree.failure or ""
    assert failed.startswith("CodeError: Compiling the graphs ahead of training failed")
    assert "neuronx-cc: internal error 70" in failed
    assert "leave RUN_NEURON_PARALLEL_COMPILE out" in failed


def test_what_the_recipe_raises_while_it_is_compiled_is_told(tree: Tree, tmp_path: Path) -> None:
    code = image(tmp_path / "code", "raise ValueError('label_column is missing')")
    done = tree.configure().train(**RUN, **tools(tmp_path), **code)
    assert done.returncode == 2
    assert "failed: ValueError: label_column is missing" in (tree.failure or "")


@pytest.mark.parametrize(
    ("environ", "compiler", "says"),
    [
        ({"AMPHORA_NEURON_STACK": "xla"}, False, "there is no neuron_parallel_compile on PATH"),
        ({"AMPHORA_NEURON_STACK": "native"}, True, "it is for Neuron cores under torch-xla"),
    ],
)
def test_where_nothing_can_be_compiled_ahead_training_goes_on(
    tree: Tree, tmp_path: Path, environ: dict[str, str], compiler: bool, says: str
) -> None:
    found = {**RUN, **environ, **tools(tmp_path, compiler), **image(tmp_path / "code", SHOWN)}
    done = tree.configure().train(AMPHORA_NPROC_PER_NODE="1", **found)
    assert done.returncode == 0, done.stderr
    assert runs(tree) == ["0 -"] and says in done.stderr


def test_a_stop_while_graphs_are_compiled_ends_the_job(tree: Tree, tmp_path: Path) -> None:
    found = {**RUN, **tools(tmp_path), **image(tmp_path / "code", SHOWN + "time.sleep(60)")}
    started = tree.configure().start(AMPHORA_NPROC_PER_NODE="1", **found)
    ran = tree.base / "output" / "runs"
    until(lambda: started.poll() is not None or (ran.exists() and ran.read_text().endswith("\n")))
    started.terminate()
    said, _ = started.communicate(timeout=60)
    assert started.returncode == 143, said
    assert runs(tree) == ["1 -"]


def test_a_cache_that_cannot_be_made_is_only_warned_of(tree: Tree, tmp_path: Path) -> None:
    (tree.configure().base / "checkpoints").write_text("in the way")
    found = {**STACK, **tools(tmp_path), **image(tmp_path / "code", SHOWN)}
    done = tree.train(AMPHORA_NPROC_PER_NODE="1", **found)
    assert done.returncode == 0 and "compiled programs cannot be kept in" in done.stderr


def test_doctor_tells_stack_cores_and_cache(tree: Tree, tmp_path: Path) -> None:
    listing = [{**trn1(1)[0], "nc_count": 4, "logical_neuroncore_config": 2, "neuroncore_ids": []}]
    printing(tmp_path, listing)
    tree.command = lambda: [sys.executable, "-m", "amphora", "doctor", "--json"]  # type: ignore[method-assign]
    tree.script("import json\n").configure({"sagemaker_program": "script.py"})
    found = json.loads(
        tree.train(PATH=f"{tmp_path}:{os.environ['PATH']}", AMPHORA_NEURON_STACK="native").stdout
    )["findings"]
    details = {f"{each['what']}: {each['detail']}" for each in found}
    assert "device: neuron: neuron-ls lists 4 logical Neuron cores at LNC 2" in details
    assert "start: Neuron stack: native, by AMPHORA_NEURON_STACK" in details
    cache = tree.base / "checkpoints" / "neuron-compile-cache"
    assert f"start: compiled programs are kept in {cache}" in details
    assert not cache.exists()
