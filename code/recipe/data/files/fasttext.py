"""Read lines of `__label__x text`, the format of fastText and BlazingText."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from recipe.data.column_names import LABEL, TEXT
from recipe.data.files.part import Part, first_lines, open_text
from recipe.errors import DataError

MARK = "__label__"
FORMAT = f"{MARK} lines"


def is_fasttext(path: Path) -> bool:
    """Return whether the first lines that are not empty start with a mark."""
    lines = [line for line in first_lines(path, 20) if line.strip()]
    return bool(lines) and all(line.lstrip().startswith(MARK) for line in lines)


def read_fasttext(path: Path, encoding: str) -> Part:
    """Return the texts and labels of all lines; labels are lists if a line has several.

    Raises:
        DataError: a line has no label, or no text.
    """
    texts, labels, numbers = [], [], []
    with open_text(path, encoding) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            # A comma may stand between the labels and the text, or between labels.
            rest, marked = line.strip(), []
            while rest.startswith(MARK):
                mark, _, rest = rest.replace("\t", " ").partition(" ")
                marked.append(mark.rstrip(",").removeprefix(MARK))
                rest = rest.lstrip(", ")
            if not rest or not all(marked) or not marked:
                raise DataError(
                    f"{path} line {number} is not `{MARK}x text`, unlike the first lines: "
                    f"{line.strip()[:60]!r}.",
                    "Correct the line, or remove it.",
                )
            texts.append(rest)
            labels.append(marked)
            numbers.append(number)
    single = all(len(marked) == 1 for marked in labels)
    values = [marked[0] for marked in labels] if single else labels
    table = pa.table({TEXT: pa.array(texts, pa.large_string()), LABEL: pa.array(values)})
    return Part(path=path, format=FORMAT, table=table, lines=np.array(numbers))
