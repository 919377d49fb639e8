"""Models train and answer with the token ids of their tokenizer.json, whatever class their files name."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer

from amphora.serving.vllm.tokenizer_files import match_tokenizer
from recipe.errors import ModelError
from recipe.models.sources import tokenizers
from recipe.models.sources.tokenizers import load_tokenizer
from recipe.tokenization.encoding import Encoder
from tests.support.jobs import run, write
from tests.support.serving_kit import Handlers, save

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "the 12345 films, it's good",
    "caf\u00e9  at   night\n\n\tso",
    "Anna  said <s>1</s> no [MASK] x",
]
ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>",
           "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}  # fmt: skip
BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}  # fmt: skip
END = {"bos_token": "<|end|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}


def surround(file: Tokenizer, single: str, pair: str) -> Tokenizer:
    """Let `file` put tokens around each text."""
    marks = {mark.split(":")[0] for mark in single.split() if "$" not in mark}
    file.post_processor = processors.TemplateProcessing(
        single=single.split(), pair=pair.split(),
        special_tokens=[(mark, file.token_to_id(mark)) for mark in marks],
    )  # fmt: skip
    return file


def begin(file: Tokenizer) -> Tokenizer:
    return surround(file, "<|end|> $A", "<|end|> $A <|end|> $B")


def byte_pairs(
    before: Any, special: Sequence[str] = ("<|end|>",), normalizer: Any = None
) -> Tokenizer:
    """A BPE of bytes that joins digits, letters and blanks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("3", "4"), ("34", "5"), ("\u0120", "\u0120"), ("\u0120", "1"),
              ("t", "h"), ("th", "e"), ("\u0120", "t"), ("\u010a", "\u010a"), (",", "\u0120"), ("'", "s")]  # fmt: skip
    pieces = [*special, *letters, *(first + second for first, second in merges)]
    ids = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(ids, merges))
    made.normalizer, made.pre_tokenizer, made.decoder = normalizer, before, decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def split(*more: Any) -> Any:
    """Split as GPT-4 does; before that as `more`."""
    from tokenizers import Regex

    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*more, pre_tokenizers.Split(Regex(SPLIT), "isolated"), rest])


