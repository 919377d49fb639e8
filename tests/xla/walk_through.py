"""BERT on Trainium as AWS's walk-through of SageMaker trains it: a loop of the user's own.

What torch-xla 2.9 and transformers 4.57 have no more is replaced: xm.xrt_world_size and
xm.get_ordinal by torch_xla.runtime's world_size and global_ordinal, transformers.AdamW by torch's.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # noqa: F401
import torch_xla.runtime as xr
from datasets import load_from_disk
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

dist.init_process_group("xla")


def loader(split, tokenizer, batch_size, shuffle):
    def encode(rows):
        return tokenizer(rows["text"], padding="max_length", max_length=32, truncation=True)

    ready = split.map(encode, batched=True, remove_columns=["text"])
    ready = ready.rename_column("label", "labels").with_format("torch")
    sampler = None
    if xr.world_size() > 1:
        sampler = DistributedSampler(ready, xr.world_size(), xr.global_ordinal(), shuffle=shuffle)
    random = shuffle and sampler is None
    return DataLoader(ready, batch_size, sampler=sampler, shuffle=random, drop_last=True)


def accuracy(model, batches):
    right = total = 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            predicted = model(**batch).logits.argmax(dim=-1)
            right += int((predicted == batch["labels"]).sum().item())
            total += len(predicted)
    model.train()
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = xm.xla_device()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name, num_labels=2)
    model.to(device)
    data = load_from_disk(os.environ["SM_CHANNEL_TRAIN"])
    train = loader(data["train"], tokenizer, args.train_batch_size, shuffle=True)
    test = loader(data["test"], tokenizer, args.train_batch_size, shuffle=False)
    optimizer = AdamW(model.parameters(), lr=args.learning_rate)
    steps = args.epochs * len(train)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    on_device = pl.MpDeviceLoader(train, device)
    for epoch in range(args.epochs):
        for batch in on_device:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            xm.optimizer_step(optimizer)
            schedule.step()
        mean = xm.mesh_reduce("loss", loss.item(), lambda losses: sum(losses) / len(losses))
        xm.master_print(f"epoch {epoch}: loss {mean:.4f}")
    found = accuracy(model, pl.MpDeviceLoader(test, device))
    found = xm.mesh_reduce("accuracy", found, lambda each: sum(each) / len(each))
    xm.master_print(f"accuracy {found:.4f} on {xr.device_type()}, {xr.world_size()} process(es)")
    xm.rendezvous("trained")
    folder = Path(os.environ["SM_MODEL_DIR"])
    if xm.is_master_ordinal():
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    xm.save(model.state_dict(), folder / "pytorch_model.bin")
    xm.rendezvous("saved")


if __name__ == "__main__":
    main()
