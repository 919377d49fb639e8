"""A tokenized data set, and which host has which of its rows.

Subclasses of `Samples` add arrays. Arrays of tokens, such as `token_ids`, are indexed by
`token_positions` or `span`; arrays of rows, such as `labels`, by the number of the row. Code that
does so also works if the data is sharded over hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from recipe.batching.packing import Rows
from recipe.data.layout.shards import Hosts


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Which host has which rows: those of the first host come first, then those of the next."""

    starts: tuple[int, ...]
    """[hosts + 1]: the number of each host's first row, then the number of all rows."""
    process_hosts: tuple[int, ...]
    """[processes]: the number of the host of each process."""
    lengths: Rows
    """[rows]: tokens of each row of all hosts."""
    digest: str
    """A digest of the data of all hosts."""

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.starts) - 1

    def rows(self, host: int) -> Rows:
        """Return the numbers of a host's rows."""
        return np.arange(self.starts[host], self.starts[host + 1])

    def ranks(self, host: int) -> list[int]:
        """Return the processes of a host."""
        return [rank for rank, other in enumerate(self.process_hosts) if other == host]


Some = TypeVar("Some", bound="Samples")


@dataclass(frozen=True)
class Samples:
    """A data set: the token ids of all samples one after the other, and their labels."""

    token_ids: Rows
    starts: Rows
    """Where each sample starts in `token_ids`, then the end of the data; if sharded, of this host's
    samples only, which `span` and `token_positions` take into account."""
    labels: Any
    """An array [samples] or [samples, labels]; of a sharded data set, of all hosts' samples."""
    types: Rows | None = field(default=None, kw_only=True)
    """The token type of each of `token_ids`, if the tokenizer has types (texts of a pair)."""
    judged: bool = field(default=False, kw_only=True)
    """Whether a model that computes its losses returns its answers, too: of evaluation data."""
    shards: Shards | None = field(default=None, kw_only=True)
    """The rows of each host, if the data is sharded over hosts."""
    first: int = field(default=0, kw_only=True)
    """The number of this host's first row."""

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def lengths(self) -> Rows:
        """Return the tokens of each sample, of all hosts."""
        return np.diff(self.starts) if self.shards is None else self.shards.lengths

    @property
    def text_lengths(self) -> Rows:
        """Return the tokens of each text: of each sample, unless a subclass has several texts."""
        return self.lengths

    def weight(self, rows: Rows) -> int:
        """Return the weight of the samples at `rows` in the mean loss: 1 for each sample."""
        return len(rows)

    def draw_epoch(self, seed: int, epoch: int) -> Samples:
        """Return the samples as masked or augmented in an epoch; a function of the arguments."""
        return self

    def fingerprint(self) -> str:
        """Return a digest of all arrays, those of a subclass too; of all hosts if sharded."""
        if self.shards is not None:
            return self.shards.digest
        digest = hashlib.sha256()
        for item in dataclasses.fields(self):
            if isinstance(array := getattr(self, item.name), np.ndarray):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def span(self, row: int) -> slice:
        """Return where the tokens of one sample of this host are in `token_ids`."""
        local_row = row - self.first
        if not 0 <= local_row < len(self.starts) - 1:
            raise IndexError(
                f"row {row} is on another host; this one has {len(self.starts) - 1} rows"
            )
        return slice(int(self.starts[local_row]), int(self.starts[local_row + 1]))

    def tokens(self, row: int) -> Rows:
        """Return the token ids of one sample."""
        ids: Rows = self.token_ids[self.span(row)]
        return ids

    def token_positions(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Return three arrays over the tokens of the samples at `rows`: the position of each token
        in `token_ids`, the number of its sample among `rows`, and its position in that sample."""
        local_rows = rows - self.first
        if len(local_rows) and not 0 <= local_rows.min() <= local_rows.max() < len(self.starts) - 1:
            raise IndexError(f"some of the rows {rows} are on another host")
        starts = self.starts[local_rows]
        lengths = self.starts[local_rows + 1] - starts
        owners = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(owners)) - (np.cumsum(lengths) - lengths)[owners]
        return starts[owners] + within, owners, within


def sharded(samples: Some, hosts: Hosts) -> Some:
    """Return the samples of all hosts, with the tokens of this host's samples only.

    Lengths and labels of all rows (2 to 12 bytes a row) are exchanged; all processes call it.
    """
    lengths = np.diff(samples.starts)
    narrow = lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))))
    by_host = hosts.gather((narrow, samples.labels, samples.fingerprint()))
    digests = " ".join(digest for *_, digest in by_host)
    starts = (0, *np.cumsum([len(part) for part, *_ in by_host]).tolist())
    labels = [part for _, part, _ in by_host if len(part)] or [samples.labels]
    shards = Shards(
        starts=starts,
        process_hosts=tuple(map(hosts.names.index, hosts.process_hosts)),
        lengths=np.concatenate([part.astype(np.int32) for part, *_ in by_host]),
        digest=hashlib.sha256(digests.encode()).hexdigest()[:16],
    )
    first = starts[hosts.position]
    return dataclasses.replace(samples, labels=np.concatenate(labels), shards=shards, first=first)
