"""Sentence embedding: trained in this process, read by sentence-transformers, served by our image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from recipe import arguments
from recipe.data import relevance
from recipe.errors import DataError, HyperparameterError
from recipe.models.pretrained import Source
from recipe.tasks import numbered_texts, ranking_scores
from recipe.tasks.ranking_scores import Corpus
from recipe.tasks.sentence_embedding.task import SentenceEmbedding
from tests.support.paths import CODE
from tests.support.ranking_jobs import run, scored, triplets, write
from tests.support.serving_kit import Handlers, assert_close

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TASK = ("--task", "sentence-embedding")


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    base = tmp_path_factory.mktemp("embedding")
    rows = triplets(60)
    channels = {
        "train": write(base / "data", rows[:44]),
        "validation": write(base / "held", rows[44:], "validation"),
    }
    argv = (*TASK, "--lr", "5e-4", "--epochs", "1", "--batch_size", "8", "--max_length", "40")
    argv += ("--query_prompt", "film , ", "--matryoshka_dims", "8,16")
    return base, run(base, tiny_model, channels, *argv)


def test_the_folder_is_sentence_transformers_own_and_served(trained: tuple[Path, Any]) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    folder = trained[0] / "model"
    library = SentenceTransformer(str(folder), device="cpu")
    assert library.max_seq_length == 40
    assert library.prompts == {"query": "film , ", "document": ""}
    texts = ["film number 7", "the great film was number 12 , truly", "bad " * 60]
    vectors = library.encode(texts)
    served = Handlers(folder)
    assert_close(served.ask({"inputs": texts}), vectors.tolist())
    named = served.ask({"inputs": texts, "parameters": {"prompt_name": "query"}})
    assert_close(named, library.encode(texts, prompt_name="query").tolist())
    encoder = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        plain = encoder(**library.tokenizer(texts[:1], return_tensors="pt")).last_hidden_state
    assert_close(plain.mean(dim=1)[0].tolist(), vectors[0].tolist())
    assert "library_name: sentence-transformers" in (folder / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in (folder / "README.md").read_text()
    assert "1_Pooling/config.json" in (folder / "SHA256SUMS").read_text()
    report = (trained[0] / "output" / "report.html").read_text()
    assert "Ranks, evaluation data" in report
    assert "Worst queries" in report


def test_the_scores_are_the_librarys(trained: tuple[Path, Any]) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import (
        InformationRetrievalEvaluator,
    )

    rows = triplets(60)[44:]
    documents = list(dict.fromkeys(row[key] for row in rows for key in ("positive", "negative")))
    evaluator: Any = InformationRetrievalEvaluator(
        queries={str(n): row["query"] for n, row in enumerate(rows)},  # it adds the prompt
        corpus={text: text for text in documents},
        relevant_docs={str(n): {row["positive"]} for n, row in enumerate(rows)},
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10, 100],
        show_progress_bar=False,
    )
    model = SentenceTransformer(str(trained[0] / "model"), device="cpu")
    theirs = {name: value for name, value in evaluator(model).items() if "cosine" in name}
    ours = trained[1]
    assert 0.2 < ours["eval_recall_at_1"] < 1
    for name in ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100"):
        (value,) = [each for key, each in theirs.items() if key.endswith(f"cosine_{name}")]
        assert ours[f"eval_{name.replace('@', '_at_')}"] == pytest.approx(value, abs=1e-6)


def test_the_gradients_are_those_of_the_librarys_model(tiny_model: Path, tmp_path: Path) -> None:
    """Packed, padded and computed in parts: as MultipleNegativesRankingLoss on the same rows."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from transformers import AutoTokenizer

    rows = triplets(60)[::2]  # neighbours share a text
    channels = {"train": write(tmp_path / "data", rows)}
    library = SentenceTransformer(str(tiny_model), device="cpu")
    for module in library.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    columns = [library.tokenize([row[key] for row in rows]) for key in rows[0]]
    chosen = np.arange(24)
    some = [{name: value[chosen] for name, value in each.items() if name != "modality"}
            for each in columns]  # fmt: skip
    loss: Any = losses.MultipleNegativesRankingLoss(library)
    theirs = loss(some, torch.zeros(24))
    theirs.backward()
    wanted = {name: each.grad for name, each in library[0].auto_model.named_parameters()}
    for packed, parts in ((True, 1), (False, 1), (True, 3), (False, 3)):
        argv = ["--task", "sentence-embedding", "--eval_strategy", "no", "--batch_size", "26"]
        argv += ["--mini_batch_size", "9"] if parts > 1 else []
        task = SentenceEmbedding(channels, arguments.parse(argv))
        model, _ = task.load(Source(name=str(tiny_model), is_local=True))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        samples = task.samples(AutoTokenizer.from_pretrained(tiny_model), 64)["train"]
        layout = task.objective.layout(model, packed, 26, 0, [(samples, chosen)])
        assert task.objective._parts == parts
        task.objective.prepare(model, packed)
        batch = layout.tensors(samples, chosen)
        labels = torch.zeros((26, 3), dtype=torch.int64)
        labels[:24] = torch.from_numpy(samples.labels[chosen])
        each = task.objective.losses(model.train()(**batch).logits, labels, 0.0)
        ours = each[:24].mean()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        ours.backward()  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            if "pooler" in name:
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_pairs_with_scores_learn_their_order(tiny_model: Path, tmp_path: Path) -> None:
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer, util

    rows = scored(30)
    channels = {"train": write(tmp_path / "data", rows), "test": write(tmp_path / "t", rows[:24])}
    argv = (*TASK, "--lr", "1e-3", "--epochs", "2", "--batch_size", "16", "--eval_strategy", "no")
    metrics = run(tmp_path / "job", tiny_model, channels, *argv, "--do_eval", "True")
    model = SentenceTransformer(str(tmp_path / "job" / "model"), device="cpu")
    first, second = (
        model.encode([row[key] for row in rows[:24]])
        for key in rows[0]
        if "s" in key[:1] and key != "score"
    )
    # A third of the pairs are one text twice: their cosines tie, but for last digits that are
    # chance, and Spearman's correlation lies between that of all ties and that of none.
    cosines = util.pairwise_cos_sim(first, second).numpy().round(5)
    truth = [row["score"] for row in rows[:24]]
    tied = spearmanr(cosines, truth).statistic
    apart = spearmanr(cosines + 1e-7 * np.arange(24), truth).statistic
    assert apart - 1e-6 <= metrics["eval_spearman"] <= tied + 1e-6
    assert tied - apart < 0.02
    assert metrics["eval_spearman"] > 0.4


