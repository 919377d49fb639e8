import dataclasses
import json
from pathlib import Path

import pytest

from amphora.common.errors import ConfigError
from amphora.contract import job, sm_variables
from recipe import arguments, foreign_names, paths
from recipe.errors import CheckpointError, HyperparameterError
from recipe.hyperparameters import FIELDS, GROUPS, REFUSED, fields_by_topic
from recipe.plan import trainer_arguments
from recipe.runtime import device
from recipe.runtime.distribution import Distribution
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--epochs", "2"], "num_train_epochs", 2.0),
        (["--epochs", "2", "--num_train_epochs", "2.0"], "num_train_epochs", 2.0),
        (["--train-batch-size=8"], "per_device_train_batch_size", 8),
        (["--model_id", "a/b"], "model_name_or_path", "a/b"),
        (["--bf16"], "bf16", True),
        (["--trust_remote_code", "--seed", "3"], "trust_remote_code", True),
        (["--max_length", ""], "max_length", None),
        (["--mixed_precision", "no"], "bf16", False),
        (["--warmup_ratio", "0.06"], "warmup_steps", 0.06),
        (["--augmentation", "none"], "augmentation", "none"),
        (["--query_prompt", ""], "query_prompt", ""),
        (["--document_prompt", "none"], "document_prompt", ""),
        (["--save_total_limit", "None"], "save_total_limit", None),
        (["--missing_labels", "NULL"], "missing_labels", "NULL"),
        (["--merge_weights", "False"], "lora_save", "adapter"),
        (["--lora_r", "4", "--lora_target", "all"], "lora_target_modules", "all-linear"),
        (["--lora_r", "4", "--additional_target", "lm_head"], "modules_to_save", "lm_head"),
        (["--do_regression", "True"], "problem_type", "regression"),
        (["--dataset_text_field", "body"], "text_column", "body"),
        *((["--compile", value], "compile", True)
          for value in ("True", "true", "TRUE", "1", "yes", "y", "t")),
        *((["--packing", value], "packing", False)
          for value in ("False", "false", "FALSE", "0", "no", "n", "f")),
    ],
)  # fmt: skip
def test_a_value_reaches_its_field(argv: list[str], name: str, value: object) -> None:
    assert arguments.parse(argv).values[name] == value


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--evaluation_strategy", "no"], "eval_strategy", "no"),
        (["--eval_strategy", "none"], "eval_strategy", "no"),
        (["--gradient_accumulation", "2"], "gradient_accumulation_steps", 2),
        (["--mixed_precision", "fp16"], "fp16", True),
        (["--load_best_model_at_end"], "load_best_model_at_end", True),
        (["--label_smoothing_factor", "0.1"], "label_smoothing_factor", 0.1),
        (["--torch_compile_mode", "default"], "torch_compile_mode", "default"),
        *((["--fsdp", value], "fsdp", True) for value in ("True", "TRUE", "1", "yes", "y", "t")),
        (["--fsdp", "False"], "fsdp", False),
    ],
)
def test_other_training_arguments_pass_through(argv: list[str], name: str, value: object) -> None:
    assert arguments.parse(argv).passed == {name: value}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--epoches", "3"], ["epoches", "'3'", "Did you mean", "epochs"]),
        (["--gradient_accumulation_step", "1"], ["gradient_accumulation_steps"]),
        (["--qqqqqqqq", "1"], ["qqqqqqqq", "--help"]),
        (["--model.peft.rank", "8"], ["model.peft.rank", "Give lora_r"]),
        (["--trainer.max_epochs", "8"], ["trainer.max_epochs", "Give num_train_epochs"]),
        (["--run.name", "a"], ["run.name", "run_name"]),
        (["--model.forward_prefetch", "a"], ["model.forward_prefetch", "Leave it out"]),
        (["--shard_degree", "8"], ["shard_degree", "Give fsdp=True"]),
        (["--epochs", "many"], ["num_train_epochs", "'many'", "float"]),
        (["--bf16", "perhaps"], ["bf16", "'perhaps'"]),
        (["--eval_strategy", "never"], ["eval_strategy", "'never'", "epoch"]),
        (
            ["--epochs", "2", "--num_train_epochs", "3"],
            ["num_train_epochs", "2.0", "3.0", "epochs"],
        ),
        (["--lr", "0"], ["learning_rate", "above 0"]),
        (["--max_length", "2"], ["max_length", "4 or more"]),
        (["stray"], ["'stray'", "--key value"]),
        (["--lr", "nan"], ["learning_rate", "nan", "above 0"]),
        (["--lora_r", "8", "--lora_dropout", "1.5"], ["lora_dropout", "1.5", "from 0 to below 1"]),
        (["--batch_size", "8.5"], ["per_device_train_batch_size", "'8.5'", "int"]),
        (["--load_in_4bit", "True"], ["load_in_4bit", "lora_r"]),
        (["--save_only_model", "True"], ["save_only_model", "could not resume exactly"]),
        (["--lr_scheduler_kwargs", "0.5"], ["lr_scheduler_kwargs", "not an object", '{"key": 1}']),
        (["--gradient_checkpointing_kwargs", "{no}"], ["gradient_checkpointing_kwargs", "JSON"]),
        (["--warmup_ratio", "10"], ["warmup_ratio", "'10'", "share of all steps", "warmup_steps"]),
        (["--mixed_precision", "fp8"], ["mixed_precision", "'fp8'", "bf16 or fp16 or no"]),
        (["--push_to_hub"], ["push_to_hub=True", "hub_model_id=owner/name"]),
        (["--save_safetensors", "False"], ["save_safetensors", "pickled"]),
        (["--dataset_name", "imdb"], ["dataset_name", "'imdb'", "channel called train"]),
        (["--checkpoints", "5"], ["checkpoints", "'5'", "/opt/ml/checkpoints"]),
        (["--dataloader_drop_last"], ["dataloader_drop_last", "no text is left out"]),
        (["--do_train", "False"], ["do_train=False", "do_eval=True or do_predict=True"]),
        (["--task", "masked-lm", "--do_predict"], ["do_predict", "masked-lm"]),
        (["--model_revision", "v2"], ["model_revision", "channel model"]),
        (["--task", "speech"], ["task", "'speech'", "causal-lm"]),
        (["--task", "causal-lm", "--label_column", "x"], ["label_column", "'x'", "task=text-cl"]),
        (["--task", "causal-lm", "--label_smoothing_factor", "0.1"], ["label_smoothing_factor"]),
        (
            ["--task", "text-classification", "--prompt_column", "x"],
            ["prompt_column", "'x'", "task=causal-lm"],
        ),
        (
            ["--task", "causal-lm", "--text_column", "a", "--prompt_column", "b"],
            ["text_column=a", "prompt_column=b"],
        ),
        (["--torch_compile_mode", "max-autotune"], ["torch_compile_mode", "'max-autotune'"]),
        (["--lora_alpha", "8", "--lora_dropout", "0.1"], ["Without lora_r", "lora_dropout"]),
        (["--peft", "False", "--lora_r", "8"], ["peft=False", "lora_r=8"]),
        (["--save_steps", "-1"], ["save_steps", "above 0"]),
        (["--neftune_noise_alpha", "5", "--packing", "True"], ["neftune_noise_alpha", "packing"]),
        (
            ["--accelerator_config", '{"gradient_accumulation_kwargs": {"num_steps": 3}}'],
            ["num_steps", "gradient_accumulation_steps"],
        ),
        (["--task", "text-classification", "--long_texts", "split"], ["long_texts", "ModernBERT"]),
        (
            ["--hub_model_id", "a/b", "--push_to_hub", "True", "--hub_revision", "v2"],
            ["hub_revision", "'v2'"],
        ),
        (["--parallelism_config", '{"cp_size": 2}'], ["cp_size", "takes one text in each row"]),
        (["--task", "preference"], ["task has value 'preference'", "task=dpo", "task=reward"]),
        (["--task", "causal-lm", "--beta", "0.2"], ["beta", "task=dpo", "task=grpo"]),
        (["--chosen_column", "good"], ["columns=chosen:"]),
        # Values that would train something else.
        (["--lr", "5e5"], ["at most 1"]),
        (["--encoding", "latin-one"], ["encoding has value 'latin-one'", "windows-1252"]),
        (["--encoding", "base64"], ["encoding has value 'base64'"]),
        (["--encoding", "unicode_escape"], ["encoding has value 'unicode_escape'"]),
        (["--encoding", "UTF7"], ["encoding has value 'UTF7'"]),
        (
            ["--metric_for_best_model", "accuracy", "--greater_is_better", "False"],
            ["would keep the worst weights by accuracy"],
        ),
        (["--greater_is_better", "True"], ["would keep the worst weights by loss"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_remedy(
    argv: list[str], words: list[str]
) -> None:
    with refused(HyperparameterError, *words):
        arguments.parse(argv)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version_2_with_negative", "True", ""),
        ("max_answer_length", "50", "it is 30 tokens"),
        ("assistant_only_loss", "False", "train_on_prompt=True"),
        ("add_input_output_demarcation_key", "True", "Write ### Response: at the end"),
        ("instruction_tuned", "True", ""),
        ("global_batch_size", "64", "Give per_device_train_batch_size"),
        ("enable_thinking", "False", "chat_template_kwargs={"),
        ("quantization_bit", "4", "load_in_4bit=True"),
        ("pooling", "cls", "pooling is the one you want"),
        ("cp_size", "2", "takes one text in each row"),
        ("lisa_step_interval", "1", "--help"),
        ("imgsz", "640", "preprocessor_config.json"),
        ("rpo_alpha", "1", "trl_args={"),
        ("n_jobs", "-1", ""),
        ("C", "0.5", "weight_decay"),
        ("train_from_scratch", "True", "freeze_layers"),
    ],
)
def test_names_of_other_trainers_have_a_line(name: str, value: str, words: str) -> None:
    if not words:
        assert arguments.parse([f"--{name}", value]).notes[0].startswith(name)
        return
    with pytest.raises(HyperparameterError) as caught:
        arguments.parse([f"--{name}", value])
    assert words in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("learnin_rate", "Did you mean learning_rate?"),
        ("num_train_epoch", "Did you mean num_train_epochs?"),
        ("dataloader_drop_lst", ""),  # which is refused itself
        ("eval_on_each_dataset", ""),
    ],
)
def test_a_suggestion_is_accepted_and_means_the_same(name: str, suggested: str) -> None:
    with pytest.raises(HyperparameterError) as caught:
        arguments.parse([f"--{name}", "1"])
    assert (suggested or "--help") in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == bool(suggested)


