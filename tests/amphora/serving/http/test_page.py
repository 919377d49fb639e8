"""The page at `/`, in a real headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.servers import Running, Start, write_model
from tests.support.until import until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DESCRIBED = """
    import json

    def model_fn(model_dir):
        return {form}

    def describe_fn(model_dir, model):
        return {"model": "<i>mine</i>", "task": "a-task", "form": model, "max_length": 64,
                "routes": ["/v1/chat/completions"]}

    def input_fn(body, content_type):
        return json.loads(body)

    def predict_fn(data, model):
        print("asked", json.dumps(data, sort_keys=True), flush=True)
        if data.get("inputs") == "fail":
            raise RuntimeError("as asked")
        if model == "similarity":
            if isinstance(data["inputs"], dict):
                return [0.5 for each in data["inputs"]["sentences"]]
            return [[0.5] * 4 + [0.0] * 12]
        if model == "chat":
            return [{"generated_text": [*data["inputs"], {"role": "assistant", "content": "<b>x</b>"}]}]
        return [{"label": "<b>storm</b>", "score": 0.75}, {"label": "calm", "score": 0.25}]

    def output_fn(prediction, accept, context):
        if "generated_text" in str(prediction):
            context.set_response_header(0, "X-Amphora-Unfinished", "0")
        return json.dumps(prediction)
