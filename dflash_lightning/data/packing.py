"""Packing: several samples in one row, so that little of a batch is padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Rows(Sequence[list[int]]):
    """Which samples share a row: those of `order[starts[i] : starts[i + 1]]`."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        """Return the samples of a row."""
        found: list[int] = self.order[self.starts[index] : self.starts[index + 1]].tolist()
        return found

    def lengths(self, sample_lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens of each row, given those of each sample."""
        ends = np.concatenate([[0], np.cumsum(sample_lengths[self.order])])
        return np.diff(ends[self.starts])


def pack(lengths: npt.NDArray[np.int64], capacity: int, seed: int) -> Rows:
    """Share samples out to rows of at most `capacity` tokens (best fit, longest sample first).

    Each sample goes into the fullest row that still has room for it. Which of equally long samples
    meet depends on the seed; the rows are the same in every epoch, so epochs are equally long.

    >>> pack(np.array([5, 3, 9, 2]), capacity=10, seed=0).lengths(np.array([5, 3, 9, 2]))
    array([ 9, 10])
    """
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).numpy()
    by_length = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    some = 0  # bit r: a row with r tokens of room
    count = 0
    for sample in by_length.tolist():
        length = int(lengths[sample])
        fitting = some >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                some ^= 1 << room
        else:
            room, row, count = capacity, count, count + 1
        row_of[sample] = row
        if room > length:
            open_rows[room - length].append(row)
            some |= 1 << room - length
    order = np.argsort(row_of, kind="stable")
    starts = np.searchsorted(row_of[order], np.arange(count + 1))
    return Rows(order, starts)
