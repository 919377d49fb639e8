"""lm-eval against a served decoder, by the commands of examples/README.md: tasks of the tester's own,
by generation and by log-probabilities."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import chain
from tests.support.exports import environment
from tests.support.paths import ROOT
from tests.support.servers import IN_FLOAT32, Running

pytestmark = pytest.mark.heavy
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
{more}
"""
# Characters have the successors of tests/support/chain.py.
TASKS: Mapping[str, tuple[str, str, list[dict[str, Any]]]] = {
    "chosen": ("multiple_choice", 'doc_to_choice: "{{choices}}"', [
        {"question": "a0123", "choices": ["4567", "a", "45é"], "answer": 0},
        {"question": "a01", "choices": ["9", "2", "aa"], "answer": 1},
        {"question": "a", "choices": ["0", "1", "45"], "answer": 0},
    ]),
    "written": (
        "generate_until",
        'generation_kwargs: {until: ["!"], max_gen_toks: 9, do_sample: false}',
        [{"question": "0123", "answer": "456789012"}, {"question": "é", "answer": "Ciaoé"}],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its command, in an environment of its own with the packages of the tests."""

    python = environment(tmp_path_factory.mktemp("venv"))
    wanted = (ROOT / "examples/evaluation/requirements.txt").read_text().split("==")[1].strip()
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"lm_eval[api]=={wanted}"]
    done = subprocess.run(install, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in {path.name for path in python.parents[1].glob("lib/python*/*/*")}
    return python.with_name("lm_eval")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("served")
    chain.save(base / "model")
    with Running(base, {**preloaded, **IN_FLOAT32}) as server:
        yield server.ready()


def evaluate(
    lm_eval: Path, server: Running, folder: Path, tasks: str, *, is_chat: bool = False
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return the scores and samples of tasks, by the README's command."""
    for name, (kind, more, rows) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{name}.yaml").write_text(
            TASK.format(name=name, data=data, kind=kind, more=more)
        )
    page = (ROOT / "examples/README.md").read_text()
    (line,) = re.findall(r"`(lm_eval .*)`", page)
    if is_chat:
        line = line.replace("local-completions", "local-chat-completions")
        line = line.replace("/v1/completions", "/v1/chat/completions") + " --apply_chat_template"
    line = line.replace("HOST:8080", f"127.0.0.1:{server.port}").replace("NAMES", tasks)
    line = line.replace("FOLDER", str(server.log_path.parent / "model")).replace(
        "TASKS", str(folder)
    )
    words = [str(lm_eval), *shlex.split(line)[1:], "--log_samples", "--output_path", str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, text=True, capture_output=True, env=offline | {"PATH": "/usr/bin"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (scores,) = folder.rglob("results_*.json")
    samples = {
        name: [json.loads(row) for row in path.read_text().splitlines()]
        for name in tasks.split(",")
        for path in folder.rglob(f"samples_{name}_*.jsonl")
    }
    return json.loads(scores.read_text())["results"], samples


def test_a_decoder_is_scored_by_choices_and_by_generation(
    lm_eval: Path, server: Running, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scores, samples = evaluate(lm_eval, server, tmp_path, "chosen,written")
    assert scores["chosen"]["acc,none"] == pytest.approx(2 / 3)
    assert scores["written"]["exact_match,none"] == pytest.approx(1 / 2)
    assert samples["written"][0]["filtered_resps"] == ["456789012"]
    folder = server.log_path.parent / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for sample in samples["chosen"]:
        for choice, answer in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            begin = tokenizer(sample["doc"]["question"])["input_ids"]
            ids = torch.tensor([*begin, *tokenizer(choice)["input_ids"]])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(begin) - 1 : -1].log_softmax(-1)
            end = ids[len(begin) :]
            total = float(logits.gather(-1, end[:, None]).sum())
            assert float(answer[0]) == pytest.approx(total, abs=1e-3)
            is_likeliest = bool((logits.argmax(-1) == end).all())
            assert str(answer[1]) == str(is_likeliest)


def test_a_decoders_chats_are_scored(lm_eval: Path, server: Running, tmp_path: Path) -> None:
    """To any message it answers with its reply, which ends at a text of the task."""
    scores, samples = evaluate(lm_eval, server, tmp_path, "written", is_chat=True)
    assert [sample["filtered_resps"] for sample in samples["written"]] == [["Ciaoé"]] * 2
    assert scores["written"]["exact_match,none"] == pytest.approx(1 / 2)
