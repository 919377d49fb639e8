"""What hyperparameters of other trainers are called here, or why this recipe has none of them.

The names are those of run_glue.py, run_classification.py and run_clm.py of transformers, of older
releases of its TrainingArguments, of TRL's DPOTrainer, AutoTrain, SetFit and SageMaker JumpStart,
and of notebooks that Hugging Face and AWS show for SageMaker. A name is of one of three kinds: it
means what a name of this recipe means (`RENAMED`, `REWRITTEN`); it changes nothing here, for some
or for all of its values, which is said (`LEFTOVERS`, `PLACES`); or it asks for what is not done
here (`ADVICE`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

RENAMED: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "valid_batch_size": "per_device_eval_batch_size",
    "test_batch_size": "per_device_eval_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "num_epochs": "num_train_epochs",
    "model_checkpoint": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "label_column_name": "label_column",
    "image_column_name": "image_column",
    "target_column": "label_column",
    "text_column_name": "text_column",
    "max_input_length": "max_length",
    "max_source_length": "max_length",
    "generation_max_length": "max_target_length",
    "val_max_target_length": "max_target_length",
    "max_sequence_length": "max_length",
    "prompt_text_column": "prompt_column",
    "rejected_text_column": "rejected_column",
    "dpo_beta": "beta",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "adam_beta_1": "adam_beta1",
    "adam_beta_2": "adam_beta2",
    "target_modules": "lora_target_modules",
    "log": "report_to",
    "token": "hf_token",
    "access_token": "hf_token",
}
"""Names of the same meaning."""

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
UNSET = ("", "none", "null")
"""What stands, in any case, for no value."""


def _precision(value: str) -> tuple[str, str] | None:
    values = {"bf16": ("bf16", "True"), "fp16": ("fp16", "True"), "no": ("bf16", "False")}
    return values.get(value.lower())


def _switch(
    name: str, value_if_true: str, if_false: str
) -> Callable[[str], tuple[str, str] | None]:
    values = {**dict.fromkeys(_TRUE, value_if_true), **dict.fromkeys(_FALSE, if_false)}

    def rewrite(value: str) -> tuple[str, str] | None:
        return (name, values[value.lower()]) if value.lower() in values else None

    return rewrite


def _share_of_steps(value: str) -> tuple[str, str] | None:
    try:
        return ("warmup_steps", value) if 0 <= float(value) < 1 else None
    except ValueError:
        return None


def _one_column(value: str) -> tuple[str, str] | None:
    return None if "," in value else ("text_column", value)


def _folder(value: str) -> tuple[str, str] | None:
    return ("output_dir", value) if "/" in value and "://" not in value else None


REWRITTEN: Mapping[str, tuple[Callable[[str], tuple[str, str] | None], str]] = {
    "mixed_precision": (_precision, "Give no, bf16 or fp16."),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_proportion"),
        (_share_of_steps, "Give a share of all steps, from 0 to below 1; or warmup_steps."),
    ),
    "merge_adapter": (_switch("lora_save", "merged", "adapter"), "Give True or False."),
    "merge_weights": (_switch("lora_save", "merged", "adapter"), "Give True or False."),
    "do_regression": (_switch("problem_type", "regression", ""), "Give True or False."),
    "text_column_names": (
        _one_column,
        "Several columns are not joined: put them together in the data, or give "
        "text_column=a,b for a pair of texts.",
    ),
    "adafactor": (_switch("optim", "adafactor", ""), "Give True or False."),
    "checkpoints": (_folder, "Give a folder, or leave it out: /opt/ml/checkpoints."),
    "checkpoint_dir": (_folder, "Give a folder, or leave it out: /opt/ml/checkpoints."),
    "checkpoint_path": (_folder, "Give a folder, or leave it out: /opt/ml/checkpoints."),
}
"""Names that are another name with another value, and what to give where the value has none."""

_ANY = None
_OFF = (*_FALSE, "-1", "no", "off")
_ON = _TRUE
_CHOSEN = "a text becomes tokens by the tokenizer that comes with the model"
_REFERENCES = "what the model says before training is computed once"
_BY_NAMES = "channels and files say what is which"
_BY_CHANNELS = "Data comes in channels: give the file in a channel called {}, and leave this out."
LEFTOVERS: Mapping[str, tuple[tuple[str, ...] | None, str, str]] = {
    "overwrite_output_dir": (
        _ANY,
        "a stopped job goes on from its checkpoints, and resume_from_checkpoint=False starts anew",
        "",
    ),
    "logging_dir": (_ANY, "TensorBoard's files go to output/tensorboard", ""),
    "save_safetensors": (
        _ON,
        "weights are saved as safetensors",
        "Leave it out: pickled weights are not written.",
    ),
    "group_by_length": (_ANY, "batches are balanced by length already", ""),
    "pad_to_max_length": (_ANY, "texts are packed, or padded to few lengths", ""),
    "overwrite_cache": (_ANY, "nothing is cached between jobs", ""),
    "cache_dir": (_ANY, "the variable HF_HOME says where the hub's files are kept", ""),
    "preprocessing_num_workers": (_ANY, "the tokenizer takes all cores by itself", ""),
    "use_auth_token": (
        (*_TRUE, *_FALSE),
        "a model that needs a token takes it from hf_token or the variable HF_TOKEN",
        "Give it as hf_token.",
    ),
    "use_fast_tokenizer": (_ON, _CHOSEN, "Leave it out: only fast tokenizers are used."),
    "use_fast": (_ON, _CHOSEN, "Leave it out: only fast tokenizers are used."),
    "ignore_mismatched_sizes": (_ANY, "a head that does not fit the labels is made anew", ""),
    "ignore_pad_token_for_loss": (_ON, "padding is never learned", "Leave it out."),
    "resize_position_embeddings": (_OFF, "positions are the model's", "Leave it out."),
    "line_by_line": (
        _ANY,
        "sample_by says what is a text of a .txt file, and several texts are packed into one row",
        "",
    ),
    "mlm": (_ON, "the task says so", "Give task=masked-lm, or task=causal-lm."),
    "shuffle_train_dataset": (_ANY, "the texts of each epoch are shuffled", ""),
    "low_cpu_mem_usage": (_ANY, "the model is loaded once for each process", ""),
    "model_revision": (
        ("main",),
        "main is what is loaded",
        "Download that revision and give it as the channel model.",
    ),
    "load_in_8bit": (
        _OFF,
        "no weights are quantized",
        "Leave it out: lora_r trains with little memory, and load_in_4bit=True with less.",
    ),
    "torch_dtype": (
        ("auto", "float32", "torch.float32", "fp32"),
        "weights are loaded in float32",
        "Leave it out: weights are loaded in float32, and bf16=True computes in bfloat16.",
    ),
    "use_flash_attention_2": (
        _OFF,
        "attention is chosen by what the device and the packing need",
        "Leave it out: attention is chosen by what the device and the packing need.",
    ),
    "use_peft": (_OFF, "all weights are trained", "Give lora_r, the rank of LoRA's adapters."),
    "train_only_top_layer": (
        _OFF,
        "all weights are trained",
        "Leave it out: all weights are trained, or LoRA's with lora_r.",
    ),
    "reinitialize_top_layer": (
        ("auto", *_TRUE),
        "a head that does not fit the labels is made anew",
        "Leave it out: a head that fits the labels is kept, another one made anew.",
    ),
    "train_from_scratch": (_OFF, "training starts from the model's weights", "Leave it out."),
    "instruction_tuned": (
        _OFF,
        "the columns say what is learned",
        "Give task=causal-lm and a channel with columns prompt and completion.",
    ),
    "precompute_ref_log_probs": (_ON, _REFERENCES, f"Leave it out: {_REFERENCES}."),
    "precompute_ref_batch_size": (_ANY, "it is computed in the batches of the training", ""),
    "padding_free": (_ANY, "several texts are packed into one row", ""),
    "disable_dropout": (_ON, "dropout is off in task=preference", "Leave it out."),
    "truncation_mode": (("keep_start",), "what is long is cut at its end", "Leave it out."),
    "dataset_num_proc": (_ANY, "the tokenizer takes all cores by itself", ""),
    "f_divergence_type": (("reverse_kl",), "it is the divergence of DPO", "Leave it out."),
    "reference_free": (_OFF, "the reference is the model before training", "Leave it out."),
    "sync_ref_model": (_OFF, _REFERENCES, f"Leave it out: {_REFERENCES}."),
    "use_weighting": (_OFF, "each pair counts alike", "Leave it out."),
    "chat_dataset": (
        _OFF,
        "the columns say what is learned",
        "Give task=causal-lm and a channel with a column messages.",
    ),
    "enable_fsdp": (_OFF, "weights are not sharded", "Give fsdp=True."),
    "validation_split_ratio": (
        ("0.1",),
        "a tenth of the training data is held out where there is no evaluation data",
        "Leave it out (a tenth is held out), or give evaluation data in a channel called test.",
    ),
    "add_eos_token": (_ON, "the end token follows each text", "Leave it out."),
    "local_rank": (_ANY, "torchrun says which process this is", ""),
    "tpu_num_cores": (_ANY, "there is no TPU", ""),
    "past_index": (_OFF, "no state is kept between batches", "Leave it out."),
    "fp16_opt_level": (_ANY, "torch's own mixed precision is used", ""),
    "half_precision_backend": (_ANY, "torch's own mixed precision is used", ""),
    "fp16_backend": (_ANY, "torch's own mixed precision is used", ""),
    "jit_mode_eval": (_OFF, "compile=True compiles the model", "Give compile=True."),
    "use_ipex": (_OFF, "torch's own kernels are used", "Leave it out."),
    "save_steps_to_hub": (_OFF, "nothing is pushed", "Leave it out."),
    "project_name": (_ANY, "the model goes where SageMaker keeps the job's", ""),
    "train_split": (("train",), _BY_NAMES, _BY_CHANNELS.format("train")),
    "train_split_name": (
        ("train",),
        _BY_NAMES,
        _BY_CHANNELS.format("train"),
    ),
    "valid_split": (
        ("validation", "valid", "test"),
        _BY_NAMES,
        _BY_CHANNELS.format("test"),
    ),
    "validation_split_name": (
        ("validation", "valid", "test"),
        _BY_NAMES,
        _BY_CHANNELS.format("test"),
    ),
    "test_split_name": (("test",), _BY_NAMES, _BY_CHANNELS.format("test")),
    "n_gpu": (_ANY, "there is a process for each GPU that is there", ""),
    "num_gpus": (_ANY, "there is a process for each GPU that is there", ""),
    "use_cuda": (_ON, "a GPU that is there is used", "Give use_cpu=True."),
}  # fmt: skip
"""Values that change nothing here (None: all), what is said of them, what to do with another."""
for _name, _like in {
    "int8_quantization": "load_in_8bit",
    "quantization": "load_in_8bit",
    "use_int4": "load_in_8bit",
    "dtype": "torch_dtype",
    "peft": "use_peft",
    "use_lora": "use_peft",
    "peft_type": "use_peft",
}.items():
    LEFTOVERS = {**LEFTOVERS, _name: LEFTOVERS[_like]}

_FEWER = "Give a channel with as many rows as you want to use."
_SETFIT = "This recipe trains the whole classifier; SetFit's contrastive phase has no part in it."
ADVICE: Mapping[str, str] = {
    "dataset_name": "Data comes in channels: save the data set (to_parquet, save_to_disk) to S3 "
    "and give that prefix as the channel called train.",
    "dataset": "Save the data set to S3 and give that prefix as the channel called train.",
    "task_name": "The data says what the task is: give GLUE's files as channels train and test.",
    "tokenizer_name": f"Leave it out: {_CHOSEN}.",
    "config_name": "Leave it out: the configuration is the model's.",
    "config_overrides": "Change config.json in the channel called model.",
    "model_type": "Give the model itself by model_name_or_path.",
    "attn_implementation": "Leave it out: it is chosen by what the device and the packing need.",
    "block_size": "Give max_length: texts are split at that many tokens, and the pieces packed.",
    "model_max_length": "Give max_length.",
    "log_interval": "Give logging_steps: a share of all steps below 1, steps from 1.",
    "log_interval_steps": "Give logging_steps: a share of all steps below 1, steps from 1.",
    "evaluate_during_training": "Give eval_strategy: no, steps or epoch.",
    "max_train_samples": _FEWER,
    "max_eval_samples": _FEWER,
    "max_val_samples": _FEWER,
    "max_test_samples": _FEWER,
    "max_predict_samples": _FEWER,
    "validation_split_percentage": "Leave it out (a tenth is held out), or give evaluation data in "
    "a channel called test.",
    "metric_name": "Give metric_for_best_model: all metrics of the task are computed.",
    "metric": "Give metric_for_best_model: all metrics of the task are computed.",
    "shuffle_seed": "Give seed, or data_seed for the order of the texts alone.",
    "train_data_split_seed": "Give seed, which the hold-out is drawn by.",
    "text_column_delimiter": "Put the texts together in the data, or name columns of a pair.",
    "remove_columns": "Leave it out: columns that are not named are not used.",
    "remove_splits": "Take the files out of the channel.",
    "lang": "Give source_lang and target_lang.",
    "forced_bos_token": "Give target_lang.",
    "keep_linebreaks": "Give sample_by: line, paragraph or document.",
    "labels": "Leave it out: the labels are found in the data.",
    "label_list": "Leave it out: the labels are found in the data.",
    "num_classes": "Give num_labels, or leave it out: the labels are found in the data.",
    "num_iterations": _SETFIT,
    "head_learning_rate": _SETFIT,
    "body_learning_rate": _SETFIT,
    "end_to_end": _SETFIT,
    "l2_weight": "Give weight_decay.",
    "use_amp": "Give bf16=True or fp16=True.",
    "backend": "Leave it out, or give ddp_backend.",
    "dist_backend": "Leave it out, or give ddp_backend.",
    "world_size": "The instances and their devices say how many processes there are.",
    "nproc_per_node": "Set the variable AMPHORA_NPROC_PER_NODE.",
    "username": "Leave it out: nothing is pushed to the hub.",
    "repo_id": "Leave it out: nothing is pushed to the hub.",
    "chat_template": "Put it into the tokenizer_config.json of the model.",
    "trainer": (
        "Give task=causal-lm, and columns by their names. NeuronTrainer, which neither evaluates "
        "nor resumes, takes a script of your own (docs/TRAINIUM.md)."
    ),
    "disable_gradient_checkpointing": "Give gradient_checkpointing.",
    "chunk_size": "Give max_length.",
    "max_prompt_length": "Give max_length: prompt and answer together are cut at its end.",
    "max_completion_length": "Give max_length: prompt and answer together are cut at its end.",
    "ref_model": "Leave it out: the reference is the model before training.",
    "model_ref": "Leave it out: the reference is the model before training.",
    "rpo_alpha": "Train on the chosen answers by task=causal-lm first.",
    "loss_weights": "Give one loss_type.",
    "stride": "Leave it out: a text is cut at max_length.",
    "freeze_embeddings": "Leave it out: all weights are trained, or LoRA's with lora_r.",
    "dropout": "Change the model's config.json; lora_dropout is that of LoRA.",
    "momentum": "Give adam_beta1, or optim and optim_args.",
}
"""Names that are refused, and what to do instead."""

_TRAIN, _OTHER = ("train", "training"), ("test", "testing", "validation", "eval", "valid", "dev")
PLACES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("dataset_path", "data_path", "data_dir", "dataset_dir", "input_dir", "data"), ()
    ),
    **dict.fromkeys(("train_dir", "training_dir", "train_path", "train_data_dir"), _TRAIN),
    **dict.fromkeys(
        ("test_dir", "eval_dir", "validation_dir", "val_dir", "test_path", "valid_dir"), _OTHER
    ),
    **dict.fromkeys(("train_file", "train_data_file", "training_file"), _TRAIN),
    **dict.fromkeys(("validation_file", "test_file", "eval_file", "eval_data_file"), _OTHER),
}
"""Names that say where data lies, and the channels that it may lie in (none named: all)."""
OUTPUTS: Mapping[str, str] = {
    "model_dir": "SM_MODEL_DIR",
    "model_output_dir": "SM_MODEL_DIR",
    "output_data_dir": "SM_OUTPUT_DATA_DIR",
}
"""Names that say where results go, and the variable that says it here."""

KNOWN = frozenset({*RENAMED, *REWRITTEN, *LEFTOVERS, *ADVICE, *PLACES, *OUTPUTS})


def said_of(
    name: str, value: str, channels: Mapping[str, Path], outputs: Mapping[str, Path]
) -> tuple[str, str]:
    """What is said of a name in `KNOWN` that changes nothing, or what to do instead: one is ''.

    Args:
        name: A name of `LEFTOVERS`, `ADVICE`, `PLACES` or `OUTPUTS`.
        channels: Channel name to its folder.
        outputs: The folders that the variables in `OUTPUTS` name.
    """
    if value.lower() in UNSET:
        return f"{name} has no value", ""
    if name in ADVICE:
        return "", ADVICE[name]
    if name in PLACES:
        if _is_in_place(Path(value), name, channels):
            return f"{name} is where a channel lies", ""
        return "", _BY_CHANNELS.format(next(iter(PLACES[name]), "train"))
    if name in OUTPUTS:
        variable = OUTPUTS[name]
        if outputs.get(variable) == Path(value):
            return f"{name} is where results go", ""
        return "", f"Leave it out: the variable {variable} says where results go."
    values, line, remedy = LEFTOVERS[name]
    if values is None or value.lower() in values:
        return f"{name}={value} changes nothing: {line}", ""
    return "", remedy


def _is_in_place(path: Path, name: str, channels: Mapping[str, Path]) -> bool:
    """Whether what lies at `path` is all that the recipe reads of the channels it may lie in."""
    place = PLACES[name]
    # A channel of any name is for training where it is the only one.
    is_only = len(channels) == 1
    fitting = [
        folder
        for key, folder in channels.items()
        if not place or key.lower() in place or (is_only and place is _TRAIN)
    ]
    if not name.endswith("file"):
        return path in fitting or {folder.parent for folder in fitting} == {path}
    holding = [folder for folder in fitting if folder in path.parents]
    visible = [
        each
        for each in (holding[0].rglob("*") if holding else ())
        if each.is_file() and not each.name.startswith((".", "_"))
    ]
    return visible == [path]