def test_a_model_that_cannot_tell_texts_apart_scores_nothing() -> None:
    corpus = Corpus(
        queries=np.arange(5),
        documents=np.arange(5, 45),
        relevant=[np.asarray([at]) for at in range(5)],
        same=np.full(5, -1),
    )
    for value in (1.0, np.nan):
        vectors = np.full((45, 8), value, dtype=np.float32)
        found = ranking_scores.search(vectors, corpus)
        scores = ranking_scores.of_search(found, corpus)
        assert scores["ndcg_at_10"] == scores["recall_at_10"] == 0
        assert {rank.item() for rank in found.ranks} == {40}


@pytest.mark.parametrize(
    ("rows", "argv", "words"),
    [
        (
            [{"id": 1, "url": "x"}] * 9,
            [],
            ["no column that is known", "text_column="],
        ),
        (
            [{"query": "a", "passage": f"b {n}", "label": 1} for n in range(9)],
            [],
            ["Every row", "has 1 in column 'label'", "Leave the column out"],
        ),
        (
            [{"premise": f"a {n}", "hypothesis": "b c", "label": "neutral"} for n in range(9)],
            [],
            ["line 1", '"neutral"', "label_column"],
        ),
        (
            [{"premise": f"a {n}", "hypothesis": "b c", "label": n % 3} for n in range(9)],
            [],
            ["numbers 0, 1, 2, which may be classes of entailment", "Give triplets"],
        ),
        (
            [{"query": "a", "documents": ["b", "c"], "labels": [1]}] * 9,
            [],
            ["2 texts", "1 scores"],
        ),
        (
            [{"query": {"a": 1}, "positive": {"b": 2}}] * 9,
            [],
            ["no column that is known", "'query.a'"],
        ),
        (triplets(9), ["--negative_columns", "negativ"], ["negativ", "Did you mean negative?"]),
    ],
)
def test_data_that_cannot_be_right_is_refused(
    rows: list[Any], argv: list[str], words: list[str], tmp_path: Path
) -> None:
    channels = {"train": write(tmp_path, rows)}
    given = arguments.parse([*TASK, *argv])
    with pytest.raises(DataError) as caught:
        SentenceEmbedding(channels, given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "kind", "first"),
    [
        (triplets(20), "pairs", ("film number 0", 2)),
        ([{"anchor": f"a{n}", "positive": f"b{n}", "negative_1": "c", "negative_2": f"d{n}"}
          for n in range(20)], "pairs", ("a0", 3)),
        ([{"query": f"q{n}", "pos": [f"p{n}", f"r{n}"], "neg": ["x", "y", f"p{n}"]}
          for n in range(20)], "pairs", ("q0", 3)),
        ([{"query": f"q{n}", "positive_passages": [{"docid": "1", "title": "t", "text": f"x{n}"}],
           "negative_passages": [{"docid": "2", "title": "", "text": "y"}]} for n in range(20)],
         "pairs", ("q0", 2)),
        ([{"question": f"q{n}", "answer": f"an answer {n}"} for n in range(20)], "pairs", ("q0", 1)),
        (scored(8), "scored", ("the film number 0", 1)),
        ([{"query": f"q{n}", "documents": ["a", "b", f"c{n}"], "labels": [0, 1, 1]}
          for n in range(20)], "pairs", ("q0", 2)),
    ],
)  # fmt: skip
def test_formats_that_circulate_are_read(
    rows: list[Any], kind: str, first: tuple[str, int], tmp_path: Path
) -> None:
    given = arguments.parse([*TASK, "--eval_strategy", "no"])
    task = SentenceEmbedding({"train": write(tmp_path, rows)}, given)
    assert task.data.kind == kind
    row = task.train[0]
    assert (row["query"], len(row["texts"])) == first
    assert all(text not in row["texts"][1:] for text in row["texts"][:1])


