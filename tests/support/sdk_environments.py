"""The environments of SageMaker's SDKs, which tests/sdk_venvs.sh makes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of pytest at a time make what several use, below the folder `build`."""
    path = ROOT / "build" / "tests.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def sdk_python(name: str) -> str:
    """Return the Python of an SDK's environment, made if it is missing."""
    with one_at_a_time():
        command = [ROOT / "tests" / "sdk_venvs.sh", name]
        made = subprocess.run(command, text=True, capture_output=True)
    assert made.returncode == 0, made.stderr[-4000:]
    return made.stdout.strip()


def sdk_variables(folder: Path, address: str, others: str = "http://127.0.0.1:9") -> dict[str, str]:
    """Return variables of an SDK's process: no account of AWS, no telemetry, nothing of this machine's.

    Args:
        address: Of what stands in for AWS.
        others: The proxy to everywhere else; by default it leads nowhere.
    """
    config = folder / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
    )
    return {
        "HOME": str(folder),
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(config),
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), others),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"),
    }
