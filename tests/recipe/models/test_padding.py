"""Texts in one padded batch get the logits that each gets by itself, whatever the model heeds."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers

from recipe.batching.batches import Padded
from recipe.batching.samples import Samples
from recipe.errors import ModelError
from recipe.models import packed_encoders
from recipe.tokenization import texts as text_tokens
from recipe.tokenization.encoding import refuse_types

END, PAD = 1, 0
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENCODER = {"hidden_size": 16, "max_position_embeddings": 64, **LAYERS}
T5 = {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16,
      "decoder_start_token_id": PAD}  # fmt: skip
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "max_position_embeddings": 64, "decoder_start_token_id": END}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "deberta-v2": {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "convbert": {**ENCODER, "embedding_size": 16, "num_attention_heads": 4, "head_ratio": 1,
                 "conv_kernel_size": 3},
    "fnet": {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16},
    "yoso": {**ENCODER, "use_expectation": True},
    "canine": {**ENCODER, "num_hash_buckets": 64, "local_transformer_stride": 8,
               "downsampling_rate": 4},
    "funnel": {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "block_sizes": [1, 1]},
    "mobilebert": {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16},
    "nystromformer": {**ENCODER, "conv_kernel_size": 5},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "t5": T5,
    "bart": BART,
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
}  # fmt: skip


def model_with_head(
    kind: str, head: Any = transformers.AutoModelForSequenceClassification, **more: Any
) -> Any:
    torch.manual_seed(0)
    kind_of_config: Any = transformers.CONFIG_MAPPING[kind]
    config = kind_of_config(vocab_size=40, **{**SIZES[kind], **more})
    config.num_labels = 2 if head is transformers.AutoModelForQuestionAnswering else 3
    config.pad_token_id, config.eos_token_id = PAD, END
    model = head.from_config(config).eval()
    with torch.no_grad():
        for weights in model.parameters():  # those of a new model tell texts hardly apart
            if weights.dim() > 1:
                weights.normal_(0, 0.4)
    return model


def some_samples(*lengths: int) -> Samples:
    """Each ends with the end token, as T5 and BART want it."""
    draw = np.random.default_rng(0)
    rows = [[*draw.integers(2, 40, length - 1), END] for length in lengths]
    starts = np.cumsum([0, *lengths])
    return Samples(np.concatenate(rows).astype(np.int32), starts, np.zeros(len(rows), np.int64))


@pytest.mark.parametrize("kind", SIZES)
def test_a_padded_text_is_answered_as_by_itself(kind: str) -> None:
    model, samples = model_with_head(kind), some_samples(9, 23, 9, 14)
    with torch.inference_mode():
        alone = [
            model(input_ids=torch.from_numpy(samples.tokens(row))[None].long()).logits[0]
            for row in range(4)
        ]
        spread = torch.stack(alone).std(0).max()
        packed_encoders.patch_forward_for_lengths(model)
        # Two places more than there are samples, as in the last batch of an evaluation.
        layout = Padded((32,), 6, PAD)
        together = model(**layout.tensors(samples, np.array([3, 1, 0, 2]))).logits
        of_none = model(**layout.tensors(samples, np.empty(0, np.int64))).logits
    assert together.shape == of_none.shape == (6, 3)
    assert of_none.isfinite().all()
    expected = torch.stack([alone[row] for row in (3, 1, 0, 2)])
    assert spread > 1e-3
    torch.testing.assert_close(together[:4], expected, atol=1e-5, rtol=1e-4)


def test_gradients_are_those_of_each_text_by_itself() -> None:
    samples, weight = some_samples(9, 23, 9, 14), "transformer.layer.0.ff.layer_1.weight"
    alone, together = model_with_head("xlnet"), model_with_head("xlnet")
    for row in range(4):
        ids = torch.from_numpy(samples.tokens(row))[None].long()
        alone(input_ids=ids).logits[0, row % 3].backward()
    packed_encoders.patch_forward_for_lengths(together)
    logits = together(**Padded((32,), 4, PAD).tensors(samples, np.arange(4))).logits
    logits[torch.arange(4), torch.arange(4) % 3].sum().backward()
    expected, made = (model.get_parameter(weight).grad for model in (alone, together))
    assert expected is not None
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["convbert", "fnet", "funnel", "mobilebert", "nystromformer"])
@pytest.mark.parametrize(
    "head",
    [transformers.AutoModelForTokenClassification, transformers.AutoModelForQuestionAnswering],
)
def test_tokens_of_a_padded_text_are_answered_as_by_itself(kind: str, head: Any) -> None:
    model, samples = model_with_head(kind, head), some_samples(9, 23, 14)
    with torch.inference_mode():
        alone = [
            model(input_ids=torch.from_numpy(samples.tokens(row))[None].long()).to_tuple()
            for row in range(3)
        ]
        packed_encoders.patch_forward_for_lengths(model)
        together = model(**Padded((32,), 3, PAD).tensors(samples, np.arange(3))).to_tuple()
    for row, length in enumerate((9, 23, 14)):
        for actual, expected in zip(together, alone[row], strict=True):
            assert actual.shape[:2] == (3, 32)
            torch.testing.assert_close(actual[row, :length], expected[0], atol=1e-5, rtol=1e-4)


def test_single_texts_keep_the_types_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token of XLNet that stands for a text is its last, of a type of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    pieces = [*special, "▁", *"w0123456789"]
    tokenizer: Any = transformers.XLNetTokenizer(
        vocab=[(piece, -float(n)) for n, piece in enumerate(pieces)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    texts = ["w1 w2 w3", "w4", " ".join(f"w{index}" for index in range(30))]
    split = datasets.Dataset.from_dict({"text": texts, "label": [0, 1, 0]})
    made = text_tokens.samples(split, tokenizer, 12)
    expected = tokenizer(texts, truncation=True, max_length=12)
    for row in range(3):
        assert made.tokens(row).tolist() == expected["input_ids"][row]
        assert made.types[made.span(row)].tolist() == expected["token_type_ids"][row]
    assert made.types[made.span(1)].tolist()[-2:] == [0, 2]
    with pytest.raises(ModelError, match="which a model of type xlnet takes"):
        refuse_types(model_with_head("xlnet"), tokenizer)
