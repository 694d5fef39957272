"""From logits to distributions, and the two lossless rules that accept or reject drafts.

`match` (proposal is a point mass): the drafter's argmax is accepted iff the target's own sample
equals it. `rejection`: the drafter samples from q, and a draft is accepted with probability
min(1, p/q); the first rejected one is replaced by a sample of max(p - q, 0). Taking the drafter's
argmax AND min(1, p/q) is not lossless.

Every draw is a uniform number turned into a token by inverting the distribution's sum, so a
sequence sampled in a batch gets the same tokens as alone.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dflash_lightning.errors import UserError

Rule = Literal["match", "rejection"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; applied to target and drafter alike.

    Args:
        temperature: 0 is greedy.
        top_k: Keep the k most probable tokens; null keeps all.
        top_p: Keep the most probable tokens that together have at least this probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens that occurred.
        rule: `match` or `rejection`; no difference at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    rule: Rule = "match"

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature: needs 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: needs at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p: needs more than 0 and at most 1, got {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty: needs more than 0, got {self.repetition_penalty}")
        if self.rule not in get_args(Rule):
            raise UserError(f"rule: must be match or rejection, got {self.rule}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logits `[..., V]` with those of `seen` tokens `[..., V]` (bool) pushed down."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities `[..., V]` tokens are drawn from, in float32.

    A point mass if greedy.
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return a token `[...]` for each distribution `[..., V]`.

    Args:
        probabilities: Need not sum to 1.
        uniform: Numbers in [0, 1) `[...]`.
    """
    total = probabilities.double().cumsum(dim=-1)
    place = uniform.double()[..., None] * total[..., -1:]
    tokens = torch.searchsorted(total, place, right=True)[..., 0]
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).long().argmax(dim=-1)
    return torch.minimum(tokens, last)


def accept_matching(drafts: Tensor, choices: Tensor, room: Tensor) -> Tensor:
    """Return how many leading drafts `[B, k]` equal the target's choices `[B, k+1]`.

    At most `room` `[B]`.

    >>> accept_matching(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 0, 7]]), torch.tensor([9]))
    tensor([2])
    """
    count = drafts.shape[1]
    matching = (drafts == choices[:, :count]).long().cumprod(dim=1).sum(dim=1)
    return torch.minimum(matching, room)


def accept_rejecting(
    drafts: Tensor, q: Tensor, p: Tensor, uniform: Tensor, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many leading drafts are accepted `[B]`, and the token that follows them `[B]`.

    Args:
        drafts: Sampled from `q` `[B, k]`.
        q: The drafter's distributions `[B, k, V]`.
        p: The target's distributions `[B, k+1, V]`.
        uniform: Two numbers in [0, 1) per slot `[B, k+1, 2]`: to accept with, and to draw with.
        room: Most drafts that may be accepted `[B]`; the one behind them counts as never made.
    """
    batch, count = drafts.shape
    at = drafts[..., None]
    ratio = p[:, :count].gather(-1, at)[..., 0] / q.gather(-1, at)[..., 0]
    accepted = (uniform[:, :count, 0] < ratio).long().cumprod(dim=1).sum(dim=1)
    full = torch.minimum(torch.full_like(room, count), room)
    accepted = torch.minimum(accepted, full)
    row = torch.arange(batch, device=drafts.device)
    here = p[row, accepted]
    behind = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1)[row, accepted]
    residual = (here - behind).clamp(min=0)
    keep_p = (accepted == full)[:, None] | (residual.sum(dim=-1, keepdim=True) <= 0)
    return accepted, draw(torch.where(keep_p, here, residual), uniform[row, accepted, 1])
