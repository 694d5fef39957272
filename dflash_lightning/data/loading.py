"""In which order rows come, as which batches, and how a loader is continued mid-epoch."""

import time
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dflash_lightning.data.blocks import Batch, Document
from dflash_lightning.data.features import FeatureStore
from dflash_lightning.data.packing import Rows
from dflash_lightning.data.samples import Sample

Row = list[Document]


class EpochSampler(Sampler[tuple[int, int]]):
    """Yields (row index, epoch), so that loader processes need not be told the epoch.

    A row is a sample, or several packed together. Shuffled order keeps rows of similar length in
    one batch: a random order is sorted by length within stretches of 16 batches, and the batches of
    a stretch are shuffled.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows per batch.
        seed: Seed of the order.
        shuffle: False yields rows in order, always as of epoch 0.
        rank: Which share of the rows this process takes.
        world: Number of processes. With several, shuffled epochs keep whole batches only, equally
            many a process.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.int64],
        batch_size: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.rank, self.world = rank, world
        self.epoch = 0
        self.ahead = 0
        self.skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order and anchors of this epoch from now on (Lightning calls it)."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of this process's rows in a whole epoch."""
        count = len(self.lengths)
        if self.shuffle and self.world > 1:
            return count // self.batch_size // self.world * self.batch_size
        return len(range(self.rank, count, self.world))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (row index, epoch), without the first `skip` rows."""
        epoch = self.epoch - self.ahead if self.shuffle else 0
        in_order = np.arange(self.rank, len(self.lengths), self.world)
        order = self._shuffled(epoch) if self.shuffle else in_order
        return ((int(index), epoch) for index in order[self.skip :])

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        stretch = 16 * self.batch_size
        batches: list[npt.NDArray[np.int64]] = []
        tail = order[:0]
        for start in range(0, len(order), stretch):
            block = order[start : start + stretch]
            block = block[np.argsort(self.lengths[block], kind="stable")]
            cut = [block[i : i + self.batch_size] for i in range(0, len(block), self.batch_size)]
            if len(cut[-1]) < self.batch_size:
                tail = cut.pop()
            batches += [cut[i] for i in torch.randperm(len(cut), generator=generator).tolist()]
        if self.world > 1:
            even = len(batches) // self.world * self.world
            return np.concatenate([order[:0], *batches[self.rank : even : self.world]])
        return np.concatenate([*batches, tail])


class ResumableLoader(DataLoader[Row]):
    """A loader that a checkpoint can continue in the middle of an epoch.

    It skips the batches already given, and after a finished epoch goes on with the next one:
    Lightning's own count runs one ahead when a run with `max_steps` is resumed from a checkpoint
    that was saved by the validation at the end of an epoch.
    """

    _epoch = 0
    _given = 0
    _resumed = False
    waited = 0.0
    """Seconds that the training waited for batches."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield the batches of an epoch that were not given yet."""
        sampler = cast(EpochSampler, self.sampler)
        epoch, start = sampler.epoch - sampler.ahead, 0
        if self._resumed and epoch == self._epoch and self._given < len(self):
            start = self._given
        elif self._resumed:
            sampler.ahead, epoch = sampler.epoch - (self._epoch + 1), self._epoch + 1
        self._resumed, self._epoch, self._given = False, epoch, start
        sampler.skip = start * (self.batch_size or 1)
        batches, end = super().__iter__(), object()
        while True:
            began = time.perf_counter()
            batch = next(batches, end)
            self.waited += time.perf_counter() - began
            if batch is end:
                return
            self._given += 1
            yield cast(Batch, batch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its batches were given."""
        ahead = cast(EpochSampler, self.sampler).ahead
        return {"epoch": self._epoch, "batches": self._given, "ahead": ahead}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that were given.

        Unless another epoch is begun before the next batch is taken.
        """
        self._epoch, self._given, self._resumed = state["epoch"], state["batches"], True
        cast(EpochSampler, self.sampler).ahead = state.get("ahead", 0)


class RowDataset(Dataset[Row]):
    """Rows of documents by (row index, epoch), with the tapped states `[S, T*H]` if stored.

    Args:
        samples: The samples.
        store: Their states, or None.
        rows: Which samples share a row; None gives each its own.
    """

    def __init__(
        self, samples: Sequence[Sample], store: FeatureStore | None, rows: Rows | None = None
    ) -> None:
        self.samples, self.store, self.rows = samples, store, rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.samples if self.rows is None else self.rows)

    def __getitem__(self, key: tuple[int, int]) -> Row:
        """Return a row's documents."""
        row, epoch = key
        inside = [row] if self.rows is None else self.rows[row]
        return [(i, epoch, self.samples[i], self.store[i] if self.store else None) for i in inside]


class PromptDataset(Dataset[list[int]]):
    """Prompts to decode, as lists of token ids."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    def __getitem__(self, index: int) -> list[int]:
        """Return the token ids of one prompt."""
        return self.prompts[index]


def only_item(batch: list[list[int]]) -> list[int]:
    """Collate a batch of one prompt: return the prompt."""
    return batch[0]
