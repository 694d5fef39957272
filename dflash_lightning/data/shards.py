"""Shards of tapped states: which samples share one, and its files, one a layer.

A file holds the states `[tokens, H]` of its samples, one after the other, then their CRC-32.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_lightning.data.files import write_whole
from dflash_lightning.target_rules import FINAL

SHARD_BYTES = 64 << 20
CHECKSUM_BYTES = 4
_PIECE = 1 << 20
_MAPS = 512
"""Open maps a process keeps; more shards than that are mapped again when they are read again."""


@dataclass(frozen=True)
class ShardPlan:
    """How samples are shared out to shards; it follows from their lengths alone.

    `starts` `[n + 1]` is the first token of each sample, `bounds` `[shards + 1]` the first sample
    of each shard.
    """

    folder: Path
    starts: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    hidden_size: int
    dtype: torch.dtype

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.bounds) - 1

    def path(self, layer_id: int, shard: int) -> Path:
        """Return the file of one layer's states in one shard."""
        layer = "final" if layer_id == FINAL else f"layer_{layer_id:02d}"
        return self.folder / layer / f"shard_{shard:05d}.bin"

    def samples(self, shard: int) -> range:
        """Return the indices of a shard's samples."""
        return range(int(self.bounds[shard]), int(self.bounds[shard + 1]))

    def tokens(self, shard: int) -> int:
        """Return the tokens of a shard."""
        return int(self.starts[self.bounds[shard + 1]] - self.starts[self.bounds[shard]])

    def num_bytes(self, shard: int) -> int:
        """Return the size of a layer's states in a shard, without checksum."""
        return self.tokens(shard) * self.hidden_size * self.dtype.itemsize

    def locate(self, sample: int) -> tuple[int, slice]:
        """Return the shard of a sample and its rows there."""
        shard = int(np.searchsorted(self.bounds, sample, side="right")) - 1
        first = self.starts[self.bounds[shard]]
        return shard, slice(int(self.starts[sample] - first), int(self.starts[sample + 1] - first))

    def states(self, layer_id: int, shard: int) -> Tensor:
        """Return a layer's states `[tokens, H]` in a shard, mapped into memory."""
        path, size = self.path(layer_id, shard), self.tokens(shard) * self.hidden_size
        return mapped(path, size, self.dtype).view(-1, self.hidden_size)


def plan_shards(
    folder: Path, starts: npt.NDArray[np.int64], hidden_size: int, dtype: torch.dtype
) -> ShardPlan:
    """Share samples out to shards of about SHARD_BYTES a layer, in order, none cut in two."""
    owner = starts[:-1] * (hidden_size * dtype.itemsize) // SHARD_BYTES
    inner = np.flatnonzero(np.diff(owner)) + 1
    bounds = np.concatenate([[0], inner, [len(owner)]]) if len(owner) else np.zeros(1)
    return ShardPlan(folder, starts, bounds.astype(np.int64), hidden_size, dtype)


@functools.lru_cache(maxsize=_MAPS)
def mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Map `size` values at the start of a file; what is written to them stays in this process."""
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)


def write_shard(path: Path, states: Tensor) -> None:
    """Write states `[tokens, H]` and their checksum, whole or not at all."""
    content = states.contiguous().view(torch.uint8).numpy().data.cast("B")
    write_whole(path, content, zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little"))


def has_size(path: Path, num_bytes: int) -> bool:
    """Return whether a shard's file is there with all its bytes."""
    return path.is_file() and path.stat().st_size == num_bytes + CHECKSUM_BYTES


def is_sound(path: Path) -> bool:
    """Return whether a shard's bytes have their checksum.

    A process reads an unchanged file once, however often it asks.
    """
    stat = path.stat()
    return _is_sound(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.cache
def _is_sound(path: Path, size: int, _mtime_ns: int, _inode: int) -> bool:
    checksum, left = 0, size - CHECKSUM_BYTES
    with path.open("rb") as stream:
        while left:
            piece = stream.read(min(_PIECE, left))
            if not piece:
                return False
            checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        return stream.read() == checksum.to_bytes(CHECKSUM_BYTES, "little")


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices in batches of similar length, of at most `max_tokens` padded tokens each.

    A sample longer than that is alone.
    """
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
