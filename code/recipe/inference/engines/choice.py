"""Which engine computes an encoder on a CPU: PyTorch or OpenVINO.

`AMPHORA_ENGINE` is torch (the default) or openvino. A model is converted and compared with its own
answers in float32 in a fork of the process that loads it: that process stays without threads, so
that workers can be forked from it. The graph is kept in a folder for the next start on the host.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.inference.engines import batches, graph
from recipe.inference.engines.graph import Forward
from recipe.inference.rows import TokenRow, are_close, padded, tolerance_of
from recipe.models import packed_encoders
from recipe.storage import checksums, private_folder

NAME = "AMPHORA_ENGINE"
TORCH, OPENVINO = "torch", "openvino"
_SECONDS = 240.0
"""After which a conversion is given up."""
_LONGEST = 4096
"""Tokens of the longest text that is compared."""
_OUTCOME, _VERSION = "outcome.json", 3
_REMEDY = f"Leave {NAME} out: then PyTorch computes the model."


@dataclass
class _State:
    """Of this process."""

    requested: str = TORCH
    waiting: list[tuple[PreTrainedModel, Forward, int]] = field(default_factory=list)
    """Models that OpenVINO computes once they have warmed up, and the tokens they read at most."""
    started: list[tuple[Forward, int]] = field(default_factory=list)
    """Graphs that replace a model's forward, and the tokens of a text that warms each up."""


_state = _State()


def select(environ: Mapping[str, str]) -> None:
    """Apply AMPHORA_ENGINE to the models that are loaded from now on.

    Without this call PyTorch computes every model, as a user's own handlers expect.

    Raises:
        ValueError: It names no engine.
    """
    requested = environ.get(NAME) or TORCH
    if requested not in (TORCH, OPENVINO):
        raise ValueError(f"{NAME} is {requested!r}. Give {TORCH} or {OPENVINO}.")
    _state.requested, _state.waiting = requested, []


def refuse_unused() -> None:
    """Raise ModelError if OpenVINO was requested and computes none of the models."""
    if _state.requested == OPENVINO and not _state.waiting:
        raise ModelError(
            f"{NAME} is {OPENVINO}, which computes encoders on a CPU (classification, entities, "
            "question answering, vectors, rankings), and this model is none of them.",
            _REMEDY,
        )


def replace_forwards() -> None:
    """Let OpenVINO compute the models it was selected for, in each process that calls them next,
    and free PyTorch's weights.

    Until then PyTorch computes: a process that has run OpenVINO's threads cannot be forked.
    """
    for model, forward, longest in _state.waiting:
        forward.replace(model)
        _state.started.append((forward, min(longest, batches.STEP)))
    _state.waiting = []


def start() -> None:
    """Compile the graphs in this process and call each once: the first call lays out weights."""
    for forward, tokens in _state.started:
        forward(torch.ones((1, tokens), dtype=torch.long))


