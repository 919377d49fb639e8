"""Stage C on a GPU, 8 minutes: how much does it serve?

    make gpu-serve                     on a machine with a CUDA device
    python benchmarks/gpu/serve.py --smoke      the same code, small, on a CPU

A classifier of MiniLM's shape behind `amphora serve`, with 1, 2 and 4 workers and 1, 32 and 256
clients that ask for one short text each; beside it the model alone in batches of 64, and LitServe
if it is installed. Answers are checked before anything is timed. Then calls of several texts with
their padding and end to end (`AMPHORA_PACKING`), and generation: 32 prompts at once through the
server, beside `generate` on one after the other.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stage import CODE, ROOT, Failed, Stage, Values, minilm, table, timed

import torch  # isort: skip
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

LOAD = ROOT / "benchmarks" / "load.py"
WORDS = [
    "film", "was", "the", "a", "good", "bad", "great", "awful",
    "plot", "cast", "music", "long", "short", "day", "rain",
]  # fmt: skip
TEXTS = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 4 + n % 20)) for n in range(64)]


def save_model(stage: Stage, folder: Path) -> None:
    """A classifier with random weights, and its tokenizer."""
    config = AutoConfig.from_pretrained(minilm(stage.options))
    config.num_labels = 2
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm(stage.options)).save_pretrained(folder)


@contextmanager
def served(base: Path, workers: int) -> Iterator[int]:
    """`amphora serve` over base/model; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "container"),
        "AMPHORA_CODE_DIR": str(CODE),
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": str(workers),
    }
    log = (base / f"server-{workers}.log").open("w+")
    with log, subprocess.Popen(
        [sys.executable, "-m", "amphora", "serve"], env=environ, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            end = time.monotonic() + 180
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise Failed("the server does not start", log=log.read()[-1500:]) from None
                    time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def ask(port: int, value: Any) -> Any:
    """One request's answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        json.dumps(value).encode(),
        {"Content-Type": "application/json"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def alone(stage: Stage, folder: Path) -> tuple[float, list[str]]:
    """Texts a second of the model in batches of 64 that lie on the device, and its labels."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).to(stage.device).eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt").to(stage.device)
    with torch.inference_mode():
        labels = [model.config.id2label[int(n)] for n in model(**inputs).logits.argmax(dim=-1)]
        with torch.autocast(stage.device.type, torch.bfloat16):
            seconds = timed(stage.device, lambda: model(**inputs).logits.cpu(), 5)
    return len(TEXTS) / seconds, labels


def classification(stage: Stage, base: Path, workers: int) -> Values:
    """Requests a second and latencies with 1, 32 and 256 clients."""
    rate, labels = alone(stage, base / "model")
    bodies = base / "bodies.jsonl"
    bodies.write_text("\n".join(json.dumps({"inputs": text}) for text in TEXTS))
    rows = []
    with served(base, workers) as port:
        # Its first answers are what is timed later: they must be the model's own.
        got = [each["label"] for each in ask(port, {"inputs": TEXTS})]
        same = sum(one == other for one, other in zip(got, labels, strict=True))
        if same < 0.97 * len(TEXTS):
            raise Failed("other labels than the model's", same=same, of=len(TEXTS))
        for clients in (1, 8) if stage.smoke else (1, 32, 256):
            seconds = "2" if stage.smoke else "10"
            command = [sys.executable, str(LOAD), str(port), "/invocations", str(clients), seconds]
            done = subprocess.run(
                [*command, str(bodies)], capture_output=True, text=True, check=True
            )
            found = json.loads(done.stdout)
            good = found["statuses"].get("200", 0)
            rows.append({
                "workers": workers, "clients": clients,
                "requests/s": round(good / found["seconds"]),
                "p50 ms": round(found["p50"], 2), "p99 ms": round(found["p99"], 2),
                "others": sum(found["statuses"].values()) - good,
                "to the model alone": round(good / found["seconds"] / rate, 2),
            })  # fmt: skip
    print(table(rows), flush=True)
    return {"rows": rows, "model alone, texts/s": round(rate)}


