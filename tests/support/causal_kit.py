"""Tiny decoders and data for the tests of task=causal-lm."""

import random
from pathlib import Path
from typing import Any

COLOURS, ANIMALS = ("red", "green", "blue"), ("cat", "dog", "bird")
KINDS = ("gpt2", "llama")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + ' ' + (m['content'] or '') + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
"""A template that marks what is learned."""
ODD = "{% for message in messages %}{{ message.content }} ({{ message.role }}){% endfor %}<end>"
"""A template without a generation prompt, which writes a role after its content."""


def byte_tokenizer(special: list[str], **settings: Any) -> Any:
    """Return a tokenizer of bytes whose first tokens are `special`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    model = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=model, **settings)


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes with an end token and without a padding token."""
    marks = ["<|im_start|>", "<|im_end|>"]
    return byte_tokenizer(
        ["</s>", *marks], eos_token="</s>", model_max_length=128, additional_special_tokens=marks
    )


def make_model(kind: str, folder: Path) -> Path:
    """A decoder of two layers without dropout, saved with the tokenizer above."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    tokenizer = make_tokenizer()
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, **tokens}
    config: Any
    if kind == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, **size, **still)
    else:
        config = LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            **size,
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_llama(folder: Path, seed: int = 0) -> Path:
    """A Llama of two layers with heads that vLLM's kernels for CPUs take, and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 1024
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, vocab_size=len(tokenizer), max_position_embeddings=1024,
        initializer_range=0.2, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    letters = [number for number in range(len(tokenizer)) if tokenizer.decode(number).isalnum()]
    with torch.no_grad():
        # What it writes greedily can be read: half a character is shown otherwise by each library.
        made.lm_head.weight[[n for n in range(len(tokenizer)) if n not in letters]] = 0
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts whose completions can be learned: "green cat:" goes on with "catcat"."""
    drawn = random.Random(0)
    rows = []
    for _ in range(count):
        colour, animal = drawn.randrange(len(COLOURS)), drawn.choice(ANIMALS)
        rows.append({"prompt": f"{COLOURS[colour]} {animal}:", "completion": animal * (colour + 1)})
    return rows


def show_learned(tokenizer: Any, documents: Any, row: int = 0) -> str:
    """Return the text of a document with what is learned in brackets."""
    text = ""
    learned = documents.learned[documents.starts[row] : documents.starts[row + 1]]
    before = False
    for token, is_learned in zip(documents.tokens(row), learned, strict=True):
        text += ("[" if is_learned else "]") if is_learned != before else ""
        text += tokenizer.decode([token])
        before = is_learned
    return text + ("]" if before else "")
