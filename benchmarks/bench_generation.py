"""Text generation for many clients: vLLM behind the front, vLLM alone, and transformers.

    make build/vllm/.made
    .venv/bin/python benchmarks/bench_generation.py [--prompts 32] [--rounds 2] [--passes 3]
        [--dtype bfloat16]

A Llama with random weights (26 million parameters: 8 layers, 512 dimensions, grouped queries)
continues prompts of 4 to 200 tokens by 8 to 128. All prompts arrive at once, each from its own
client, which reads the stream of `/v1/completions` (temperature 0). The servers take turns, each
started anew for each round, with one pass over the prompts that does not count; vLLM is the CPU
build of tests/vllm/environment.sh, without prefix caching and compilation, and OMP_NUM_THREADS is
1.

Prints a Markdown table of medians over all passes: generated tokens a second and a CPU-second (of a
server's whole process tree), the CPU time of the front's process in relation to that of the rest,
the first token of a text (median and slowest), memory (PSS), and the seconds until the first
answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    Server,
    amphora_server,
    cpu_seconds,
    free_port,
    memory,
    parser,
    table,
    take_turns,
)

VLLM = ROOT / "build/vllm/bin/python"
WORDS = 8000


def make_model(folder: Path) -> None:
    """Save a random Llama whose tokens are numbers."""
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
    """A text of token numbers, and how many tokens are to follow."""

    text: str
    new_tokens: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        """Return the body of a request; without a stream, for two tokens."""
        count = self.new_tokens if stream else 2
        return {"model": "model", "prompt": self.text, "temperature": 0, "stream": stream,
                "max_tokens": count}  # fmt: skip


@dataclass(frozen=True)
class Pass:
    """What one server did in a pass over all prompts. Times are in seconds."""

    texts: list[str] = dataclasses.field(repr=False)
    seconds: float
    cpu: float
    front_cpu: float
    """CPU time of the process that was started."""
    first_median: float
    """From the requests to the first token of a text."""
    first_slowest: float
    memory: float
    """MB."""
    start: float
    """From the start of the server to its first answer."""


def measure(server: Server, prompts: list[Prompt], count: int) -> list[Pass]:
    """Start a server, make `count` passes after one that does not count, and stop it."""
    with server:
        start = server.start(prompts[0].body(stream=False))
        return [run_pass(server, prompts, start) for _ in range(count + 1)][1:]


def run_pass(server: Server, prompts: list[Prompt], start: float) -> Pass:
    """Request all texts at once. Raises RuntimeError if one is refused."""
    texts, firsts = [""] * len(prompts), [0.0] * len(prompts)
    errors: list[str] = []
    ready = threading.Barrier(len(prompts) + 1)

    def read(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=900)
        connection.connect()
        body = json.dumps(prompts[index].body(stream=True))
        ready.wait()
        connection.request("POST", server.path, body, {"Content-Type": "application/json"})
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
                if choice["text"] and not texts[index]:
                    firsts[index] = time.monotonic() - began
                texts[index] += choice["text"] or ""

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    assert server.process is not None
    front = [server.process.pid]
    cpu, front_cpu = cpu_seconds(server.tree()), cpu_seconds(front)
    began = time.monotonic()
    ready.wait()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if errors:
        raise RuntimeError(f"{server.name} answered {errors[0]}")
    return Pass(
        texts, seconds, cpu_seconds(server.tree()) - cpu, cpu_seconds(front) - front_cpu,
        statistics.median(firsts), max(firsts), memory(server.tree()), start,
    )  # fmt: skip


def make_servers(base: Path, dtype: str) -> list[Server]:
    """Return the three servers of the model in base/model."""
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    front = {**common, "SAGEMAKER_MODEL_SERVER_TIMEOUT": "900"}
    settings = {
        "SM_VLLM_DTYPE": dtype, "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true",
    }  # fmt: skip
    port = free_port()
    command = [
        str(VLLM), "-m", "vllm.entrypoints.cli.main", "serve", str(base / "model"), "--port",
        str(port), "--served-model-name", "model", "--host", "127.0.0.1", "--dtype", dtype,
        "--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
        "--max-logprobs", "20",
    ]  # fmt: skip
    vllm = amphora_server(
        base, 1, name="vLLM behind the front", python=str(VLLM), **front, **settings
    )
    transformers = amphora_server(
        base, 1, name="transformers behind the front", AMPHORA_DTYPE=dtype, **front
    )
    servers = [vllm, Server("vLLM alone", command, common, port, base), transformers]
    for server in servers:
        server.path = "/v1/completions"
        server.values = lambda answer: [choice["text"] for choice in answer["choices"]]
    return servers


def compare(options: argparse.Namespace) -> str:
    """Return a Markdown table of all servers."""
    draw = random.Random(0)
    prompts = []
    for _ in range(options.prompts):
        tokens = [str(draw.randrange(2, WORDS)) for _ in range(draw.choice([4, 20, 60, 200]))]
        prompts.append(Prompt(" ".join(tokens), draw.choice([8, 16, 32, 64, 128])))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        make_model(Path(scratch) / "model")
        servers = make_servers(Path(scratch), options.dtype)
        ways = {
            server.name: partial(measure, server, prompts, options.passes) for server in servers
        }
        results = take_turns(ways, options.rounds)
    passes = {name: [one for made in rounds for one in made] for name, rounds in results.items()}
    count = sum(prompt.new_tokens for prompt in prompts)
    reference = next(iter(passes.values()))[0].texts
    rows = []
    for name, some in passes.items():
        equal = sum(a == b for a, b in zip(some[0].texts, reference, strict=True))

        def median(value: Any, some: list[Pass] = some) -> float:
            return statistics.median(value(one) for one in some)

        share = median(lambda one: one.front_cpu / (one.cpu - one.front_cpu))
        rows.append({
            "server": name,
            "tokens/s": f"{median(lambda one: count / one.seconds):.0f}",
            "tokens/CPU-s": f"{median(lambda one: count / one.cpu):.0f}",
            "front's CPU to the rest's": f"{share:.1%}" if "front" in name else "-",
            "first token p50": f"{median(lambda one: one.first_median):.2f} s",
            "max": f"{median(lambda one: one.first_slowest):.2f} s",
            "memory": f"{median(lambda one: one.memory):.0f} MB",
            "start": f"{median(lambda one: one.start):.1f} s",
            "texts of the first": f"{equal} of {len(prompts)}",
        })  # fmt: skip
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{count} new tokens; load average at the end {load}\n\n{table(rows)}"


def main() -> None:
    """Read the arguments, compare, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--passes", type=int, default=3)
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    print(compare(arguments.parse_args()))


if __name__ == "__main__":
    main()
