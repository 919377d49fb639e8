"""What docs/MIGRATING.md says of images, settings and estimators is what the code does."""

import re
from pathlib import Path

from amphora.common.devices import Devices
from amphora.common.variables import SETTINGS
from amphora.serving import settings
from amphora.serving.vllm import selection
from tests.examples.conftest import ROOT

PAGE = (ROOT / "docs" / "MIGRATING.md").read_text()
HOST = Devices(cpus=2, efa=False, reason="")


def cell(row: str, column: int) -> str:
    """A cell of the row whose first cell begins with `row`."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return line.split(" | ")[column].strip("| ")


def test_it_is_short() -> None:
    assert len(PAGE.split()) <= 500


def test_every_variable_exists() -> None:
    named = set(re.findall(r"`((?:AMPHORA|SAGEMAKER)_[A-Z_]+)", PAGE))
    assert named
    read = Path(settings.__file__).read_text()
    assert not [name for name in named if name not in SETTINGS and f'"{name}"' not in read]


def test_requests_are_batched_as_it_says() -> None:
    most = re.search(r"up to (\d+)", cell("requests in one batch", 2))
    assert most
    assert settings.read(Path("/absent"), {}, HOST).batch_size == int(most[1])


def test_the_variables_of_other_servers_of_vllm_are_refused_or_read() -> None:
    assert f"`{selection.PREFIX}*`" == cell("AWS's vLLM image", 2)
    assert f"`{selection._LMI}*` is refused" == cell("LMI (DJL)", 2)
