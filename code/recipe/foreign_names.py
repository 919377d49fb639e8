"""Translate the hyperparameters of other trainers, or explain why they are not supported.

The names come from transformers' example scripts (run_glue.py, run_clm.py, run_qa.py ...), older
releases of TrainingArguments, TRL, Axolotl, LLaMA-Factory, AutoTrain, SetFit, SageMaker JumpStart,
Ultralytics, scikit-learn, recipes of HyperPod, and notebooks of Hugging Face and AWS. There are
three kinds: names with an equivalent (`RENAMED`, `REWRITTEN`); names that have no effect for some
or all values, which is logged (`LEFTOVERS`); and names that are refused with advice (`ADVICE`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


def _rows(table: str) -> Iterator[list[str]]:
    """Yield each name of a row with the row's cells; indented lines continue a row."""
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        names, *cells = line.split(" | ")
        for name in names.split():
            yield [name, *cells]


RENAMED: Mapping[str, str] = {name: new[0] for name, *new in _rows("""
evaluation_strategy | eval_strategy
no_cuda | use_cpu
per_gpu_train_batch_size micro_batch_size batch | per_device_train_batch_size
per_gpu_eval_batch_size valid_batch_size test_batch_size val_batch_size |
  per_device_eval_batch_size
gradient_accumulation | gradient_accumulation_steps
num_epochs epoch max_epochs | num_train_epochs
model_checkpoint pretrained_model_name_or_path base_model hf_model_name_or_path model |
  model_name_or_path
lr0 initial_learning_rate learning_rate_init | learning_rate
label_column_name target_column | label_column
image_column_name | image_column
text_column_name dataset_text_field | text_column
max_input_length max_source_length max_sequence_length sequence_length sequence_len cutoff_len
  max_context_length encoder_seq_length max_seq_len max_context_width max_len | max_length
generation_max_length val_max_target_length | max_target_length
prompt_text_column | prompt_column
scheduler lr_scheduler | lr_scheduler_type
optimizer | optim
adam_beta_1 beta_1 | adam_beta1
adam_beta_2 | adam_beta2
target_modules | lora_target_modules
log | report_to
token access_token hf_hub_token hf_access_token | hf_token
lora_rank | lora_r
add_tokens new_tokens tokens | added_tokens
label_smoothing | label_smoothing_factor
validation_split_ratio val_set_size val_size test_split_size validation_size eval_size
  validation_fraction | validation_split
groups | validation_group
class_weights | class_weight
sample_packing neat_packing | packing
random_state | seed
workers | dataloader_num_workers
deterministic | full_determinism
scoring | metric_for_best_model
n_iter_no_change | early_stopping_patience
tol | early_stopping_threshold
max_doc_stride | doc_stride
name | run_name
val | do_eval
save_top_k | save_total_limit
log_every_n_steps | logging_steps
""")}  # fmt: skip
"""Names with the same meaning."""

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
UNSET = ("", "none", "null")
"""Lower-case texts that mean no value."""


_SHARES = (
    *("warmup_ratio", "warmup_proportion", "lr_warmup_ratio"),
    *("warmup_steps_ratio", "warmup_steps_fraction"),
)
_VALUES: Mapping[str, Mapping[tuple[str, ...], tuple[str, str]]] = {
    "mixed_precision": {
        ("bf16",): ("bf16", "True"),
        ("fp16",): ("fp16", "True"),
        ("no",): ("bf16", "False"),
    },
    "merge_weights": {_TRUE: ("lora_save", "merged"), _FALSE: ("lora_save", "adapter")},
    "pissa_init": {_TRUE: ("init_lora_weights", "pissa"), _FALSE: ("init_lora_weights", "")},
    "use_gradient_checkpointing": {
        (*_TRUE, "unsloth"): ("gradient_checkpointing", "True"),
        _FALSE: ("gradient_checkpointing", "False"),
    },
    "disable_gradient_checkpointing": {
        _TRUE: ("gradient_checkpointing", "False"),
        _FALSE: ("gradient_checkpointing", "True"),
    },
    "do_regression": {_TRUE: ("problem_type", "regression"), _FALSE: ("problem_type", "")},
    "enable_fsdp": {_TRUE: ("fsdp", "True"), _FALSE: ("fsdp", "False")},
    "adafactor": {_TRUE: ("optim", "adafactor"), _FALSE: ("optim", "")},
}
"""Names whose values are translated, too."""
_PERCENT = "validation_split_percentage"
_TARGETS = "lora_target"
_SHARDING = "mp_parameters"
"""SageMaker's model parallelism, whose own parameters are not used."""
REWRITTEN = frozenset({*_SHARES, *_VALUES, _SHARDING, _PERCENT, _TARGETS})


