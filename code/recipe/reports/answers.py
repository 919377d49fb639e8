"""What `do_predict` writes: predictions.jsonl, a line for each row that the model is judged by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.console import say
from recipe.data.labels import NUMBER, SEVERAL
from recipe.reports.predictions import Predictions
from recipe.storage import atomic

NAME = "predictions.jsonl"


def write(given: Predictions, folder: Path, remedy: str) -> None:
    """Write a JSON line for each row, in the order of the data.

    A row has its number, counted from 0; the predicted label with its probability (labels, where a
    text has several; a value, where it is a number); and the true one.
    """
    lines = [json.dumps(row, ensure_ascii=False) for row in _rows(given)]
    text = "\n".join(lines) + "\n"
    with atomic.results(NAME, folder, len(text.encode()), remedy) as aside:
        (aside / NAME).write_text(text, encoding="utf-8")
    say(f"{len(lines)} predictions for the {given.split} data written to {folder}/{NAME}")


def _rows(given: Predictions) -> Iterator[dict[str, Any]]:
    names, problem = given.labels.names, given.labels.problem
    triples = zip(given.predicted.tolist(), given.scores.tolist(), given.true.tolist(), strict=True)
    for row, (predicted, scores, true) in enumerate(triples):
        if problem == NUMBER:
            yield {"row": row, "value": predicted, "true": true}
        elif problem == SEVERAL:
            yield {
                "row": row,
                "labels": [name for name, has in zip(names, predicted, strict=True) if has],
                "scores": dict(zip(names, scores, strict=True)),
                "true": [name for name, has in zip(names, true, strict=True) if has],
            }
        else:
            yield {
                "row": row,
                "label": names[predicted],
                "score": scores[predicted],
                "true": names[true],
            }