def litserve(stage: Stage, base: Path) -> Values:
    """LitServe with its own batching, if it is installed."""
    try:
        import litserve  # noqa: F401
    except ImportError:
        return {"not here": "LitServe is not installed"}
    program = base / "lit.py"
    program.write_text(
        "import sys, torch, litserve\n"
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        "class Api(litserve.LitAPI):\n"
        "    def setup(self, device):\n"
        "        self.device, folder = device, sys.argv[1]\n"
        "        self.tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "        model = AutoModelForSequenceClassification.from_pretrained(folder)\n"
        "        self.model = model.to(device).to(torch.bfloat16).eval()\n"
        "    def decode_request(self, request): return request['inputs']\n"
        "    def predict(self, texts):\n"
        "        inputs = self.tokenizer(texts, padding=True, return_tensors='pt')\n"
        "        with torch.inference_mode():\n"
        "            return self.model(**inputs.to(self.device)).logits.argmax(-1).tolist()\n"
        "    def encode_response(self, output): return {'label': output}\n"
        "if __name__ == '__main__':\n"
        "    api = Api(max_batch_size=64, batch_timeout=0.002, api_path='/invocations')\n"
        "    litserve.LitServer(api, accelerator='auto', devices=1, workers_per_device=2)"
        ".run(port=int(sys.argv[2]), generate_client_file=False)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, str(program), str(base / "model"), str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        try:
            end = time.monotonic() + 90
            while True:
                try:
                    ask(port, {"inputs": TEXTS[0]})
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > end:
                        raise Failed("LitServe does not start") from None
                    time.sleep(0.5)
            rows = []
            for clients in (1, 8) if stage.smoke else (1, 32, 256):
                command = [sys.executable, str(LOAD), str(port), "/invocations", str(clients)]
                command += ["2" if stage.smoke else "10", str(base / "bodies.jsonl")]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                good = found["statuses"].get("200", 0)
                rows.append({"clients": clients, "requests/s": round(good / found["seconds"]),
                             "p50 ms": round(found["p50"], 2)})  # fmt: skip
        finally:
            os.killpg(server.pid, 9)
    return {"rows": rows}


def packing(stage: Stage, base: Path) -> Values:
    """Milliseconds a text, padded and end to end, in rows of several lengths, by the handlers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import bench_packing
    from bench_packing import LoadedModel, Origin

    environ = {**os.environ, "AMPHORA_PACKING": "1"}
    origin = Origin.find(str(base / "model"), environ)
    loaded = LoadedModel.load(origin, AutoModelForSequenceClassification, environ)
    if loaded.packed is None:
        raise Failed("the model is not packed here")
    rows = []

    def clock() -> float:
        if stage.device.type == "cuda":
            torch.cuda.synchronize(stage.device)
        return time.perf_counter()

    for name in bench_packing.SETS:
        calls = bench_packing.calls_of(name, 2000 if stage.smoke else 100_000)
        ways = bench_packing.ways_of(loaded, (512, 2048) if stage.smoke else (2048, 8192, 16384))
        found = bench_packing.compare(ways, calls, 2 if stage.smoke else 5, clock)
        count = sum(map(len, calls))
        for way, (milliseconds, changed) in found.items():
            if changed > 0.03 * count:
                raise Failed("other labels end to end", way=way, changed=changed, of=count)
            rows.append({
                "a call": name, "by": way, "ms a text": round(milliseconds, 4),
                "other labels": f"{changed} of {count}",
            })  # fmt: skip
    print(table(rows), flush=True)
    return {"rows": rows}


def generation(stage: Stage, base: Path) -> Values:
    """32 prompts at once, beside one after the other by `generate`; greedy answers must agree."""
    from jobs import save_decoder
    from transformers import AutoModelForCausalLM

    count, new = (4, 8) if stage.smoke else (32, 64)
    folder = base / "decoder" / "model"
    save_decoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(stage.device).eval()
    prompts = [TEXTS[number][: 8 + number] for number in range(count)]
    began, wanted = time.perf_counter(), []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(stage.device)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        wanted.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))
    one_by_one = time.perf_counter() - began
    parameters = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False,
                  "return_full_text": False}  # fmt: skip
    with served(base / "decoder", 1) as port:
        ask(port, {"inputs": prompts[0], "parameters": parameters})
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            answers = list(pool.map(
                lambda prompt: ask(port, {"inputs": prompt, "parameters": parameters}), prompts
            ))  # fmt: skip
            together = time.perf_counter() - began
    texts = [answer[0]["generated_text"] for answer in answers]
    same = sum(one == other for one, other in zip(texts, wanted, strict=True))
    return {
        "tokens/s one after the other": round(count * new / one_by_one),
        "tokens/s through the server, together": round(count * new / together),
        "same greedy answers (bfloat16 may differ)": f"{same} of {count}",
    }


def main() -> None:
    """All of it; exit code 1 if something failed."""
    stage = Stage("serve", __doc__, seconds=480)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        save_model(stage, base / "model")
        for workers in (1,) if stage.smoke else (1, 2, 4):
            run = functools.partial(classification, stage, base, workers)
            stage.check(f"classification, {workers} worker(s)", 60, run)
        stage.check("packing", 60, lambda: packing(stage, base))
        stage.check("LitServe", 60, lambda: litserve(stage, base))
        stage.check("generation", 60, lambda: generation(stage, base))
    stage.end()


if __name__ == "__main__":
    main()
