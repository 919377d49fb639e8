"""LoRA adapters with random weights, and the same adapters merged into their base."""

import warnings
from pathlib import Path
from typing import Any


def adapter(base: Path, folder: Path, auto: Any, seed: int, **settings: Any) -> Path:
    """Save an adapter of `base` in `folder` that changes every answer.

    Args:
        auto: The Auto class that loads the base.
        settings: Of peft's LoraConfig.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        model = get_peft_model(auto.from_pretrained(base), LoraConfig(r=4, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def merged(base: Path, folder: Path, to: Path, auto: Any = None) -> Path:
    """Save a copy of `base` with the adapter in `folder` merged by peft; return `to`.

    Args:
        auto: The Auto class that loads the base; None: of causal models.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        (auto or AutoModelForCausalLM).from_pretrained(base), str(folder)
    )
    model.merge_and_unload().save_pretrained(to)
    for path in base.iterdir():
        if not (to / path.name).exists():
            (to / path.name).write_bytes(path.read_bytes())
    return to