def test_all_that_is_wrong_is_said_at_once_and_what_is_right_is_not() -> None:
    run_glue = {
        "task_name": "mnli",
        "do_train": True,
        "do_eval": True,
        "max_seq_length": 128,
        "per_gpu_train_batch_size": 32,
        "learning_rate": "2e-5x",
        "overwrite_output_dir": True,
        "overwrite_cache": True,
        "save_stepz": 5500,
        "tokenizer_name": "bert-base-cased",
        "lora_r": 0,
        "load_in_8bit": True,
    }
    argv = [word for name, value in run_glue.items() for word in (f"--{name}", str(value))]
    with pytest.raises(HyperparameterError) as caught:
        arguments.parse([*argv, "--epochs", "1", "--num_train_epochs", "2", "stray", "--seed", "1"])
    message = str(caught.value)
    assert message.startswith("8 hyperparameters cannot be used:\n- ")
    wrong = ("task_name", "learning_rate", "save_stepz", "tokenizer_name", "lora_r", "load_in_8bit")
    named = [line.split()[2] for line in message.splitlines()[1:]]
    assert sorted(named) == sorted([*wrong, "num_train_epochs", "'stray'"])
    assert "save_steps" in message  # the nearest name
    for name in ("do_train", "max_seq_length", "overwrite_output_dir", "seed"):
        assert f" {name} " not in message


