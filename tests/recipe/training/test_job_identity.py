"""Which hyperparameters a resume may not change."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import TrainingArguments

from recipe.arguments import parse
from recipe.errors import CheckpointError
from recipe.hyperparameters import FIELDS, Hyperparameters
from recipe.option_fields import Effect, option
from recipe.paths import from_environment
from recipe.plan import trainer_arguments
from recipe.runtime import distribution
from recipe.runtime.device import Device
from recipe.settings import DataSettings
from recipe.storage import checkpoints
from recipe.training import job_identity


def test_no_new_name_is_without_effect_by_chance() -> None:
    # What the patterns of job_identity cover. A new name may have an effect: look before you add it.
    COVERED = """
        activation_checkpointing activation_checkpointing_kwargs bf16_full_eval dataloader_drop_last
        dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor do_eval
        do_predict do_train eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
        eval_steps eval_strategy eval_use_gather_object fp16_full_eval fsdp fsdp_config
        gradient_checkpointing gradient_checkpointing_kwargs hub_always_push hub_model_id
        hub_private_repo hub_revision hub_strategy hub_token include_for_metrics
        include_num_input_tokens_seen log_level log_level_replica log_on_each_node logging_first_step
        logging_nan_inf_filter logging_steps logging_strategy push_to_hub save_minutes
        save_on_each_node save_only_model save_steps save_strategy save_total_limit trackio_bucket_id
        trackio_space_id trackio_static_space_id
        lora_save max_flips max_score_loss output_dir per_device_eval_batch_size price_per_hour
        quantize tune_thresholds
    """
    # A new field of DataSettings must change the fingerprint of the samples before it is listed here.
    HASHED = """
        chat_template_kwargs class_names columns completion_column doc_stride encoding hf_token negative_columns
        header ignore_columns missing_labels
        image_column label_column label_separator long_texts max_length
        max_target_length messages_column mlm_probability model_name_or_path num_labels packing
        per_device_train_batch_size problem_type prompt_column sample_by
        source_lang source_prefix target_lang text_column text_pair_column train_on_prompt
        trust_remote_code
        drop_duplicates validation_date validation_group validation_split
    """
    OF_TRANSFORMERS_4 = """
        fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap include_inputs_for_metrics
        include_tokens_per_second logging_dir push_to_hub_model_id push_to_hub_organization
        push_to_hub_token save_safetensors
    """
    trainer = {item.name for item in dataclasses.fields(TrainingArguments)}
    hashed = {name for name, effect in job_identity._EFFECTS.items() if effect is Effect.SAMPLES}
    assert set(HASHED.split()) == hashed
    listed = {name for name in job_identity.WITHOUT_EFFECT if "*" not in name}
    covered = {name for name in {*FIELDS, *trainer} if not job_identity.counts(name)}
    covered -= (
        listed
        | hashed
        | {
            "predict_with_generate",
            "do_generate",
            "generated_rows",
            "generated_scores",
            "num_beams",
        }
    )
    assert covered <= {*COVERED.split(), *OF_TRANSFORMERS_4.split()}


def test_a_hyperparameter_counts_until_it_is_declared_without_effect() -> None:
    assert option(1.0, "Share of the rows to train on.").metadata["effect"] is Effect.WEIGHTS
    ours = {name for name, item in FIELDS.items() if item.metadata["effect"] is Effect.WEIGHTS}
    ours -= {*DataSettings.__annotations__}
    assert {"lora_r", "class_weight", "listwise"} <= ours
    assert all(map(job_identity.counts, ours))


def arguments(given: Hyperparameters, tmp_path: Path) -> TrainingArguments:
    device = Device(kind="cpu", bf16=False, reason="", processes=1, threads=1)
    folders = from_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    return trainer_arguments.make(given, folders, device, distribution.Distribution())


def job(tmp_path: Path, *argv: str) -> dict[str, object]:
    given = parse(argv)
    actual = job_identity.decisive(given.values, arguments(given, tmp_path))
    assert json.loads(json.dumps(actual)) == actual
    return actual


@pytest.mark.parametrize(
    "argv",
    [
        ["--class_weight", "balanced"],
        ["--lora_alpha", "8", "--lora_r", "4"],
        ["--adam_beta1", "0.8"],
        ["--optim_args", "momentum=0.9"],
        ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--lr_scheduler_type", "cosine"],
        ["--data_seed", "7"],
        ["--task", "causal-lm"],
        ["--compile"],
        ["--early_stopping_patience", "2"],
    ],
)
def test_what_changes_the_weights_is_refused_either_way(tmp_path: Path, argv: list[str]) -> None:
    before, after = job(tmp_path), job(tmp_path, *argv)
    for was, now in ((before, after), (after, before)):
        with pytest.raises(CheckpointError, match=argv[0].removeprefix("--")):
            checkpoints.check_same(checkpoints.Checkpoint(tmp_path, was, False), now)


@pytest.mark.parametrize(
    "argv",
    [
        ["--logging_steps", "1"],
        ["--eval_strategy", "no"],
        ["--price_per_hour", "3"],
        ["--dataloader_num_workers", "2"],
        ["--hf_token", "hf_planted"],
        ["--output_dir", "/tmp/elsewhere"],
        ["--lora_save", "adapter"],
        ["--gradient_accumulation_steps", "2"],
        ["--fsdp", "True"],
    ],
)
def test_what_changes_no_weight_is_not(tmp_path: Path, argv: list[str]) -> None:
    assert job(tmp_path, *argv) == job(tmp_path)


def test_evaluations_count_if_they_decide(tmp_path: Path) -> None:
    steps = ["--eval_strategy", "steps", "--save_strategy", "steps", "--eval_steps", "2"]
    for decided in (
        ["--early_stopping_patience", "2"],
        ["--early_stopping_patience", "2", "--load_best_model_at_end", "False"],
        ["--load_best_model_at_end", "True"],
        ["--lr_scheduler_type", "reduce_lr_on_plateau"],
    ):
        assert job(tmp_path, *decided) != job(tmp_path, *decided, *steps, "--save_steps", "2")
    plain = ["--lr_scheduler_type", "constant"]
    assert job(tmp_path, *plain) == job(tmp_path, *plain, *steps, "--save_steps", "2")
