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
the first token of a text (median and slowest), memory (PSS), and the time from start to the first
answer.
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
class Pass:
    """What one server did in a pass over all prompts."""

    texts: list[str]
    firsts: list[float]
    """When the first token of each text arrived, in seconds after the prompts were sent."""
    seconds: float
    cpu: float
    """Seconds of CPU time."""
    first_process: float
    """Those of the process that was started, which is the front."""
    memory: float
    """MB."""
    start: float
    """Seconds from start to the first answer."""


def measure(server: Server, prompts: list[Prompt], count: int) -> list[Pass]:
    """Start a server, make `count` passes, and stop it. Raises SystemExit if it fails."""
    start = server.start(json.dumps(body_of(prompts[0], stream=False)))
    try:
        one_pass(server, prompts, start)
        return [one_pass(server, prompts, start) for _ in range(count)]
    finally:
        server.stop()


def one_pass(server: Server, prompts: list[Prompt], start: float) -> Pass:
    """Request all texts at once."""
    texts, firsts = [""] * len(prompts), [0.0] * len(prompts)
    errors: list[str] = []
    ready = threading.Barrier(len(prompts) + 1)

    def read(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.launch.port, timeout=900)
        connection.connect()
        body = json.dumps(body_of(prompts[index], stream=True))
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
                if choice["text"] and not texts[index]:
                    firsts[index] = time.monotonic() - began
                texts[index] += choice["text"] or ""

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    assert server.process is not None
    front = [server.process.pid]
    before = cpu_seconds(server.tree()), cpu_seconds(front)
    began = time.monotonic()
    ready.wait()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    cpu, front_cpu = cpu_seconds(server.tree()) - before[0], cpu_seconds(front) - before[1]
    if errors:
        raise SystemExit(f"{server.name} answered {errors[0]}")
    return Pass(texts, firsts, seconds, cpu, front_cpu, pss_mb(server.tree()), start)


def body_of(prompt: Prompt, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request; without a stream, a short one."""
    new = prompt.new if stream else 2
    return {"model": "model", "prompt": prompt.text, "temperature": 0, "stream": stream,
            "max_tokens": new}  # fmt: skip


def completion_texts(answer: Any) -> list[Any]:
    """Return the texts of an answer that is not streamed."""
    return [choice["text"] for choice in answer["choices"]]


def servers_of(base: Path, dtype: str) -> list[Server]:
    """Return the three servers, of the model in `base`."""
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    front = {
        "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT": "900",
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
                command,
                {**common, **environ},
                int(port),
                "/v1/completions",
                values=completion_texts,
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
    passes: dict[str, list[Pass]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = Path(scratch)
        make_model(base / "model")
        servers = servers_of(base, settings.dtype)
        for _ in range(settings.rounds):
            for server in servers:
                made = measure(server, prompts, settings.passes)
                passes.setdefault(server.name, []).extend(made)
                for one in made:
                    line = f"{server.name}: {one.seconds:.1f} s, CPU {one.cpu:.2f} s"
                    print(f"{line}, first process {one.first_process:.2f} s", file=sys.stderr)
    count = sum(prompt.new for prompt in prompts)
    load = " ".join(Path("/proc/loadavg").read_text().split()[:3])
    lines = [
        f"{settings.prompts} prompts, {count} new tokens, {settings.dtype},"
        f" {settings.rounds} rounds of {settings.passes} passes; load average at the end {load}",
        "",
        "| server | tokens/s | tokens/CPU-s | front's CPU to the rest's | first token p50 | max"
        " | memory | start | texts of the first |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reference = next(iter(passes.values()))[0].texts
    for name, some in passes.items():
        rate = statistics.median(count / one.seconds for one in some)
        cpu = statistics.median(count / one.cpu for one in some)
        share = statistics.median(
            one.first_process / (one.cpu - one.first_process) for one in some
        )  # fmt: skip
        first = statistics.median(statistics.median(one.firsts) for one in some)
        last = statistics.median(max(one.firsts) for one in some)
        memory = statistics.median(one.memory for one in some)
        start = statistics.median(one.start for one in some)
        same = sum(a == b for a, b in zip(some[0].texts, reference, strict=True))
        lines.append(
            f"| {name} | {rate:.0f} | {cpu:.0f} | {f'{share:.1%}' if 'front' in name else '-'}"
            f" | {first:.2f} s | {last:.2f} s | {memory:.0f} MB | {start:.1f} s"
            f" | {same} of {len(prompts)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    print(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
