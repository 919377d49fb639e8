"""Jobs that the stages on a GPU start in processes, as a user does, and what is checked of them."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from stage import (
    CODE,
    CommandError,
    Failed,
    Stage,
    Values,
    amphora_server,
    find_minilm,
    python_path,
    run,
)

from tests.support.causal_kit import byte_tokenizer

SMALL = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 1024, "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip
"""The sizes of a model."""
WORDS = (
    "film", "was", "the", "a", "good", "bad", "great", "awful", "plot", "cast", "music", "long",
    "short",
)  # fmt: skip
SHOWN = re.compile(r"device|precision |trial|forecast")
"""Lines of a log that a check's record keeps."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
DECODER = (
    *("--task", "causal-lm", "--text_column", "text", "--batch_size", "8", "--epochs", "2"),
    "--model_name_or_path",
)


class Job:
    """A job's folder with random rows in its channel, and its environment."""

    def __init__(self, base: Path, stage: Stage, rows: int) -> None:
        self.base = base
        channel = base / "input" / "data" / "train"
        channel.mkdir(parents=True)
        draw = np.random.default_rng(0)
        with (channel / "train.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["text", "label"])
            for _ in range(rows):
                text = " ".join(draw.choice(WORDS, size=draw.integers(2, 8)))
                writer.writerow([text, "pos" if "good" in text or "great" in text else "neg"])
        self.environ = {
            **os.environ, "SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(channel)
        }  # fmt: skip
        if stage.smoke:
            self.environ["OMP_NUM_THREADS"] = "1"

    def command(self, *arguments: object, processes: int = 1) -> list[str]:
        """Return what starts code/train.py."""
        launcher = [*TORCHRUN, f"--nproc_per_node={processes}"] if processes > 1 else []
        return [sys.executable, *launcher, str(CODE / "train.py"), *map(str, arguments)]

    def train(self, *arguments: object, processes: int = 1) -> str:
        """Train and return the log. Raises CommandError if it fails."""
        return run(self.command(*arguments, processes=processes), self.environ)

    def metrics(self) -> dict[str, Any]:
        """Return what the training has written to metrics.json."""
        path = self.base / "output" / "data" / "metrics.json"
        metrics: dict[str, Any] = json.loads(path.read_text())
        return metrics


def kill_and_resume(stage: Stage) -> Values:
    """Check that a killed and resumed training has an undisturbed one's weights, bit for bit."""
    sums = []
    arguments = ["--model_name_or_path", find_minilm(stage), "--batch_size", 8, "--epochs", 1]
    arguments += ["--max_steps", 8, "--save_steps", 2, "--eval_strategy", "no", "--seed", 3]
    with tempfile.TemporaryDirectory() as folder:
        for is_killed in (False, True):
            job = Job(Path(folder) / str(is_killed), stage, 96)
            if is_killed:
                command, null = job.command(*arguments), subprocess.DEVNULL
                with subprocess.Popen(command, env=job.environ, stdout=null, stderr=null) as killed:
                    end = time.monotonic() + 240
                    while not (job.base / "checkpoints" / "checkpoint-4").exists():
                        if killed.poll() is not None or time.monotonic() > end:
                            break
                        time.sleep(0.01)
                    killed.kill()
            log = job.train(*arguments)
            weights = (job.base / "model" / "model.safetensors").read_bytes()
            sums.append(hashlib.sha256(weights).hexdigest()[:16])
            device = next((line for line in log.splitlines() if line.startswith("device:")), "")
    if sums[0] != sums[1]:
        raise Failed("the weights differ", sums=sums, device=device)
    return {"sha256": sums[0], "device": device}


def several_processes(stage: Stage, backend: str, processes: int) -> Values:
    """Check all-reduce of several processes; NCCL needs one GPU per process, gloo does not."""
    if backend == "nccl" and stage.device.type != "cuda":
        return {"not here": "NCCL needs a CUDA device"}
    program = (
        "import torch, torch.distributed as dist\n"
        f"dist.init_process_group('{backend}')\n"
        f"total = torch.ones(4, device='{'cuda' if backend == 'nccl' else 'cpu'}')\n"
        "dist.all_reduce(total)\n"
        "assert total.tolist() == [float(dist.get_world_size())] * 4\n"
        "dist.destroy_process_group()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sum.py"
        path.write_text(program)
        run([sys.executable, *TORCHRUN, f"--nproc_per_node={processes}", str(path)])
    return {"processes": processes}


def two_on_one(stage: Stage) -> Values:
    """Check that two ranks on one GPU are refused with NCCL and train with gloo."""
    results: dict[str, Any] = {}
    is_gpu = stage.device.type == "cuda"
    arguments = ["--model_name_or_path", find_minilm(stage), "--max_steps", 2]
    arguments += ["--batch_size", 8, "--save_strategy", "no"]
    with tempfile.TemporaryDirectory() as folder:
        for backend, more in (("nccl", []), ("gloo", ["--ddp_backend", "gloo"])):
            job = Job(Path(folder) / backend, stage, 64)
            if is_gpu:
                job.environ["CUDA_VISIBLE_DEVICES"] = "0"
            try:
                output, results[backend] = job.train(*arguments, *more, processes=2), "trained"
            except CommandError as error:
                output, results[backend] = error.output, "failed"
            if "share one GPU" in output:
                results[backend] = "refused"
            if results[backend] != ("refused" if is_gpu and backend == "nccl" else "trained"):
                raise Failed(f"{backend}: {results[backend]}", output=output[-1500:])
    return results


def sharded_decoder(stage: Stage) -> Values:
    """Check that a decoder learns under FSDP2, in the device's default precision."""
    processes = 2 if stage.device.type == "cpu" else torch.cuda.device_count()
    if processes == 1:
        return {"not here": "one GPU: nothing to shard, and gloo's FSDP2 ends by signal 11 on it"}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), stage, 96)
        save_decoder(job.base / "decoder")
        more = ["--lr", "5e-3", "--fsdp", "full_shard", "--logging_steps", 4]
        job.train(*DECODER, job.base / "decoder", *more, processes=processes)
        metrics = job.metrics()
    if not metrics["eval_loss"] < 5.0:
        raise Failed("it has not learned", **metrics)
    return {"processes": processes, **{name: metrics[name] for name in ("eval_loss", "train_loss")}}


