"""Sentence embedding: trained in this process, read by sentence-transformers, served by our image."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoTokenizer

from recipe import arguments
from recipe.backend.requests.payloads import Request
from recipe.data import relevance, values
from recipe.errors import HyperparameterError
from recipe.inference import named_adapters
from recipe.metrics import metric_names
from recipe.models import sentence_encoders
from recipe.models.sources.origin import Origin
from recipe.reports import figures
from recipe.tasks import numbered_texts, ranking_scores
from recipe.tasks.ranking_scores import Corpus
from recipe.tasks.sentence_embedding.task import SentenceEmbedding
from tests.support import adapter_kit
from tests.support.jobs import run, write
from tests.support.serving_kit import Handlers, assert_close
from tests.support.words import triplets

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TASK = ("--task", "sentence-embedding")


def test_prompts_and_lengths_are_those_of_the_librarys_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the library reads is in tests/contract."""
    monkeypatch.setattr(figures, "svg", lambda figure: "")  # it takes a second
    rows = triplets(24)
    channels = {"train": write(tmp_path / "data", rows[:16]),
                "test": write(tmp_path / "held", rows[16:], "test")}  # fmt: skip
    argv = (*TASK, "--max_steps", "2", "--batch_size", "8", "--max_length", "40")
    argv += ("--query_prompt", "film , ", "--matryoshka_dims", "8,16")
    run(tmp_path, tiny_model, channels, *argv, has_report=True)
    folder = tmp_path / "model"
    library = SentenceTransformer(str(folder), device="cpu")
    assert library.max_seq_length == 40
    assert library.prompts == {"query": "film , ", "document": ""}
    texts = ["film number 7", "the great film was number 12 , truly", "bad " * 60]
    named = Handlers(folder).ask({"inputs": texts, "parameters": {"prompt_name": "query"}})
    assert_close(named, library.encode(texts, prompt_name="query").tolist())
    assert "1_Pooling/config.json" in (folder / "SHA256SUMS").read_text()
    report = (tmp_path / "output" / "data" / "report.html").read_text()
    assert "Worst queries" in report
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert settings["similarity_fn_name"] == "cosine"
    assert not (folder / "config.json").read_text().count("after_encoder")


def test_a_model_that_normalizes_is_saved_as_it_was_trained(
    still_model: Path, tmp_path: Path
) -> None:
    """Such as MiniLM: the job compares the vectors of both."""
    channels = {"train": write(tmp_path / "data", triplets(16))}
    modules = [Transformer(str(still_model)), Pooling(32, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "base"))
    argv = (*TASK, "--max_steps", "1", "--batch_size", "8", "--eval_strategy", "no")
    run(tmp_path, tmp_path / "base", channels, *argv)
    assert (tmp_path / "model" / "proof.json").is_file()
    (vector,) = Handlers(tmp_path / "model").ask({"inputs": ["film"]})
    assert np.linalg.norm(vector) == pytest.approx(1)


