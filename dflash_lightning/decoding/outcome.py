"""What decoding one prompt gave: its tokens, its cycles, and where the time went."""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Cycle:
    """One draft-and-verify cycle of one row."""

    drafted: int
    """Tokens the target verified."""
    accepted: int
    """Of these, how many led the block and were accepted."""
    committed: int
    """Tokens added to the output: accepted + one, cut at a stop token."""
    drafts: list[int] = field(default_factory=list, repr=False, compare=False)
    """The drafted tokens, to compare with what the output became."""


@dataclass
class Decoded:
    """What decoding one prompt gave; seconds are its share of the batch's, so that they add up."""

    tokens: list[int] = field(default_factory=list)
    """New tokens, the stop token included."""
    cycles: list[Cycle] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def accept_len(self) -> float:
        """Tokens committed per cycle, prefill token not; NaN without cycles."""
        return (
            sum(c.committed for c in self.cycles) / len(self.cycles)
            if self.cycles
            else float("nan")
        )


def until_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in stop_ids), tokens)
