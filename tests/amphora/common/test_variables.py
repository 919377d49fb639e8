"""Variables of the environment: values and names that cannot be meant are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amphora.common import devices, variables
from amphora.common.errors import ConfigError
from amphora.serving import settings
from amphora.training.limits import Limits
from tests.support.job_tree import Tree

ROOT = Path(__file__).parents[3]


def test_all_that_the_sources_read_is_known() -> None:
    sources = [*(ROOT / "container").rglob("*.py"), *(ROOT / "code").rglob("*.py")]
    sources += ROOT.glob("Dockerfile.*")
    known = variables.SETTINGS.keys() | variables._INTERNAL
    for source in sources:
        # AMPHORA_ARGUMENT_... are made up for one start.
        read = set(re.findall(r"\bAMPHORA_(?!ARGUMENT)[A-Z]\w*", source.read_text()))
        assert read <= known, f"{source}: list it in amphora.common.variables"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("AMPHORA_STOP_SECOND", "AMPHORA_STOP_SECONDS"), ("AMPHORA_DTYP", "AMPHORA_DTYPE")],
)
def test_an_unknown_variable_is_refused_with_the_near_one(
    name: str, meant: str, tmp_path: Path
) -> None:
    environ = {name: "1", "AMPHORA_HOST_WAIT_SECONDS": "many", "AMPHORAX": "a user's own"}
    with pytest.raises(ConfigError, match=f"many.*{name} is not a variable.*Did you mean {meant}"):
        Limits.of(environ)
    with pytest.raises(ConfigError, match=f"{name} is not a variable.*Did you mean {meant}"):
        settings.read(tmp_path, environ, devices.detect({}))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e999"])
def test_a_time_that_is_not_above_zero_is_refused(value: str) -> None:
    assert Limits.of({"AMPHORA_STOP_SECONDS": " 2.5 "}).stop_seconds == 2.5
    with pytest.raises(ConfigError, match=rf"STOP_SECONDS is '{value}'. Give a number of sec"):
        Limits.of({"AMPHORA_STOP_SECONDS": value})


def test_train_refuses_it_before_the_script_starts(scripted: Tree) -> None:
    scripted.script("raise AssertionError")
    result = scripted.train(AMPHORA_NPROC_PER_NOD="2")
    assert result.returncode == 2
    assert scripted.failure and "Did you mean AMPHORA_NPROC_PER_NODE" in scripted.failure