def test_the_gradients_are_those_of_the_librarys_model(tiny_model: Path, tmp_path: Path) -> None:
    """Packed and padded: as MultipleNegativesRankingLoss on the same rows."""
    rows = triplets(60)[::2]  # neighbours share a text
    channels = {"train": write(tmp_path / "data", rows)}
    library = SentenceTransformer(str(tiny_model), device="cpu")
    for module in library.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    columns = [library.tokenize([row[key] for row in rows]) for key in rows[0]]
    chosen = np.arange(24)
    some = [{name: value[chosen] for name, value in column.items() if name != "modality"}
            for column in columns]  # fmt: skip
    loss: Any = losses.MultipleNegativesRankingLoss(library)
    theirs = loss(some, torch.zeros(24))
    theirs.backward()
    wanted = {name: tensor.grad for name, tensor in library[0].auto_model.named_parameters()}
    for packed in (True, False):
        argv = ["--task", "sentence-embedding", "--eval_strategy", "no", "--batch_size", "26"]
        task = SentenceEmbedding(channels, arguments.parse(argv))
        model, _ = task.load(Origin(str(tiny_model)))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        samples = task.samples(AutoTokenizer.from_pretrained(tiny_model), 64)["train"]
        layout = task.objective.layout(model, packed, 26, 0, [(samples, chosen)])
        task.objective.prepare(model, packed)
        batch = layout.tensors(samples, chosen)
        labels = torch.zeros((26, 3), dtype=torch.int64)
        labels[:24] = torch.from_numpy(samples.labels[chosen])
        gradient_of = task.objective.losses(model.train()(**batch).logits, labels, 0.0)
        ours = gradient_of[:24].mean()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        ours.backward()  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            if "pooler" in name:
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_pairs_with_scores_learn_their_order(tiny_model: Path, tmp_path: Path) -> None:
    # They share a number, an ending, or nothing.
    second = ["the bad {} was awful", "film number {}", "the film number {}"]
    rows: list[dict[str, Any]] = [
        {"sentence1": f"the film number {index}", "sentence2": second[score].format(
            index if score == 2 else index + 7), "score": score / 2}
        for index in range(30) for score in range(3)
    ]  # fmt: skip
    channels = {"train": write(tmp_path / "data", rows), "test": write(tmp_path / "t", rows[:24])}
    argv = (*TASK, "--lr", "1e-3", "--epochs", "2", "--batch_size", "16", "--eval_strategy", "no")
    metrics = run(tmp_path / "job", tiny_model, channels, *argv, "--do_eval", "True")
    model = SentenceTransformer(str(tmp_path / "job" / "model"), device="cpu")
    sides = (model.encode([row[f"sentence{side}"] for row in rows[:24]]) for side in (1, 2))
    # A third of the pairs are one text twice, whose cosines tie but for last digits.
    cosines = util.pairwise_cos_sim(*sides).numpy().round(5)
    expected = spearmanr(cosines, [row["score"] for row in rows[:24]]).statistic
    assert metrics["eval_spearman"] == pytest.approx(expected, abs=0.02)
    assert metrics["eval_spearman"] > 0.4
    assert {"eval_spearman", "eval_pearson"} <= {*metric_names("sentence-embedding")} & {*metrics}


def test_a_model_that_cannot_tell_texts_apart_scores_nothing() -> None:
    corpus = Corpus(
        queries=np.arange(5),
        documents=np.arange(5, 45),
        relevant=[np.asarray([index]) for index in range(5)],
        same=np.full(5, -1),
    )
    for value in (1.0, np.nan):
        vectors = np.full((45, 8), value, dtype=np.float32)
        match = ranking_scores.search(vectors, corpus)
        scores = ranking_scores.search_scores(match)
        assert scores["ndcg_at_10"] == scores["recall_at_10"] == 0
        assert {rank.item() for rank in match.ranks} == {40}


def test_a_text_that_belongs_to_the_query_is_not_its_negative(tmp_path: Path) -> None:
    """tests/recipe/data/test_shapes.py has the columns of public data sets."""
    rows = [
        {"query": f"q{n}", "pos": [f"p{n}", f"r{n}"], "neg": ["x", "y", f"p{n}"]} for n in range(9)
    ]
    given = arguments.parse([*TASK, "--eval_strategy", "no"])
    task = SentenceEmbedding({"train": write(tmp_path, rows)}, given)
    assert task.data.kind == "pairs"
    assert [row["texts"] for row in task.train][:2] == [["p0", "x", "y"], ["r0", "x", "y"]]


def test_what_is_held_out_is_whole_queries(tmp_path: Path) -> None:
    rows = [{"query": f"q {n // 3}", "positive": f"p {n}"} for n in range(60)]
    task = SentenceEmbedding({"train": write(tmp_path, rows)}, arguments.parse([*TASK]))
    queries = [set(split["query"]) for split in (task.data.train, task.data.evaluation)]
    assert not queries[0] & queries[1]
    assert len(task.data.evaluation) == 6


