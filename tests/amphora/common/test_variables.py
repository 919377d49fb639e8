"""Variables of the environment: values and names that cannot be meant are refused."""

from __future__ import annotations

import re
from pathlib import Path

from amphora.common import variables
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


def test_train_refuses_it_before_the_script_starts(scripted: Tree) -> None:
    scripted.script("raise AssertionError")
    result = scripted.train(AMPHORA_NPROC_PER_NOD="2")
    assert result.returncode == 2
    assert scripted.failure and "Did you mean AMPHORA_NPROC_PER_NODE" in scripted.failure
