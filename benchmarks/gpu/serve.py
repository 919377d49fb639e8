"""Stage C on a GPU, 12 minutes: correctness and speed of serving.

    make gpu-serve                     on a machine with a CUDA device
    python benchmarks/gpu/serve.py --smoke      the same code, small, on a CPU

Checks packed rows, calls ahead and a full device. Then a classifier of MiniLM's shape behind
`amphora serve`, with 1, 2 and 3 workers, by graphs (`AMPHORA_CUDA_GRAPHS`) and without, and 1, 32
and 256 clients that send one short text each: answers are compared with the model alone before
anything is timed. Then calls of several texts, padded and end to end (`AMPHORA_PACKING`), and
generation: 32 prompts at once through the server, by transformers and, if it is installed, by
vLLM, compared with `generate` on one after the other.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import json
import sys
import tempfile
import time
import urllib.error
from pathlib import Path

import serving_rows
from stage import ROOT, Failed, Stage, Values, amphora_server, find_minilm, table, timed

import torch  # isort: skip
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

WORDS = [
    "film", "was", "the", "a", "good", "bad", "great", "awful",
    "plot", "cast", "music", "long", "short", "day", "rain",
]  # fmt: skip
TEXTS = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 4 + n % 20)) for n in range(64)]


def save_model(stage: Stage, folder: Path) -> None:
    """Save a classifier with random weights, and its tokenizer."""
    config = AutoConfig.from_pretrained(find_minilm(stage))
    config.num_labels = 2
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_minilm(stage)).save_pretrained(folder)


def alone(stage: Stage, folder: Path) -> tuple[float, list[str]]:
    """Return texts a second of the model, in batches of 64 on the device, and its labels."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).to(stage.device).eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt").to(stage.device)
    with torch.inference_mode():
        labels = [model.config.id2label[int(n)] for n in model(**inputs).logits.argmax(dim=-1)]
        with torch.autocast(stage.device.type, torch.bfloat16):
            seconds = timed(stage.device, lambda: model(**inputs).logits.cpu(), 5)
    return len(TEXTS) / seconds, labels


def classification(
    stage: Stage, base: Path, workers: int, rates: dict[str, int], **variables: str
) -> Values:
    """Measure requests a second and latencies with 1, 32 and 256 clients.

    Args:
        rates: Gets the requests a second of the most clients.
        variables: Of the server's environment.
    """
    rate, labels = alone(stage, base / "model")
    bodies = base / "bodies.jsonl"
    bodies.write_text("\n".join(json.dumps({"inputs": text}) for text in TEXTS))
    rows = []
    with amphora_server(base, workers, **variables) as server:
        server.start({"inputs": TEXTS})
        # Its first answers are what is timed later: they must be the model's own.
        answered = [entry["label"] for entry in server.request({"inputs": TEXTS})]
        same = sum(one == other for one, other in zip(answered, labels, strict=True))
        if same < 0.97 * len(TEXTS):
            raise Failed("other labels than the model's", same=same, of=len(TEXTS))
        for clients in (1, 8) if stage.smoke else (1, 32, 256):
            results = server.load(clients, 2 if stage.smoke else 10, bodies)
            good = results["statuses"].get("200", 0)
            rows.append({
                "workers": workers, "clients": clients,
                "requests/s": round(good / results["seconds"]),
                "p50 ms": round(results["p50"], 2), "p99 ms": round(results["p99"], 2),
                "others": sum(results["statuses"].values()) - good,
                "to the model alone": round(good / results["seconds"] / rate, 2),
            })  # fmt: skip
    settings = [f"{name}={value}" for name, value in variables.items()]
    rates[" ".join([f"{workers} worker(s)", *settings])] = rows[-1]["requests/s"]
    print(table(rows), flush=True)
    log = (base / "amphora.log").read_text().splitlines()
    chosen = [line.partition("batches: ")[2] for line in log if "batches: " in line]
    is_recorded = any("graphs of rows" in line for line in chosen)
    if stage.device.type == "cuda" and is_recorded != ("AMPHORA_CUDA_GRAPHS" in variables):
        raise Failed("graphs are used, or are not", rows=rows, batches=chosen)
    return {"rows": rows, "model alone, texts/s": round(rate), "batches": chosen}


