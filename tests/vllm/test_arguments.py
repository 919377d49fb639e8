"""The kinds of vLLM's arguments that are read from its source, compared with vLLM's own parser."""

import json
import subprocess

import pytest

from tests.vllm.conftest import PYTHON, START_SECONDS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_SECONDS)]
SCRIPT = """
import argparse, json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from amphora.serving.vllm import server_arguments, vllm_source

kinds = {None: "VALUE", 0: "SWITCH", "?": "OPTIONAL"}
parsed = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    kind = kinds.get(action.nargs, "LIST")
    kind = "FLAG" if isinstance(action, argparse.BooleanOptionalAction) else kind
    # The first of a flag's names is the positive one.
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    parsed |= dict.fromkeys(names[: 1 if kind == "FLAG" else None], kind)
read = vllm_source.read_arguments(vllm_source.find_package())
for name in {"help", *server_arguments._REFUSED}:
    parsed.pop(name, None)
print(json.dumps({
    name: [kind, read[name].name if name in read else None] for name, kind in parsed.items()
}))
"""


def test_arguments_are_read_as_vllm_parses_them() -> None:
    done = subprocess.run([PYTHON, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout.splitlines()[-1])
    assert len(kinds) > 250
    assert not {name: both for name, both in kinds.items() if both[0] != both[1]}
