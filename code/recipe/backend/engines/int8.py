"""An encoder in int8, in the folder of its model, with the proof of what it costs.

`recipe.training.quantization` writes the folder `int8` of a model: CTranslate2's files of the
encoder in int8, and proof.json with the error of its answers to the probes (`backend.proofs`). A
CPU uses it if its answers are as near to the float weights', and if a text alone and a text in a
call of many together take less time than by PyTorch. Both are tried at each start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe.backend.engines import ctranslate
from recipe.backend.engines.ctranslate import FILES
from recipe.backend.padded_rows import pad_rows
from recipe.backend.rows import TokenRow
from recipe.compat import positions_of
from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.storage import checksums

FOLDER, PROOF = "int8", "proof.json"
_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Int8Proof:
    """The content of proof.json."""

    outputs: Sequence[str]
    tolerance: float
    """How far answers to the probes may be from those of the float weights; infinity until it is
    measured."""
    metric: str
    score: float
    """Of the float weights, on the evaluation data."""
    score_int8: float
    changed: float
    """Share of the evaluation data's answers that differ; of vectors and numbers, 1 - the mean
    cosine or the correlation."""
    evaluated: int
    """Rows of the evaluation data."""
    weights: str
    """Digest of the float weights that it was made of (`weights_of`)."""
    versions: Mapping[str, str]
    processor: str
    milliseconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """CPU time of a text on this processor, in PyTorch and in int8: `alone` and `together`."""


@dataclass(frozen=True)
class Trial:
    """The outcome of trying an encoder in int8 on this host."""

    why_not: str
    """The reason to compute by PyTorch instead; empty if there is none."""
    milliseconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """As in `Int8Proof`."""
    tolerance: float = math.inf
    """The tolerance that the measured error gives."""

    def __str__(self) -> str:
        times = (
            f"{quick:.2f} CPU-ms a text {how} instead of {exact:.2f}"
            for how, (exact, quick) in self.milliseconds.items()
        )
        return ", ".join(times)


@dataclass(frozen=True)
class Artefact:
    """The folder `int8` of a model."""

    folder: Path
    proof: Int8Proof

    @classmethod
    def find(cls, location: str) -> Artefact | None:
        """Return the int8 of a model; None if it has none. Raise ModelError if a file is damaged
        or missing."""
        folder = Path(location) / FOLDER
        if not folder.is_dir():
            return None
        with checksums.verified(str(folder)):
            try:
                proof = Int8Proof(**json.loads((folder / PROOF).read_text()))
                for name in FILES:
                    (folder / name).stat()
            except (OSError, ValueError, TypeError) as error:
                name = PROOF if not isinstance(error, OSError) else error.filename
                raise ModelError(
                    f"{folder} cannot be read: {name}: {error}.",
                    "Copy the folder again, make it again by `amphora quantize`, or remove it: "
                    "then PyTorch computes the model.",
                ) from error
        return cls(folder, proof)


def why_slower(milliseconds: Mapping[str, Sequence[float]]) -> str:
    """Return why int8 is not used if it takes no less CPU time than PyTorch, texts alone and
    together in sum (`Int8Proof.milliseconds`); else ''."""
    exact, quick = (sum(times) for times in zip(*milliseconds.values(), strict=True))
    return "" if quick < exact else "PyTorch is as fast on this processor"


def weights_of(model: Path) -> str:
    """Return a digest of the weights and configurations in a model's folder: an int8 of others is
    stale."""
    names = ("*.safetensors", "pytorch_model*.bin", "config.json")
    files = sorted(
        file
        for name in names
        for file in (*model.glob(name), *model.glob(f"*/{name}"))
        if file.parent.name not in (FOLDER, "code")
    )
    sums = "".join(checksums.digest(file) for file in files)
    return hashlib.sha256(sums.encode()).hexdigest()


def write(folder: Path, proof: Int8Proof) -> None:
    """Write the proof, and the checksums of all files."""
    (folder / PROOF).write_text(json.dumps(dataclasses.asdict(proof), indent=1) + "\n")
    checksums.write(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and progress bars of a conversion, whose outcome is compared."""
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def why_unavailable() -> str:
    """Return which package is missing; empty if none is."""
    if util.find_spec("ctranslate2") is None:
        return "the package ctranslate2 is not installed (it is in the image for CPUs)"
    return ""


