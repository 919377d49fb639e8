"""Compare the answers of a model with its proof.json, and print the differences of each probe.

    python code/verify.py path/to/model

Environment variables are those of a server, such as AMPHORA_DTYPE. The exit code is 1 if an answer
differs.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from recipe.backend.proofs import reference, verification
from recipe.backend.proofs.verification import Outcome
from recipe.errors import ModelError, RecipeError
from recipe.inference import registry
from recipe.models.sources.origin import Origin


def main(argv: list[str]) -> int:
    """Print the table of a model's probes, and return the exit code."""
    (folder,) = argv
    environ = {name: value for name, value in os.environ.items() if name != "AMPHORA_PROOF"}
    proof = reference.find(Origin.find(folder, environ), environ)
    if proof is None:
        raise ModelError(f"{folder} has no proof.json.", "Train it again, or copy all its files.")
    # A model that differs is loaded, too, by its own answers.
    os.environ["AMPHORA_PROOF"] = "off"
    with contextlib.redirect_stdout(io.StringIO()):
        task = registry.load(folder, os.environ)
    if type(task).__name__ != proof.handler:
        raise ModelError(
            f"The proof is made for {proof.task}, and the model is served for another task.",
            "Leave HF_TASK out.",
        )
    outcomes = [*verification.compare_probes(proof, task)]
    _print(outcomes)
    del os.environ["AMPHORA_PROOF"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            registry.load(folder, os.environ)
    except ModelError as error:
        print(f"differs: {error}")
        return 1
    if not all(outcome.is_same for outcome in outcomes):
        print("differs: the layout above, which a server would not choose")
        return 1
    print(f"verified: {len(outcomes)} probes, on {proof.device} in {proof.precision} when trained")
    return 0


def _print(outcomes: Sequence[Outcome]) -> None:
    head = "probe", "tokens", "difference", "allowed", "answer"
    lines = [head, *((
        outcome.probe, "differ" if outcome.tokens else "same", f"{outcome.difference:.2g}",
        f"{outcome.tolerance:.2g}", "same" if outcome.is_same else outcome.answer or "differs",
    ) for outcome in outcomes)]  # fmt: skip
    for line in lines:
        print("{:10} {:8} {:>10} {:>10}  {}".format(*line))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RecipeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
