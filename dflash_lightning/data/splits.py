"""Deals rows among train, val and test: disjoint, complete, none of them in two splits."""

import hashlib
import logging
import math
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_lightning.data.prompts import SPLITS, Prompt, Split
from dflash_lightning.data.rows import BadRows, Row
from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)

_CODES: dict[Split, int] = {split: n for n, split in enumerate(SPLITS)}
_DROPPED = len(SPLITS)


@dataclass
class Deal:
    """Which rows go to which split.

    Rows for a split without a part of its own are taken from the training part, evenly spread over
    it, so that a file sorted by topic is held out from every topic. A prompt that occurs in two
    splits stays in test before val before train.

    Args:
        parts: The part (a file, a split of a data set) of `train`, and those of `val` and `test`
            that have one.
        read: Reads the rows of a part, good and bad.
        held_out: Rows held out for each split without a part: a count, or a share of the rows.
        limit: At most so many training rows; None takes all.
        max_bad_share: Highest share of bad rows in a part.
    """

    parts: Mapping[Split, str]
    read: Callable[[str], Iterator[Row]]
    held_out: int | float
    limit: int | None
    max_bad_share: float

    def __post_init__(self) -> None:
        """Read every row once; what stays in memory is a hash and a split a row."""
        if self.limit is not None and self.limit < 0:
            raise UserError(f"data.prompts.limit: needs 0 or more, got {self.limit}")
        hashes = {split: self._hashes(part) for split, part in self.parts.items()}
        self._splits = {
            split: np.full(len(found), _CODES[split], dtype=np.uint8)
            for split, found in hashes.items()
        }
        for split, rows in self._held_out(len(hashes["train"])).items():
            self._splits["train"][rows] = _CODES[split]
        self._drop_repeated(hashes)

    def count(self, split: Split) -> int:
        """Return how many prompts a split has."""
        part = split if split in self.parts else "train"
        found = int((self._splits[part] == _CODES[split]).sum())
        return found if split != "train" or self.limit is None else min(found, self.limit)

    def stream(self, split: Split) -> Iterator[Prompt]:
        """Yield the prompts of a split, in the order of their rows.

        Raises:
            UserError: The rows are no longer those that were dealt.
        """
        part = split if split in self.parts else "train"
        wanted = self._splits[part] == _CODES[split]
        left = self.count(split)
        good = (row for row in self.read(self.parts[part]) if isinstance(row, Prompt))
        if left == 0:
            return
        for number, prompt in enumerate(good):
            if number >= len(wanted):
                break
            if wanted[number]:
                yield prompt
                left -= 1
                if left == 0:
                    return
        raise UserError(f"{self.parts[part]}: the rows changed while they were read; start again")

    def _hashes(self, part: str) -> NDArray[np.uint64]:
        bad = BadRows(self.max_bad_share, log.warning)
        found = array("Q")
        for row in self.read(part):
            if isinstance(row, UserError):
                bad.add(row)
            else:
                bad.good()
                found.append(content_hash(row))
        bad.end()
        return np.frombuffer(found, dtype=np.uint64) if found else np.zeros(0, dtype=np.uint64)

    def _held_out(self, count: int) -> dict[Split, NDArray[np.int64]]:
        """Return the training rows that each split without a part gets."""
        splits: list[Split] = [split for split in SPLITS if split not in self.parts]
        each = self.held_out
        if not 0 <= each < math.inf:
            raise UserError(f"data.prompts.held_out: needs a count or a share, got {each}")
        number = each if isinstance(each, int) else math.floor(each * count + 0.5)
        total = number * len(splits)
        if total and total >= count:
            raise UserError(
                f"{self.parts['train']}: {count} rows are too few to hold out {each} for each of "
                f"{' and '.join(splits)}; give data.prompts.init_args.{splits[0]} or a smaller "
                "held_out"
            )
        rows = (2 * np.arange(total, dtype=np.int64) + 1) * count // max(1, 2 * total)
        return {split: rows[n :: len(splits)] for n, split in enumerate(splits)}

    def _drop_repeated(self, hashes: Mapping[Split, NDArray[np.uint64]]) -> None:
        taken: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        for split in reversed(SPLITS):
            part = split if split in self.parts else "train"
            codes, found = self._splits[part], hashes[part]
            inside = codes == _CODES[split]
            repeated = inside & np.isin(found, taken) if len(taken) else np.zeros_like(inside)
            codes[repeated] = _DROPPED
            if repeated.any():
                log.warning(
                    "%s: %d prompts of %s occur in a held-out split too and are left out of it",
                    self.parts[part],
                    int(repeated.sum()),
                    split,
                )
            taken = np.union1d(taken, found[inside]) if split != "train" else taken


def content_hash(prompt: Prompt) -> int:
    """Return 64 bits of what is asked, or of a text; answers, case and white space don't count."""
    messages = list(prompt.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    said = [prompt.text] if prompt.text is not None else [m["content"] for m in messages]
    words = [" ".join(unicodedata.normalize("NFC", text).casefold().split()) for text in said]
    digest = hashlib.blake2b("\0".join(words).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
