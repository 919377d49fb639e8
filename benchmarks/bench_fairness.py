"""How long a short request waits beside long ones, in milliseconds and in slices of work.

    .venv/bin/python benchmarks/bench_fairness.py [--seconds 15] [--workers 2] [--models NAME ...]

Three servers, one after the other. A classifier (MiniLM-L6 with a new head of two labels) is asked
for one word, alone and beside two clients that ask for lists of 5,000 texts again and again. A
decoder of that size, with random weights, is asked for 4 tokens: alone, beside two clients that ask
for 600, and beside four streams whose readers stand still (its words have 2,000 letters, so that
streams soon wait for their readers). An encoder-decoder of T5-small's sizes (60 million random
weights) is asked for 4 tokens of a text of 12 words, with the image's 4 beams: alone, and beside
two clients that ask for 600. A short request is sent 20 ms after the last one's answer, and every
answer has to be the one that was given alone.

How long a slice was, is taken from the run itself, by `amphora_slices_total` of /metrics: what the
workers had of time, divided by the slices that they made; a dash where they made hardly any. Prints
a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_serve import ROOT, Server
from servers.peer import Launch
from servers.workloads import make_texts, save_model

PORT = 18191
JSON = {"Content-Type": "application/json"}
ANSWER_KEYS = ("label", "generated_text")
# Of fewer there is no mean: where nothing is cut, the wait is as long as the work.
FEWEST_SLICES = 10
# Answers that nobody waits for any more may have to end before the streams begin.
STANDSTILL_SECONDS = 300
LONG_TEXTS, LONG_TOKENS, SHORT_TOKENS, STREAMS = 5000, 600, 4, 4


def save_decoder(folder: Path) -> None:
    """GPT-2 of 6 layers and 384 dimensions, whose tokens are words of 2,000 letters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "short": 2}
    words.update({f"{number:04d}" * 500: number for number in range(3, 8000)})
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words), n_layer=6, n_head=12, n_embd=384, n_positions=2048,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_encoder_decoder(folder: Path) -> None:
    """T5 of T5-small's sizes, whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    words.update({f"word{number}": number for number in range(3, 32128)})
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SAVES = {
    "classifier": save_model,
    "decoder": save_decoder,
    "encoder-decoder": save_encoder_decoder,
}


def written(kind: str, count: int, **more: Any) -> dict[str, Any]:
    """A request for so many tokens."""
    exactly: dict[str, Any] = {
        "max_new_tokens": count, "min_new_tokens": count, "do_sample": False,
    }  # fmt: skip
    if kind == "decoder":
        return {"inputs": "short", "parameters": {**exactly, "return_full_text": False}, **more}
    text = " ".join(f"word{number}" for number in range(100, 112))
    return {"inputs": text, "parameters": exactly, **more}


def answer_of(body: bytes) -> Any:
    """The part of an answer that does not depend on what it was computed with."""
    (answer,) = json.loads(body)
    return next(answer[key] for key in ANSWER_KEYS if key in answer)


class Asking:
    """Clients that ask for long work again and again, until the end of a `with`."""

    def __init__(self, request: Any, clients: int) -> None:
        self._body = json.dumps(request)
        self._connections = [
            http.client.HTTPConnection("127.0.0.1", PORT, timeout=600) for _ in range(clients)
        ]
        self._threads = [
            threading.Thread(target=self._ask, args=(connection,), daemon=True)
            for connection in self._connections
        ]
        self._is_over = False
        self.wrong: list[int] = []
        """Statuses other than 200."""

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while not self._is_over:
                connection.request("POST", "/invocations", self._body, JSON)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    self.wrong.append(answer.status)

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        # So that all of them are at work.
        time.sleep(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def stalled(request: Any, clients: int) -> Iterator[None]:
    """Clients whose streams have begun and wait for them to read on."""
    body = json.dumps(request).encode()
    socks = []
    first = slices()
    for _ in range(clients):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", PORT))
        head = "POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        socks.append(sock)
    # Each has made slices, and then none makes another one.
    end = time.monotonic() + STANDSTILL_SECONDS
    now = first
    before = -1.0
    while before != now or now < first + clients:
        if time.monotonic() > end:
            raise SystemExit("the streams do not come to a standstill")
        time.sleep(1)
        before, now = now, slices()
    try:
        yield
    finally:
        for sock in socks:
            sock.close()


def metric(name: str) -> float:
    """A figure of /metrics; 0 where it is not there yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60) as answer:
        match = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(match[1]) if match else 0.0


