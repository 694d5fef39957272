"""What a cycle costs and what speedup follows: (draft + verify) / accept length against a step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from dflash_lightning.decoding.cache import RowCache
from dflash_lightning.decoding.loop import GREEDY
from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.target import Target


@dataclass(frozen=True)
class Cost:
    """Median milliseconds, warm, at batch 1 behind one prompt."""

    parameters: int
    """Trained ones; embedding and head are the target's."""
    draft_ms: float
    """One drafted block: two new context positions, and a pass or as many as it takes."""
    verify_ms: float
    """One target forward over K tokens."""
    plain_ms: float
    """One target forward over one token."""

    def speedup(self, accept_len: float) -> float:
        """Return the speedup over plain decoding that follows from an accept length."""
        return accept_len * self.plain_ms / (self.draft_ms + self.verify_ms)


@torch.no_grad()
def measure_cost(
    target: Target, proposer: DrafterProposer, prompt: Tensor, repeats: int = 15
) -> Cost:
    """Time the forwards of a cycle and of a plain step, interleaved, behind a prompt `[P]`."""
    cache, tokens = RowCache(target.model, 1), prompt[None].to(target.device)
    length = torch.tensor([len(prompt)], device=target.device)
    hidden = target.forward(tokens, None, cache.positions(len(prompt)), cache).hidden
    assert hidden is not None
    cache.rows.set(length)
    proposer.begin(1)
    proposer.observe(hidden, length, tokens)
    block = tokens[:, -1:].expand(1, proposer.block_size).contiguous()
    uniform = torch.zeros(1, proposer.block_size, device=target.device)
    none = torch.tensor([0], device=target.device)

    def draft() -> None:
        proposer.observe(hidden[:, :2], none, tokens[:, :2])
        proposer.propose(block[:, 0], GREEDY, uniform, None)

    def forward(ids: Tensor) -> None:
        target.forward(ids, None, cache.positions(ids.shape[1]), cache, logits_to_keep=0)

    parts: dict[str, Callable[[], None]] = {
        "draft_ms": draft,
        "verify_ms": lambda: forward(block),
        "plain_ms": lambda: forward(block[:, :1]),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, run in parts.items():
            start = _now(target)
            run()
            times[name].append(1e3 * (_now(target) - start))
    count = sum(p.numel() for p in proposer.drafter.parameters())
    return Cost(count, **{name: median(values[1:]) for name, values in times.items()})


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
