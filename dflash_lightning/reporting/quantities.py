"""The figures of a run, each from sums over its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.reporting.statistics import Figure, Floats, Measured, Sums


@dataclass(frozen=True)
class Quantity:
    """A figure with its name in texts and on axes."""

    key: str
    words: str
    unit: str
    figure: Figure

    @property
    def label(self) -> str:
        """The axis label."""
        return f"{self.words} [{self.unit}]"

    def known(self, runs: Sequence[Measured]) -> bool:
        """Whether all of these runs measured it."""
        try:
            for run in runs:
                self.figure(run.columns)
        except KeyError:
            return False
        return True


def ratio(over: str, under: str, scale: float = 1.0) -> Figure:
    """Return the figure `scale * sum(over) / sum(under)`."""

    def figure(sums: Sums) -> Floats:
        return scale * sums[over] / sums[under]

    return figure


def _speedup(sums: Sums) -> Floats:
    speculative, plain = sums["tokens"] / sums["seconds"], sums["plain_tokens"]
    return speculative * sums["plain_seconds"] / plain


ACCEPT_LEN = Quantity("accept_len", "accept length", "tokens/cycle", ratio("committed", "cycles"))
SPEEDUP = Quantity("speedup", "speedup, measured", "x plain decoding", _speedup)
MODELLED = Quantity(
    "model_speedup", "speedup, cost model", "x plain decoding", ratio("modelled", "cycles")
)
DRAFT_MS = Quantity("draft_ms", "draft", "ms/cycle", ratio("draft_seconds", "cycles", 1e3))
VERIFY_MS = Quantity("verify_ms", "verify", "ms/cycle", ratio("verify_seconds", "cycles", 1e3))
QUANTITIES = (ACCEPT_LEN, SPEEDUP, MODELLED, DRAFT_MS, VERIFY_MS)


def accepted_up_to(k: int) -> Quantity:
    """Return the share of cycles whose first k drafts were all accepted."""
    return Quantity(
        f"accept_rate/pos_{k}",
        f"accepted up to position {k}",
        "share of cycles",
        ratio(f"accepted_{k}", f"drafted_{k}"),
    )
