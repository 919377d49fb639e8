"""Small random models, samples and an engine for tests of packed batches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import torch
import transformers
from transformers import PreTrainedModel, TrainingArguments

from recipe.batching import batches, flat, packing
from recipe.batching.batches import Packed, Samples
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.models import flat_attention, packed_decoders, packed_encoders
from recipe.plan import batch_layout
from recipe.plan.batch_layout import BatchPlan, TrainableModel
from recipe.tasks.text_classification.task import CLASSES
from recipe.training.engine import Engine

PAD, SIZE = 1, 6
SMALL = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 80, "num_labels": 3, "pad_token_id": PAD,
}  # fmt: skip
TOKENS = {"cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
MODERN = {**SMALL, **TOKENS, "local_attention": 16, "global_attn_every_n_layers": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SMALL),
    "distilbert": ("DistilBert", {**SMALL, "hidden_dim": 48}),
    "roberta": ("Roberta", SMALL),
    "xlm-roberta": ("XLMRoberta", SMALL),
    "camembert": ("Camembert", SMALL),
    "electra": ("Electra", {**SMALL, "embedding_size": 16}),
    "modernbert": ("ModernBert", {**MODERN, "classifier_pooling": "cls"}),
    "modernbert, mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean"}),
}
DECODERS = (*packed_decoders.DECODERS, "qwen3, with windows", "llama, LoRA")
LENGTHS = [30, 5, 17, 2, 41]


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights far from 0, so that a leak would be seen, and turn dropout off."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return model.eval()


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of `loss` by the names of the weights that have any."""
    model.zero_grad()
    loss.backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def assert_same_losses(
    model: PreTrainedModel, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5
) -> None:
    """Assert equal losses, shape (samples,), and equal gradients of their sums.

    Args:
        tolerance: Of a gradient, beside a ten-thousandth of it.
    """
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    wanted, received = gradients(model, expected.sum()), gradients(model, actual.sum())
    assert set(received) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(received[name], gradient, rtol=1e-4, atol=tolerance, msg=name)


def make(kind: str, head: str = "ForSequenceClassification", **options: Any) -> PreTrainedModel:
    """A small random model whose weights are far from 0, so that a leak would be seen."""
    name, values = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**values, **options})
    torch.manual_seed(0)
    return spread(getattr(transformers, f"{name}{head}")(config))


def samples_of(lengths: list[int], classes: int = 3) -> Samples:
    random = np.random.default_rng(0)
    ids = random.integers(4, 50, sum(lengths)).astype(np.int32)
    labels = random.integers(0, classes, len(lengths))
    return Samples(ids, np.cumsum([0, *lengths]), labels)


def tweet_lengths(count: int) -> list[int]:
    return np.clip(np.random.default_rng(1).normal(28, 12, count), 4, 80).astype(int).tolist()


def documents_of(lengths: list[int]) -> Documents:
    """Documents of which some tokens are learned, in places that differ."""
    random = np.random.default_rng(0)
    starts = np.cumsum([0, *lengths])
    learned = random.random(starts[-1]) < 0.6
    learned[starts[1:] - 1] = True
    learned[starts[:-1]] = False
    counts = np.add.reduceat(learned, starts[:-1], dtype=np.int64)
    ids = random.integers(4, 50, starts[-1]).astype(np.int32)
    return Documents(ids, starts, counts, learned)


def prepared(kind: str, head: str) -> tuple[Any, dict[str, Any]]:
    """Return a small model in training, and a batch of it."""
    rows = np.arange(5)
    if kind in KINDS:
        model: Any = make(kind, head)
        samples = samples_of(LENGTHS)
        packed_encoders.patch_forward_for_packing(model)
        first = packed_encoders.FAMILIES[model.config.model_type].first_position(model.config)
        return model, Packed(packing.shape([samples.lengths]), SIZE, PAD, first).tensors(
            samples, rows
        )
    values = {
        **SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 96, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    if "windows" in kind:
        values |= {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    config = transformers.CONFIG_MAPPING[kind.partition(",")[0]](**values)
    torch.manual_seed(0)
    model = spread(transformers.AutoModelForCausalLM.from_config(config))
    if kind.endswith("LoRA"):
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
    documents = documents_of(LENGTHS)
    packed_decoders.patch_forward_for_documents(model)
    flat_attention.use(model)
    layout = Packed(flat.row([documents.lengths]), SIZE, PAD, 0)
    return model, DocumentLayout(layout, documents.weight(rows)).tensors(documents, rows)


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the sum of the losses: those that a decoder computes, or of the first class."""
    logits = model(**batch).logits[:5].float()
    return (logits[:, 0] if logits.shape[-1] == 2 else logits.log_softmax(-1)[:, 0]).sum()


def gradients_of(
    model: Any, batch: dict[str, Any], autocast: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradients by the names of the weights."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model, batch)
    loss.backward()
    rounded = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return rounded


def to_train(model: Any, objective: Any, size: int, packing: bool | None = None) -> TrainableModel:
    """A model whose evaluations have batches of `size`."""
    tokenizer: Any = SimpleNamespace(pad_token_id=PAD)
    arguments: Any = SimpleNamespace(eval_batch_size=size)
    return TrainableModel(
        model=model, tokenizer=tokenizer, arguments=arguments, objective=objective, packing=packing
    )


def engine(folder: Path, class_weights: list[float] | None = None, **changes: Any) -> Engine:
    """An engine of a packed BERT with dropout, which makes eight steps of SGD, two an epoch.

    Args:
        changes: Of transformers' TrainingArguments.
    """
    torch.manual_seed(0)
    run = batches.Training(samples=samples_of(tweet_lengths(16)), size=8, seed=3)
    layout = Packed(
        packing.shape([run.samples.lengths[rows] for rows in run.rows(4, True)]), 8, PAD, 0
    )
    model = make("bert")
    packed_encoders.patch_forward_for_packing(model)
    # Adam would make a step of a rounding error where the gradient is 0 (keys' biases).
    values: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": 8, "optim": "sgd", "learning_rate": 0.02,
        "logging_steps": 500, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, **changes,
    }  # fmt: skip
    args = TrainingArguments(**values)
    return Engine(
        model=model, args=args, eval_dataset=run.samples, objective=CLASSES,
        decided=BatchPlan(training=run, cut=batch_layout.requested_cut(args), train_layout=layout,
                          eval_layout=layout),
        class_weights=class_weights, compute_metrics=None,
    )  # fmt: skip
