"""Portions of the training data, made tokens by a process of its own while others train on them.

A folder for each job tells how far that is: `0.json`, `1.json` ... are there when a portion is
whole; `wanted` names the place that training has come to; `writer` is locked while the process
lives; `error` is what it failed with. Of the other data sets `NAME.asked` is there when somebody
waits for them, `NAME.begun` while they are made, and `NAME.made` when they are; NAME says which
they are. The tokens themselves lie in files as others do (`store`), by a key of their contents.
The process is forked, so that the rows, which are mapped, are read once; it uses no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe import errors
from recipe.batching.portions import FilePlan, Plan
from recipe.batching.samples import Samples
from recipe.errors import CheckpointError, DataError, RecipeError

AHEAD = 4
"""Portions that are made beyond the one that training has come to."""
_POLL_SECONDS = 0.05
_STALLED_SECONDS = 900.0
"""Portions take seconds, of slow tokenizers a minute or two."""
_LOCK_SECONDS = 10.0
"""For the process of a job that was killed to end, too."""
_NICER = 10
_PR_SET_PDEATHSIG = 1
_WANTED, _LOCK, _ERROR = "wanted", "writer", "error"
_ASKED, _BEGUN, _MADE = ".asked", ".begun", ".made"


@dataclass(frozen=True, kw_only=True)
class Others:
    """The data sets that a job has beside its training data."""

    name: str
    """Tells them apart from others, and is the name of files."""
    make: Callable[[], Any]
    """Makes them tokens, and keeps these."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """How few portions are kept, where not all have room."""

    ahead: int
    """Portions beyond the one that training has come to."""
    behind: int
    """Portions before it, for processes that are not as far."""
    forget: Callable[[int], None]
    """Removes the tokens of a portion, if they are there."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a portion that was made."""

    samples: int
    digest: str
    """Of its tokens and labels."""