def test_a_secret_is_not_shown_in_what_is_wrong_with_it() -> None:
    assert "hf_planted" not in repr(arguments.parse(["--huggingface_token", "hf_planted"]))
    for argv in (
        ["--use_auth_token", "hf_planted", "--tokens_token", "hf_planted2"],
        ["--hf_token", "a", "--hf_token", "hf_planted"],
    ):
        with pytest.raises(HyperparameterError) as caught:
            arguments.parse(argv)
        assert "hf_planted" not in str(caught.value)
        assert "(a secret)" in str(caught.value) or "--hf_token" in argv


def test_what_changes_nothing_is_a_line_each() -> None:
    harmless = {
        "overwrite_output_dir": "True",
        "logging_dir": "/opt/ml/output/tensorboard",
        "save_safetensors": "True",
        "group_by_length": "True",
        "pad_to_max_length": "False",
        "overwrite_cache": "True",
        "cache_dir": "/tmp/cache",
        "use_auth_token": "False",
        "load_in_8bit": "False",
        "model_revision": "main",
        "dataset_name": "None",
    }
    argv = [f"--{name}={value}" for name, value in harmless.items()]
    parsed = arguments.parse(argv)
    assert parsed == arguments.parse([])
    assert len(parsed.notes) == len(harmless)
    for name, note in zip(harmless, parsed.notes, strict=True):
        assert note.startswith(name)


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        ("--metric_for_best_model f1", "metric_for_best_model=f1 has no effect"),
        ("--metric_for_best_model f1 --load_best_model_at_end True", ""),
        ("--metric_for_best_model f1 --early_stopping_patience 2", ""),
        ("--metric_for_best_model f1 --save_strategy best", ""),
        ("--metric_for_best_model f1 --lr_scheduler_type reduce_lr_on_plateau", ""),
        ("--early_stopping_threshold 0.1", "early_stopping_threshold has no effect"),
        ("--early_stopping_threshold 0.1 --early_stopping_patience 2", ""),
    ],
)
def test_what_lacks_its_counterpart_is_a_line(argv: str, note: str) -> None:
    notes = arguments.parse(argv.split()).notes
    assert len(notes) == bool(note)
    assert "".join(notes).startswith(note)


