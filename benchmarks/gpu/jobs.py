"""Jobs that the stages on a GPU start as a user does, in processes, and what is checked of them."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
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

from stage import CODE, ROOT, Failed, Stage, Values, minilm

import numpy as np  # isort: skip
import torch
import transformers

SMALL = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 1024, "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip
"""A decoder's sizes."""


def write_job(folder: Path, stage: Stage, rows: int) -> dict[str, str]:
    """Made rows in a channel below `folder`; the environment of a job there."""
    channel = folder / "input" / "data" / "train"
    channel.mkdir(parents=True)
    draw = np.random.default_rng(0)
    words = [
        "film",
        "was",
        "the",
        "a",
        "good",
        "bad",
        "great",
        "awful",
        "plot",
        "cast",
        "music",
        "long",
        "short",
    ]
    with (channel / "train.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for _ in range(rows):
            text = " ".join(draw.choice(words, size=draw.integers(2, 8)))
            writer.writerow([text, "pos" if "good" in text or "great" in text else "neg"])
    return {
        **os.environ,
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_CHANNEL_TRAIN": str(channel),
        "HF_HUB_OFFLINE": "1",
        **({"OMP_NUM_THREADS": "1"} if stage.smoke else {}),
    }


def train_command(environ: dict[str, str], *arguments: str, processes: int = 1) -> list[str]:
    """What starts code/train.py."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*command, str(CODE / "train.py"), *arguments]


def kill_and_resume(stage: Stage) -> Values:
    """A training that is killed and goes on has the weights of one that was not, bit by bit."""
    sums = []
    with tempfile.TemporaryDirectory() as folder:
        for is_killed in (False, True):
            base = Path(folder) / str(is_killed)
            environ = write_job(base, stage, 96)
            arguments = ["--model_name_or_path", str(minilm(stage.options)), "--batch_size", "8"]
            arguments += ["--epochs", "1", "--max_steps", "8", "--save_steps", "2"]
            arguments += ["--eval_strategy", "no", "--seed", "3"]
            command = train_command(environ, *arguments)
            if is_killed:
                with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL) as process:  # fmt: skip
                    end = time.monotonic() + 240
                    while not list((base / "checkpoints").glob("checkpoint-4")):
                        if process.poll() is not None or time.monotonic() > end:
                            break
                        time.sleep(0.01)
                    process.send_signal(signal.SIGKILL)
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
            weights = (base / "model" / "model.safetensors").read_bytes()
            sums.append(hashlib.sha256(weights).hexdigest()[:16])
            line = next((li for li in done.stdout.splitlines() if li.startswith("device:")), "")
    if sums[0] != sums[1]:
        raise Failed("the weights differ", sums=sums, device=line)
    return {"sha256": sums[0], "device": line}


def several_processes(stage: Stage, backend: str, processes: int) -> Values:
    """A sum over processes: NCCL needs a GPU for each, gloo takes two on one."""
    program = (
        "import os, torch, torch.distributed as dist\n"
        f"device = 'cuda' if {backend == 'nccl'} else 'cpu'\n"
        f"dist.init_process_group('{backend}')\n"
        "total = torch.ones(4, device=device); dist.all_reduce(total)\n"
        "assert total.tolist() == [float(dist.get_world_size())] * 4\n"
        "dist.destroy_process_group()\n"
    )
    if backend == "nccl" and stage.device.type != "cuda":
        return {"not here": "NCCL needs a CUDA device"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sum.py"
        path.write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
    return {"processes": processes}


def two_on_one(stage: Stage) -> Values:
    """Two ranks on one GPU: refused by NCCL's rule, trained by gloo."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, more in (("nccl", []), ("gloo", ["--ddp_backend", "gloo"])):
            environ = write_job(Path(folder) / way, stage, 64)
            arguments = ["--model_name_or_path", str(minilm(stage.options)), "--max_steps", "2"]
            arguments += ["--batch_size", "8", "--save_strategy", "no", *more]
            one = {**environ, "CUDA_VISIBLE_DEVICES": "0"} if stage.device.type == "cuda" else {}
            done = subprocess.run(
                train_command(environ, *arguments, processes=2), env={**environ, **one},
                capture_output=True, text=True, check=False, timeout=200,
            )  # fmt: skip
            is_refused = "share one GPU" in done.stderr
            results[way] = "refused" if is_refused else f"exit code {done.returncode}"
            wanted = stage.device.type == "cuda" and way == "nccl"
            if is_refused != wanted or (done.returncode != 0) != wanted:
                raise Failed(f"{way}: {results[way]}", **results, stderr=done.stderr[-1500:])
    return results


def estimate(stage: Stage, size: int) -> Values:
    """doctor's estimate of memory beside what torch has allocated at a training's peak."""
    with tempfile.TemporaryDirectory() as folder:
        environ = write_job(Path(folder), stage, max(96, 4 * size))
        arguments = ["--model_name_or_path", str(minilm(stage.options)), "--max_steps", "3"]
        arguments += ["--batch_size", str(size), "--eval_strategy", "no", "--save_strategy", "no"]
        check = [sys.executable, str(CODE / "check.py"), "1", *arguments]
        completed = subprocess.run(check, env=environ, capture_output=True, text=True, check=False)
        line = next(li for li in completed.stdout.splitlines() if '"memory"' in li)
        detail = json.loads(line.partition(" ")[2])["detail"]
        done = subprocess.run(
            train_command(environ, *arguments),
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
    results = {"said": detail}
    if stage.device.type != "cuda":
        return results
    peak = next(li for li in done.stdout.splitlines() if li.startswith("device memory:"))
    told_gb, real_gb = (float(text.split(" GB")[0].split()[-1]) for text in (detail, peak))
    if abs(told_gb / real_gb - 1) > 0.15:
        raise Failed("more than 15 % from what torch reports", **results, peak=peak)
    return results | {"peak": peak}


def sharded_decoder(stage: Stage) -> Values:
    """FSDP2 in the device's default precision with task=causal-lm: its losses must fall."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        environ = write_job(base, stage, 96)
        model = base / "decoder"
        save_decoder(model)
        arguments = ["--task", "causal-lm", "--model_name_or_path", str(model)]
        arguments += ["--text_column", "text", "--batch_size", "8", "--epochs", "2"]
        arguments += ["--lr", "5e-3", "--fsdp", "full_shard", "--logging_steps", "4"]
        processes = 2 if stage.device.type == "cpu" else torch.cuda.device_count()
        command = train_command(environ, *arguments, processes=processes)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}", stderr=done.stderr[-1500:])
        metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
    if not metrics["eval_loss"] < 5.0:
        raise Failed("it has not learned", **metrics)
    return {"processes": processes, **{k: metrics[k] for k in ("eval_loss", "train_loss")}}


def four_bits(stage: Stage) -> Values:
    """Adapters learn on weights of 4 bits what they learn on the weights themselves, in less
    memory; a CPU refuses."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "decoder"
        save_decoder(model)
        for way, more in (("whole", []), ("4 bits", ["--load_in_4bit", "True"])):
            environ = write_job(Path(folder) / way.replace(" ", "-"), stage, 96)
            arguments = ["--task", "causal-lm", "--model_name_or_path", str(model)]
            arguments += ["--text_column", "text", "--batch_size", "8", "--epochs", "2"]
            arguments += ["--lr", "1e-2", "--lora_r", "16", "--lora_save", "adapter", *more]
            done = subprocess.run(
                train_command(environ, *arguments),
                env=environ, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if more and "Hyperparameter load_in_4bit has value True, but" in done.stderr:
                reason = done.stderr.partition("value True, but ")[2][:100]
                if stage.device.type == "cuda" and "bitsandbytes is not here" not in reason:
                    raise Failed("refused", reason=reason)
                return {**results, "refused": reason}
            if done.returncode:
                raise Failed(f"{way}: exit code {done.returncode}", stderr=done.stderr[-1500:])
            base = Path(environ["SAGEMAKER_BASE_DIR"])
            metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
            memory = [line for line in done.stdout.splitlines() if line.startswith("device mem")]
            results[way] = {"eval_loss": metrics["eval_loss"], "memory": memory}
            if "quantization_config" in json.loads((base / "model" / "config.json").read_text()):
                raise Failed("the saved configuration says how it was trained")
    if abs(results["4 bits"]["eval_loss"] - results["whole"]["eval_loss"]) > 0.3:
        raise Failed("the losses differ", **results)
    return results


def save_decoder(folder: Path) -> None:
    """A small random one with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="</s>", model_max_length=256
    )
    sizes = {**SMALL, "vocab_size": len(pieces), "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=64)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def the_whole_way(stage: Stage) -> Values:
    """`amphora doctor`, `train` and `serve`, and a request, as an image does it."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        environ = write_job(base, stage, 160)
        environ |= {"PYTHONPATH": str(ROOT / "container"), "AMPHORA_CODE_DIR": str(CODE)}
        config = base / "input" / "config"
        config.mkdir(parents=True)
        values = {"model_name_or_path": str(minilm(stage.options)), "epochs": "5", "lr": "2e-4"}
        values["batch_size"] = "8"
        (config / "hyperparameters.json").write_text(json.dumps(values))
        reported = {}
        for command in ("doctor", "train"):
            done = subprocess.run(
                [sys.executable, "-m", "amphora", command],
                env=environ, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                failure = base / "output" / "failure"
                reason = failure.read_text() if failure.exists() else done.stderr[-1500:]
                raise Failed(f"amphora {command}: exit code {done.returncode}", reason_=reason)
            reported[command] = [line for line in done.stdout.splitlines() if "device" in line][:3]
        with _served(environ) as address:
            request = urllib.request.Request(
                f"{address}/invocations",
                json.dumps({"inputs": ["a good film", "a long plot"]}).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
    labels = [entry["label"] for entry in answer]
    if labels != ["pos", "neg"]:
        raise Failed("a wrong answer", answer=answer)
    return {**reported, "answer": answer}


@contextmanager
def _served(environ: dict[str, str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-m", "amphora", "serve"],
        env={**environ, "SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_MODEL_SERVER_WORKERS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/ping", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        try:
            yield address
        finally:
            server.terminate()
