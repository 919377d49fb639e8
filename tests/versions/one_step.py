"""What must work under any transformers: imports, a model, a training, a resume, a prediction.

python one_step.py FOLDER      prints what came of it as a JSON line
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2] / "code"
sys.path[:0] = [str(CODE.parent), str(CODE)]


def import_all() -> Any:
    """Every module of the recipe, and the handlers."""
    recipe = importlib.import_module("recipe")
    for module in pkgutil.walk_packages(recipe.__path__, "recipe."):
        importlib.import_module(module.name)
    return importlib.import_module("inference")


def train(model: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """code/train.py in `folder`, from `model`; five steps make an epoch."""
    rows = [{"text": f"the film was {word}", "label": word} for word in ("good", "bad")] * 10
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "in" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    channels = {f"SM_CHANNEL_{name}": str(folder / "in") for name in ("TRAIN", "VALIDATION")}
    given = {"SAGEMAKER_BASE_DIR": str(folder), **channels}
    argv = ["--model_id", str(model), "--batch_size", "4", *more]
    return subprocess.run(
        [sys.executable, str(CODE / "train.py"), *argv],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_TORCH_XLA": "0", **given},
        capture_output=True,
        text=True,
    )


def main(folder: Path) -> None:
    """Train for 10 steps, and again from step 5 of them; ask the model.

    The checkpoint is that of the end of an epoch, without the evaluation that the second asks for.
    """
    import transformers

    from tests.support.serving_kit import save

    inference = import_all()
    start, whole, cut = folder / "start", folder / "whole", folder / "cut"
    arguments, errors = (importlib.import_module(f"recipe.{x}") for x in ("arguments", "errors"))
    try:
        arguments.parse(["--learning_rat", "1"])
        refusal = ""
    except errors.RecipeError as error:
        refusal = str(error)
    save("BertModel", start)
    steps = ["--epochs", "2", "--save_strategy", "steps", "--save_steps", "5"]
    steps += ["--save_total_limit", "9"]
    trained = train(start, whole, *steps, "--eval_strategy", "no")
    assert trained.returncode == 0, trained.stderr
    shutil.copytree(whole / "checkpoints/checkpoint-5", cut / "checkpoints/checkpoint-5")
    rest = train(start, cut, *steps)
    assert rest.returncode == 0, rest.stderr
    first, second = ((base / "model/model.safetensors").read_bytes() for base in (whole, cut))
    model = inference.model_fn(str(whole / "model"))
    request = inference.input_fn(b'{"inputs": "the film was good"}', "application/json")
    answer, kind = inference.output_fn(inference.predict_fn(request, model), "application/json")
    result = {
        "transformers": transformers.__version__,
        "refusal": refusal,
        "log": trained.stdout,
        "answer": json.loads(answer),
        "kind": kind,
        "missing": list(importlib.import_module("recipe.compat.parts").missing()),
        "same": first == second,
        "resumed": rest.stdout,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