def test_what_is_held_out_is_whole_queries(tmp_path: Path) -> None:
    rows = [{"query": f"q {n // 3}", "positive": f"p {n}"} for n in range(60)]
    task = SentenceEmbedding({"train": write(tmp_path, rows)}, arguments.parse([*TASK]))
    queries = [set(split["query"]) for split in (task.data.train, task.data.evaluation)]
    assert not queries[0] & queries[1]
    assert len(task.data.evaluation) == 6


def test_sizes_and_adapters_that_cannot_be_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    channels = {"train": write(tmp_path, triplets(20))}
    with pytest.raises(HyperparameterError, match="33"):
        SentenceEmbedding(channels, arguments.parse([*TASK, "--matryoshka_dims", "33,8"])).load(
            Source(name=str(tiny_model), is_local=True)
        )
    pairs = {
        "train": write(tmp_path / "pairs", [{"query": f"a{n}", "positive": "b"} for n in range(20)])
    }
    with pytest.raises(HyperparameterError, match="Give 2 or more"):
        SentenceEmbedding(pairs, arguments.parse([*TASK, "--batch_size", "1"]))
    argv = [*TASK, "--lora_r", "4", "--lora_save", "adapter"]
    with pytest.raises(HyperparameterError, match="merged"):
        SentenceEmbedding(channels, arguments.parse(argv))


