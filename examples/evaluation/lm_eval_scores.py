"""Score a trained decoder by tasks of lm-evaluation-harness that lie in a channel.

Channels: `model`, a model's folder or the model.tar.gz of a training job; `tasks`, the tasks' YAML
files with their data. A task names its data by `dataset_path: json` and `data_files` below
/opt/ml/input/data/tasks. The scores go to the job's metrics and to metrics.json in its output.
Start it as any script (script_*.py --source-dir examples/evaluation --entry-point
lm_eval_scores.py).
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
from pathlib import Path

import lm_eval
import torch
from lm_eval.tasks import TaskManager


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--num_fewshot", type=int)
    parser.add_argument("--limit", type=int, help="rows of each task")
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()

    model = Path(os.environ["SM_CHANNEL_MODEL"])
    if (archive := model / "model.tar.gz").is_file():
        model = Path(tempfile.mkdtemp())
        with tarfile.open(archive) as packed:
            packed.extractall(model, filter="data")
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model)},
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=os.environ["SM_CHANNEL_TASKS"]),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    # A name in lm-eval is "acc,none": the metric, and the filter of its answers.
    scores = {
        f"{task}_{name.replace(',none', '').replace(',', '_')}": value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    for name, value in scores.items():
        # The estimator's metric_definitions: {"Name": "NAME", "Regex": "metric NAME=([0-9.eE+-]+)"}
        print(f"metric {name}={value:.6f}", flush=True)
    path = Path(os.environ["SM_OUTPUT_DATA_DIR"]) / "metrics.json"
    path.write_text(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
