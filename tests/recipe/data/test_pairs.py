"""Pairs of texts: found, joined as the tokenizer joins them, learned, packed or not, shown."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from recipe.batching import batches
from recipe.batching.batches import Packed, Padded, Samples
from recipe.data import classification
from recipe.data.files.formats import read
from recipe.errors import DataError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models import losses, packed_encoders
from recipe.tasks.text_classification import task as text_classification
from recipe.tokenization import encoding
from recipe.tokenization import texts as tokens
from tests.support.packed_batches import KINDS, PAD, SIZE, make

ONE = "the film was {} and number {} was shown first"
OTHER = "a film of kind {} with number {} came later"


def write(
    path: Path, header: str, *columns: Sequence[object], delimiter: str = "\t", bom: bool = False
) -> Path:
    """Rows as GLUE's files have them: nothing is quoted."""
    lines = [header.replace(",", delimiter)]
    lines += [delimiter.join(map(str, row)) for row in zip(*columns, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig" if bom else "utf-8")
    return path


def filled(template: str, count: int = 40) -> list[str]:
    return [template.format(number * 7 % 11, number) for number in range(count)]


IDS, LABELS = range(100, 140), ["0", "1"] * 20
FIRST, SECOND = filled(ONE), filled(OTHER)


def test_quotes_of_glue_s_files_are_characters(tmp_path: Path) -> None:
    long = '"He said it" on day {} , and then the {} came back" again'
    quoted = [long.format(number, number) for number in range(40)]
    open_ended = [*quoted[:3], '"open', *quoted[4:20], 'closed"', *quoted[21:]]
    header = "Quality,#1 ID,#2 ID,#1 String,#2 String"
    path = write(tmp_path / "MRPC.tsv", header, LABELS, IDS, IDS, quoted, open_ended, bom=True)
    table = read(path).table
    assert table.column_names[0] == "Quality"
    assert table["#1 String"].to_pylist() == quoted
    assert table["#2 String"].to_pylist() == open_ended
    in_doubt = [*SECOND[:3], '"open', *SECOND[4:7], 'shut"', *SECOND[8:]]
    names = "label,sentence1,sentence2"
    with pytest.raises(
        DataError, match=r"b\.tsv line 5 begins a cell of several lines in quotes, or"
    ):
        read(write(tmp_path / "b.tsv", names, LABELS, FIRST, in_doubt))
    swallowed = write(tmp_path / "b.tsv", names, LABELS, ['a "b" c', *FIRST[1:]], in_doubt)
    assert read(swallowed).table["sentence2"].to_pylist() == in_doubt
    out = io.StringIO()
    rows = [("label", "text"), *((label, f"two\nlines of {text}") for label, text in
                                 zip(LABELS, FIRST, strict=True))]  # fmt: skip
    csv.writer(out, delimiter="\t").writerows(rows)
    (tmp_path / "c.tsv").write_text(out.getvalue())
    assert read(tmp_path / "c.tsv").table["text"].to_pylist()[0] == f"two\nlines of {FIRST[0]}"


def test_hidden_labels_are_not_evaluated_and_rows_without_one_are_left_out(tmp_path: Path) -> None:
    def dataset(labels: Sequence[int]) -> datasets.Dataset:
        kind = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
        features = datasets.Features(
            {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string"),
             "label": kind}
        )  # fmt: skip
        rows = {
            "premise": FIRST[: len(labels)],
            "hypothesis": SECOND[: len(labels)],
            "label": labels,
        }
        return datasets.Dataset.from_dict(rows, features=features)

    whole = datasets.DatasetDict(
        train=dataset([0, 1, 2, -1] * 10), validation=dataset([2, 1, 0]), test=dataset([-1] * 9)
    )
    whole.save_to_disk(str(tmp_path / "snli"))
    splits = classification.load({"train": tmp_path / "snli"}, Hyperparameters())
    assert (len(splits.train), len(splits.evaluation), splits.test) == (30, 3, None)
    assert set(splits.train["label"]) == {0, 1, 2}
    assert splits.train["text"][2:4] == [FIRST[2], FIRST[4]]
    notes = "\n".join(splits.notes)
    assert "10 rows of" in notes
    assert "test has no value in 'label'" in notes
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    write(train, "sentence1,sentence2,gold_label", FIRST, SECOND, ["a", "b", "-", "c"] * 10)
    write(test, "sentence1,sentence2,gold_label", FIRST, SECOND, ["-1"] * 40)
    splits = classification.load({"train": train, "test": test}, Hyperparameters())
    assert splits.labels.names == ("a", "b", "c")
    assert len(splits.train) + len(splits.evaluation) == 30
    assert any("test.tsv has no value in" in line for line in splits.notes)


WORDS = [f"w{number}" for number in range(40)]


def tokenizer_of(kind: str, side: str = "right") -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    pair = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "[CLS] $A [SEP] [SEP] $B [SEP]"}
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair[kind], special_tokens=ids
    )
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind == "bert")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", model_input_names=names, truncation_side=side
    )