def test_no_foreign_name_hides_a_name_of_the_recipe() -> None:
    fields = {*FIELDS}
    assert not fields & foreign_names.KNOWN
    named = {*foreign_names.RENAMED.values()}
    assert named <= fields | {*arguments._training_fields()}
    assert {*REFUSED} <= {*arguments._training_fields()}


def test_tasks_that_share_a_name_share_its_declaration() -> None:
    for group in GROUPS:
        for item in dataclasses.fields(group):
            if item.metadata:
                assert item == FIELDS[item.name] or item.metadata == FIELDS[item.name].metadata


def test_every_hyperparameter_is_documented() -> None:
    text = arguments.describe()
    assert all(f"--{name}  (default " in text for name in FIELDS) and "passed" not in text
    assert "--num_train_epochs, --epochs" in arguments.describe("--epochs")
    assert "\nOnly task=summarization or translation or text2text-generation:\n" in text
    assert "of transformers.TrainingArguments" in arguments.describe("adam_beta2")
    with pytest.raises(HyperparameterError, match="Did you mean num_train_epochs"):
        arguments.describe("num_train_epoch")


def test_examples_of_topics_are_valid_and_each_shows_one_of_its_topic() -> None:
    topics = fields_by_topic()
    assert sum(map(len, topics.values())) == len(FIELDS)
    examples = {title: example for title, example in topics if example}
    assert len(examples) > 10
    for (title, example), fields in topics.items():
        if not example:
            assert title.startswith("Only task="), title
            continue
        names = {name for item in fields for name in (item.name, *item.metadata["aliases"])}
        assert names & {word.partition("=")[0] for word in example.split()}, title
        assert not arguments.parse([f"--{word}" for word in example.split()]).notes, title