def versions() -> dict[str, str]:
    """Return the versions of what quantizes and computes."""
    return {name: metadata.version(name) for name in ("ctranslate2", "torch", "transformers")}


def processor() -> str:
    """Return the name of the CPU, and which instructions for int8 it has."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = {"avx512_vnni", "avx_vnni", "amx_int8"} & set(values.get("flags", "").split())
    return f"{values.get('model name', 'unknown')} ({', '.join(sorted(flags)) or 'no VNNI'})"


def run_forked(work: Callable[[], Any], remedy: str = "") -> Any:
    """Return what `work` returns in a fork of this process, with one thread. Raise ModelError if
    it fails there, or does not end in time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        # The pool of threads of the process before the fork, if it had one, is not here.
        torch.set_num_threads(1)
        try:
            outcome = "", work()
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:300]}", None
        sender.send(outcome)
        # The threads of CTranslate2 are not waited for.
        sender.close()
        os._exit(0)

    process = context.Process(target=run, daemon=True)
    with receiver:
        process.start()
        sender.close()
        try:
            if not receiver.poll(_SECONDS):
                raise failed(f"it was not computed in {_SECONDS:g} s", remedy)
            why, result = receiver.recv()
        except EOFError:
            process.join()
            raise failed(f"it ended with exit code {process.exitcode}", remedy) from None
        finally:
            process.kill()
            process.join()
    if why:
        raise failed(why, remedy)
    return result


def failed(why: str, remedy: str = "") -> ModelError:
    """Return the error for a model that CTranslate2 cannot compute."""
    return ModelError(f"The model cannot be computed in int8: {why}.", remedy)


_REMEDY = "Leave quantize out."
_LONGEST, _LONGEST_BEYOND = 4096, 1024
"""Tokens of the longest text that is compared, and of one that only a request may ask for."""
_TOLERANCE = 1e-3
"""The difference of states that rounding may cause, as a share of their length."""


def check_encoder(model: Any, tokenizer: Any, longest: int) -> None:
    """Check, in a fork, that CTranslate2 computes the encoder of a model as PyTorch does, by texts
    of random tokens up to `longest`. Raise ModelError if it does not."""
    inputs = ctranslate.inputs_of(model, tokenizer)
    if why_not := ctranslate.why_unknown(model.config):
        raise failed(why_not, _REMEDY)
    config, random = model.config, np.random.default_rng(0)
    # A request may set another max_length: windows of attention show beyond their width.
    most = min(max(longest, min(positions_of(model), _LONGEST_BEYOND)), _LONGEST)
    has_types = TYPE_IDS in inputs and getattr(config, "type_vocab_size", 2) > 1
    rows = []
    for length in (2, 17, most // 3, most):
        drawn = random.integers(1, config.vocab_size, max(1, min(length, most)))
        # A text holds no padding: some models count no position for it.
        pad = int(config.pad_token_id or 0)
        ids = np.where(drawn == pad, pad - 1 if pad else 1, drawn).tolist()
        rows.append(TokenRow(ids))
        if has_types:
            rows.append(TokenRow(ids, sorted(random.integers(0, 2, len(ids)).tolist())))

    def compare() -> str:
        with quiet(), tempfile.TemporaryDirectory(prefix="int8-") as folder:
            exact = model.base_model.eval()
            names = ctranslate.convert(exact, Path(folder) / "encoder")
            forward = ctranslate.Forward(Path(folder) / "encoder", names, "float32")
            differences = []
            for row in rows:
                batch = pad_rows([row], len(row.ids), 0, torch.device("cpu"))
                given = {name: batch[name] for name in inputs if name in batch}
                outputs = [encoder(**given)["last_hidden_state"] for encoder in (forward, exact)]
                # What heads read: the state of the first token, or the mean.
                states = [output[0].float() for output in outputs]
                ours, theirs = (torch.cat([hidden[0], hidden.mean(0)]) for hidden in states)
                differences.append((ours - theirs).norm() / theirs.norm())
            difference = float(torch.stack(differences).max())
        if difference <= _TOLERANCE:
            return ""
        return (
            f"its states of texts of up to {most} tokens differ from PyTorch's by {difference:.3g}"
        )

    if why_not := run_forked(compare, _REMEDY):
        raise failed(why_not, _REMEDY)
