"""Errors a user can act on. Each message names the key (or file and line), value and remedy."""

from __future__ import annotations

import contextlib
import difflib
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence

from safetensors import SafetensorError


class RecipeError(Exception):
    """An error that the user can fix.

    Args:
        message: What is wrong; it names the key or file, and the value.
        remedy: What to do instead, as a sentence; empty if the message says it.
    """

    is_users_mistake = True
    """Lets the supervisor log the message without the recipe's stack frames."""

    def __init__(self, message: str, remedy: str = "") -> None:
        end = "." if remedy and message[-1:] not in {*".:?!", ""} else ""
        super().__init__(f"{message}{end} {remedy}".strip())
        self.message, self.remedy = message, remedy


class HyperparameterError(RecipeError):
    """A hyperparameter is unknown, or its value cannot be used."""


class DeviceError(RecipeError):
    """This host's accelerator cannot be used."""


class DataError(RecipeError):
    """A channel, a file or a row cannot be used."""


class RowError(DataError):
    """A row of a data set cannot be used; `located` names its file and line.

    Args:
        row: Its number in the data set.
        message: What is wrong, with `{row}` for the location.
    """

    def __init__(self, row: int, message: str, remedy: str) -> None:
        super().__init__(message.replace("{row}", f"row {row} (from 0)", 1), remedy)
        self.row, self._unlocated = row, message

    def located(self, location: str) -> DataError:
        """Return the error with the row's location."""
        return DataError(self._unlocated.replace("{row}", location, 1), self.remedy)


class Problems:
    """Collects errors in data, to report them in one message."""

    _MOST = 10

    def __init__(self) -> None:
        self._errors: list[DataError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Collect a DataError of the block for `check`."""
        try:
            yield
        except DataError as error:
            self._errors.append(error)

    def check(self) -> None:
        """Raise the collected errors as one DataError, if there are any."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            more = len(self._errors) - self._MOST
            numbered = [f"({number}) {error}" for number, error in enumerate(self._errors, 1)]
            last = [f"And {more} more."] if more > 0 else []
            raise DataError(
                " ".join([f"{len(numbered)} problems.", *numbered[: self._MOST], *last])
            ) from self._errors[0]


class ModelError(RecipeError):
    """The model to start from cannot be found or loaded."""


class DistributedError(RecipeError):
    """The processes of this job do not form the world that their launcher announced."""


class LibraryError(RecipeError):
    """An installed library lacks what the recipe relies on."""


class CheckpointError(RecipeError):
    """A checkpoint cannot be written, read, or resumed from."""


class OutputError(RecipeError):
    """The results of a job cannot be written."""


class DivergedError(RecipeError):
    """The loss is NaN or infinite."""


UNLOADABLE = (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)
"""Raised when model files are missing, damaged or of another format."""


def why_unloadable(error: Exception) -> str:
    """Return the first line of a loading error. torch's own text advises to run pickles."""
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a pickle of more than tensors, which could run code."
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "ignore_mismatched_sizes" in str(error):
        return "its config.json (id2label, vocab_size ...) contradicts the shapes of its weights."
    if "deserializing header" in reason:
        return f"its weights are cut off or damaged ({reason})."
    if "TokenizersBackend" in reason:
        reason += " It was saved by transformers 5: use an image without `--transformers 4`."
    return reason


def describe_error(error: Exception) -> str:
    """Return the text of a library's error without objects in memory and addresses of others, such
    as `at 0x7f5c`."""
    text = re.sub(r" ?<_io\.[^<>]*>", "", str(error))
    return re.sub(r"<([\w.]+)[^<>]* at 0x[0-9a-fA-F]+>", r"<\1>", text)


def join_names(names: Sequence[object], most: int = 20) -> str:
    """Join the first names for a message, and count the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def did_you_mean(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return 'Did you mean a or b?' for similar known names, or ''.

    Args:
        alike: The smallest similarity, from 0 to 1.
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=alike)
    return f"Did you mean {' or '.join(matches)}?" if matches else ""