def test_no_value_for_a_default_that_does_something_is_a_line() -> None:
    parsed = arguments.parse(["--max_grad_norm", "none", "--warmup_steps", "", "--lr", "null"])
    assert parsed.notes == (
        "max_grad_norm=none means its default, 1.0; 0 turns it off",
        "warmup_steps=(empty) means its default, 0.1; 0 turns it off",
    )


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("class_names", ["good", "bad, worse"], '["good", "bad, worse"]'),
    ("added_tokens", ["<a>", "b,c"], '["<a>", "b,c"]'),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
    ("text_column", ["a", "b"], "a,b"),
    ("label_column", ["x", "y"], "x,y"),
    ("negative_columns", ["n 1", "n 2"], "n 1,n 2"),
    ("matryoshka_dims", [64, 32], "64,32"),
    ("lora_target_modules", ["q_proj", "v_proj"], "q_proj,v_proj"),
    ("report_to", ["tensorboard", "mlflow"], "tensorboard,mlflow"),
    ("lr_scheduler_kwargs", {"num_cycles": 2, "min_lr": 1e-6}, {"num_cycles": 2, "min_lr": 1e-6}),
    ("gradient_checkpointing_kwargs", {"use_reentrant": False}, {"use_reentrant": False}),
    *(("fsdp_config", value, value) for value in
      [{"version": 2, "xla": {"a": 1, "b": [1, 2]}, "transformer_layer_cls_to_wrap": ["A", "B"]}]),
    ("optim_args", {"betas": 0.9, "eps": 1e-08}, "betas=0.9,eps=1e-08"),
])  # fmt: skip
def test_lists_and_objects_are_read_in_every_form_in_which_they_arrive(
    name: str, value: object, expected: object
) -> None:
    """As JSON (SDK v3's drivers), and as SageMaker's toolkits write them into argv."""
    of_toolkit = sm_variables.to_arguments({name: value})[1]
    for text in (json.dumps(value), str(value), of_toolkit):
        others = ["--lora_r", "4"] if name.startswith("lora_") else []
        parsed = arguments.parse([f"--{name}", text, *others])
        assert {**parsed.passed, **parsed.values}[name] == expected, text


def test_an_objects_values_keep_their_types_in_argv(tmp_path: Path) -> None:
    given = ["--lr_scheduler_type", "cosine_with_restarts", "--lr_scheduler_kwargs", "num_cycles=2"]
    folders = paths.from_environment({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    chosen = device.choose({}, False, use_cpu=True, fp16=False)
    made = trainer_arguments.make(arguments.parse(given), folders, chosen, Distribution())
    assert made.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "{base}/checkpoints"),
        ('{"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/checkpoints"}', "{base}/checkpoints"),
        ('{"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/kept/here"}', "{base}/kept/here"),
        ('{"S3Uri": "s3://b/c", "LocalPath": "/mnt/kept"}', "/mnt/kept"),
        ('{"S3Uri": "s3://b/c"}', "{base}/checkpoints"),
    ],
)
def test_checkpoints_lie_where_sagemaker_uploads_them(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    if content is not None:
        (config / "checkpointconfig.json").write_text(content)
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    path = Path(expected.format(base=tmp_path))
    assert paths.from_environment(environ).checkpoints == path
    assert job.Paths.from_environment(environ).checkpoints == path


def test_a_broken_checkpointconfig_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "checkpointconfig.json").write_text("[")
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    with pytest.raises(CheckpointError, match=r"checkpointconfig.json cannot be read"):
        paths.from_environment(environ)
    with pytest.raises(ConfigError, match=r"checkpointconfig.json is not valid JSON"):
        _ = job.Paths.from_environment(environ).checkpoints
