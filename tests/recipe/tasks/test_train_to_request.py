"""From `amphora train` on hyperparameters and channels to an answered request, for each task."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import causal_kit, ranking_jobs, task_cases, texts_and_pictures
from tests.support.job_tree import trained
from tests.support.servers import Running, served

pytestmark = pytest.mark.heavy


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(server: Running, body: Any) -> Any:
    return server.invoke(body).raise_for_status().json()


def tags(server: Running, base: Path) -> None:
    parameters = {"aggregation_strategy": "simple"}
    (found,) = answer(server, {"inputs": "the was good", "parameters": parameters})
    assert (found["entity_group"], found["word"]) == ("PER", "good")


def spans(server: Running, base: Path) -> None:
    inputs = {"question": "the number", "context": "the film was number 7 good great"}
    found = answer(server, {"inputs": inputs})
    assert (found["answer"], found["start"]) == ("7", 20)
    config = json.loads((base / "model" / "config.json").read_text())
    assert config["question_answering"] == {
        "max_seq_len": 40, "doc_stride": 20, "max_answer_len": 30,
        "handle_impossible_answer": False, "align_to_words": False,
    }  # fmt: skip


def chosen(server: Running, base: Path) -> None:
    rows = task_cases.choices(3, first=200)
    inputs = [{name: row[name] for name in ("question", "choices")} for row in rows]
    found = answer(server, {"inputs": inputs})
    assert [row["index"] for row in found] == ["ABCD".index(row["answer"]) for row in rows]


TEXTS = ["the great film was number 7", "number 3 , truly", "bad"]


def vectors(server: Running, base: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(base / "model"), device="cpu").encode(TEXTS)
    found = torch.tensor(answer(server, {"inputs": TEXTS}))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0.03)


def ranks(server: Running, base: Path) -> None:
    from sentence_transformers import CrossEncoder

    query = "film number 7"
    found = answer(server, {"inputs": {"query": query, "texts": TEXTS}})
    scores = {each["index"]: each["score"] for each in found}
    library = CrossEncoder(str(base / "model"), device="cpu")
    expected = library.predict([(query, text) for text in TEXTS]).tolist()
    assert [scores[at] for at in range(3)] == pytest.approx(expected, abs=0.03)


def completion(server: Running, base: Path) -> None:
    assert causal_kit.complete(server, "green dog:")


def adapter(server: Running, base: Path) -> None:
    names = {path.name for path in (base / "model").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    completion(server, base)


def masks(server: Running, base: Path) -> None:
    first, *_ = answer(server, {"inputs": "the [MASK] was good"})
    assert set(first) >= {"score", "token_str", "sequence"}


def summaries(server: Running, base: Path) -> None:
    """What do_predict generated with the prefix, the served model generates by itself."""
    rows = lines(base / "input" / "data" / "test" / "pairs.jsonl")
    inputs = [row["document"] for row in rows]
    found = answer(server, {"inputs": inputs, "parameters": {"num_beams": 1}})
    predicted = lines(base / "output" / "data" / "predictions.jsonl")
    assert [each["generated_text"] for each in found] == [line["text"] for line in predicted]


def pictures(server: Running, base: Path) -> None:
    file = min((base / "input" / "data" / "test" / "right").glob("*.png")).read_bytes()
    kind = {"content-type": "image/png"}
    found = server.http.post("/invocations", content=file, headers=kind).raise_for_status().json()
    assert found[0]["label"] == "right"
    assert answer(server, {"inputs": base64.b64encode(file).decode()})[0]["label"] == "right"


@dataclass(frozen=True)
class Flow:
    """A training, the metric that it must reach, and a check of what is served."""

    task: str
    metric: str
    least: float
    check: Callable[[Running, Path], None]
    rows: Callable[[int], task_cases.Rows] | None = None
    """Of a channel with so many rows; None: `texts_and_pictures` makes model and channels."""
    model: str = "bert"
    counts: dict[str, int] = field(default_factory=lambda: {"train": 300, "test": 30})
    more: dict[str, str] = field(default_factory=dict)


WORDS = {"epochs": "5", "lr": "5e-3", "max_length": "40", "do_predict": "True",
         "early_stopping_patience": "4", "metric_for_best_model": "f1"}  # fmt: skip
RANKED = {"epochs": "1", "lr": "1e-3", "max_length": "40"}
ADAPTERS = {"lr": "3e-2", "lora_r": "16"}
LARGE = {"epochs": "8", "lr": "5e-3", "batch_size": "16", "use_cpu": "True"}
FLOWS = {
    "tags": Flow("token-classification", "eval_f1", 0.99, tags, task_cases.tagged, more=WORDS),
    "spans": Flow("question-answering", "eval_f1", 60, spans, task_cases.asked, more=WORDS),
    "choices": Flow(
        "multiple-choice", "eval_accuracy", 0.9, chosen, task_cases.choices,
        more={"epochs": "4", "lr": "2e-3", "max_length": "40", "do_predict": "True"},
    ),
    "vectors": Flow(
        "sentence-embedding", "eval_ndcg_at_10", 0, vectors, ranking_jobs.triplets,
        counts={"train": 45}, more=RANKED,
    ),
    # Labelled rows may be for several tasks.
    "ranks": Flow(
        "reranking", "eval_ndcg_at_10", 0, ranks,
        lambda count: ranking_jobs.rows_of(ranking_jobs.lists(count)),
        counts={"train": 40}, more={**RANKED, "task": "reranking"},
    ),
    # Around random weights adapters learn little: of 259 tokens, all but none would be right.
    "an adapter": Flow(
        "causal-lm", "eval_token_accuracy", 0.3, adapter, causal_kit.pairs, "llama",
        {"train": 200}, {**ADAPTERS, "lora_save": "adapter", "epochs": "8"},
    ),
    "preferences": Flow(
        "preference", "eval_reward_margin", 0.3, completion, task_cases.preferred, "llama",
        {"train": 120}, {**ADAPTERS, "metric_for_best_model": "reward_margin", "epochs": "4",
                         "early_stopping_patience": "3", "max_length": "96"},
    ),
    "masks": Flow("masked-lm", "eval_token_accuracy", 0.1, masks, more=LARGE),
    "summaries": Flow(
        "summarization", "eval_rouge1", 30, summaries, more={**LARGE, "do_predict": "True"}
    ),
    "pictures": Flow(
        "image-classification", "eval_accuracy", 0.9, pictures,
        more={**LARGE, "do_predict": "True"},
    ),
}  # fmt: skip
LONG = ("ranks", "masks", "pictures")
GENERATED = (completion, adapter, summaries)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FLOWS]
)
def test_a_task_is_recognised_trained_and_served(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    flow = FLOWS[name]
    given = {"batch_size": "8", **flow.more}
    if flow.rows is None:
        kind = texts_and_pictures.make(flow.task, tmp_path / "kind", 320)
        model = kind.model
        for channel, folder in kind.channels.items():
            shutil.copytree(folder, tmp_path / "input" / "data" / channel)
        pairs = zip(kind.arguments[::2], kind.arguments[1::2], strict=True)
        given |= {key.removeprefix("--"): value for key, value in pairs}
    else:
        model = tiny_model
        if flow.model != "bert":
            model = causal_kit.make_model(flow.model, tmp_path / "start")
        for channel, count in flow.counts.items():
            ranking_jobs.write(tmp_path / "input" / "data" / channel, flow.rows(count))
    log = trained(tmp_path, {"model_name_or_path": str(model), **given})
    assert f"task            {flow.task} (" in log
    output = tmp_path / "output" / "data"
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics[flow.metric] > flow.least
    assert "<html" in (output / "report.html").read_text()
    assert (tmp_path / "model" / "SHA256SUMS").is_file()
    assert "pipeline_tag: " in (tmp_path / "model" / "README.md").read_text()
    if "do_predict" in given:
        assert len(lines(output / "predictions.jsonl")) == (30 if flow.rows else 24)
    # Words are generated alike in one precision; all else is served as by default.
    precision = {"AMPHORA_DTYPE": "float32"} if flow.check in GENERATED else {}
    with served(tmp_path, **precision) as server:
        flow.check(server, tmp_path)
