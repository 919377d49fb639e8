"""Many models where memory is short: a control group's limit, as a container has it."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers import NAMED, Running, fault, write_model

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1024 * 1024
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access(GROUPS / "memory.limit_in_bytes", os.W_OK),
        reason="needs root and control groups of version 1",
    ),
]
LARGE = NAMED.replace(
    "def model_fn(model_dir):", f"def model_fn(model_dir, kept=b'x' * {300 * MIB}):"
)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Running]:
    """A multi-model server that finds itself in a container of 1 GiB."""
    group = GROUPS / f"amphora-test-{uuid.uuid4().hex}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(1024 * MIB))
    inside = (
        f"echo $$ > {group}/tasks && mount --bind {group} {GROUPS} && exec {sys.executable}"
        " -m amphora serve"
    )
    command = [str(shutil.which("unshare")), "--mount", "sh", "-c", inside]
    with Running(tmp_path, {"SAGEMAKER_MULTI_MODEL": "true"}, command) as server:
        yield server
    # A group can be removed when its last process is gone.
    subprocess.run(
        ["sh", "-c", f"until rmdir {group}; do sleep 0.1; done"], timeout=240, check=True
    )


def test_507_where_the_limit_is_reached_and_nothing_is_unloaded_unasked(
    limited: Running, tmp_path: Path
) -> None:
    http = limited.ready().http

    def load(name: str) -> httpx.Response:
        url = str(tmp_path / "models" / name)
        return http.post("/models", json={"model_name": name, "url": url})

    for name in "abc":
        write_model(tmp_path / "models" / name, LARGE)
    assert [load(name).status_code for name in "ab"] == [200, 200]
    refused = load("c")
    assert fault(refused) == (507, "out_of_memory")
    assert "of memory" in refused.json()["error"]["message"]
    for name in "ab":
        assert http.post(f"/models/{name}/invoke", json=1).json() == [name, 1]
    assert http.delete("/models/a").status_code == 200
    assert load("c").status_code == 200
    assert http.post("/models/c/invoke", json=2).json() == ["c", 2]
