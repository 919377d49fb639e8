"""The page at `/`, in a real headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.serve.conftest import Start

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

LABELS = """
    import json

    def model_fn(model_dir):
        return ["calm", "<b>storm</b>"]

    def input_fn(body, content_type):
        data = json.loads(body)
        if data["inputs"] == "plain" and "parameters" in data:
            raise ValueError("no parameters here")
        if data["inputs"] == "fail":
            raise RuntimeError("as asked")
        return data

    def predict_fn(data, model):
        return [[{"label": model[1], "score": 0.75}, {"label": model[0], "score": 0.25}]]

    def output_fn(prediction, accept):
        return json.dumps(prediction)
"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last = 0

    def command(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        order = {"id": self._last, "method": method, "params": parameters}
        self._socket.send(json.dumps(order))
        while (answer := json.loads(self._socket.recv(20))).get("id") != self._last:
            pass
        return answer["result"]

    def run(self, expression: str) -> Any:
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + 10
        while not self.run(expression):
            assert time.monotonic() < end, self.run("document.body.innerText")
            time.sleep(0.02)

    def ask(self, text: str) -> str:
        """Type a text, press the button, and give what the page then shows."""
        self.run("$('note').textContent = ''")
        self.run(f"$('text').value = {json.dumps(text)}; $('ask').click()")
        self.until("$('note').textContent.includes(' ms')")
        shown: str = self.run("$('answer').innerText + '|' + $('note').textContent")
        return shown


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    profile = tmp_path / "profile"
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        end = time.monotonic() + 30
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        targets = httpx.get(f"http://127.0.0.1:{port}/json").json()
        (page,) = [each for each in targets if each["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.kill()
        process.wait()


def test_a_sentence_is_tried_in_a_browser(start: Start, browser: Browser) -> None:
    server = start(LABELS, AMPHORA_UI="1").ready()
    browser.command("Page.enable")
    browser.command("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
    browser.until("document.readyState === 'complete' && typeof ask === 'function'")

    shown = browser.ask("a storm is coming")
    assert shown.startswith("<b>storm</b>\t")
    assert "0.750" in shown
    assert "0.250" in shown
    assert browser.run("document.querySelectorAll('#answer tr').length") == 2
    assert browser.run("document.querySelectorAll('#answer b').length") == 0, "labels are text"
    assert "status 200" in shown

    assert "0.750" in browser.ask("plain"), "handlers that know no parameters are asked without"
    failed = browser.ask("fail")
    assert "RuntimeError: as asked" in failed
    assert "status 500" in failed