def refuse(why_not: str) -> None:
    """Raise ModelError if OpenVINO was requested for a model that it cannot compute."""
    if _state.requested == OPENVINO:
        raise ModelError(f"{NAME} is {OPENVINO}, and it cannot be: {why_not}.", _REMEDY)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that OpenVINO may compute."""

    model: PreTrainedModel
    """In the precision that it answers in, as it was loaded."""
    inputs: Sequence[str]
    """What it is given of `input_ids`, `attention_mask` and `token_type_ids`."""
    longest: int
    """Tokens that it reads at most."""
    why_not: str = ""
    """Why OpenVINO cannot compute it; empty if nothing is known against it."""

    @classmethod
    def of(cls, loaded: Any, why_not: str = "") -> Candidate:
        """Describe a LoadedModel.

        Args:
            loaded: It.
            why_not: Why OpenVINO cannot compute it.
        """
        untyped = {TYPE_IDS} - set(loaded.tokenizer.model_input_names)
        return cls(
            model=loaded.model,
            inputs=sorted(loaded.inputs - untyped),
            longest=loaded.max_length,
            why_not=why_not,
        )

    def take(self) -> bool:
        """Return whether OpenVINO will compute the model; a log line says which graph it uses.

        Raises:
            ModelError: AMPHORA_ENGINE is openvino, and it cannot.
        """
        if _state.requested == TORCH:
            return False
        if why_not := self.why_not or self._unfit():
            refuse(why_not)
        began, folder = time.monotonic(), self._folder()
        outcome = _kept(folder)
        is_known = "names" in outcome
        if not is_known:
            outcome = self._made(folder)
        if why_not := outcome.get("why_not", ""):
            refuse(why_not)
        how = "kept in" if is_known else f"made in {time.monotonic() - began:.1f} s and kept in"
        version = importlib.metadata.version("openvino")
        print(f"engine: OpenVINO {version}, its graph is {how} {folder}", flush=True)
        forward = Forward(folder, self.inputs, outcome["names"], self.model.dtype)
        _state.waiting.append((self.model, forward, self.longest))
        return True

    def _unfit(self) -> str:
        """Why OpenVINO cannot compute it; empty if it may."""
        if self.model.device.type != "cpu":
            return f"the model is on {self.model.device.type}, not on a CPU"
        if self.model.dtype not in graph.PRECISIONS:
            return f"the precision is {self.model.dtype}, not float32 or bfloat16"
        kind = self.model.config.model_type
        if kind in packed_encoders.UNMASKED or "forward" in vars(self.model):
            return f"{kind} computes texts of one length at a time"
        if importlib.util.find_spec("openvino") is None:
            return "the package openvino is not installed (it is in the image for CPUs)"
        return ""

    def _folder(self) -> Path:
        """Where its graph is kept: the name is made of all that may change it."""
        digest = hashlib.sha256()
        for name, own in self.model.state_dict().items():
            digest.update(f"{name} {own.dtype} {tuple(own.shape)}\n".encode())
            digest.update(own.contiguous().view(-1).view(torch.uint8).numpy())
        parts = (
            _VERSION, torch.__version__, transformers.__version__,
            importlib.metadata.version("openvino"), type(self.model).__name__,
            self.model.config.to_json_string(use_diff=False), list(self.inputs), self.longest,
            _LONGEST,
        )  # fmt: skip
        digest.update(json.dumps(parts).encode())
        return private_folder.path() / f"openvino-{digest.hexdigest()[:20]}"

    def _made(self, folder: Path) -> dict[str, Any]:
        """What a fork finds out about the model; its graph is in `folder` if that is usable."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._make, args=(folder, sender), daemon=True)
        with receiver:
            process.start()
            sender.close()
            try:
                if not receiver.poll(_SECONDS):
                    return {"why_not": f"it was not converted in {_SECONDS:g} s"}
                outcome: dict[str, Any] = receiver.recv()
                return outcome
            except EOFError:
                process.join()
                return {"why_not": f"its conversion ended with exit code {process.exitcode}"}
            finally:
                process.kill()
                process.join()

    def _make(self, folder: Path, sender: Connection) -> None:
        """In the fork."""
        # The pool of threads of the process before the fork, if it had one, is not here.
        torch.set_num_threads(1)
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            private_folder.ensure()
            part.mkdir()
            with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(io.StringIO()):
                # What tracing warns of is held to the model's answers; what is printed of the
                # model as PyTorch computes it comes again.
                warnings.simplefilter("ignore")
                outcome = self._converted(part)
            if not outcome.get("why_not"):
                sums = {path.name: checksums.digest(path) for path in part.iterdir()}
                (part / _OUTCOME).write_text(json.dumps({**outcome, "sums": sums}))
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            why = f"{type(error).__name__}: {first[:300]}"
            outcome = {"why_not": f"it cannot be converted, or answers in another form: {why}"}
        finally:
            shutil.rmtree(part, ignore_errors=True)
        sender.send(outcome)
        # The threads of OpenVINO are not waited for.
        sender.close()
        os._exit(0)

    def _converted(self, folder: Path) -> dict[str, Any]:
        """Return the `names` of the graph's outputs; or `why_not`."""
        exact: Any = torch.nn.Module.float(copy.deepcopy(self.model))
        names = graph.convert(exact, self.inputs, folder)
        dtypes = dict.fromkeys((torch.float32, self.model.dtype))
        forwards = {dtype: Forward(folder, self.inputs, names, dtype) for dtype in dtypes}
        for rows in drawn(self.longest, self.model.config, TYPE_IDS in self.inputs):
            batch = padded(rows, max(len(row.ids) for row in rows), self._pad, exact.device)
            # Each alone: what a text's neighbours are must not change its answer.
            alone = [
                _values(exact(**self._taken(padded([row], len(row.ids), self._pad, exact.device))),
                        names, [row])
                for row in rows
            ]  # fmt: skip
            wanted = [own[place] for place in range(len(names)) for own in alone]
            for dtype, forward in forwards.items():
                values = _values(forward(**self._taken(batch)), names, rows)
                tolerance = tolerance_of(wanted, dtype)
                if not are_close(values, wanted, tolerance):
                    far = max(
                        float((o - w).abs().max()) for o, w in zip(values, wanted, strict=True)
                    )
                    return {
                        "why_not": f"in {dtype} its graph's answers to {len(rows)} texts of up to "
                        f"{batch['input_ids'].shape[1]} tokens differ from PyTorch's in float32 by "
                        f"{far:.3g}, where {tolerance:.3g} would be rounding"
                    }
        return {"names": names}

    @property
    def _pad(self) -> int:
        return int(self.model.config.pad_token_id or 0)

    def _taken(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: batch[name] for name in self.inputs if name in batch}