def rewritten(name: str, value: str) -> tuple[str, str] | str:
    """Translate a name in `REWRITTEN` and its value; return a remedy for other values."""
    if name == _SHARDING:
        return "fsdp", "False" if value == "{}" else "True"
    if name == _TARGETS:
        return "lora_target_modules", "all-linear" if value == "all" else value
    if name == _PERCENT:
        try:
            return "validation_split", f"{float(value) / 100:g}"
        except ValueError:
            return "Give validation_split, a share such as 0.1."
    if name in _SHARES:
        try:
            is_share = 0 <= float(value) < 1
        except ValueError:
            is_share = False
        return ("warmup_steps", value) if is_share else (
            "Give a share of all steps, from 0 to below 1; or warmup_steps."
        )  # fmt: skip
    known = {written: here for values, here in _VALUES[name].items() for written in values}
    return known.get(value.lower()) or f"Give {' or '.join(v[0] for v in _VALUES[name])}."


_WORDS: Mapping[str, tuple[str, ...]] = {"on": _TRUE, "off": (*_FALSE, "-1", "off")}
LEFTOVERS: Mapping[str, tuple[tuple[str, ...] | None, str, str]] = {
    name: (
        None
        if values == "any"
        else tuple(value for word in values.split() for value in _WORDS.get(word, (word,))),
        line,
        remedy[0] if remedy else f"Leave it out: {line}.",
    )
    for name, values, line, *remedy in _rows("""
overwrite_output_dir exist_ok | any | a stopped job resumes from its checkpoints, unless
  resume_from_checkpoint=False
logging_dir | any | TensorBoard's files go to output/tensorboard
save_safetensors | on | weights are saved as safetensors | Leave it out: pickled weights are not
  written.
group_by_length | any | batches are balanced by length already
pad_to_max_length pad_to_multiple_of pad_to_sequence_len padding | any | texts are packed, or padded
  to few
  lengths
overwrite_cache skip_prepare_dataset cache | any | nothing is cached between jobs
cache_dir dataset_prepared_path | any | the variable HF_HOME sets the folder of the hub's files
preprocessing_num_workers dataset_num_proc dataset_processes n_jobs | any | the tokenizer uses all
  cores
use_auth_token hf_use_auth_token | on off | a model that needs a token takes it from hf_token or the
  variable HF_TOKEN | Give it as hf_token.
use_fast_tokenizer use_fast tokenizer_use_fast | on | the model's tokenizer is used | Leave it out:
  only fast tokenizers are used.
ignore_mismatched_sizes reinitialize_top_layer | any | a head that does not fit the labels is newly
  initialised
ignore_pad_token_for_loss | on | padding is never learned | Leave it out.
line_by_line | any | sample_by sets the unit of .txt files, and several texts are packed into one
  row
instruction_tuned chat_dataset multi_turn | any | the columns of the data decide what is learned
add_input_output_demarcation_key | off | prompts are those of the data | Write ### Response: at the
  end of the prompts, or of the prompt in template.json.
mlm | on | the task implies it | Give task=masked-lm, or task=causal-lm.
shuffle_train_dataset shuffle_dataset shuffle_merged_datasets shuffle | any | the texts of each
  epoch are
  shuffled
low_cpu_mem_usage | any | the model is loaded once for each process
model_revision revision_of_model | main | main is loaded | Download that revision and give it as the
  channel model.
load_in_8bit int8_quantization quantization use_int4 | off | no weights are quantized | Leave it
  out: lora_r trains with little memory, and load_in_4bit=True with less.
torch_dtype dtype | auto float32 torch.float32 fp32 | weights are loaded in float32 | Leave it out:
  weights are loaded in float32, and bf16=True computes in bfloat16.
use_flash_attention_2 flash_attention flash_attn xformers_attention sdp_attention | off | attention
  is chosen by what the device and the packing need
use_peft peft use_lora peft_type adapter | off | all weights are trained | Give lora_r, the rank of
  LoRA's adapters.
padding_free | any | several texts are packed into one row
add_eos_token | on | the end token follows each text | Leave it out.
local_rank | any | torchrun sets the rank
fp16_opt_level half_precision_backend fp16_backend | any | torch's own mixed precision is used
hub_strategy | end every_save | the model is pushed once, after training
save_steps_to_hub | off | nothing is pushed | Leave it out.
project_name | any | SageMaker stores the model with the job
train_split train_split_name dataset_train_split train_on_split | train | channels and files name
  the splits | Data
  comes in channels: give the file in a channel called train, and leave this out.
valid_split validation_split_name dataset_test_split | validation valid test | channels and files
  name the splits | Data comes in channels: give the file in a channel called test, and leave this
  out.
test_split_name | test | channels and files name the splits | Data comes in channels: give the file
  in a channel called test, and leave this out.
n_gpu num_gpus device_map ddp | any | there is one process for each GPU
forward_prefetch delayed_param enable_loss_parallel | any | it changes no result, and FSDP2 has
  its own
use_cuda | on | available GPUs are used | Give use_cpu=True.
finetuning_type | full | all weights are trained | Give lora_r, the rank of LoRA's adapters, or
  freeze_layers.
resize_vocab | any | embeddings are made for added_tokens
assistant_only_loss completion_only_loss | on | completions and the assistant's turns are learned |
  Give train_on_prompt=True to learn prompts, too.
label_all_tokens | off | the first token of each word is learned | Leave it out: only the first
  token of each word is learned.
version_2_with_negative | any | the data shows which questions have no answer
n_best_size | any | all spans are compared
max_answer_length | 30 | it is the value of evaluations | Leave it out: it is 30 tokens; a served
  model takes max_answer_len.
null_score_diff_threshold | 0 0.0 | it is the value of evaluations | Leave it out: no answer wins if
  its score is the highest.
lora_target_linear | on | all linear layers are adapted | Give lora_target_modules.
lora_task_type | any | the task implies it
use_bnb_nested_quant double_quantization | on | scales are quantized
bnb_4bit_quant_type | nf4 | weights are NF4
quantization_method | bnb bitsandbytes | bitsandbytes quantizes
stratify | any | rows of each class alike are held out
pretrained | on | training starts from the model's weights | Leave it out: training starts from the
  model's weights.
train_from_scratch train_only_top_layer | off | all weights of the model are trained further | Give
  freeze_layers to train the last layers only.
compute_accuracy return_entity_level_metrics | any | all metrics of the task are computed
plots plot_loss | any | output/data/report.html has the curves
save | on | the model is always saved | Leave it out: the model is always saved.
verbose profile | any | the log has the progress
device | 0 auto cuda gpu | available GPUs are used | Give use_cpu=True, or set CUDA_VISIBLE_DEVICES.
upcast_layernorm | any | weights are kept in float32
is_llama_derived_model lora_fan_in_fan_out jit_mode_eval sortish_sampler | any | what fits the model
  is chosen
distributed_backend | any | it follows from the device
reference_free precompute_ref_log_probs sync_ref_model | off | the reference is the model at the
  start | Give it in trl_args.
auto_resume_from_checkpoints resume | on | a stopped job resumes automatically | Give
  resume_from_checkpoint=False.
""")
}
"""Values without effect (None: all), the note about them, and the remedy for other values."""

