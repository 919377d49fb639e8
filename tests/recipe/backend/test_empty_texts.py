"""Texts of which a tokenizer makes no token, beside others and alone, in every task."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe.backend.requests.payloads import BadRequest
from tests.support.serving_kit import Handlers, save


@pytest.mark.parametrize(
    ("kind", "environ"),
    [
        ("BertForSequenceClassification", {"AMPHORA_PACKING": "0"}),
        ("BertForSequenceClassification", {}),
        ("BertModel", {}),
        ("BertModel", {"HF_TASK": "feature-extraction"}),
        ("T5ForConditionalGeneration", {}),
        ("sentences", {}),
    ],
)
def test_an_empty_text_is_refused_or_is_its_records_fault(
    kind: str, environ: dict[str, str], tmp_path: Path
) -> None:
    def save_plain_tokenizer(folder: Path) -> None:
        """Save a tokenizer that adds no token of its own."""
        known = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        kind = PreTrainedTokenizerFast(
            tokenizer_object=made, model_max_length=48, pad_token="[PAD]", unk_token="[UNK]"
        )
        kind.save_pretrained(folder)

    folder = save("BertModel" if kind == "sentences" else kind, tmp_path / "model")
    save_plain_tokenizer(folder)
    if kind == "sentences":
        SentenceTransformer(str(folder)).save(str(tmp_path / "st"))
        folder = tmp_path / "st"
    handlers = Handlers(folder, **environ)
    more = {"parameters": {"max_new_tokens": 2}} if kind.startswith("T5") else {}
    for inputs in ("", [""], ["the film", "", "anna was good"]):
        with pytest.raises(BadRequest, match=r"Input [12] has no token"):
            handlers.ask({"inputs": inputs, **more})
    lines = [{"inputs": text, **more} for text in ("the film", "", "anna was good", "")]
    body = "\n".join(map(json.dumps, lines)).encode()
    film = {"inputs": ["the film"], **more}
    (answer, others) = handlers.ask_all([(body, "application/jsonlines"), film])
    alone = handlers.ask({"inputs": ["the film", "anna was good"], **more})
    assert len(answer) == 4 and "has no token" in answer[1]["error"]["message"]
    assert answer[1] == answer[3]
    assert str(answer[0])[:12] == str(alone[0])[:12] == str(others[0])[:12]
    assert str(answer[2])[:12] == str(alone[1])[:12]