class PortionFiles:
    """The portions of a job's training data on this host; see `recipe.batching.portions`.

    Args:
        folder: Of this job: the same for the same rows, ways to make tokens of them, and portions.
        make: Gives the samples of a portion: made, or read where they were made before.
        one_each: Whether each row is one sample.
        others: What is made beside the portions, once those that are wanted soon are there.
        window: Of which portions tokens are kept, if not of all.
        remedy: What to do where a portion takes too long or too much memory.
    """

    def __init__(
        self,
        plan: Plan | FilePlan,
        folder: Path,
        make: Callable[[int], Samples],
        *,
        one_each: bool,
        others: Others | None = None,
        window: Window | None = None,
        remedy: str = "fewer streaming_rows, or streaming=False",
    ) -> None:
        self._plan, self._folder, self._make = plan, folder, make
        self.one_each, self._others = one_each, others
        self._window, self._remedy = window, remedy
        self._records: dict[int, Record] = {}
        self._expected: Mapping[int, Record] = {}

    @property
    def plan(self) -> Plan | FilePlan:
        """Which rows each portion has."""
        return self._plan

    def samples(self, place: int) -> int:
        """How many samples the portion at a place has; waits where neither the rows tell, nor a
        checkpoint, nor the portion itself yet."""
        _, portion = self._plan.at(place)
        if self.one_each:
            return self._plan.rows_in(portion)
        if portion in self._expected:
            return self._expected[portion].samples
        return self._wait(place, portion).samples

    def read(self, place: int) -> Samples:
        """The samples of the portion at a place in the order of all epochs; waits for them.

        Raises:
            RecipeError: what the process that makes portions has failed with.
            DataError: it has ended without a word, or makes none.
            CheckpointError: the portion is another one than when a checkpoint was made.
        """
        _, portion = self._plan.at(place)
        _write(self._folder / _WANTED, str(place))
        if self._window is not None and portion in self._records:
            # Its tokens may be gone since, and are to be the same when they are made again.
            known = self._records.pop(portion)
            self._check_expected(portion, known)
            self._expected = {**self._expected, portion: known}
        record = self._wait(place, portion)
        samples = self._make(portion)
        if len(samples) != record.samples:
            raise DataError(
                f"Portion {portion} of the training data has {len(samples)} samples in its files, "
                f"and had {record.samples} when it was made.",
                f"Remove the folder {self._folder.parent}.",
            )
        return samples

    def wait_for_others(self) -> None:
        """Wait until the other data sets are made tokens, or nobody makes them (any more): whoever
        needs them then finds them, or makes them.

        Raises:
            RecipeError: what the process that makes them has failed with.
        """
        _write(self._of_others(_ASKED), "")
        while True:
            # Asked before the look at the file: what has ended may have made it before.
            lives = self._is_locked()
            if self._of_others(_MADE).exists():
                return
            self._check_error()
            if not lives:
                return
            time.sleep(_POLL_SECONDS)

    def made(self) -> list[Samples]:
        """The samples of the portions that are made by now."""
        self._look()
        there = self._records if self._window is None else filter(self._is_made, self._records)
        return [self._make(portion) for portion in sorted(there)]

    def records(self) -> bytes:
        """What is known of the portions that were made, here and before a checkpoint."""
        self._look()
        known = {**self._expected, **self._records}
        content = {str(portion): asdict(known[portion]) for portion in sorted(known)}
        return json.dumps(content).encode()

    def expect(self, records: bytes) -> None:
        """See that portions are as a checkpoint's `records` say, those that were made too.

        Raises:
            CheckpointError: one is not.
        """
        content = json.loads(records)
        self._expected = {int(portion): Record(**content[portion]) for portion in content}
        for portion, record in self._records.items():
            self._check_expected(portion, record)

    def _wait(self, place: int, portion: int) -> Record:
        """What is known of a portion, once it is made."""
        started = time.monotonic()
        while portion not in self._records:
            path = self._folder / f"{portion}.json"
            # Asked before the look at the file: what has ended may have made it before.
            lives = self._is_locked()
            if (record := _read(path)) is not None:
                self._check_expected(portion, record)
                self._records[portion] = record
                break
            self._check_error()
            if lives and self._others is not None and self._of_others(_BEGUN).exists():
                started = time.monotonic()  # as long as they take
            waited = time.monotonic() - started
            # It may be about to lock the file.
            if not lives and waited > _LOCK_SECONDS:
                raise DataError(
                    f"The process that makes tokens of the training data has ended before portion "
                    f"{portion}, maybe killed where memory is short.",
                    "Start the job again, which goes on with the portions that are made; or give "
                    f"{self._remedy}.",
                )
            if waited > _STALLED_SECONDS:
                raise DataError(
                    f"Portion {portion} of the training data is not made tokens after "
                    f"{waited:.0f} s.",
                    f"Give {self._remedy}.",
                )
            _write(self._folder / _WANTED, str(place))
            time.sleep(_POLL_SECONDS)
        return self._records[portion]

    def _check_error(self) -> None:
        if (self._folder / _ERROR).exists():
            name, text = json.loads((self._folder / _ERROR).read_text())
            raise getattr(errors, name, RecipeError)(text)

    def _of_others(self, what: str) -> Path:
        """A file that tells of the other data sets."""
        assert self._others is not None
        return self._folder / f"{self._others.name}{what}"

    def _check_expected(self, portion: int, record: Record) -> None:
        expected = self._expected.get(portion, record)
        if expected != record:
            raise CheckpointError(
                f"Portion {portion} of the training data ({record.samples} samples, "
                f"{record.digest}) is another one than when the checkpoint was made "
                f"({expected.samples} samples, {expected.digest}).",
                "Go on with the image that the job began with, or give "
                "resume_from_checkpoint=False.",
            )

    def _look(self) -> None:
        """Read the records of what is made, without waiting."""
        for path in self._folder.glob("*.json"):
            portion = int(path.stem)
            if portion not in self._records and (record := _read(path)) is not None:
                self._records[portion] = record

    def _is_locked(self) -> bool:
        try:
            with (self._folder / _LOCK).open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """A block beside which a process of this one makes the portions, unless another process on
        this disk does. It ends with the block."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("ab") as lock:
            if not _locked(lock.fileno()):
                yield
                return
            for path in (self._folder / _WANTED, self._folder / _ERROR):
                path.unlink(missing_ok=True)
            for what in (_ASKED, _BEGUN) if self._others is not None else ():
                self._of_others(what).unlink(missing_ok=True)
            with warnings.catch_warnings():  # of Python 3.12 and later, of forks beside threads
                warnings.simplefilter("ignore", DeprecationWarning)
                process = multiprocessing.get_context("fork").Process(
                    target=self._work, args=(lock.fileno(), os.getpid()), daemon=True
                )
                process.start()
        # Closed here, it is locked for as long as that process lives.
        try:
            yield
        finally:
            process.kill()
            process.join()

    def _work(self, lock: int, parent: int) -> None:
        """What the process does."""
        # A signal to the parent is not one to this.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        os.nice(_NICER)  # before the tokenizer has threads, which each have their own
        # Connections of the parent's must end when it does; their numbers stay taken, since what
        # has them here may yet close them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number not in (lock, nothing):
                with contextlib.suppress(OSError):  # that of the listing is closed
                    os.fstat(number)
                    os.dup2(nothing, number)
        try:
            with Path(os.devnull).open("w") as silent, contextlib.redirect_stdout(silent):
                self._make_all(parent)
        except BaseException as error:
            name, text = type(error).__name__, str(error)
            if not isinstance(error, RecipeError):
                name, text = "DataError", f"The tokens of the training data: {name}: {text}"
            _write(self._folder / _ERROR, json.dumps([name, text]))
            raise

    def _make_all(self, parent: int) -> None:
        place = 0
        while os.getppid() == parent:
            portion = self._next(place)
            if self._others_are_next(portion):
                assert self._others is not None
                _write(self._of_others(_BEGUN), "")
                self._others.make()
                _write(self._of_others(_MADE), "")
                self._of_others(_BEGUN).unlink()
            elif portion is not None:
                samples = self._make(portion)
                record = Record(samples=len(samples), digest=samples.fingerprint())
                _write(self._folder / f"{portion}.json", json.dumps(asdict(record)))
            elif all(self._is_made(each) for each in range(self._plan.count)):
                return
            else:
                time.sleep(_POLL_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                place = int((self._folder / _WANTED).read_text())
            self._forget(place)

    def _next(self, place: int) -> int | None:
        """The portion to make: the first one, then the one that is wanted, and those after it."""
        ahead = AHEAD if self._window is None else self._window.ahead
        soon = [self._plan.at(each)[1] for each in range(place, place + ahead + 1)]
        if self._window is None:
            soon.insert(0, 0)
        return next((each for each in soon if not self._is_made(each)), None)

    def _forget(self, place: int) -> None:
        """Remove the portions that are not wanted soon, where not all have room."""
        if (window := self._window) is None:
            return
        kept = range(max(0, place - window.behind), place + window.ahead + 1)
        # The first one tells what batches are like, to the end.
        wanted = {0, *(self._plan.at(each)[1] for each in kept)}
        for path in self._folder.glob("*.json"):
            if (portion := int(path.stem)) not in wanted:
                path.unlink()
                window.forget(portion)

    def _others_are_next(self, portion: int | None) -> bool:
        """Whether the other data sets are to be made now, and not that portion."""
        if self._others is None or self._of_others(_MADE).exists():
            return False
        # Who waits for them waits for no portion.
        return portion is None or self._of_others(_ASKED).exists()

    def _is_made(self, portion: int) -> bool:
        return (self._folder / f"{portion}.json").exists()


def _read(path: Path) -> Record | None:
    """What a file says of a portion; None where it is not there, or not any more."""
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _locked(descriptor: int) -> bool:
    """Whether this process has the lock now; that of a process that is about to end is waited for,
    as is the look of others whether it is taken."""
    end = time.monotonic() + _LOCK_SECONDS / 2
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)