@pytest.mark.parametrize("limit", [7, 33])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_joined_and_cut_as_the_tokenizer_does(kind: str, side: str, limit: int) -> None:
    tokenizer, draw = tokenizer_of(kind, side), random.Random(limit)

    def text() -> str:
        # The longest have more characters than are read of a text where that decides.
        size = draw.choice([0, 1, 3, limit, 2 * limit, 24 * limit + draw.randrange(9)])
        return " ".join(draw.choice(WORDS) for _ in range(size))

    first, second = [text() for _ in range(20)], [text() for _ in range(20)]
    first.append("a" * 24 * limit)  # one token
    second.append(" ".join(WORDS))
    wanted = tokenizer(first, second, truncation=True, max_length=limit)
    ids, types = encoding.encode_pairs(tokenizer, first, second, limit)
    assert ids == wanted["input_ids"]
    assert types == wanted.get("token_type_ids")
    assert (types is None) == (kind == "roberta")
    if side == "right":
        read_whole = [encoding.beginning(tokenizer, item, limit) == item for item in first]
        assert not all(read_whole)


def tokenised(kind: str = "bert", count: int = 5) -> Samples:
    draw = random.Random(1)
    sizes = [(draw.randrange(1, 20), draw.randrange(1, 20)) for _ in range(count)]
    pairs = [[" ".join(draw.choice(WORDS) for _ in range(size)) for size in two] for two in sizes]
    first, second = zip(*pairs, strict=True)
    labels = [number % 3 for number in range(count)]
    rows = datasets.Dataset.from_dict({"text": first, "text_pair": second, "label": labels})
    return tokens.samples(rows, tokenizer_of(kind), 64)


@pytest.mark.parametrize("kind", [*KINDS, "deberta", "padded bert"])
def test_logits_and_gradients_are_those_of_pairs_alone(kind: str) -> None:
    """As the unpacked model has them, given all that its tokenizer makes."""
    if kind == "deberta":
        config = transformers.DebertaV2Config(**KINDS["bert"][1], type_vocab_size=0)
        torch.manual_seed(0)
        model: Any = transformers.DebertaV2ForSequenceClassification(config).eval()
    else:
        model = make(kind.removeprefix("padded "))
    if kind in ("roberta", "xlm-roberta", "camembert"):
        samples = tokenised("roberta")
    else:
        samples = tokenised()
        assert samples.types is not None
    typed = samples.types is not None and encoding.takes_token_types(model)
    assert typed == (kind in ("bert", "electra", "padded bert"))
    rows, labels = np.arange(5), torch.from_numpy(samples.labels)
    alone = []
    for row in rows:
        inputs = {"input_ids": samples.tokens(row)}
        if typed:
            inputs["token_type_ids"] = samples.types[samples.span(row)]
        alone.append(
            model(**{k: torch.from_numpy(v.astype(np.int64))[None] for k, v in inputs.items()})
        )
    expected = torch.cat([output.logits for output in alone])
    losses.sample_losses(expected, labels).mean().backward()
    wanted = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    packed = packed_encoders.family_of(model.config) is not None and not kind.startswith("padded")
    layout = text_classification.CLASSES.layout(model, packed, SIZE, PAD, [(samples, rows)])
    assert isinstance(layout, Packed if packed else Padded)
    text_classification.CLASSES.prepare(model, packed)
    model.zero_grad()
    logits = model(**layout.tensors(samples, rows)).logits
    torch.testing.assert_close(logits[:5], expected, rtol=0, atol=1e-5)
    losses.sample_losses(logits[:5], labels).mean().backward()
    for name, weight in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    if typed:
        name = next(name for name in wanted if "token_type" in name)
        assert (wanted[name].abs().sum(dim=1) > 0).all()


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model = make("roberta", type_vocab_size=1)
    samples = tokenised()
    with pytest.raises(ModelError, match="types up to 1"):
        text_classification.CLASSES.layout(model, True, SIZE, PAD, [(samples, np.arange(5))])


def test_a_swap_of_columns_is_other_data() -> None:
    rows = {"text": ["w1 w2"], "text_pair": ["w3"], "label": [0]}
    swapped = {"text": ["w3"], "text_pair": ["w1 w2"], "label": [0]}
    one, other = (
        tokens.samples(datasets.Dataset.from_dict(columns), tokenizer_of("bert"), 32)
        for columns in (rows, swapped)
    )
    assert one.fingerprint() != other.fingerprint()
    untyped = batches.Samples(one.token_ids, one.starts, one.labels)
    assert untyped.fingerprint() != one.fingerprint()
