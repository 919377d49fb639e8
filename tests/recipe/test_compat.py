"""What the recipe relies on in libraries beyond their interface is listed, and looked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Trainer

from recipe.compat import new_weights, parts
from recipe.errors import LibraryError
from recipe.training.engine import Engine

RECIPE = Path(__file__).resolve().parents[2] / "code" / "recipe"
LISTED = {part.name for part in parts.PARTS}


def of_others(source: str) -> Iterator[str]:
    """Attributes that begin with an underscore and that the module neither defines nor sets."""
    tree = list(ast.walk(ast.parse(source)))
    own = {each.name for each in tree if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    for each in tree:
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            own.add(each.attr)
        targets = each.targets if isinstance(each, ast.Assign) else []
        targets = [each.target] if isinstance(each, ast.AnnAssign) else targets
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    for each in tree:
        if isinstance(each, ast.Attribute) and each.attr.startswith("_"):
            if ast.unparse(each) == "os._exit":  # Python documents it
                continue
            of_super = isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "super"
            if not each.attr.startswith("__") and (of_super or each.attr not in own):
                yield each.attr


def test_every_private_part_of_a_library_is_listed() -> None:
    used = {
        (path.relative_to(RECIPE).as_posix(), name)
        for path in RECIPE.rglob("*.py")
        for name in of_others(path.read_text())
    }
    assert {each for each in used if each[1] not in LISTED} == set()


def test_every_override_of_the_trainer_is_listed() -> None:
    ours = [each for each in Engine.__mro__ if each.__module__.startswith("recipe.")]
    overridden = {name for each in ours for name in vars(each) if hasattr(Trainer, name)}
    private = {name for name in overridden if name.startswith("_") and not name.startswith("__")}
    assert "_save_checkpoint" in private
    assert private <= LISTED


def test_the_installed_libraries_have_them() -> None:
    parts.check()


def test_one_that_is_gone_or_takes_other_arguments_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Trainer, "_save_checkpoint")
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self, where: None)
    with pytest.raises(LibraryError) as caught:
        parts.check()
    said = str(caught.value)
    assert "Trainer._save_checkpoint is missing (writes whole checkpoints)" in said
    assert "_load_rng_state" not in said
    monkeypatch.setattr(
        parts, "PARTS", (parts.Seam(parts.TRAINER, "train", "", ("self", "other")),)
    )
    with pytest.raises(LibraryError, match=r"takes \(self, .*\) instead of \(self, other\)"):
        parts.check()


def test_weights_of_another_shape_are_named_alike_in_all_versions() -> None:
    of_4 = {"missing_keys": ["head.bias"], "mismatched_keys": ["head.weight"]}
    of_5 = {"missing_keys": {"head.bias"}, "mismatched_keys": {("head.weight", (2, 4), (3, 4))}}
    assert new_weights.unread(of_4) == new_weights.unread(of_5) == ["head.bias", "head.weight"]
