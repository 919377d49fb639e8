"""The page at `/`, in a real headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from websockets.sync.client import ClientConnection, connect

from tests.support import images, pipeline_models, serving_kit
from tests.support.servers import Running, Start, served, write_model
from tests.support.until import until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DESCRIBED = """
    import json

    def model_fn(model_dir):
        return {form}

    def describe_fn(model_dir, model):
        described = {"labels": 12, "columns": {"text": "Betreff", "text_pair": "Nachricht"}} if model == "pair" else {}
        task = "token-classification" if model == "text" else "a-task"
        return {"model": "<i>mine</i>", "task": task, "form": model, "max_length": 64,
                "routes": ["/v1/chat/completions"], **described}

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
            if data["inputs"][-1]["content"] == "for ever":
                return ({"token": {"text": "and on ", "special": False}} for each in endless())
            return [{"generated_text": [*data["inputs"], {"role": "assistant", "content": "<b>x</b>"}]}]
        if model == "text":
            return [{"entity_group": "PER", "score": 0.9, "word": "Anna", "start": 4, "end": 8}]
        return [{"label": "<b>storm</b>", "score": 0.75}] + [{"label": "calm", "score": 0.1}] * 11

    def endless():
        import itertools, time

        for number in itertools.count():
            time.sleep(0.01)
            yield number

    def output_fn(prediction, accept, context):
        if not isinstance(prediction, list):
            return (b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in prediction), "text/event-stream"
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
    assert browser.run("document.querySelectorAll('#answer tr').length") == 10
    browser.run("document.querySelector('#answer button').click()")
    assert browser.run("document.querySelectorAll('#answer tr').length") == 12
    fields = "[...document.querySelectorAll('#fields span')].map((each) => each.innerText).join()"
    assert browser.run(fields) == "Betreff,Nachricht"
    assert browser.run("document.querySelectorAll('#answer b').length") == 0, "labels are text"
    browser.ask(text="a", text_pair="b")
    browser.ask(text="a", text_pair="", parameters='{"top_k": 2}')
    example, *others = requested(server)
    assert example["inputs"].keys() == {"text", "text_pair"}, "a pair needs both"
    second = example["inputs"]["text_pair"]
    assert others == [
        {"inputs": {"text": "it's late", "text_pair": second}, "parameters": {"top_k": 12}},
        {"inputs": {"text": "a", "text_pair": "b"}, "parameters": {"top_k": 12}},
        {"inputs": "a", "parameters": {"top_k": 2}},
    ]
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
    assert requested(server)[-2:] == [{"inputs": "it's", "parameters": {"top_k": 12}}] * 2
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
    assert {**requested(server)[-1], "stream": True} == requested(server)[-2]
    browser.run(
        "$('text').value = 'third'; $('text').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert "third" in browser.code("curl")
    # A stream is shown as it grows, until it is stopped.
    browser.run("$('text').value = 'for ever'; $('ask').click()")
    browser.until("/and on and on/.test($('turns').innerText) && !$('stop').hidden")
    browser.run("$('stop').click()")
    browser.until("/^stopped; .* ms$/.test($('note').textContent) && $('stop').hidden")
    assert "and on and on" in browser.run("$('turns').innerText")
    # Parameters have fields.
    browser.run("document.querySelector('[data-name=max_new_tokens]').value = '7'")
    browser.ask(text="fourth")
    assert requested(server)[-1]["parameters"] == {"max_new_tokens": 7}


def test_entities_are_highlighted_and_examples_are_buttons(start: Start, browser: Browser) -> None:
    server = start(described_as("text"), AMPHORA_UI="1").ready()
    browser.open(server)
    browser.ask(text="😀 so Anna said")
    assert requested(server)[-1]["parameters"] == {"aggregation_strategy": "simple"}
    # Positions are those of Python's characters.
    assert browser.run("document.querySelector('#answer mark').firstChild.textContent") == " Ann"
    browser.run("document.querySelector('#examples button:last-child').click()")
    browser.until("/ ms$/.test($('note').textContent) && $('text').value.startsWith('Anna')")
    assert requested(server)[-1]["inputs"].startswith("Anna Schmidt")


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
    assert browser.run("document.querySelectorAll('#answer tr').length") == 2
    shown = browser.ask(sentences="")
    assert "16 dimensions, norm 1.0000: [0.5000, 0.5000" in shown
    assert browser.run("$('answer').offsetHeight") < 200
    assert "0.500" in browser.ask(sentences="one\n\ntwo")
    assert requested(server)[-1]["inputs"]["sentences"] == ["one", "two"]
    sent = subprocess.run(browser.code("curl"), shell=True, capture_output=True, check=True)
    assert json.loads(sent.stdout) == [0.5, 0.5]
    assert 'TargetModel="a/second.tar.gz"' in browser.code("boto3")


CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}the{% endif %}"
KINDS = {
    "BertForSequenceClassification": "/LABEL_0/",
    "BertForTokenClassification": "/LABEL_|No entities/",
    "BertForQuestionAnswering": r"/^Anna wrote[^]*\t0\.\d{3}$/",
    "BertForMaskedLM": r"/^\S+\s+0\.\d{3}/",
    "BertForMultipleChoice": r"/^In an oven\.\s+0\.\d{3}\s+On a train\.\s+0\.\d{3}$/",
    "BertModel": "/^We wait/",
    "T5ForConditionalGeneration": "/generated_text|^\\S+/",
    "LlamaForCausalLM": "/\\w/",
    "GPT2LMHeadModel": "/\\w/",
    "ranks": "/The train is an hour late/",
}
FILES = {
    "images": ("noise.png", r"/^(LABEL_\d+\s+0\.\d{3}\s+){10}Show all 12$/"),
    "asks": ("noise.png", r"/^LABEL_\d+\s+0\.\d{3}|^\w+\s+0\.\d{3}/"),
    "clip": ("noise.png", r"/^[^]*a cat\s+0\.\d{3}/"),
    "objects": ("noise.png", r"/LABEL_\d\s+0\.\d{3}/"),
    "depth": ("noise.png", ""),
    "describes": ("noise.png", r"/\w/"),
    "sounds": ("sound.wav", r"/LABEL_\d\s+0\.\d{3}/"),
    "speech": ("sound.wav", ""),
}  # fmt: skip
"""Models of files: the file, and what the page shows for it."""
SAVED = {
    "clip": images.save_clip, "objects": images.save_detector, "depth": pipeline_models.save_depth,
    "asks": pipeline_models.save_vilt,
    "describes": images.save_llava, "sounds": pipeline_models.save_audio_classifier,
    "speech": pipeline_models.save_ctc, "spoken": pipeline_models.save_vits,
}  # fmt: skip


