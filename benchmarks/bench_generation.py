"""Texts that are written for many clients at once: `amphora serve` beside `transformers serve`.

    .venv/bin/python benchmarks/bench_generation.py [--prompts 32] [--rounds 1] [--dtype float32]
        [--peers transformers,transformers-joining]

A Llama with random weights (26 million parameters: 8 layers, 512 dimensions, grouped queries)
continues prompts of 4 to 200 tokens by 8 to 128. All prompts come at once, each by a client of its
own that reads the stream of `/v1/completions` (temperature 0). The ways take turns, one process of
one thread each: the image's server, `transformers serve` (installed under build/peers the first
time) with and without its continuous batching, and plain `generate` without any server: one prompt
after the other, in batches of 8 in the order in which they came, and all in one batch, each as long
as its longest text. A text of a batch is there when the batch is.

What the first way wrote has to be what all others write. Prints a Markdown table, of each way's
round with the least CPU time: tokens a second of the clock and of the CPU (of a server's whole
process tree), and when the first tokens of texts are there, in seconds after the prompts came.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serve import ROOT, Server, cpu_seconds
from servers.in_python import PEERS
from servers.peer import Launch, free_ports

JSON = {"Content-Type": "application/json"}
WORDS = 8000
STATIC = 8
"""Prompts of a batch that is written from first to last."""


def make_model(folder: Path) -> None:
    """A random Llama whose tokens are numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{str(number): number for number in range(2, WORDS)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="[UNK]", pad_token="[PAD]", model_max_length=1024
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Prompt:
    """Token numbers, and how many are to follow."""

    ids: list[int]
    new: int

    @property
    def text(self) -> str:
        return " ".join(map(str, self.ids))


@dataclass(frozen=True)
class Round:
    """What one way made of all prompts."""

    texts: list[str]
    firsts: list[float]
    """When the first token of each text was there, in seconds after the prompts came."""
    seconds: float
    cpu: float
    """Seconds of CPU time."""


class Plain:
    """`generate` in this process."""

    def __init__(self, folder: Path, dtype: str, prompts: list[Prompt]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        # As transformers loads it: the image lays weights out for the CPU's kernels.
        precision = getattr(torch, dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=precision).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._prompts = prompts

    def batches(self, size: int) -> Round:
        """All prompts in batches of so many."""
        import torch

        began, cpu = time.monotonic(), time.process_time()
        texts: list[str] = []
        firsts: list[float] = []
        for start in range(0, len(self._prompts), size):
            batch = self._prompts[start : start + size]
            longest = max(len(prompt.ids) for prompt in batch)
            pads = [longest - len(prompt.ids) for prompt in batch]
            ids = [[0] * pad + prompt.ids for pad, prompt in zip(pads, batch, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
            before = time.monotonic()
            new = max(prompt.new for prompt in batch)
            written = self._model.generate(
                input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False,
                max_new_tokens=new,
            )  # fmt: skip
            now = time.monotonic()
            for row, prompt in zip(written.tolist(), batch, strict=True):
                own = row[longest : longest + prompt.new]
                texts.append(self._tokenizer.decode(own, skip_special_tokens=True))
            # One alone could be shown after its first step, as a server of one thread does.
            first = before + (now - before) / new if size == 1 else now
            firsts += [first - began] * len(batch)
        return Round(texts, firsts, time.monotonic() - began, time.process_time() - cpu)


class Served:
    """A server that is started for each round."""

    def __init__(self, server: Server, model: str, prompts: list[Prompt]) -> None:
        self._server = server
        self._model = model
        self._prompts = prompts

    def stream(self) -> Round:
        """Ask for all texts at once."""
        server = self._server
        server.start(json.dumps(self._body(self._prompts[0], stream=False)))
        texts, firsts = [""] * len(self._prompts), [0.0] * len(self._prompts)
        errors: list[str] = []
        ready = threading.Barrier(len(self._prompts) + 1)

        def ask(place: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.launch.port, timeout=600)
            connection.connect()
            body = json.dumps(self._body(self._prompts[place], stream=True))
            ready.wait()
            connection.request("POST", server.launch.path, body, JSON)
            answer = connection.getresponse()
            if answer.status != 200:
                errors.append(f"{answer.status}: {answer.read()[:500]!r}")
                return
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                document = json.loads(line[6:])
                if "choices" not in document:
                    errors.append(line.decode())
                    return
                for choice in document["choices"]:
                    if choice["text"] and not texts[place]:
                        firsts[place] = time.monotonic() - began
                    texts[place] += choice["text"] or ""

        threads = [
            threading.Thread(target=ask, args=(place,)) for place in range(len(self._prompts))
        ]
        try:
            for thread in threads:
                thread.start()
            before = cpu_seconds(server.tree())
            began = time.monotonic()
            ready.wait()
            for thread in threads:
                thread.join()
            spent = time.monotonic() - began, cpu_seconds(server.tree()) - before
        finally:
            server.stop()
        if errors:
            raise SystemExit(f"{server.name} answered {errors[0]}")
        return Round(texts, firsts, *spent)

    def _body(self, prompt: Prompt, *, stream: bool) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt.text, "temperature": 0, "stream": stream}
        return {**body, "max_tokens": prompt.new if stream else 2}


def of_completions(answer: Any) -> list[Any]:
    """The texts of an answer that is not streamed."""
    return [choice["text"] for choice in answer["choices"]]


def servers_of(base: Path, names: list[str], dtype: str) -> list[tuple[Server, str]]:
    """The image's server and the peers, each with what it calls the model in `base`."""
    (port,) = free_ports(1)
    environ = {
        "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "AMPHORA_CODE_DIR": str(ROOT / "code"),
        "AMPHORA_DTYPE": dtype, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "amphora", "serve"]
    launch = Launch(command, environ, port, "/v1/completions", values=of_completions)
    servers = [(Server("the image's server", launch, base), "model")]
    model = str((base / "model").resolve())
    os.environ["PEER_DTYPE"] = dtype
    for name in names:
        if name not in PEERS or "generation" not in PEERS[name].tasks:
            continue
        peer = PEERS[name]
        folder = base / name
        folder.mkdir()
        tools = peer.install(ROOT / "build" / "peers")
        found = peer.prepare(tools, folder, Path(model), "generation")
        launch = Launch(found.command, found.environ, found.port, found.path, values=of_completions)
        servers.append((Server(peer.name, launch, folder), model))
    return servers


def compare(asked: argparse.Namespace) -> str:
    """A Markdown table of all ways. Raises SystemExit if a server fails."""
    drawn = random.Random(0)
    prompts = [
        Prompt(
            [drawn.randrange(2, WORDS) for _ in range(drawn.choice([4, 20, 60, 200]))],
            drawn.choice([8, 16, 32, 64, 128]),
        )
        for _ in range(asked.prompts)
    ]
    best: dict[str, Round] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        make_model(base / "model")
        plain = Plain(base / "model", asked.dtype, prompts)
        one = "`generate`, one after the other"
        ways: dict[str, Callable[[], Round]] = {
            one: lambda: plain.batches(1),
            f"`generate`, batches of {STATIC}": lambda: plain.batches(STATIC),
            "`generate`, one batch": lambda: plain.batches(asked.prompts),
        }
        for server, model in servers_of(base, asked.peers, asked.dtype):
            ways[server.name] = Served(server, model, prompts).stream
        for _ in range(asked.rounds):
            for name, way in ways.items():
                made = way()
                if name not in best or made.cpu < best[name].cpu:
                    best[name] = made
    count = sum(prompt.new for prompt in prompts)
    lines = [
        f"{asked.prompts} prompts, {count} new tokens, {asked.dtype}, load average at the end "
        + Path("/proc/loadavg").read_text().split()[0],
        "",
        "| way | tokens/s | tokens/CPU-s | the same, of one after the other | first token p50 "
        "| p99 | texts as alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, made in best.items():
        firsts = sorted(made.firsts)
        middle, late = firsts[len(firsts) // 2], firsts[-1 - len(firsts) // 100]
        same = sum(a == b for a, b in zip(made.texts, best[one].texts, strict=True))
        lines.append(
            f"| {name} | {count / made.seconds:.1f} | {count / made.cpu:.1f} "
            f"| {best[one].cpu / made.cpu:.2f} | {middle:.2f} s | {late:.2f} s "
            f"| {same} of {asked.prompts} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--peers",
        type=lambda names: names.split(","),
        default=list(PEERS),
        help="those of other workloads are left out",
    )
    print(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