def drawn(longest: int, config: Any, has_types: bool) -> Iterator[list[TokenRow]]:
    """Texts of tokens drawn at random: one and several, short ones and as long as the model reads,
    of one length and of several; with the types of pairs, where it takes them, and without.

    Args:
        longest: Tokens that the model reads at most.
        config: The model's.
        has_types: Whether it takes types.
    """
    random = np.random.default_rng(0)
    most = min(longest, _LONGEST)
    for lengths in (
        (2,),
        (17,),
        (9, 30, 5),
        (40, 3, 40, 21, 12, 2, 33),
        (most // 3, most),
        (most,),
    ):
        rows = [_row(random, config, max(1, min(length, longest))) for length in lengths]
        yield rows
        if has_types and getattr(config, "type_vocab_size", 2) > 1:
            yield [
                replace(row, types=sorted(random.integers(0, 2, len(row.ids)).tolist()))
                for row in rows
            ]


def _row(random: np.random.Generator, config: Any, tokens: int) -> TokenRow:
    """A text without padding in it: for that some models count no position."""
    pad = int(config.pad_token_id or 0)
    ids = random.integers(1, config.vocab_size, tokens)
    return TokenRow(np.where(ids == pad, pad - 1 if pad else 1, ids).tolist())


def _values(output: Any, names: Sequence[str], rows: Sequence[TokenRow]) -> list[Tensor]:
    """What is read of an output, in float32, without what padding has."""
    values = []
    for name in names:
        whole = output[name].float()
        is_per_token = name != "logits" or whole.ndim == 3
        for own, row in zip(whole, rows, strict=True):
            values.append(own[: len(row.ids)] if is_per_token else own)
    return values


def _kept(folder: Path) -> dict[str, Any]:
    """What was found out earlier about the graph in `folder`; empty if it is not as it was."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        # Others may write to the folder for temporary files, too.
        if folder.parent == private_folder.ensure():
            outcome = json.loads((folder / _OUTCOME).read_text())
            if all(checksums.digest(folder / name) == own for name, own in outcome["sums"].items()):
                return dict(outcome)
    return {}