def save_kind(kind: str, folder: Path) -> None:
    """Save a tiny model of a class, or one that ranks, classifies images or reads other files."""
    torch.manual_seed(5)
    if save := SAVED.get(kind):
        folder.mkdir(parents=True)
        save(folder)
    elif kind == "ranks":
        serving_kit.save("BertForSequenceClassification", folder, num_labels=1)
    elif kind == "images":
        config = images.made.ViTConfig(image_size=32, patch_size=8, **images.SIZES, num_labels=12)
        images.made.ViTForImageClassification(config).save_pretrained(folder)
        images.made.ViTImageProcessorPil(size=images.SQUARE).save_pretrained(folder)
    else:
        serving_kit.save(kind, folder)
    if kind.startswith("Llama"):
        tokenizer = serving_kit.tokenizer()
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder)


def assert_answered(browser: Browser, shown: str, kind: str) -> None:
    """Assert that the page shows an answer that matches, and that the page is as wide as a phone."""
    page = browser.run("document.body.innerText")
    assert "status 200" in browser.run("$('note').textContent"), (kind, page)
    assert browser.run(f"{shown or '/^/'}.test($('answer').innerText)"), (kind, page)
    browser.command(
        "Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False
    )  # fmt: skip
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), kind
    broken = "[...document.querySelectorAll('#answer td:first-child')].some((cell) => cell.offsetHeight > 150)"
    assert not browser.run(broken), f"{kind}: names are broken into letters"
    browser.command("Emulation.clearDeviceMetricsOverride")


