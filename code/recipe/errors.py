"""Errors a user can act on. Each message names the key (or file and line), value and remedy."""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterable, Iterator, Sequence

from safetensors import SafetensorError


class RecipeError(Exception):
    """Something the user can mend.

    Args:
        message: What is wrong; it names the key or file, and the value.
        remedy: What to do instead, as a sentence; empty where the message says it.
    """

    is_users_mistake = True
    """A supervisor that records it shows the message alone, without the frames of the recipe."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message, self.remedy = message, remedy


class HyperparameterError(RecipeError):
    """A hyperparameter is unknown, or its value cannot be used."""


class DeviceError(RecipeError):
    """This host's accelerator cannot be used."""


class DataError(RecipeError):
    """A channel, a file or a row cannot be used."""


class Problems:
    """Collects what is wrong with data, so that one message tells all of it."""

    _MOST = 10

    def __init__(self) -> None:
        self._found: list[DataError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A block whose DataError waits for `check`."""
        try:
            yield
        except DataError as error:
            self._found.append(error)

    def check(self) -> None:
        """Raises DataError: all that was noted, if anything was."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            more = len(self._found) - self._MOST
            numbered = [f"({number}) {error}" for number, error in enumerate(self._found, 1)]
            last = [f"And {more} more."] if more > 0 else []
            raise DataError(
                " ".join([f"{len(numbered)} problems.", *numbered[: self._MOST], *last])
            ) from self._found[0]


class ModelError(RecipeError):
    """The model to start from cannot be found or loaded."""


class DistributedError(RecipeError):
    """The processes of this job do not form the world that their launcher announced."""


class LibraryError(RecipeError):
    """An installed library lacks what the recipe relies on."""


class CheckpointError(RecipeError):
    """A checkpoint cannot be written, read, or resumed from."""


class OutputError(RecipeError):
    """What a job leaves behind cannot be written."""


class DivergedError(RecipeError):
    """The loss is no number any more."""


UNLOADABLE = (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)
"""What loading a model raises whose files are missing, damaged, or not what they say."""


def why_unloadable(error: Exception) -> str:
    """The first line of what loading a model raised; of a pickle torch's own advises to run it."""
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a pickle of more than tensors, which could run code."
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "TokenizersBackend" in reason:
        reason += " transformers 5 has saved it: use an image without `--transformers 4`."
    return reason


def listed(names: Sequence[object], most: int = 20) -> str:
    """The first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def near(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """A sentence naming what `name` may have been meant to be: 'Did you mean a or b?', or ''.

    Args:
        alike: The share of characters in common from which it may.
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=alike)
    return f"Did you mean {' or '.join(matches)}?" if matches else ""
