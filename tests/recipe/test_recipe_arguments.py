from __future__ import annotations

import pytest

from recipe import arguments
from recipe.errors import HyperparameterError


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--epochs", "2"], "num_train_epochs", 2.0),
        (["--batch-size", "8"], "per_device_train_batch_size", 8),
        (["--batch_size", "8"], "per_device_train_batch_size", 8),
        (["--train-batch-size=8"], "per_device_train_batch_size", 8),
        (["--lr", "2e-5"], "learning_rate", 2e-5),
        (["--model_id", "a/b"], "model_name_or_path", "a/b"),
        (["--model_name", "a/b"], "model_name_or_path", "a/b"),
        (["--max_steps", "-1"], "max_train_steps", -1),
        (["--warmup_steps", "500"], "warmup_steps", 500),
        (["--bf16"], "bf16", True),
        (["--bf16", "True"], "bf16", True),
        (["--bf16", "true"], "bf16", True),
        (["--bf16", "1"], "bf16", True),
        (["--bf16", "False"], "bf16", False),
        (["--trust_remote_code", "--seed", "3"], "trust_remote_code", True),
        (["--max_length", ""], "max_length", None),
        (["--text_column", "None"], "text_column", None),
        (["--text_column", "a b"], "text_column", "a b"),
    ],
)
def test_a_value_reaches_its_field(argv: list[str], name: str, value: object) -> None:
    assert getattr(arguments.parse(argv), name) == value


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--gradient_accumulation_steps", "2"], "gradient_accumulation_steps", 2),
        (["--eval_strategy", "steps"], "eval_strategy", "steps"),
        (["--evaluation_strategy", "no"], "eval_strategy", "no"),
        (["--load_best_model_at_end"], "load_best_model_at_end", True),
        (["--dataloader_pin_memory", "False"], "dataloader_pin_memory", False),
        (["--report_to", "tensorboard"], "report_to", "tensorboard"),
        (["--label_smoothing_factor", "0.1"], "label_smoothing_factor", 0.1),
    ],
)
def test_other_training_arguments_pass_through(argv: list[str], name: str, value: object) -> None:
    assert arguments.parse(argv).passed == {name: value}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--epoch", "3"], ["epoch", "'3'", "Did you mean", "epochs"]),
        (["--learning-rat", "1"], ["learning-rat", "learning_rate"]),
        (["--gradient_accumulation", "1"], ["gradient_accumulation_steps"]),
        (["--qqqqqqqq", "1"], ["qqqqqqqq", "--help"]),
        (["--epochs", "many"], ["num_train_epochs", "'many'", "float"]),
        (["--bf16", "perhaps"], ["bf16", "'perhaps'"]),
        (["--eval_strategy", "never"], ["eval_strategy", "'never'", "epoch"]),
        (["--logging_steps", "x"], ["logging_steps", "'x'"]),
        (["--epochs", "2", "--num_train_epochs", "3"], ["num_train_epochs", "'2'", "'3'"]),
        (["--batch_size", "0"], ["per_device_train_batch_size", "0", "1 or more"]),
        (["--lr", "0"], ["learning_rate", "above 0"]),
        (["--max_length", "2"], ["max_length", "4 or more"]),
        (["stray"], ["'stray'", "--key value"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_remedy(
    argv: list[str], words: list[str]
) -> None:
    with pytest.raises(HyperparameterError) as caught:
        arguments.parse(argv)
    for word in words:
        assert word in str(caught.value)


def test_the_same_value_under_two_names_is_no_quarrel() -> None:
    assert arguments.parse(["--epochs", "2", "--num_train_epochs", "2"]).num_train_epochs == 2


def test_every_hyperparameter_is_documented() -> None:
    text = arguments.describe()
    assert "--num_train_epochs, --epochs" in text
    assert "passed" not in text