def long_lists(stage: Stage, base: Path) -> Values:
    """Compare two lists of texts in sequence and at once, when one is tokenized while the device
    computes the other."""
    count = 400 if stage.smoke else 4000
    lists = [{"inputs": [f"{text} {number}" for number, text in enumerate(TEXTS * (count // 64))]}]
    lists.append({"inputs": lists[0]["inputs"][::-1]})
    with amphora_server(base, 1) as server:
        server.start(lists[0])
        expected = [server.request(body) for body in lists]
        began = time.perf_counter()
        for body in lists:
            server.request(body)
        apart = time.perf_counter() - began
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            began = time.perf_counter()
            results = list(pool.map(server.request, lists))
            together = time.perf_counter() - began
    pairs = [
        (one, other)
        for ours, theirs in zip(results, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    others = sum(one["label"] != other["label"] for one, other in pairs)
    if others > 0.01 * len(pairs):
        raise Failed("other labels where two lists are at work", others=others, of=len(pairs))
    return {"texts": count, "seconds apart": apart, "seconds together": together}


def full(stage: Stage, base: Path) -> Values:
    """Check that a request beyond the device's memory gets 507, and the next one an answer."""
    if stage.device.type != "cuda":
        return {"not here": "the memory of this device is the host's"}
    with amphora_server(base, 1) as server:
        server.start({"inputs": TEXTS})
        free, _ = torch.cuda.mem_get_info()
        held = torch.empty(max(0, free - (64 << 20)), dtype=torch.uint8, device=stage.device)
        status = 200
        try:
            server.request({"inputs": [" ".join(WORDS * 30)] * 2000})
        except urllib.error.HTTPError as error:
            status = error.code
        del held
        torch.cuda.empty_cache()
        after = len(server.request({"inputs": TEXTS}))
    # What torch has kept for itself may be enough: then nothing was full.
    if status not in (200, 507) or after != len(TEXTS):
        log = (base / "amphora.log").read_text()[-3000:]
        raise Failed("a full device", status=status, answered_after=after, log=log)
    return {"status": status, "answered after": after}


def vllm_python() -> str:
    """Return a Python that has vLLM: this one, or the one of tests/vllm/environment.sh; or ""."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    made = ROOT / "build/vllm/bin/python"
    return str(made) if made.is_file() else ""


def generation(stage: Stage, base: Path, python: str, **variables: str) -> Values:
    """Compare 32 prompts at once, sent to the server, with `generate` on one after the other."""
    if not python:
        return {"not here": "vLLM is not installed: make build/vllm/.made, or use AWS's vLLM image"}
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
    bodies = [{"inputs": prompt, "parameters": parameters} for prompt in prompts]
    with amphora_server(base / "decoder", 1, python=python, **variables) as server:
        server.start(bodies[0])
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            answers = list(pool.map(server.request, bodies))
            together = time.perf_counter() - began
    texts = [answer[0]["generated_text"] for answer in answers]
    same = sum(one == other for one, other in zip(texts, wanted, strict=True))
    return {
        "tokens/s one after the other": round(count * new / one_by_one),
        "tokens/s through the server, together": round(count * new / together),
        "same greedy answers (bfloat16 may differ)": f"{same} of {count}",
    }


def workers_chosen(rates: dict[str, int]) -> Values:
    """Return the number of workers with the most requests a second, and its setting."""
    best = max(
        (way for way in rates if way.endswith("worker(s)")), key=rates.__getitem__, default=""
    )
    if not best:
        raise Failed("no number of workers was measured")
    return {"requests/s": rates, "best": f"SAGEMAKER_MODEL_SERVER_WORKERS={best.split()[0]}"}


def main() -> None:
    """Run all checks; the exit code is 1 if one failed."""
    stage = Stage("serve", __doc__, seconds=720)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        save_model(stage, base / "model")
        stage.check("rows end to end", 30, lambda: serving_rows.truth(stage))
        stage.check("calls ahead", 20, lambda: serving_rows.ahead(stage, base / "model"))
        stage.check("full device", 30, lambda: full(stage, base))
        rates: dict[str, int] = {}
        for workers in (1,) if stage.smoke else (1, 2, 3):
            run = functools.partial(classification, stage, base, workers, rates)
            stage.check(f"classification {workers} worker(s)", 50, run)
        for way, name, value in (
            ("graphs", "AMPHORA_CUDA_GRAPHS", "1"),
            ("padded", "AMPHORA_PACKING", "0"),
        ):
            run = functools.partial(classification, stage, base, 1, rates, **{name: value})
            if way == "graphs" or not stage.smoke:
                stage.check(f"classification {way}", 50, run)
        stage.check("workers", 0, lambda: workers_chosen(rates))
        stage.check("long lists", 30, lambda: long_lists(stage, base))
        stage.check("packing", 60, lambda: serving_rows.packing(stage, base / "model"))
        stage.check("generation", 60, lambda: generation(stage, base, sys.executable))
        settings = {"AMPHORA_GENERATION": "vllm", "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.5"}
        if stage.smoke:
            settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "SM_VLLM_ENFORCE_EAGER": "true"}
        run = functools.partial(generation, stage, base, vllm_python(), **settings)
        stage.check("vLLM", 180, run)
    stage.end()


if __name__ == "__main__":
    main()