def slices() -> float:
    """Slices that the workers have told of."""
    return metric("amphora_slices_total")


def probe(request: Any, seconds: float, expected: Any = None) -> tuple[list[float], Any]:
    """Ask for short work, one request after the other. Seconds that each took, and the answer.

    Raises:
        SystemExit: An answer is an error, or not the expected one.
    """
    took: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not took:
        began = time.monotonic()
        connection.request("POST", "/invocations", json.dumps(request), JSON)
        answer = connection.getresponse()
        body = answer.read()
        took.append(time.monotonic() - began)
        if answer.status != 200:
            raise SystemExit(f"a short request was answered {answer.status}: {body[:500]!r}")
        if expected is None:
            expected = answer_of(body)
        if answer_of(body) != expected:
            raise SystemExit("a short request's answer is not the one that it has alone")
        time.sleep(0.02)
    connection.close()
    return took, expected


def row(title: str, took: list[float], workers: int, begun: tuple[float, float]) -> str:
    """A line of the table; `begun` is when the run began, and the slices until then."""
    took = sorted(took)
    late = took[int(len(took) * 0.99)]
    made, seconds = slices() - begun[1], time.monotonic() - begun[0]
    in_slices = mean = "-"
    if made >= FEWEST_SLICES:
        mean = f"{workers * seconds / made * 1000:.0f}"
        in_slices = f"{late / (workers * seconds / made):.1f}"
    middle = statistics.median(took) * 1000
    return f"| {title} | {len(took)} | {middle:.0f} | {late * 1000:.0f} | {mean} | {in_slices} |"


def measure(kind: str, seconds: float, workers: int) -> Iterator[str]:
    """The lines of one server, by the name of its model in `SAVES`."""
    short: Any = {"inputs": "water"} if kind == "classifier" else written(kind, SHORT_TOKENS)
    name = "one word" if kind == "classifier" else f"{SHORT_TOKENS} tokens"
    if kind == "encoder-decoder":
        name += " of T5"
    took, expected = probe(short, seconds / 3)
    yield row(f"{name}, alone", took, workers, (time.monotonic(), slices()))
    if kind == "classifier":
        texts = make_texts() * (LONG_TEXTS // 1000)
        long = Asking({"inputs": texts}, 2)
        title = f"{name}, beside two lists of {LONG_TEXTS:,} texts"
    else:
        long = Asking(written(kind, LONG_TOKENS), 2)
        title = f"{name}, beside two of {LONG_TOKENS}"
    with long:
        begun = time.monotonic(), slices()
        took, _ = probe(short, seconds, expected)
        yield row(title, took, workers, begun)
    if long.wrong:
        raise SystemExit(f"long requests were answered {long.wrong}")
    if kind == "decoder":
        with stalled(written(kind, 2000, stream=True), STREAMS):
            took, _ = probe(short, seconds, expected)
            begun = time.monotonic(), slices()
            # Nothing is cut while the streams stand still, so that there are no slices to count in.
            yield row(f"{name}, beside {STREAMS} readers that stall", took, workers, begun)


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(SAVES), default=list(SAVES))
    options = parser.parse_args()
    lines = [
        "| | requests | p50 ms | p99 ms | a slice, ms | p99 in slices |",
        "|---|---|---|---|---|---|",
    ]
    for kind in options.models:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            base = Path(scratch)
            SAVES[kind](base / "model")
            environ = {
                "SAGEMAKER_BASE_DIR": str(base),
                "SAGEMAKER_BIND_TO_PORT": str(PORT),
                "SAGEMAKER_MODEL_SERVER_WORKERS": str(options.workers),
                "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "600",
                "AMPHORA_CODE_DIR": str(ROOT / "code"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "amphora", "serve"]
            server = Server("amphora", Launch(command, environ, PORT, "/invocations"), base)
            try:
                start(server)
                lines += measure(kind, options.seconds, options.workers)
            finally:
                server.kill()
    busy = Path("/proc/loadavg").read_text().split()[0]
    print(f"load average at the end: {busy}\n\n" + "\n".join(lines))


def start(server: Server) -> None:
    """Start a server, and wait until it is ready, whatever it answers."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", PORT))
    server.process = subprocess.Popen(
        server.launch.command, env={**os.environ, **server.launch.environ}, cwd=server.folder,
        stdout=(server.folder / "log").open("wb"), stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    while True:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ping", timeout=5),
        ):
            return
        if server.process.poll() is not None:
            raise SystemExit((server.folder / "log").read_text()[-2000:])
        time.sleep(0.05)


if __name__ == "__main__":
    main()