ADVICE: Mapping[str, str] = {name: advice[0] for name, *advice in _rows("""
dataset_path data_path data_dir dataset_dir input_dir data train_dir training_dir train_path
  train_data_dir train_file train_data_file training_file train_data_path | Data comes in
  channels: give the file in a channel called train, and leave this out.
test_dir eval_dir validation_dir val_dir test_path valid_dir validation_file test_file eval_file
  eval_data_file validation_data_path | Data comes in channels: give the file in a channel called
  test, and leave this out.
model_dir model_output_dir output_data_dir export_dir | Leave it out: SageMaker names the folders of
  results.
dataset_name dataset datasets eval_dataset data_files | Data comes in channels: save the data set
  (to_parquet, save_to_disk) to S3 and give that prefix as the channel called train, evaluation data
  as the channel called test.
dataset_config_name dataset_config | Give the S3 prefix of that folder as the channel.
task_name | The data determines the task: give GLUE's files as channels train and test.
tokenizer_name | Leave it out: the model's tokenizer is used.
config_name | Leave it out: the configuration is the model's.
model_init_kwargs | Change config.json in the channel called model.
model_type | Give the model itself by model_name_or_path.
attn_implementation eager_attention flex_attention | Leave it out: it is chosen by what the device
  and the packing need.
block_size | Give max_length: texts are split at that many tokens, and the pieces packed.
model_max_length | Give max_length.
log_interval | Give logging_steps: a share of all steps below 1, steps from 1.
max_train_samples max_eval_samples max_val_samples max_predict_samples max_samples
  fraction limit_val_batches | Give a channel
  with as many rows as you want to use.
patience early_stopping use_early_stopping | Give early_stopping_patience: the evaluations
  without improvement after which training stops.
hidden_dropout_prob attention_probs_dropout_prob hidden_dropout attention_dropout
    classifier_dropout dropout_rate | Set it in the config.json of the model, given as the channel
  model.
deduplicate remove_duplicates | Give drop_duplicates=True.
metric_name metric | Give metric_for_best_model: all metrics of the task are computed.
shuffle_seed train_data_split_seed | Give seed.
text_column_names sentence1_column sentence2_column | Give text_column: one column, or a,b for a
  pair of texts.
checkpoints checkpoint_dir checkpoint_path | Give output_dir, or leave it out: /opt/ml/checkpoints.
lang | Give source_lang and target_lang.
forced_bos_token | Give target_lang.
keep_linebreaks | Give sample_by: line, paragraph or document.
labels label_list | Leave it out: the labels are found in the data; class_names names numbers.
num_classes binarize_labels | Give num_labels, or leave it out: the labels are found in the data.
num_iterations head_learning_rate body_learning_rate end_to_end | This recipe trains the whole
  classifier; SetFit's contrastive phase is not supported.
use_amp amp precision | Give bf16=True or fp16=True.
world_size nproc_per_node | Set the variable AMPHORA_NPROC_PER_NODE.
chat_template | Put it into the tokenizer_config.json of the model.
trainer | Give task=causal-lm, and columns by their names. NeuronTrainer, which neither evaluates
  nor resumes, needs your own script (docs/TRAINIUM.md).
max_prompt_length | Give max_length: prompt and answer together are cut at its
  end.
global_batch_size | Give per_device_train_batch_size, the samples of a process, and
  gradient_accumulation_steps.
stride | Leave it out: a text is cut at max_length.
mini_batch_size | Give gradient_checkpointing=True, or a lower per_device_train_batch_size.
dropout | Change the model's config.json; lora_dropout is that of LoRA.
eos_token pad_token special_tokens tokenizer_type chat_template_path template | Leave it out:
  it is the tokenizer's own (tokenizer_config.json in the channel called model).
chosen_column rejected_column rejected_text_column | Give columns=chosen:...,rejected:... with the
  names of the columns.
ref_model model_ref | Leave it out: the reference is the model at the start; with lora_r it is only
  an adapter.
reward_model | Give reward_funcs: exact_answer, format, length, or functions of rewards.py, which
  may load a model.
stage rl | Give task: causal-lm (sft, pt), dpo, kto, orpo, reward (rm) or grpo.
use_galore use_unsloth unsloth loraplus_lr_ratio use_badam badam_mode relora_steps mixture_of_depths
  shift_attn embedding_lr curriculum_sampling lora_plus_lr_ratio | Leave it out: all weights are
  trained, or LoRA's with lora_r; for others use your own script (docs/TRAINING.md).
freeze_trainable_layers freeze_trainable_modules freeze_extra_modules unfrozen_parameters
  unfreeze_layers freeze_base freeze_base_model freeze_encoder freeze_embeds freeze_embeddings
  freeze freeze_vision_tower | Give what stays unchanged: freeze_layers, or names in freeze_modules.
adapter_name_or_path lora_model_dir peft_model_id peft_model adapter_model | Give the adapter as
  model_name_or_path or as the channel model, and its base as the channel base_model.
create_new_adapter merge_lora | Give merge_adapter=True, which merges the adapter to start from.
loftq_config use_loftq | Give init_lora_weights=loftq.
new_special_tokens add_special_tokens trainable_token_indices | Give added_tokens, whose embeddings
  are trained, or modules_to_save for all.
rope_scaling_factor rope_scaling_type rope_type yarn | Give rope_scaling={"rope_type": "yarn",
  "factor": 4}.
quantization_bit | Give load_in_4bit=True with lora_r and
  lora_save=adapter.
pure_bf16 bfloat16 float16 fp8 | Leave it out: weights are kept in float32, and bf16=True computes
  in bfloat16.
wandb_project use_wandb use_mlflow use_tensorboard | Give report_to, such as mlflow, tensorboard or
  wandb.
saves_per_epoch evals_per_epoch val_check_interval val_every_n_steps checkpoint_every_n_steps |
  Give save_steps, or eval_steps: below 1 a share of all steps.
eval_packing eval_sample_packing packing_strategy | Leave it out, or give packing.
mask_history roles_to_train | Give train: False on the turns of messages
  that are not learned.
pooling pooling_mode | Give the folder of a sentence-transformers model whose pooling is the one you
  want; an encoder is pooled by the mean.
fsdp_transformer_layer_cls_to_wrap shard_degree sharding_strategy tensor_model_parallel_degree
  expert_model_parallel_degree use_smp_model | Give fsdp=True: each layer of the model is sharded.
rank peft_scheme | Give lora_r and lora_alpha, the rank and alpha of LoRA's adapters.
min_lr decay_steps | Give lr_scheduler_type=cosine_with_min_lr and lr_scheduler_kwargs={"min_lr":
  1e-6}.
context_parallel context_parallel_size context_parallel_degree sequence_parallel_size cp_size
  sp_size parallelism_config_cp_size parallelism_config_sp_size | A text is not split between GPUs,
  since accelerate's attention for that takes one text in each row, and rows are packed: give a
  lower max_length or gradient_checkpointing=True, or your own script with ParallelismConfig.
activation_offloading activation_loading_horizon | Give gradient_checkpointing=True.
streaming dataset_streaming | Leave it out: tokens are made before the first step, once for a host,
  and mapped from its disk. Larger data needs your own script, with datasets' IterableDataset
  (load_dataset(streaming=True)).
whole_word_masking whole_word_mask wwm | Leave it out: tokens are masked one by one.
default_system dataset_kwargs | Leave it out: only the messages of the data are learned.
enable_thinking | Give chat_template_kwargs={"enable_thinking": false}.
rpo_alpha ld_alpha f_divergence_type ref_model_mixup_alpha truncation_mode disable_dropout top_p
  vllm_mode vllm_gpu_memory_utilization scale_rewards epsilon epsilon_high importance_sampling_level
  mask_truncated_completions log_completions generate_during_eval | Give it in trl_args, as JSON:
  trl_args={"name": value}.
dpo_label_smoothing | Give trl_args={"label_smoothing": 0.1}.
simpo_gamma pref_ftx ppo_score_norm | Give loss_type, and TRL's other arguments in trl_args.
kto_chosen_weight kto_rejected_weight | Give trl_args={"desirable_weight": 1, "undesirable_weight":
  1}.
enable_liger_kernel liger_rope cut_cross_entropy lora_mlp_kernel lora_qkv_kernel plugins | Leave it
  out: such kernels replace forward passes that packed batches need; torch_compile=True fuses the
  same operations.
wandb_entity wandb_run_id | Set the variable WANDB_ENTITY or WANDB_RUN_ID.
use_swanlab | Give report_to.
tokenized_path buffer_size mix_strategy interleave_probs | Leave it out: all files of a channel are
  read, and their rows shuffled.
tokens_column tags_column | Give columns=tokens:...,tags:... with the names of the columns.
field_messages message_property_mappings | Give messages_column.
username | Give hub_model_id=owner/name.
imgsz image_max_pixels image_resize_interpolation | Leave it out: the size is that of the model's
  preprocessor_config.json.
hsv_h hsv_s hsv_v degrees translate shear perspective flipud fliplr mosaic close_mosaic mixup
  auto_augment erasing crop_fraction multi_scale | Give augmentation: none, crop or flip.
box cls dfl single_cls rect overlap_mask mask_ratio | Leave it out: images are classified, and no
  boxes are found in them.
cos_lr lrf cosine_min_lr_ratio lr_quadratic_warmup apply_warmup_learning_rate | Give
  lr_scheduler_type, such as cosine, and warmup_steps.
warmup_epochs warmup_momentum warmup_bias_lr | Give warmup_steps: steps, or below 1 a share of all.
momentum rho nbs | Leave it out: AdamW is used, whose momentum is adam_beta1.
save_period | Give save_strategy=epoch, or save_steps.
time | Give max_minutes.
neuron_parallel_degree | Leave it out: each device has the whole model.
train_size | Give validation_split, the share that is held out.
max_iter | Give num_train_epochs or max_steps.
penalty C alpha l2 regularizers_l2 | Give weight_decay; lora_alpha is that of LoRA.
warm_start | Give the trained model as model_name_or_path, or as the channel model.
cv n_splits | Give a job for each fold, with its rows as the channel test.
sample_weight | Give class_weight, which weights classes.
solver activation hidden_layer_sizes n_estimators max_depth max_features ngram_range min_df max_df
  stop_words lowercase | Leave it out: the model reads texts by its own tokenizer and layers.
""")}  # fmt: skip
"""Names that are refused, and what to do instead."""

KNOWN = frozenset({*RENAMED, *REWRITTEN, *LEFTOVERS, *ADVICE})


def note_and_remedy(name: str, value: str) -> tuple[str, str]:
    """Return a note for a name of `LEFTOVERS` or `ADVICE` that has no effect, or the remedy for a
    refused one; else ""."""
    if value.lower() in UNSET:
        return f"{name} has no value", ""
    if name in ADVICE:
        return "", ADVICE[name]
    values, line, remedy = LEFTOVERS[name]
    if values is None or value.lower() in values:
        return f"{name}={value} has no effect: {line}", ""
    return "", remedy
