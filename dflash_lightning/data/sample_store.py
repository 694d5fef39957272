"""Samples on disk, read through a memory map: a data set may be larger than memory.

A store is a folder of flat files: `ids.bin` (int32) and `loss_mask.bin` (bool) of all samples, one
after the other, `starts.npy`, and `store.json` with their digest.
"""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from dflash_lightning.data.files import disk_full_as_user_error
from dflash_lightning.data.samples import Sample

TOKENS_PER_CHUNK = 1 << 20


class TokenLists(Sequence[list[int]]):
    """Lists of token ids in a memory-mapped file of int32, `starts` `[n + 1]` between them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.starts: npt.NDArray[np.int64] = np.load(folder / f"{name}_starts.npy")
        self.ids = _mapped(folder / f"{name}.bin", np.int32, int(self.starts[-1]))

    def __len__(self) -> int:
        """Return the number of lists."""
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        """Return one list, or the lists of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        found: list[int] = self.ids[self.starts[row] : self.starts[row + 1]].tolist()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the place to another process, not the content."""
        return TokenLists, (self.folder, self.name)


class SampleStore(Sequence[Sample]):
    """The samples of a folder that `write_samples` made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lists = TokenLists(folder, "ids")
        self.loss_mask = _mapped(folder / "loss_mask.bin", np.bool_, self.num_tokens)
        about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.digest: str = about["digest"]
        """Changes with any token id or length; not with the loss mask."""
        self.content: str = about["content"]
        """Changes with anything in the folder."""
        self.left_out: int = about["left_out"]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """First token of each sample, and the number of tokens last `[n + 1]`."""
        return self.lists.starts

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample `[n]`."""
        return np.diff(self.starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.lists)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Return one sample, copied out of the map, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        span = slice(self.starts[row], self.starts[row + 1])
        ids = torch.from_numpy(self.lists.ids[span].astype(np.int64))
        return Sample(ids, torch.from_numpy(np.array(self.loss_mask[span])))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the place to another process, not the content."""
        return SampleStore, (self.folder,)

    def supervised_ids(self) -> Iterator[npt.NDArray[np.int32]]:
        """Yield all supervised token ids in order, in pieces that are read, not mapped.

        So that a pass over all of them doesn't fill the memory map.
        """
        with (
            (self.folder / "ids.bin").open("rb") as ids,
            (self.folder / "loss_mask.bin").open("rb") as mask,
        ):
            for _ in range(0, self.num_tokens, TOKENS_PER_CHUNK):
                tokens = np.fromfile(ids, np.int32, TOKENS_PER_CHUNK)
                yield tokens[np.fromfile(mask, np.bool_, TOKENS_PER_CHUNK)]


def write_samples(
    folder: Path, samples: Iterable[Sample | None], prompts: Iterable[Sequence[int]] = ()
) -> SampleStore:
    """Write samples into a new `folder` and return their store; one sample is in memory at a time.

    Args:
        folder: What it held before is lost.
        samples: None counts as left out.
        prompts: Prompts to decode, read by `TokenLists(folder, "prompts")`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    digest, content, left_out = (*(hashlib.blake2b(digest_size=16) for _ in range(2)), 0)
    with ExitStack() as stack:
        stack.enter_context(disk_full_as_user_error(folder))
        ids = stack.enter_context(_ListWriter(folder, "ids"))
        mask = stack.enter_context((folder / "loss_mask.bin").open("wb"))
        asked = stack.enter_context(_ListWriter(folder, "prompts"))
        for sample in samples:
            if sample is None:
                left_out += 1
                continue
            digest.update(ids.add(sample.ids.numpy()))
            supervised = sample.loss_mask.numpy().tobytes()
            mask.write(supervised)
            content.update(supervised)
        for prompt in prompts:
            content.update(asked.add(np.asarray(prompt)))
        digest.update(np.asarray(ids.ends, np.int64).tobytes())
        content.update(np.asarray(asked.ends, np.int64).tobytes() + digest.digest())
    about = {
        "digest": digest.hexdigest(),
        "content": content.hexdigest(),
        "left_out": left_out,
    }
    (folder / "store.json").write_text(json.dumps(about), encoding="utf-8")
    return SampleStore(folder)


def opened(folder: Path) -> SampleStore | None:
    """Return the store in `folder`, None if there is none or its files are not whole."""
    try:
        TokenLists(folder, "prompts")
        return SampleStore(folder)
    except (OSError, ValueError, KeyError, EOFError):
        return None


class _ListWriter:
    """Writes what `TokenLists` reads; the index is written last, on leaving the context."""

    def __init__(self, folder: Path, name: str) -> None:
        self.index = folder / f"{name}_starts.npy"
        self.stream = (folder / f"{name}.bin").open("wb")
        self.ends = array("q", [0])

    def __enter__(self) -> "_ListWriter":
        return self

    def add(self, ids: npt.NDArray[Any]) -> bytes:
        content = ids.astype(np.int32).tobytes()
        self.stream.write(content)
        self.ends.append(self.ends[-1] + len(ids))
        return content

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        np.save(self.index, np.asarray(self.ends, np.int64))


def _mapped(path: Path, dtype: Any, size: int) -> Any:
    """Map a file of `size` values; an empty file can't be mapped."""
    return np.asarray(np.memmap(path, dtype, "r", shape=(size,))) if size else np.zeros(0, dtype)
