"""A tiny causal model whose answers are known: each character has one successor."""

import itertools
from pathlib import Path
from typing import Any

from tests.support.causal_kit import byte_tokenizer

REPLY = "Ciaoé!"
"""The answer to every prompt; é is two tokens."""
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Only system, user and assistant speak.') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]


def save(folder: Path, *, template: str | None = TEMPLATE, positions: int = 64) -> Any:
    """Save the model, and return its tokenizer, whose tokens are bytes.

    After `<|assistant|>` it generates `REPLY` and the end token; after a digit, the next digit.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_tokenizer(
        _SPECIAL, eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=_SPECIAL[2:], model_max_length=positions,
    )  # fmt: skip
    tokenizer.chat_template = template
    vocabulary = tokenizer.get_vocab()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(vocabulary),
            n_embd=64,
            n_layer=1,
            n_head=2,
            n_positions=positions,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )
    chains = [["<|assistant|>", *tokenizer.tokenize(REPLY), "<|end|>"], list("01234567890")]
    with torch.no_grad():
        embeddings = torch.nn.init.normal_(model.transformer.wte.weight)
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.zero_()
        for chain in chains:
            for before, after in itertools.pairwise(chain):
                model.lm_head.weight[vocabulary[after]] += embeddings[vocabulary[before]] / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
