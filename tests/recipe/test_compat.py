"""What the recipe relies on in libraries beyond their interface is listed, and looked for."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Trainer

from recipe.compat import new_weights, parts
from recipe.errors import LibraryError
from recipe.training.engine import Engine

LISTED = {part.name for part in parts.PARTS}


def test_every_private_part_of_a_library_is_listed() -> None:
    def private_attributes(source: str) -> Iterator[str]:
        """Attributes that begin with an underscore and that the module neither defines nor sets."""
        tree = list(ast.walk(ast.parse(source)))
        local_names = {
            item.name for item in tree if isinstance(item, (ast.FunctionDef, ast.ClassDef))
        }
        for node in tree:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                local_names.add(node.attr)
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            local_names |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in tree:
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                if ast.unparse(node) == "os._exit":  # Python documents it
                    continue
                of_super = (
                    isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
                )
                if not node.attr.startswith("__") and (of_super or node.attr not in local_names):
                    yield node.attr

    recipe = Path(__file__).resolve().parents[2] / "code" / "recipe"
    used = {
        (path.relative_to(recipe).as_posix(), name)
        for path in recipe.rglob("*.py")
        for name in private_attributes(path.read_text())
    }
    assert {node for node in used if node[1] not in LISTED} == set()


def test_every_override_of_the_trainer_is_listed_and_there() -> None:
    ours = [node for node in Engine.__mro__ if node.__module__.startswith("recipe.")]
    overridden = {name for node in ours for name in vars(node) if hasattr(Trainer, name)}
    private = {name for name in overridden if name.startswith("_") and not name.startswith("__")}
    assert "_save_checkpoint" in private
    assert private <= LISTED
    parts.check()


def test_one_that_is_gone_or_takes_other_arguments_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Trainer, "_save_checkpoint")
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self, where: None)
    with pytest.raises(LibraryError) as caught:
        parts.check()
    message = str(caught.value)
    assert "Trainer._save_checkpoint is missing (writes whole checkpoints)" in message
    assert "_load_rng_state" not in message
    monkeypatch.setattr(
        parts, "PARTS", (parts.Seam(parts.TRAINER, "train", "", ("self", "other")),)
    )
    with pytest.raises(LibraryError, match=r"takes \(self, .*\) instead of \(self, other\)"):
        parts.check()


def test_weights_of_another_shape_are_named_alike_in_all_versions() -> None:
    of_4 = {"missing_keys": ["head.bias"], "mismatched_keys": ["head.weight"]}
    of_5 = {"missing_keys": {"head.bias"}, "mismatched_keys": {("head.weight", (2, 4), (3, 4))}}
    assert (
        new_weights.unread_weights(of_4)
        == new_weights.unread_weights(of_5)
        == ["head.bias", "head.weight"]
    )


@pytest.mark.heavy
def test_the_handlers_start_without_what_only_losses_of_detectors_need() -> None:
    server = """
import sys
import inference
for name in ("scipy.optimize", "boto3", "botocore"):
    assert name not in sys.modules, f"{name} is imported at start"
from accelerate.commands.config import sagemaker
assert callable(sagemaker.boto3.client), "it is there once it is asked for"
import boto3
assert boto3.client is sagemaker.boto3.client
from transformers.loss import loss_for_object_detection as losses
import numpy
rows, columns = losses.linear_sum_assignment(numpy.array([[4, 1], [2, 3]]))
assert columns.tolist() == [1, 0]
import scipy.optimize
assert scipy.optimize.linear_sum_assignment.__module__.startswith("scipy")
assert callable(scipy.optimize.minimize)
"""
    code = Path(__file__).resolve().parents[2] / "code"
    subprocess.run([sys.executable, "-c", server], check=True, cwd=code, timeout=240)