@pytest.mark.parametrize(
    ("row", "left_out"),
    [
        ({"negatives": ["n", None, ""]}, 2),
        ({"negatives": ["n", "p"]}, 1),
        ({"negatives": [None]}, 1),
        ({"negatives": None}, 0),
        ({"positive": ["p", None, "other"]}, 1),
    ],
)
def test_texts_of_lists_that_are_not_used_are_counted(
    tmp_path: Path, row: dict[str, Any], left_out: int
) -> None:
    usual = {"query": "q", "positive": ["p"] if "positive" in row else "p"}
    usual |= {"negatives": ["n"]} if "negatives" in row else {}
    rows = [{**usual, "query": f"q {n}"} for n in range(20)]
    channels = {"train": write(tmp_path, [*rows, {**usual, **row}])}
    notes = SentenceEmbedding(channels, arguments.parse([*TASK])).data.notes
    lines = [note for note in notes if "in lists of" in note]
    assert [line.split()[0] for line in lines] == [str(left_out)] * bool(left_out)


def test_sizes_that_cannot_be_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    channels = {"train": write(tmp_path, triplets(20))}
    with pytest.raises(HyperparameterError, match="33"):
        SentenceEmbedding(channels, arguments.parse([*TASK, "--matryoshka_dims", "33,8"])).load(
            Origin(str(tiny_model))
        )
    pairs = {
        "train": write(tmp_path / "pairs", [{"query": f"a{n}", "positive": "b"} for n in range(20)])
    }
    with pytest.raises(HyperparameterError, match="Give 2 or more"):
        SentenceEmbedding(pairs, arguments.parse([*TASK, "--batch_size", "1"]))


@pytest.mark.heavy
@pytest.mark.parametrize("init", ["", pytest.param("pissa", marks=pytest.mark.long)])
def test_an_adapter_saved_alone_answers_as_the_merged_model(
    init: str, still_model: Path, tmp_path: Path
) -> None:
    """Alone, by name, and trained further; of a base with a dense layer, that is adapted, too."""
    channels = {"train": write(tmp_path / "data", triplets(24))}
    first = Transformer(str(still_model))
    parts = [Pooling(32, "cls"), Dense(32, 16), Normalize()]
    base = tmp_path / "base"
    SentenceTransformer(modules=[first, *parts], device="cpu").save(str(base))
    texts = ["film number 7", "the great film was number 12 , truly", "bad " * 60]
    body = {"inputs": texts, "parameters": {"prompt_name": "query"}}

    def trained(name: str, model: Path, *argv: str, steps: int = 3) -> Path:
        argv = (*TASK, "--max_steps", str(steps), "--lr", "0.05", "--batch_size", "8",
                "--eval_strategy", "no", *argv)  # fmt: skip
        run(tmp_path / name, model, channels, *argv)
        return tmp_path / name / "model"

    lora = ("--lora_r", "4", "--max_length", "40", "--query_prompt", "film , ")
    lora += ("--init_lora_weights", init) if init else ()
    merged = trained("merged", base, *lora)
    adapter = trained("adapter", base, *lora, "--lora_save", "adapter")
    assert not (adapter / "model.safetensors").exists()
    assert (adapter / "2_Dense" / "model.safetensors").is_file()
    expected = Handlers(merged).ask(body)
    assert np.ptp(np.abs(np.array(expected) - Handlers(base).ask({"inputs": texts}))) > 0.01
    assert_close(Handlers(adapter).ask(body), expected, 1e-4)
    library = SentenceTransformer(str(base), device="cpu")
    library.max_seq_length = 40
    library.load_adapter(str(adapter))
    library[2] = Dense.load(str(adapter), subfolder="2_Dense")
    assert_close(library.encode(texts, prompt="film , ").tolist(), expected, 1e-4)
    # By name, beside requests to the base.
    served = Handlers(base, AMPHORA_ADAPTERS="1")
    environ = {"AMPHORA_DTYPE": "float32"}
    origin = Origin.find(str(base), {})
    named_adapters.load("a", str(adapter), served.model, origin, environ)
    tasks = (served.model.adapters.tasks["a"], served.model)
    requests = [Request(inputs=texts, parameters=body["parameters"]), Request(inputs=texts)]
    prepared = [
        replace(task.prepare(some), task=task) for task, some in zip(tasks, requests, strict=True)
    ]
    ours, its = (answer["entries"] for answer in named_adapters.predict(prepared, served.model))
    assert_close(ours, expected, 1e-4)
    assert_close(its, Handlers(base).ask({"inputs": texts}), 1e-4)
    assert tasks[0].max_length == 40 < served.model.max_length
    # Further, from where it ended, and merged.
    again = trained("again", adapter, "--lora_save", "adapter", "--lr", "1e-12", steps=1)
    whole = trained("whole", again, "--merge_adapter", "True", "--lr", "1e-12", steps=1)
    for folder in (again, whole):
        assert_close(Handlers(folder).ask(body), expected, 1e-4)


