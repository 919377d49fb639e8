"""Models unlike BERT: what their tokenizers and their forwards need, compared with transformers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.serving_kit import LETTERS, TEXTS, Handlers, assert_close, save


def saved(folder: Path, tokenizer: Any, kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_longformer_answers_questions(tmp_path: Path) -> None:
    BYTES = {piece: index for index, piece in enumerate(
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", ".", *LETTERS])}  # fmt: skip
    tokenizer = transformers.RobertaTokenizer(vocab=BYTES, merges=[], model_max_length=64)
    config = transformers.LongformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        attention_window=[8], max_position_embeddings=66, vocab_size=len(BYTES), pad_token_id=1,
        sep_token_id=2, type_vocab_size=1, initializer_range=0.5,
    )  # fmt: skip
    model = saved(tmp_path, tokenizer, "LongformerForQuestionAnswering", config)
    question, context = "who was bad", TEXTS[1]
    encoded = tokenizer(question, context, return_tensors="pt")
    with torch.no_grad():
        output = model(**encoded)
    of_context = torch.tensor([owner == 1 for owner in encoded.sequence_ids(0)])
    # The token <s> stands for "no answer": it takes its part of the probability.
    kept = of_context.clone()
    kept[0] = True
    starts, ends = (
        torch.where(kept, logits[0], -1e4).softmax(-1) * of_context
        for logits in (output.start_logits, output.end_logits)
    )
    spans = torch.triu(starts[:, None] * ends).tril(14)
    first, last = divmod(int(spans.argmax()), len(kept))
    answer = Handlers(tmp_path).ask(
        {
            "inputs": {"question": question, "context": context},
            "parameters": {"align_to_words": False},
        }
    )
    assert abs(answer["score"] - float(spans.max())) < 1e-5
    assert answer["start"] == encoded[0].offsets[first][0]
    assert answer["end"] == encoded[0].offsets[last][1]


def entities_are_those_of_transformers(folder: Path, **options: Any) -> None:
    pipeline: Any = transformers.pipeline("token-classification", str(folder), **options)
    expected = [json.loads(json.dumps(entities, default=float)) for entities in pipeline(TEXTS)]
    assert_close(Handlers(folder).ask({"inputs": TEXTS, "parameters": options}), expected)


def test_a_model_reads_the_types_of_tokens_if_zeros_change_its_answers(tmp_path: Path) -> None:
    # GPT-2 adds a word's embedding for each type, and tokenizers of Chinese GPT-2 make types.
    save("GPT2ForTokenClassification", tmp_path, num_labels=3)
    entities_are_those_of_transformers(tmp_path, ignore_labels=[])


def test_windows_that_are_padded_on_the_left_keep_their_tokens(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    pieces = [(piece, 0.0) for piece in special] + [(piece, -3.0) for piece in ("▁", ".", *LETTERS)]
    tokenizer = transformers.XLNetTokenizer(vocab=pieces, model_max_length=24)
    config = transformers.XLNetConfig(
        d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=len(pieces), num_labels=4,
        initializer_range=0.5,
    )  # fmt: skip
    saved(tmp_path, tokenizer, "XLNetForTokenClassification", config)
    entities_are_those_of_transformers(
        tmp_path, aggregation_strategy="simple", ignore_labels=[], stride=5
    )
