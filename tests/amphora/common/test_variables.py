"""Variables of the environment; tests/amphora/test_errors.py has those that are refused."""

import re
from pathlib import Path

from amphora.common import variables

ROOT = Path(__file__).parents[3]


def test_all_that_the_sources_read_is_known() -> None:
    sources = [*(ROOT / "container").rglob("*.py"), *(ROOT / "code").rglob("*.py")]
    sources += ROOT.glob("Dockerfile.*")
    known = variables.SETTINGS.keys() | variables._INTERNAL
    for source in sources:
        # AMPHORA_ARGUMENT_... are made up for one start.
        read = set(re.findall(r"\bAMPHORA_(?!ARGUMENT)[A-Z]\w*", source.read_text()))
        assert read <= known, f"{source}: list it in amphora.common.variables"
