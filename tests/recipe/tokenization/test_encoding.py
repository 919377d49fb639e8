import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipe.tokenization.encoding import beginning, encode

WORDS = ["the", "film", "truly", "great", "awful", "unbelievable", "number", "ü", "東京", "b", "-"]


def texts(seed: int, count: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        between = draw.choice([" ", "", "  ", "\n"])
        size = draw.choice([3, 40, 700, 3000])
        yield between.join(draw.choice(WORDS) for _ in range(size))
    yield from ("", " " * 5000, "x" * 5000, "[" * 5000, "a b" + " " * 3000 + "c " * 900)


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "WordPiece": (
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"]),
    ),
    "BPE": (
        models.BPE(),
        pre_tokenizers.ByteLevel(),
        trainers.BpeTrainer(vocab_size=400, special_tokens=["[CLS]", "[SEP]"]),
    ),
    "Unigram": (
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], unk_token="[UNK]"
        ),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    model, before, trainer = KINDS[request.param]
    made = Tokenizer(model)
    made.pre_tokenizer = before
    # A Unigram model's training takes seconds for each of the long texts.
    longest = 4000 if request.param == "Unigram" else 20_000
    made.train_from_iterator((text for text in texts(0, 20) if len(text) < longest), trainer)
    ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=10_000)


@pytest.mark.parametrize("limit", [2, 33])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_long_text_has_the_tokens_that_all_of_it_has(
    tokenizer: PreTrainedTokenizerFast, limit: int, side: str
) -> None:
    tokenizer.truncation_side = side
    # A Unigram model splits runs without a space as a whole, where many splits weigh the same.
    is_unigram = isinstance(tokenizer.backend_tokenizer.model, models.Unigram)
    some = list(texts(1, 20))
    if is_unigram:
        some = [text for text in some if re.search(r"\s\S", text) and "   " not in text]
    whole = tokenizer(some, truncation=True, max_length=limit)["input_ids"]
    assert encode(tokenizer, some, limit) == whole
    cut = [beginning(tokenizer, text, limit) != text for text in some]
    assert any(cut) == (side == "right")


def test_of_megabytes_only_the_beginning_is_read(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.truncation_side = "right"
    assert len(beginning(tokenizer, "film " * 400_000, 16)) == 16 * 16
    spaces = " " * 100_000 + "film"
    assert beginning(tokenizer, spaces, 16) in (spaces, spaces[: 16 * 16])