def test_an_adapter_of_peft_has_the_pooling_of_its_base_alone_and_by_name(
    still_model: Path, tmp_path: Path
) -> None:
    modules = [Transformer(str(still_model)), Pooling(32, "cls"), Normalize()]
    base = tmp_path / "base"
    SentenceTransformer(modules=modules, device="cpu").save(str(base))
    bare = adapter_kit.adapter(base, tmp_path / "a", AutoModel, 1, target_modules=["query"],
                               task_type="FEATURE_EXTRACTION")  # fmt: skip
    library = SentenceTransformer(str(base), device="cpu")
    library.load_adapter(str(bare))
    expected = library.encode(["film number 7"]).tolist()
    assert_close(Handlers(bare).ask({"inputs": ["film number 7"]}), expected, 1e-5)
    served, origin = Handlers(base, AMPHORA_ADAPTERS="1").model, Origin.find(str(base), {})
    task = named_adapters.load("a", str(bare), served, origin, {})
    (answer,) = task.predict([task.prepare(Request(inputs=["film number 7"]))])
    assert_close(answer["entries"], expected, 1e-5)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_an_evaluations_loss_is_of_groups_of_nearly_one_size(count: int) -> None:
    spans = ranking_scores.loss_spans(count, 64)
    assert [index for span in spans for index in range(count)[span]] == list(range(count))
    sizes = [span.stop - span.start for span in spans]
    assert max(sizes) <= 64
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("prompts", [("", ""), ("query: ", "passage: ")])
def test_texts_are_numbered_as_they_first_come_each_once(
    prompts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    words = [[f"t {n}" for n in draw.integers(0, 30, draw.integers(2, 5))] for _ in range(60)]
    table = relevance.table_of(
        [(texts[0], texts[1:], [1.0] * len(texts[1:]), 0) for texts in words]
    )
    split = datasets.Dataset(table).select(range(59, -1, -1))
    monkeypatch.setattr(values, "CHUNK_ROWS", 7)
    by_number = numbered_texts.numbered(split, prompts, 1)
    expected: dict[tuple[str, str], int] = {}
    for texts in reversed(words):
        for index, text in enumerate(texts):
            expected.setdefault((prompts[index > 0], text), len(expected))
    assert by_number.texts["text"][:] == [prompt + text for prompt, text in expected]
    assert set(by_number.texts["label"]) == {1}
    for row, texts in zip(by_number.members, reversed(words), strict=True):
        vectors_alone = [
            expected[prompts[position > 0], text] for position, text in enumerate(texts)
        ]
        assert row.tolist() == vectors_alone + [-1] * (4 - len(vectors_alone))
    alike: dict[str, set[int]] = {}
    for (_, text), identity in zip(expected, by_number.identities.tolist(), strict=True):
        alike.setdefault(text, set()).add(identity)
    assert all(len(gradient_of) == 1 for gradient_of in alike.values())
    assert len(set().union(*alike.values())) == len(alike)


@pytest.mark.parametrize(
    ("known", "is_logged"),
    [({}, False), ({"query": "", "document": ""}, False), ({"query": "q: "}, True)],
)
def test_prompts_that_a_job_turns_off_are_logged_if_there_were_any(
    known: dict[str, str], is_logged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = SimpleNamespace(prompts=known, default_prompt_name=None)
    assert sentence_encoders.prompts(sentences, "", "") == ("", "")
    assert ("unlike the model before" in capsys.readouterr().out) == is_logged
