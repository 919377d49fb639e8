"""examples/evaluation through `amphora train`: lm-eval's scores of a model, beside transformers' own."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.causal_kit import make_model
from tests.support.exports import environment, run_on_model
from tests.support.job_tree import Tree

QUESTIONS = [
    {"question": f"{colour} {animal}:", "choices": ["cat", "dog", "bird"], "gold": number % 3}
    for number, colour in enumerate(("red", "green", "blue", "grey"))
    for animal in ("cat", "dog", "bird")
]
TASK = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.mark.heavy
@pytest.mark.long
def test_scores_of_a_local_task_are_those_of_the_models_likelihoods(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tree = Tree(tmp_path / "ml")
    folder = make_model("llama", tmp_path / "model")
    task = TASK.format(data=tree.base / "input/data/tasks/rows.jsonl")
    questions = "\n".join(map(json.dumps, QUESTIONS))
    tree.channel("tasks", **{"animals.yaml": task, "rows.jsonl": questions})
    output = run_on_model(
        tree, environment(tmp_path / "venv"), folder, "evaluation/lm_eval_scores.py",
        {"HF_HOME": str(tmp_path / "cache")}, tasks="animals",
    )  # fmt: skip

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def likelihood(question: str, choice: str) -> float:
        known = len(tokenizer(question)["input_ids"])
        ids = torch.tensor([tokenizer(question + choice)["input_ids"]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        return float(scores.gather(1, ids[0, 1:, None])[known - 1 :].sum())

    right = 0
    for row in QUESTIONS:
        results = [likelihood(str(row["question"]), choice) for choice in row["choices"]]  # type: ignore[attr-defined]
        right += results.index(max(results)) == row["gold"]
    expected = right / len(QUESTIONS)
    assert 0 < expected < 1
    scores = json.loads((tree.base / "output/data/metrics.json").read_text())
    assert scores["animals_acc"] == pytest.approx(expected)
    (printed,) = re.findall(r"metric animals_acc=([0-9.]+)", output)
    assert float(printed) == pytest.approx(expected, abs=1e-6)
