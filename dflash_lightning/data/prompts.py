"""What a prompt is, and what gives prompts: a class that an experiment names by `class_path`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from dflash_lightning.data.samples import Message

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Prompt:
    """A chat (`messages`) or a plain `text`, with the place it came from for error messages."""

    source: str
    messages: tuple[Message, ...] = ()
    text: str | None = None


class PromptSource(ABC):
    """Something that streams prompts by split; the splits share none."""

    max_bad_share: float = 0.05
    """Bad rows are left out and counted, unless more than this share of a split is bad."""

    @abstractmethod
    def stream(self, split: Split) -> Iterator[Prompt]:
        """Yield the prompts of a split, from its first, in the same order at every call.

        Raises:
            UserError: A file is missing, or too many of its rows are bad; the message names the
                first one by file and line.
        """

    def count(self, split: Split) -> int | None:
        """Return how many prompts `stream` yields, if that is known cheaply."""
        return None

    def fingerprint(self) -> str | None:
        """Return the identity of all that `stream` yields without reading it, or None.

        None stands for no cheap identity: the content is then read to know it.
        """
        return None