def four_bits(stage: Stage) -> Values:
    """Adapters on weights of 4 bits learn what they learn on whole weights, in less memory; a CPU
    refuses."""
    if stage.device.type == "cuda" and not importlib.util.find_spec("bitsandbytes"):
        return {"not here": "bitsandbytes is not installed"}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "decoder"
        save_decoder(model)
        for name, more in (("whole", []), ("4-bits", ["--load_in_4bit", "True"])):
            job = Job(Path(folder) / name, stage, 96)
            adapters = ["--lr", "1e-2", "--lora_r", 16, "--lora_save", "adapter", *more]
            try:
                log = job.train(*DECODER, model, *adapters)
            except CommandError as error:
                reason = error.output.partition("load_in_4bit has value True, but ")[2][:100]
                if not reason or (stage.device.type == "cuda" and "not here" not in reason):
                    raise
                return {**results, "refused": reason}
            memory = [line for line in log.splitlines() if line.startswith("device memory")]
            results[name] = {"eval_loss": job.metrics()["eval_loss"], "memory": memory}
            if "quantization_config" in json.loads((job.base / "model/config.json").read_text()):
                raise Failed("the saved configuration has quantization_config")
    if abs(results["4-bits"]["eval_loss"] - results["whole"]["eval_loss"]) > 0.3:
        raise Failed("the losses differ", **results)
    return results


def save_decoder(folder: Path) -> None:
    """Save a small random one with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(["</s>"], eos_token="</s>", pad_token="</s>", model_max_length=256)
    sizes = {**SMALL, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=64)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_to_end(stage: Stage) -> Values:
    """Run `amphora doctor`, also with steps, `train` and `serve`; check that it has learned."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), stage, 160)
        config = job.base / "input" / "config"
        config.mkdir(parents=True)
        values = {"model_name_or_path": str(find_minilm(stage)), "epochs": "5", "lr": "2e-4"}
        values["batch_size"] = "8"
        (config / "hyperparameters.json").write_text(json.dumps(values))
        job.environ |= {"PYTHONPATH": python_path(), "AMPHORA_CODE_DIR": str(CODE)}
        devices = {}
        for command in ("doctor", "doctor --steps 10", "train"):
            log = run([sys.executable, "-m", "amphora", *command.split()], job.environ)
            devices[command] = [line for line in log.splitlines() if SHOWN.search(line)][:6]
        with amphora_server(job.base, 1) as server:
            body = {"inputs": ["a good film", "a long plot"]}
            server.start(body)
            answer = server.request(body)
    if [entry["label"] for entry in answer] != ["pos", "neg"]:
        raise Failed("a wrong answer", answer=answer)
    return {**devices, "answer": answer}
