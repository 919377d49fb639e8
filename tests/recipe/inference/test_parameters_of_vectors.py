"""Each parameter of vectors changes them as it says, whatever pools them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe.inference.payloads import BadRequest
from tests.support.serving_kit import TEXTS, Handlers, save

POOLINGS = ["mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"]
LONG = " ".join([*["anna"] * 30, *["film"] * 30])


@pytest.fixture(scope="module", params=["plain", *POOLINGS, "padded"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    """A plain encoder, and sentence models of each pooling that end in a Normalize; the last one
    has a module that rows end to end are not known for."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    folder = tmp_path_factory.mktemp("model")
    save("BertModel", folder / "plain", 7)
    if request.param == "plain":
        return Handlers(folder / "plain")
    pooling = "mean" if request.param == "padded" else request.param
    first = modules.Transformer(str(folder / "plain"))
    parts: list[Any] = [first, modules.Pooling(32, pooling), modules.Normalize()]
    prompts = {"query": "who said ", "passage": "in "}
    library = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    library.save_pretrained(str(folder / "saved"))
    environ = {"AMPHORA_PACKING": "0"} if request.param == "padded" else {}
    return Handlers(folder / "saved", **environ)


def vectors(served: Handlers, **parameters: Any) -> Any:
    texts = [*TEXTS, LONG]
    return np.array(served.ask({"inputs": texts, "parameters": parameters}))


def lengths(rows: Any) -> Any:
    return np.linalg.norm(rows, axis=1)


def test_normalize_alone_decides_on_the_length(served: Handlers) -> None:
    is_sentences = "prompt" in served.model.vectors.parameters  # type: ignore[attr-defined]
    plain, of_length_one = vectors(served, normalize=False), vectors(served, normalize=True)
    assert (np.abs(lengths(plain) - 1) > 0.05).all()
    assert np.allclose(lengths(of_length_one), 1, atol=1e-5)
    assert np.allclose(plain / lengths(plain)[:, None], of_length_one, atol=1e-5)
    # Without the parameter the model's own modules decide.
    assert np.allclose(vectors(served), of_length_one if is_sentences else plain, atol=1e-5)


def test_vectors_are_shortened_and_then_of_length_one(served: Handlers) -> None:
    whole = vectors(served, normalize=False)
    for name in ("truncate_dim", "dimensions"):
        assert np.allclose(vectors(served, normalize=False, **{name: 8}), whole[:, :8], atol=1e-5)
        assert np.allclose(lengths(vectors(served, normalize=True, **{name: 8})), 1, atol=1e-5)
        with pytest.raises(BadRequest, match="33 dimensions, and the model's have 32"):
            vectors(served, **{name: 33})
    with pytest.raises(BadRequest, match="mean the same"):
        vectors(served, dimensions=8, truncate_dim=8)


def test_a_long_text_is_cut_where_the_request_says(served: Handlers) -> None:
    def of(text: str, **parameters: Any) -> Any:
        (vector,) = served.ask({"inputs": [text], "parameters": parameters})
        return np.array(vector)

    right, left = of(LONG), of(LONG, truncation_direction="Left")
    assert not np.allclose(right, left, atol=1e-3)
    words = LONG.split()
    assert np.allclose(right, of(" ".join(words[:46])), atol=1e-4)
    assert np.allclose(left, of(" ".join(words[-46:])), atol=1e-4)
    # Others' texts are cut as ever beside it.
    together = served.ask_all(
        [{"inputs": [LONG], "truncation_direction": "left"}, {"inputs": [LONG]}]
    )
    assert np.allclose([together[0][0], together[1][0]], [left, right], atol=1e-4)
    for refused in ({"truncate": False}, {"truncation": False}):
        with pytest.raises(BadRequest, match="longer than the 48 tokens"):
            of(LONG, **refused)
    assert np.allclose(of(LONG, truncate=True), right, atol=1e-5)


def test_prompts_change_vectors_or_are_refused(served: Handlers) -> None:
    if "prompt" not in served.model.vectors.parameters:  # type: ignore[attr-defined]
        for name in ("prompt", "prompt_name"):
            with pytest.raises(BadRequest, match=name):
                vectors(served, **{name: "query"})
        return
    plain = vectors(served)
    named = vectors(served, prompt_name="query")
    assert not np.allclose(named[:4], plain[:4], atol=1e-3)
    assert np.allclose(vectors(served, prompt="who said "), named, atol=1e-5)


def test_token_ids_are_read_if_they_are_the_models_own(served: Handlers) -> None:
    tokenizer: Any = served.model.vectors.tokenizer  # type: ignore[attr-defined]
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    body: dict[str, Any] = {"model": "m", "input": ids}
    answer = [each["embedding"] for each in served.ask(body)["data"]]
    expected = [each["embedding"] for each in served.ask({**body, "input": TEXTS})["data"]]
    assert np.allclose(answer, expected, atol=1e-5)
    (one,) = served.ask({**body, "input": ids[0]})["data"]
    assert np.allclose(one["embedding"], expected[0], atol=1e-5)
    for wrong, word in ([9906, 1917], "not one of"), ([7, 9, 11], "not what the model's tokenizer"):
        with pytest.raises(BadRequest, match=word):
            served.ask({**body, "input": wrong})
