"""A new model version behind the same name, without a failed request.

Local mode has no update of an endpoint (its UpdateEndpoint raises), so this is SageMaker's own way by
hand: a second container beside the first, the switch when it is healthy, then SIGTERM to the first.
"""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import ONE_THREAD, Docker, endpoint_of, wait_until_healthy
from tests.docker.material import GOOD
from tests.support.until import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@dataclass
class Client:
    """Asks again and again, wherever the switch points, and writes down the labels it got."""

    address: str
    labels: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.is_set():
            try:
                answer = httpx.post(
                    f"{self.address}/invocations", json={"inputs": GOOD}, timeout=30
                )
                answer.raise_for_status()
                self.labels.append(answer.json()[0]["label"])
            except (httpx.HTTPError, LookupError, ValueError) as error:
                self.failures.append(repr(error))

    def wait_for(self, count: int) -> None:
        """Return when `count` more answers, or a failure, have come."""
        wanted = len(self.labels) + count
        until(lambda: len(self.labels) >= wanted or self.failures)


def labelled(model: Path, folder: Path, label: str) -> Path:
    """A copy of a model that calls all its classes `label`."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": label, "1": label}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_switch_of_versions_fails_no_request(
    docker: Docker, cpu_image: str, material: Path, tmp_path: Path
) -> None:
    old, new = (labelled(material / "model", tmp_path / name, name) for name in ("old", "new"))

    def mounted(folder: Path) -> list[str]:
        return [*ONE_THREAD, "-v", f"{folder}:/opt/ml/model:ro"]

    with endpoint_of(docker, cpu_image, *mounted(old)) as (first, first_name):
        wait_until_healthy(first, first_name, docker)
        client = Client(first)
        threads = [threading.Thread(target=client.run) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            client.wait_for(20)
            with endpoint_of(docker, cpu_image, *mounted(new)) as (second, second_name):
                wait_until_healthy(second, second_name, docker)
                client.address = second
                docker("stop", "-t", "30", first_name)
                client.wait_for(20)
                client.done.set()
                for thread in threads:
                    thread.join(30)
        finally:
            client.done.set()
        code = docker("inspect", "-f", "{{.State.ExitCode}}", first_name).stdout.strip()
    assert client.failures == []
    assert (client.labels[0], client.labels[-1]) == ("old", "new")
    assert set(client.labels[-10:]) == {"new"}
    assert code == "0"
