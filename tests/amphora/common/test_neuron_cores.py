"""Neuron cores counted from neuron-ls, a stand-in that prints what AWS's own prints.

The listings have the fields and values of AWS's neuron-ls guide (trn2, Neuron 2.28) and of outputs
that others published (trn1.2xlarge, trn2.3xlarge). No Neuron device was asked.
"""

from pathlib import Path
from typing import Any

import pytest

from amphora.common import devices, neuron_cores, probe
from amphora.common.errors import ConfigError
from amphora.contract.job import read_job
from amphora.contract.sm_variables import sm_variables
from tests.support.job_tree import Tree
from tests.support.neuron_devices import device, neuron_ls, printing, trn1


def trn2(count: int, lnc: int, kind: str) -> list[dict[str, Any]]:
    reported = {"instance_type": kind, "instance_id": "i-0", "logical_neuroncore_config": lnc}
    return [device(number, 8 // lnc, 103079215104, **reported) for number in range(count)]


@pytest.fixture(autouse=True)
def no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev of this test's own."""
    monkeypatch.setattr(neuron_cores, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(neuron_cores, "_NEURON_TOOLS", str(tmp_path / "opt"))
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


@pytest.mark.parametrize(
    ("listing", "environ", "cores", "says"),
    [
        (trn1(1), {}, 2, "2 Neuron cores"),
        (trn1(16), {}, 32, "32 Neuron cores"),
        (trn1(1), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 2, "2 Neuron cores"),
        (trn2(1, 2, "trn2.3xlarge"), {}, 4, "4 logical Neuron cores at LNC 2"),
        (trn2(16, 1, "trn2.48xlarge"), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 128, "at LNC 1"),
        (trn2(16, 2, "trn2.48xlarge"), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 128, "at LNC 1"),
        (trn2(1, 1, "trn2.3xlarge"), {}, 8, "8 logical Neuron cores at LNC 1"),
    ],
)  # fmt: skip
def test_cores_are_counted_as_the_runtime_counts_them(
    tmp_path: Path, listing: list[dict[str, Any]], environ: dict[str, str], cores: int, says: str
) -> None:
    detected = devices.detect(printing(tmp_path, listing) | environ)
    assert (detected.kind, detected.accelerators, detected.neuron_cores) == ("neuron", cores, cores)
    assert says in detected.reason


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "31"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0,2, 8-9"}, 4),
        ({"NEURON_RT_NUM_CORES": "8"}, 8),
        ({"NEURON_RT_NUM_CORES": "0"}, 32),
        # The runtime's own rule: the list takes precedence over the number.
        ({"NEURON_RT_VISIBLE_CORES": "4-5", "NEURON_RT_NUM_CORES": "8"}, 2),
    ],
)
def test_the_users_choice_of_cores_is_honoured(
    tmp_path: Path, tree: Tree, environ: dict[str, str], cores: int
) -> None:
    detected = devices.detect(printing(tmp_path, trn1(16)) | environ)
    assert detected.accelerators == cores
    # As in SageMaker's toolkit: all cores, also those that the job may not use.
    job = read_job({"SAGEMAKER_BASE_DIR": str(tree.configure().base)})
    assert sm_variables(job, detected, {})["SM_NUM_NEURONS"] == "32"
    assert next(iter(environ)) in detected.reason or cores == 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEURON_RT_VISIBLE_CORES", "3-0"),
        ("NEURON_RT_VISIBLE_CORES", "0,0"),
        ("NEURON_RT_VISIBLE_CORES", "0-"),
        ("NEURON_RT_VISIBLE_CORES", "all"),
        ("NEURON_RT_VISIBLE_CORES", "0-99999999999"),
        ("NEURON_RT_VISIBLE_CORES", "30-32"),
        ("NEURON_RT_NUM_CORES", "33"),
        ("NEURON_RT_NUM_CORES", "-1"),
        ("NEURON_RT_NUM_CORES", "two"),
    ],
)
def test_a_choice_that_cannot_be_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '?{value}'?"):
        devices.detect(printing(tmp_path, trn1(16)) | {name: value})


def test_logical_cores_of_trainium2_are_counted(tmp_path: Path) -> None:
    listing = printing(tmp_path, trn2(1, 2, "trn2.3xlarge"))
    assert devices.detect(listing | {"NEURON_RT_VISIBLE_CORES": "0-3"}).accelerators == 4
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES is '4'"):
        devices.detect(listing | {"NEURON_RT_VISIBLE_CORES": "4"})


def test_the_tool_is_found_where_aws_puts_it(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    printing(tmp_path, trn1(1))
    (tmp_path / "neuron-ls").rename(tmp_path / "opt" / "neuron-ls")
    assert devices.detect({"PATH": "/usr/bin:/bin"}).neuron_cores == 2


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "no neuron-ls"),
        ("echo 'error: no neuron device found' >&2; exit 1", "no neuron device found"),
        ("exit 3", "exit code 3"),
        ("exec sleep 60", "does not answer"),
        # Neuron 2.34 ends this option; the format in its place was not documented yet.
        ("echo 'unknown flag: -j' >&2; exit 2", "unknown flag: -j"),
    ],
)
def test_a_tool_that_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_devices: Path, script: str | None, says: str
) -> None:
    # Only the one that says nothing is to be given up.
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3 if says == "does not answer" else 60)
    environ = {"PATH": "/usr/bin:/bin"} if script is None else neuron_ls(tmp_path, script)
    detected = devices.detect(environ)
    assert detected.kind == "cpu" and says in detected.reason
    given = devices.detect(environ | {"SM_NUM_NEURONS": "2", "NEURON_RT_NUM_CORES": "1"})
    assert (given.kind, given.accelerators) == ("neuron", 1) and says in given.reason
    (no_devices / "neuron0").touch()
    with pytest.raises(ConfigError, match=rf"neuron0\), but .*{says}.*set SM_NUM_NEURONS"):
        devices.detect(environ)


@pytest.mark.parametrize(
    "printed", ["no json", "{}", '{"a": 1}', "[1]", '[{"nc_count": "x"}]', "[{}]", "null", ""]
)
def test_garbage_is_an_error_that_names_the_tool(tmp_path: Path, printed: str) -> None:
    (tmp_path / "listing").write_text(printed)
    with pytest.raises(
        ConfigError, match=r"neuron-ls -j` printed something .* driver and tools fit"
    ):
        devices.detect(neuron_ls(tmp_path, f"cat {tmp_path}/listing"))
