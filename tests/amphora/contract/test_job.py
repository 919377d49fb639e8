"""Reading /opt/ml/input: what is accepted. test_errors.py has what is refused, and tests/contract how
hyperparameters are decoded."""

import pytest

from amphora.common.errors import ConfigError
from amphora.contract.job import read_job
from tests.support.job_tree import Tree


def read(tree: Tree, **environ: str):
    return read_job({"SAGEMAKER_BASE_DIR": str(tree.base), **environ})


def test_the_environment_names_the_program_first(tree: Tree) -> None:
    tree.configure({"sagemaker_program": "a.py"})
    assert read(tree, SAGEMAKER_PROGRAM="b.py").entry_point == "b.py"


def test_files_that_no_local_run_has_are_assumed(tree: Tree) -> None:
    job = read(tree.configure().channel("train", **{"a.csv": "text,label\n"}))
    assert list(job.channels) == ["train"] and job.hosts == ("algo-1",)


def test_a_byte_order_mark_is_no_error(tree: Tree) -> None:
    assert read(tree.configure('\ufeff{"a": "1"}')).hyperparameters == {"a": 1}


def test_a_switch_is_on_or_off(tree: Tree) -> None:
    tree.configure({"a": "true", "sagemaker_x_enabled": '"False"'})
    job = read(tree)
    assert not job.wants("sagemaker_x_enabled") and not job.wants("sagemaker_y_enabled")


def test_a_folder_in_place_of_a_file_is_refused(tree: Tree) -> None:
    # `docker run -v` creates one where the host has no such file.
    tree.configure()
    (tree.base / "input" / "config" / "resourceconfig.json").mkdir()
    with pytest.raises(ConfigError, match=r"resourceconfig\.json .*Is a directory"):
        read(tree)


@pytest.mark.parametrize("level", ["20", '"20"', " 20 "])
def test_a_log_level_is_a_number_or_the_text_of_one(tree: Tree, level: str) -> None:
    assert read(tree.configure({"sagemaker_container_log_level": level})).log_level == 20


def test_a_log_level_that_python_cannot_convert_is_refused(tree: Tree) -> None:
    tree.configure({"sagemaker_container_log_level": "1" * 5000})
    with pytest.raises(ConfigError, match="sagemaker_container_log_level is '1111"):
        read(tree)
