"""A script as people write it for Hugging Face's image: AutoModel, Trainer, SM_ variables."""

import argparse
import os

import numpy as np
from datasets import load_dataset
from sklearn.metrics import accuracy_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path", required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--train_batch_size", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=5e-5)
options = parser.parse_args()

folders = {"train": os.environ["SM_CHANNEL_TRAIN"], "test": os.environ["SM_CHANNEL_TEST"]}
data = load_dataset("json", data_files={split: f"{folder}/*" for split, folder in folders.items()})
tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
data = data.map(lambda row: tokenizer(row["text"], truncation=True), batched=True)
model = AutoModelForSequenceClassification.from_pretrained(options.model_name_or_path, num_labels=2)


def compute_metrics(prediction):
    return {"accuracy": accuracy_score(prediction.label_ids, np.argmax(prediction.predictions, -1))}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=os.environ["SM_OUTPUT_DATA_DIR"] + "/checkpoints",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.train_batch_size,
        learning_rate=options.learning_rate,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model(os.environ["SM_MODEL_DIR"])
tokenizer.save_pretrained(os.environ["SM_MODEL_DIR"])
