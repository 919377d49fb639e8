"""Text generation for many clients: vLLM behind the front, vLLM alone, and transformers.

    make build/vllm/.made
    .venv/bin/python benchmarks/bench_generation.py [--prompts 32] [--rounds 3] [--dtype bfloat16]

A Llama with random weights (26 million parameters: 8 layers, 512 dimensions, grouped queries)
continues prompts of 4 to 200 tokens by 8 to 128. All prompts arrive at once, each from its own
client, which reads the stream of `/v1/completions` (temperature 0). The servers take turns, each
started anew for each round; vLLM is the CPU build of tests/vllm/environment.sh, without prefix
caching and compilation, and OMP_NUM_THREADS is 1.

Prints a Markdown table of medians over the rounds: generated tokens a second and a CPU-second (of
a server's whole process tree, while it answers), the first token of a text (median and slowest),
memory (PSS, at the end), and the time from start to the first answer. After it, the ratio of
CPU-seconds with and without the front for each pair of consecutive rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serve import ROOT, Server, cpu_seconds, pss_mb
from servers.peer import Launch, free_ports

JSON = {"Content-Type": "application/json"}
VLLM = ROOT / "build/vllm/bin/python"
WORDS = 8000


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
    """What one server did in a round."""

    texts: list[str]
    firsts: list[float]
    """When the first token of each text arrived, in seconds after the prompts were sent."""
    seconds: float
    cpu: float
    """Seconds of CPU time."""
    memory: float
    """MB."""
    start: float
    """Seconds from start to the first answer."""


def measure(server: Server, prompts: list[Prompt]) -> Round:
    """Start a server, request all texts at once, and stop it. Raises SystemExit if it fails."""
    begun = server.start(json.dumps(body_of(prompts[0], stream=False)))
    texts, firsts = [""] * len(prompts), [0.0] * len(prompts)
    errors: list[str] = []
    ready = threading.Barrier(len(prompts) + 1)

    def read(place: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.launch.port, timeout=600)
        connection.connect()
        body = json.dumps(body_of(prompts[place], stream=True))
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

    threads = [threading.Thread(target=read, args=(place,)) for place in range(len(prompts))]
    try:
        for thread in threads:
            thread.start()
        before = cpu_seconds(server.tree())
        began = time.monotonic()
        ready.wait()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        cpu = cpu_seconds(server.tree()) - before
        memory = pss_mb(server.tree())
    finally:
        server.stop()
    if errors:
        raise SystemExit(f"{server.name} answered {errors[0]}")
    return Round(texts, firsts, seconds, cpu, memory, begun)


def body_of(prompt: Prompt, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request; without a stream, a short one."""
    new = prompt.new if stream else 2
    return {"model": "model", "prompt": prompt.text, "temperature": 0, "stream": stream,
            "max_tokens": new}  # fmt: skip


def of_completions(answer: Any) -> list[Any]:
    """Return the texts of an answer that is not streamed."""
    return [choice["text"] for choice in answer["choices"]]


def servers_of(base: Path, dtype: str) -> list[Server]:
    """Return the three servers, of the model in `base`."""
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    front = {
        "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
        "AMPHORA_CODE_DIR": str(ROOT / "code"), "PYTHONPATH": str(ROOT / "container"),
    }  # fmt: skip
    settings = {
        "SM_VLLM_DTYPE": dtype, "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true",
    }  # fmt: skip
    port = str(free_ports(1)[0])
    serve = ["-m", "amphora", "serve"]
    alone = [
        "-m", "vllm.entrypoints.cli.main", "serve", str(base / "model"), "--served-model-name",
        "model", "--port", port, "--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager",
        "--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--max-logprobs", "20",
    ]  # fmt: skip
    bound = {**front, "SAGEMAKER_BIND_TO_PORT": port}
    ways = {
        "vLLM behind the front": ([str(VLLM), *serve], bound | settings),
        "vLLM alone": ([str(VLLM), *alone], {}),
        "transformers behind the front": (
            [sys.executable, *serve], {**bound, "AMPHORA_DTYPE": dtype}
        ),
    }  # fmt: skip
    return [
        Server(
            name,
            Launch(
                command, {**common, **environ}, int(port), "/v1/completions", values=of_completions
            ),
            base,
        )
        for name, (command, environ) in ways.items()
    ]


def compare(settings: argparse.Namespace) -> str:
    """Return a Markdown table of all servers."""
    drawn = random.Random(0)
    prompts = [
        Prompt(
            [drawn.randrange(2, WORDS) for _ in range(drawn.choice([4, 20, 60, 200]))],
            drawn.choice([8, 16, 32, 64, 128]),
        )
        for _ in range(settings.prompts)
    ]
    rounds: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        make_model(base / "model")
        servers = servers_of(base, settings.dtype)
        for _ in range(settings.rounds):
            for server in servers:
                made = measure(server, prompts)
                rounds.setdefault(server.name, []).append(made)
                print(f"{server.name}: {made.seconds:.1f} s, CPU {made.cpu:.2f} s", file=sys.stderr)
    count = sum(prompt.new for prompt in prompts)
    load = Path("/proc/loadavg").read_text().split()[0]
    lines = [
        f"{settings.prompts} prompts, {count} new tokens, {settings.dtype},"
        f" {settings.rounds} rounds, load average at the end {load}",
        "",
        "| server | tokens/s | tokens/CPU-s | first token p50 | max | memory | start |"
        " texts of the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reference = next(iter(rounds.values()))[0].texts
    for name, some in rounds.items():
        middle = {
            "rate": statistics.median(count / one.seconds for one in some),
            "cpu": statistics.median(count / one.cpu for one in some),
            "first": statistics.median(statistics.median(one.firsts) for one in some),
            "last": statistics.median(max(one.firsts) for one in some),
            "memory": statistics.median(one.memory for one in some),
            "start": statistics.median(one.start for one in some),
        }
        same = sum(a == b for a, b in zip(some[0].texts, reference, strict=True))
        lines.append(
            f"| {name} | {middle['rate']:.0f} | {middle['cpu']:.0f} | {middle['first']:.2f} s"
            f" | {middle['last']:.2f} s | {middle['memory']:.0f} MB | {middle['start']:.1f} s"
            f" | {same} of {len(prompts)} |"
        )
    fronted, alone, *_ = rounds.values()
    ratios = [f"{one.cpu / other.cpu:.3f}" for one, other in zip(fronted, alone, strict=True)]
    lines += ["", f"CPU-seconds with the front / without it, round by round: {', '.join(ratios)}"]
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    print(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