def test_its_settings_say_what_was_learned(trained: tuple[Path, Any]) -> None:
    settings = json.loads((trained[0] / "model" / "config_sentence_transformers.json").read_text())
    assert settings["similarity_fn_name"] == "cosine"
    assert not (trained[0] / "model" / "config.json").read_text().count("after_encoder")


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_an_evaluations_loss_is_of_groups_of_nearly_one_size(count: int) -> None:
    spans = ranking_scores.in_batches(count, 64)
    assert [at for span in spans for at in range(count)[span]] == list(range(count))
    sizes = [span.stop - span.start for span in spans]
    assert max(sizes) <= 64
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("prompts", [("", ""), ("query: ", "passage: ")])
def test_texts_are_numbered_as_they_first_come_each_once(
    prompts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    words = [[f"t {n}" for n in draw.integers(0, 30, draw.integers(2, 5))] for _ in range(60)]
    table = relevance.table_of([(texts[0], texts[1:], [1.0] * len(texts[1:])) for texts in words])
    split = datasets.Dataset(table).select(range(59, -1, -1))
    monkeypatch.setattr(numbered_texts, "_AT_ONCE", 7)
    by_number = numbered_texts.numbered(split, prompts, 1)
    expected: dict[tuple[str, str], int] = {}
    for texts in reversed(words):
        for place, text in enumerate(texts):
            expected.setdefault((prompts[place > 0], text), len(expected))
    assert by_number.texts["text"][:] == [prompt + text for prompt, text in expected]
    assert set(by_number.texts["label"]) == {1}
    for row, texts in zip(by_number.members, reversed(words), strict=True):
        own = [expected[prompts[place > 0], text] for place, text in enumerate(texts)]
        assert row.tolist() == own + [-1] * (4 - len(own))
    alike: dict[str, set[int]] = {}
    for (_, text), identity in zip(expected, by_number.identities.tolist(), strict=True):
        alike.setdefault(text, set()).add(identity)
    assert all(len(each) == 1 for each in alike.values())
    assert len(set().union(*alike.values())) == len(alike)


_GRADIENTS = """
import sys, torch, torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from recipe.models import ranking_losses
dist.init_process_group("gloo")
rank, rows = dist.get_rank(), 4
def model():
    made = SentenceTransformer(sys.argv[1], device="cpu")
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made
def features(encoder):
    at = range(0, 4 * rows, 2)[rank * rows : (rank + 1) * rows]
    texts = [[f"film number {n}" for n in at], [f"the film was number {n}" for n in at],
             [f"the bad film was {n + 1}" for n in at]]
    return [{k: v for k, v in encoder.tokenize(each).items() if k != "modality"} for each in texts]
def gradients(encoder, loss):
    loss.backward()
    for name, weight in encoder.named_parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            yield name, weight.grad / dist.get_world_size()
theirs = model()
loss = losses.MultipleNegativesRankingLoss(theirs, gather_across_devices=True)
wanted = dict(gradients(theirs, loss(features(theirs), None)))
ours = model()
vectors = torch.stack([ours(dict(each))["sentence_embedding"] for each in features(ours)], dim=1)
texts = torch.arange(1, 3 * rows + 1).reshape(rows, 3) + rank * 3 * rows
# One place of the batch is empty.
vectors = torch.cat([vectors, torch.randn(1, *vectors.shape[1:])])
texts = torch.cat([texts, torch.zeros(1, 3, dtype=torch.int64)])
each = ranking_losses.multiple_negatives(vectors, texts, 20.0)[:rows]
found = dict(gradients(ours, each.mean()))
assert found.keys() == wanted.keys() and len(found) > 10
assert max(float(each.abs().max()) for each in wanted.values()) > 1e-2
for name, value in wanted.items():
    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
print("the same", len(found))
"""


@pytest.mark.heavy
def test_gathered_negatives_have_the_librarys_gradients(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "gradients.py"
    script.write_text(_GRADIENTS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*launcher, str(script), str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(CODE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same") == 2