@pytest.fixture(scope="module")
def kinds(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    """Serves a model of each kind."""
    base = tmp_path_factory.mktemp("kinds")
    (base / "model").mkdir()
    with served(base, preloaded, AMPHORA_UI="1", SAGEMAKER_MULTI_MODEL="true") as server:
        for kind in (*KINDS, *FILES, "spoken"):
            save_kind(kind, base / "kinds" / kind)
            about = {"model_name": kind, "url": str(base / "kinds" / kind)}
            reply = server.http.post("/models", json=about)
            assert reply.status_code == 200, (kind, reply.text, server.log[-2000:])
        yield server


@pytest.mark.heavy
def test_each_kind_of_model_answers_its_example(kinds: Running, browser: Browser) -> None:
    for kind, shown in KINDS.items():
        browser.open(kinds)
        browser.open(kinds, kind)
        assert_answered(browser, shown, kind)
    browser.open(kinds)
    browser.open(kinds, "spoken")
    browser.until("document.querySelector('#answer audio')?.duration > 0")


@pytest.mark.heavy
def test_a_file_is_dropped_shown_and_answered(
    kinds: Running, browser: Browser, tmp_path: Path
) -> None:
    texts = {"noise.png": images.TEXT, "sound.wav": base64.b64encode(pipeline_models.WAV).decode()}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    for kind, (name, shown) in FILES.items():
        browser.open(kinds)
        browser.open(kinds, kind)
        if kind != "describes":  # whose image may be left out
            assert browser.ask().endswith("not sent: choose a file")
        media = "image/png" if name.endswith("png") else "audio/wav"
        browser.run(
            f"var bytes = Uint8Array.from(atob('{texts[name]}'), (each) => each.charCodeAt(0));"
            "var dropped = new DataTransfer();"
            f"dropped.items.add(new File([bytes], '{name}', {{ type: '{media}' }}));"
            "document.querySelector('.drop').dispatchEvent("
            "new DragEvent('drop', { dataTransfer: dropped, bubbles: true, cancelable: true }));"
        )
        browser.until(
            "document.querySelector('.seen img')?.naturalWidth === 50"
            " || document.querySelector('.seen audio')?.duration > 0.4"
        )
        # A detector without training is sure of nothing.
        browser.ask(parameters='{"threshold": 0}' if kind == "objects" else "")
        assert_answered(browser, shown, kind)
        command = browser.code("curl")
        completed = subprocess.run(command, shell=True, capture_output=True, cwd=tmp_path)
        assert json.loads(completed.stdout), (command, completed.stderr)
        assert "error" not in json.loads(completed.stdout), (command, completed.stdout)
        code = browser.code("Python").replace("requests", "httpx").replace("data=", "content=")
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
        if kind == "objects":
            assert browser.run("document.querySelectorAll('.seen div').length") >= 1
        if kind == "depth":
            browser.until("document.querySelector('#answer img')?.naturalWidth === 50")


@pytest.mark.heavy
def test_labels_of_a_request_are_compared(
    browser: Browser, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    names = dict(enumerate(["contradiction", "neutral", "entailment"]))
    serving_kit.save("BertForSequenceClassification", tmp_path / "model", id2label=names)
    task = {"HF_TASK": "zero-shot-classification", "AMPHORA_UI": "1"}
    with served(tmp_path, preloaded, **task) as server:
        browser.open(server)
        assert_answered(browser, "/travel/", "zero-shot")
        assert "wet" in browser.ask(labels="dry, wet")
        assert browser.run("document.querySelectorAll('#answer tr').length") == 2