def pieces() -> Tokenizer:
    """A Unigram model as XLM-R's."""
    words = [
        "\u2581the",
        "\u2581",
        "film",
        "s",
        "1",
        "2",
        "12",
        "good",
        "no",
        "\u2581said",
        "n",
        "i",
        *"adeghotx'",
    ]
    scores = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")] + [
        (word, -1.0 - number / 10) for number, word in enumerate(words)
    ]
    made = Tokenizer(models.Unigram(scores, 3))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(
        [*(piece for piece, _ in scores[:4]), AddedToken("<mask>", lstrip=True)]
    )  # type: ignore[list-item]
    return surround(made, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def words(lower: bool) -> Tokenizer:
    """A WordPiece model as BERT's."""
    known = [*BERT.values(), "the", "Anna", "anna", "said", "good", "##s", "film", *"1234"]
    made = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(known)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([*BERT.values()])
    return surround(made, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")


def cut(file: Tokenizer) -> Tokenizer:
    """Let the file truncate and pad, as those of MiniLM do."""
    file.enable_truncation(4)
    file.enable_padding(length=4, pad_token="[PAD]")
    return file


def digits(individually: bool = True) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individually), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def write_files(folder: Path, file: Tokenizer, kind: str, settings: Mapping[str, Any]) -> Path:
    """Write a tokenizer's files and a configuration of a type of model."""
    folder.mkdir(exist_ok=True)
    file.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


LAYOUTS: Mapping[str, tuple[Any, str, str, Mapping[str, Any], bool]] = {
    "xlm-r": (pieces, "xlm-roberta", "XLMRobertaTokenizer", ROBERTA, False),
    "xlm-r named roberta": (pieces, "xlm-roberta", "RobertaTokenizer", ROBERTA, True),
    "xlm-r named bert": (pieces, "xlm-roberta", "BertTokenizer", ROBERTA, True),
    "xlm-r named bert, no names": (pieces, "xlm-roberta", "BertTokenizer", {}, True),
    "llama 3": (lambda: begin(byte_pairs(split())), "llama", "PreTrainedTokenizerFast", END, False),
    "llama 3 named gpt-2": (lambda: begin(byte_pairs(split())), "llama", "GPT2TokenizerFast", END, True),
    "qwen named qwen 2": (lambda: byte_pairs(split()), "qwen3", "Qwen2Tokenizer", {"eos_token": "<|end|>", "pad_token": "<|end|>"}, True),
    "smollm": (lambda: byte_pairs(digits()), "llama", "GPT2Tokenizer", END, True),
    "starcoder 2": (lambda: byte_pairs(digits()), "starcoder2", "GPT2Tokenizer", END, True),
    "deepseek": (lambda: begin(byte_pairs(split(pre_tokenizers.Digits(True)))), "qwen2", "LlamaTokenizerFast", {**END, "add_bos_token": True}, True),
    "gpt-2": (lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt2", "GPT2Tokenizer", END, False),
    "gpt-2 with a blank": (lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt2", "GPT2Tokenizer", {**END, "add_prefix_space": True}, False),
    "bert": (lambda: words(True), "bert", "BertTokenizer", BERT, False),
    "bert, cased": (lambda: words(False), "bert", "BertTokenizer", {**BERT, "do_lower_case": False}, False),
    "bert, cased, no setting": (lambda: words(False), "bert", "BertTokenizer", BERT, True),
    "minilm": (lambda: cut(words(True)), "bert", "BertTokenizer", BERT, False),
    "bert with more tokens": (lambda: words(True), "bert", "BertTokenizer", {**BERT, "additional_special_tokens": ["[USER]"]}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    make, kind, named, settings, is_replaced = LAYOUTS[name]
    file = make()
    folder = write_files(tmp_path / "model", file, kind, {"tokenizer_class": named, **settings})
    loaded = load_tokenizer(str(folder))
    assert bool(tokenizers.replacement_of(loaded)) == is_replaced
    file.no_truncation()
    file.no_padding()
    if settings.get("add_prefix_space"):  # what the settings name explicitly counts
        file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for special in (True, False):
        expected = [item.ids for item in file.encode_batch(TEXTS, add_special_tokens=special)]
        assert loaded(TEXTS, add_special_tokens=special)["input_ids"] == expected
        rows, _ = Encoder(loaded, with_specials=special).rows(TEXTS)
        assert rows == expected
    # What is saved has these ids for any program, except of types whose class transformers imposes.
    loaded.save_pretrained(tmp_path / "saved")
    shutil.copy(folder / "config.json", tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"))(TEXTS)["input_ids"] == loaded(TEXTS)["input_ids"]
    if kind != "qwen2":
        plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert plain(TEXTS)["input_ids"] == loaded(TEXTS)["input_ids"]
        assert plain.special_tokens_map == loaded.special_tokens_map


def test_rows_of_the_data_show_other_ids(tmp_path: Path) -> None:
    """A vocabulary may have a token for what no probe contains."""
    file = byte_pairs(digits())
    state = json.loads(file.to_str())
    state["pre_tokenizer"]["pretokenizers"][0] = {
        "type": "Split", "pattern": {"String": "qzq"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    state["model"]["merges"].append(["q", "z"])
    state["model"]["vocab"]["qz"] = len(state["model"]["vocab"])
    file = Tokenizer.from_str(json.dumps(state))
    folder = write_files(tmp_path, file, "llama", {"tokenizer_class": "GPT2Tokenizer", **END})
    text = "aqzqzqb"
    assert load_tokenizer(str(folder), [text])(text)["input_ids"] == file.encode(text).ids


def misname(folder: Path) -> Tokenizer:
    """Give a saved model a tokenizer of XLM-R's kind that its files call RoBERTa's."""
    file = pieces()
    write_files(folder, file, "", {"tokenizer_class": "RobertaTokenizer", **ROBERTA})
    return file


def test_what_trains_and_what_serves_have_the_ids_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier and a model of sentences, before and after training."""
    file = misname(save("BertForSequenceClassification", tmp_path / "base", num_labels=2))
    expected = [item.ids for item in file.encode_batch(TEXTS)]
    reason = "since a RobertaTokenizer would have other ids"
    rows = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(TEXTS * 4)]
    channels = {"train": write(tmp_path / "train", rows)}
    run(tmp_path / "job", tmp_path / "base", channels, "--epochs", "1")
    printed = capsys.readouterr().out
    assert re.search(f"^tokenizer +as tokenizer.json defines it, {reason}$", printed, re.MULTILINE)
    assert re.search(
        r"^unknown tokens +WARNING: .* of 11 rows are <unk>, most of them Latin",
        printed,
        re.MULTILINE,
    )
    for folder, is_logged in (("base", True), ("job/model", False)):
        loaded: Any = Handlers(tmp_path / folder).model.loaded
        assert loaded.tokenizer(TEXTS)["input_ids"] == expected
        assert (reason in capsys.readouterr().out) == is_logged
    assert AutoTokenizer.from_pretrained(tmp_path / "job/model")(TEXTS)["input_ids"] == expected
    # The encoder of older models of sentences is in a folder of its own.
    encoder = modules.Transformer(str(save("BertModel", tmp_path / "plain")))
    library = SentenceTransformer(modules=[encoder, modules.Pooling(32)], device="cpu")
    library.save_pretrained(str(tmp_path / "sentences"))
    inner = tmp_path / "sentences/0_Transformer"
    inner.mkdir()
    for path in (tmp_path / "sentences").glob("*.*"):
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    described = json.loads((tmp_path / "sentences/modules.json").read_text())
    described[0]["path"] = "0_Transformer"
    (tmp_path / "sentences/modules.json").write_text(json.dumps(described))
    described = json.loads((inner / "sentence_bert_config.json").read_text())
    (inner / "sentence_bert_config.json").write_text(
        json.dumps({**described, "do_lower_case": True})
    )
    misname(inner)
    lower = [item.ids for item in file.encode_batch([text.lower() for text in TEXTS])]
    sentences: Any = Handlers(tmp_path / "sentences").model
    assert sentences.model.tokenizer(TEXTS)["input_ids"] == lower != expected
    assert reason in capsys.readouterr().out


@pytest.mark.heavy
def test_vllm_is_given_the_ids_of_the_file(tmp_path: Path) -> None:
    """Also for a type of model whose class transformers imposes."""
    folder, target = tmp_path / "model", tmp_path / "target"
    file = LAYOUTS["llama 3"][0]()
    write_files(folder, file, "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast", **END})
    command = ["vllm", "serve", str(folder)]
    assert match_tokenizer(command, str(folder), target, os.environ) == ["--tokenizer", str(target)]
    expected = [item.ids for item in file.encode_batch(TEXTS)]
    assert AutoTokenizer.from_pretrained(target)(TEXTS)["input_ids"] == expected
    assert AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"] != expected
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert match_tokenizer(command, str(folder), tmp_path / "none", os.environ) == []


@pytest.mark.parametrize("name", ["../../outside", "a/b"])
def test_a_chat_template_whose_name_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    """transformers before 5.10 would save it there (CVE-2026-9856)."""
    folder = save("BertModel", tmp_path / "model")
    file = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "chat_template": named}))
    assert set(load_tokenizer(str(folder)).chat_template) == {"default", "tool_use"}
    named.append({"name": name, "template": "c"})
    file.write_text(json.dumps({**settings, "chat_template": named}))
    with pytest.raises(ModelError, match=r"chat templates .*, which are paths"):
        load_tokenizer(str(folder))