"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last = 0

    def command(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(60))).get("id") != self._last:
            pass
        return answer["result"]

    def run(self, expression: str) -> Any:
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        until(lambda: self.run(expression), 60, lambda: self.run("document.body.innerText"))

    def open(self, server: Running, follow: str = "") -> None:
        """Load the page, or follow its link of that text; wait until it has shown its example."""
        if follow:
            self.run("delete document.body.dataset.ready")
            self.run(f"[...document.links].find((each) => each.textContent === {follow!r}).click()")
        else:
            self.command("Page.enable")
            self.command("Page.navigate", url="about:blank")
            self.command("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        self.until("document.body && document.body.dataset.ready === 'true'")

    def ask(self, **fields: str) -> str:
        """Fill the fields, press the button, and give what the page then shows."""
        self.run("$('note').textContent = ''")
        for name, text in fields.items():
            self.run(f"$({json.dumps(name)}).value = {json.dumps(text)}")
        self.run("$('ask').click()")
        self.until("/ ms$|^not sent/.test($('note').textContent)")
        return str(self.run(
            "$('turns').innerText + '|' + $('answer').innerText + '|' + $('note').textContent"
        ))  # fmt: skip

    def code(self, tab: str) -> str:
        """What a tab shows of a program."""
        self.run(f"[...$('tabs').children].find((each) => each.textContent === {tab!r}).click()")
        return str(self.run("$('code').textContent"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests: each opens its page anew."""
    profile = tmp_path_factory.mktemp("profile")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    with subprocess.Popen(
        [str(CHROMIUM), *options, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            port_file = profile / "DevToolsActivePort"
            until(lambda: port_file.is_file() and port_file.read_text().count("\n"), 60)
            port = port_file.read_text().split()[0]
            targets = httpx.get(f"http://127.0.0.1:{port}/json").json()
            (page,) = [entry for entry in targets if entry["type"] == "page"]
            with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.kill()


def requested(server: Running) -> list[Any]:
    """The requests that the handlers saw."""
    lines = server.log.splitlines()
    return [json.loads(line.removeprefix("asked ")) for line in lines if line.startswith("asked ")]


def described_as(form: str) -> str:
    return DESCRIBED.replace("{form}", repr(form))


def test_a_text_is_tried_and_shown_as_programs(start: Start, browser: Browser) -> None:
    server = start(described_as("pair"), AMPHORA_UI="1").ready()
    browser.open(server)
    assert browser.run("$('model').innerText") == "<i>mine</i>"
    assert "a-task · reads up to 64 tokens" in browser.run("$('about').innerText")
    assert browser.run("$('shown').innerText") == "Example answer"
    shown = browser.ask(text="it's late")
    assert "<b>storm</b>" in shown
    assert "0.750" in shown
    assert "status 200" in shown
    assert browser.run("document.querySelectorAll('#answer tr').length") == 2
    assert browser.run("document.querySelectorAll('#answer b').length") == 0, "labels are text"
    browser.ask(text="a", text_pair="b")
    browser.ask(text="a", text_pair="", parameters='{"top_k": 2}')
    assert requested(server)[1:] == [
        {"inputs": "it's late"},
        {"inputs": {"text": "a", "text_pair": "b"}},
        {"inputs": "a", "parameters": {"top_k": 2}},
    ], "what the user did not set is not sent"
    failed = browser.ask(text="fail", parameters="")
    assert "RuntimeError: as asked" in failed
    assert "status 500" in failed
    assert "not sent" in browser.ask(parameters="{")
    assert "boto3.client(" in (browser.ask(text="it's", parameters="") and browser.code("boto3"))
    completed = subprocess.run(browser.code("curl"), shell=True, capture_output=True, check=True)
    assert json.loads(completed.stdout)[0]["score"] == 0.75
    code = browser.code("Python").replace("requests", "httpx")
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"storm" in completed.stdout
    assert requested(server)[-2:] == [{"inputs": "it's"}] * 2
    # Long lines wrap.
    browser.ask(text="a" * 400)
    for tab in ("curl", "Python", "boto3"):
        assert "a" * 400 in browser.code(tab)
        assert browser.run("$('code').scrollWidth <= $('code').clientWidth")


def test_a_conversation_goes_on(start: Start, browser: Browser) -> None:
    server = start(described_as("chat"), AMPHORA_UI="1").ready()
    browser.open(server)
    browser.ask(text="first")
    shown = browser.ask(text="second")
    assert shown.split("|")[0].split() == ["first", "<b>x</b>", "second", "<b>x</b>"]
    roles = [turn["role"] for turn in requested(server)[-1]["inputs"]]
    assert roles == ["user", "assistant", "user"]
    assert "parameters" not in requested(server)[-1], (
        "nothing is sampled unless somebody asks for it"
    )
    assert "answer ended at its limit of tokens" in shown
    assert "chat.completions.create" in browser.code("openai")
    assert "max_tokens=64,\n    temperature=0," in browser.code("openai")
    # Until a field is changed, programs show what was sent, and sending it again is the same.
    completed = subprocess.run(browser.code("curl"), shell=True, capture_output=True, check=True)
    assert json.loads(completed.stdout)
    assert requested(server)[-1] == requested(server)[-2]
    browser.run(
        "$('text').value = 'third'; $('text').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert "third" in browser.code("curl")


def test_one_of_several_models_is_chosen_and_asked(
    start: Start, browser: Browser, tmp_path: Path
) -> None:
    server = start(AMPHORA_UI="1", SAGEMAKER_MULTI_MODEL="true").ready()
    browser.open(server)
    assert "No model is loaded" in browser.run("$('about').innerText + $('note').textContent")
    for name, form in (("first", "pair"), ("a/second.tar.gz", "similarity")):
        url = write_model(tmp_path / "models" / form, described_as(form))
        server.http.post("/models", json={"model_name": name, "url": url}).raise_for_status()
    browser.open(server)
    assert "Choose one of the loaded models" in browser.run("$('about').innerText")
    browser.open(server, "a/second.tar.gz")
    assert browser.run("$('model').innerText") == "a/second.tar.gz"
    shown = browser.run("$('answer').innerText")
    assert "16 dimensions, norm 1.0000: [0.5000, 0.5000" in shown
    assert browser.run("$('answer').offsetHeight") < 200
    assert "0.500" in browser.ask(sentences="one\n\ntwo")
    assert requested(server)[-1]["inputs"]["sentences"] == ["one", "two"]
    sent = subprocess.run(browser.code("curl"), shell=True, capture_output=True, check=True)
    assert json.loads(sent.stdout) == [0.5, 0.5]
    assert 'TargetModel="a/second.tar.gz"' in browser.code("boto3")
