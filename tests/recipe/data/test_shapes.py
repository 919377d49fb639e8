"""What a job makes of tables in the shape of public data sets: read rightly, or refused with a line
that works when it is pasted; never read as something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from recipe.errors import RecipeError
from tests.support import table_reading
from tests.support.shapes import SHAPES, Shape
from tests.support.table_reading import Table


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_a_table_is_read_or_refused_with_a_line_that_works(shape: Shape, tmp_path: Path) -> None:
    given = dict(pair.split("=", 1) for pair in shape.argv.split())
    expect(shape, shape.table(), tmp_path, given, shape.outcome.split(" > "))


def expect(
    shape: Shape, table: Table, folder: Path, given: Mapping[str, str], steps: list[str]
) -> None:
    """Follow the outcomes of a table, each after a line of the refusal before it."""
    step, *rest = steps
    if step[0] not in "?!":
        task, made = table_reading.read(table, folder, given)
        assert table_reading.describe(task, made, shape.rows()).startswith(step)
        return
    with pytest.raises(RecipeError) as refusal:
        table_reading.read(table, folder, given)
    if step[0] == "!":
        assert step[2:] in str(refusal.value).replace("\n", " ")
        return
    lines = table_reading.lines(refusal.value)
    assert lines
    if step == "?":
        return
    chosen = step[2:]
    proposed = {" ".join(f"{key}={value}" for key, value in line.items()): line for line in lines}
    assert chosen in proposed
    expect(shape, table, folder, {**given, **proposed.pop(chosen)}, rest)
    # Another line is read, too, or asks something else.
    for line in list(proposed.values())[-1:]:
        try:
            table_reading.read(table, folder, {**given, **line})
        except RecipeError as other:
            assert str(other) != str(refusal.value)
