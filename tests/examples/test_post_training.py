"""The scripts of examples/post_training and retrieval through `amphora train`: stopped, gone on with,
and served."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import serving_kit
from tests.support.job_tree import Tree
from tests.support.paths import CODE
from tests.support.preloading import PRELOADED, preloading
from tests.support.servers import served
from tests.support.until import until
from tests.support.words import WORDS

sys.path.insert(0, str(CODE))
from recipe.metrics import metric_definitions
from tests.support.images import PICTURE, TEXT, save_llava

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = next(row["Regex"] for row in metric_definitions() if row["Name"] == "loss")
PAIRS = [{"anchor": f"who was {word}", "positive": f"anna was {word} in paris"} for word in WORDS]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of scripts that run in forks."""
    modules = ("torch.distributed.fsdp", "sentence_transformers.sparse_encoder.losses", "transformers.trainer",
               "trl.trainer.sft_trainer")  # fmt: skip
    with preloading(
        tmp_path_factory.mktemp("libraries"), imports=modules, CUDA_VISIBLE_DEVICES=""
    ) as variables:
        yield {**variables, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("file", "rows", "arguments", "body", "words"),
    [
        pytest.param(file, *case, id=case[1].get("kind", file), marks=[pytest.mark.long] * is_long)
        # The script of `sparse` trains `multi_vector`, too.
        for is_long, file, *case in [
            (0, "post_training/sft_images",
             [{"images": [f"{number}.png"], "messages": [
                 {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "who was"}]},
                 {"role": "assistant", "content": [{"type": "text", "text": "anna"}]},
             ]} for number in range(8)],
             {}, {"inputs": {"image": TEXT, "text": "<image> who was"}, "parameters": {"max_new_tokens": 4}},
             "'generated_text'"),
            (0, "retrieval/train_encoder", PAIRS, {"kind": "sparse", "learning_rate": 1e-4},
             {"inputs": "who was good"}, "'index'"),
            (1, "retrieval/train_encoder", PAIRS, {"kind": "multi_vector", "learning_rate": 1e-4},
             {"inputs": "who was good"}, "[["),
        ]
    ],
)  # fmt: skip
def test_a_script_trains_goes_on_with_its_checkpoint_and_is_served(
    tmp_path: Path,
    file: str,
    rows: list[dict[str, Any]],
    arguments: dict[str, Any],
    body: dict[str, Any],
    words: str,
    libraries: dict[str, str],
    preloaded: Mapping[str, str],
) -> None:
    """On one process, then on two. The last rate of a schedule is 0: a step more changes nothing,
    if the weights are those of the checkpoint. A stopped job leaves a checkpoint of its step."""
    tree, program = Tree(tmp_path, libraries), EXAMPLES / f"{file}.py"
    # The example in a fork of a process with its libraries, whose import takes longer.
    tree.channel("train", **{"rows.jsonl": "\n".join(map(json.dumps, rows))}).script(
        f"import sys\nsys.path.insert(0, {str(PRELOADED)!r})\nfrom train import main\n"
        f"main([{str(program)!r}, *sys.argv[1:]])",
        program.name,
    )
    if file.startswith("retrieval"):
        serving_kit.save("BertForMaskedLM", tmp_path / "start")
    else:
        torch.manual_seed(5)
        save_llava(tmp_path / "start")
        for row in rows:
            PICTURE.save(tmp_path / "input/data/train" / row["images"][0])
    chosen: dict[str, Any] = {
        "sagemaker_program": program.name, "sagemaker_torch_distributed_enabled": "true",
        "model_name_or_path": str(tmp_path / "start"), "learning_rate": 0.01, "batch_size": 2,
        "save_steps": 1, **arguments,
    }  # fmt: skip

    def weights_of(name: str) -> dict[str, torch.Tensor]:
        loaded = load_file(tmp_path / name / "model.safetensors")
        # An encoder alone is saved without its model's name before each weight's.
        return {name.removeprefix("bert."): weight for name, weight in loaded.items()}

    def losses(processes: int) -> int:
        done = tree.train(timeout=200, AMPHORA_NPROC_PER_NODE=str(processes))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return len(re.findall(LOSS, done.stdout + done.stderr))

    tree.configure({**chosen, "sagemaker_torch_distributed_enabled": "false", "max_steps": 2})
    assert losses(1) == 2
    first, start = weights_of("model"), weights_of("start")
    assert any(not torch.equal(first[name], start[name]) for name in first.keys() & start.keys())
    shutil.rmtree(tmp_path / "model")

    tree.configure({**chosen, "max_steps": 3})
    assert losses(2) == 1
    torch.testing.assert_close(weights_of("model"), first, rtol=0, atol=1e-6)

    with served(tmp_path, preloaded) as server:
        reply = server.invoke(body)
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()
        assert words in str(answer)

    if "images" not in file:
        return
    shutil.rmtree(tmp_path / "checkpoints")
    tree.configure({**chosen, "max_steps": 1_000_000, "save_steps": 1_000_000})
    log = tmp_path / "log"
    with log.open("w") as out:
        job = subprocess.Popen(
            tree.command(), stdout=out, stderr=out,
            env=tree.environment(AMPHORA_NPROC_PER_NODE="1"),
        )  # fmt: skip
        try:
            until(lambda: re.search(LOSS, log.read_text()), 200, log.read_text)
            job.send_signal(signal.SIGTERM)
            job.wait(240)
        finally:
            job.kill()
    (checkpoint,) = (tmp_path / "checkpoints").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == int(checkpoint.name.partition("-")[2]) > 0
    assert (checkpoint / "model.safetensors").is_file()
