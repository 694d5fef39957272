"""Acceptance by slot: pure functions on blocks, and torchmetrics that only accumulate their sums.

Three curves, never mixed (all over slots 1..K-1):
`marginal[k]` how often slot k alone is right; `survival[k]` how often slots 1..k are all right;
`conditional[k] = survival[k] / survival[k-1]`. The accept length is 1 (the bonus token) plus the
mean number of leading right slots; a product of marginals is not that, since slots are correlated.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def leading(correct: Tensor, valid: Tensor) -> Tensor:
    """Return `[..., K-1]` bool: true while every slot so far is valid and right.

    >>> correct = torch.tensor([[True, True, False, True]])
    >>> leading(correct, torch.ones_like(correct)).tolist()
    [[True, True, False, False]]
    """
    return (correct & valid).long().cumprod(dim=-1).bool()


def slot_counts(correct: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Return integer sums over blocks; slots that were not scored (`valid` false) count nowhere.

    Args:
        correct: Whether slot k's draft is right, `[M, K-1]` bool.
        valid: Whether slot k has a label, `[M, K-1]` bool.

    Returns:
        `right`, `scored`, `survived`, `reached` `[K-1]`: slot right / slot has a label / slots 1..k
        all right / slots 1..k all have labels; `full_accepted` and `full_blocks`: leading right
        slots and number of the blocks whose slots all have labels; `accepted` and `blocks`: the
        same of all blocks with at least one labelled slot.
    """
    survived = leading(correct, valid)
    reached = valid.long().cumprod(dim=-1).bool()
    full, some = valid.all(dim=-1), valid.any(dim=-1)
    return {
        "right": (correct & valid).sum(dim=0),
        "scored": valid.sum(dim=0),
        "survived": survived.sum(dim=0),
        "reached": reached.sum(dim=0),
        "accepted": survived.sum(),
        "blocks": some.sum(),
        "full_accepted": survived[full].sum(),
        "full_blocks": full.sum(),
    }


def curves(counts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `marginal`, `survival`, `conditional` `[K-1]` from the sums of `slot_counts`.

    NaN where nothing was counted.
    """
    survival = counts["survived"] / counts["reached"]
    before = torch.cat([torch.ones_like(survival[:1]), survival[:-1]])
    return {
        "marginal": counts["right"] / counts["scored"],
        "survival": survival,
        "conditional": survival / before,
    }


class AcceptanceBySlot(Metric):
    """Teacher-forced acceptance of drafted blocks, slot by slot.

    One vector state, so batches may be split anyhow.
    """

    full_state_update = False
    higher_is_better = True
    right: Tensor

    def __init__(self, num_slots: int, **kwargs: Any) -> None:
        """Make a metric over blocks of `num_slots` = K-1 drafted slots."""
        super().__init__(**kwargs)
        for name in ("right", "scored", "survived", "reached"):
            self.add_state(name, torch.zeros(num_slots, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("accepted", "blocks", "full_accepted", "full_blocks"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, correct: Tensor, valid: Tensor) -> None:
        """Add blocks: `correct` and `valid` are `[..., K-1]` bool."""
        slots = self.right.shape[0]
        for name, count in slot_counts(
            correct.reshape(-1, slots), valid.reshape(-1, slots)
        ).items():
            setattr(self, name, getattr(self, name) + count)

    def compute(self) -> dict[str, Tensor]:
        """Return the curves `[K-1]`, `accept_len` and `accept_len_full_blocks` (bonus included).

        Raises:
            ValueError: No block was scored.
        """
        counts = {name: getattr(self, name) for name in self._defaults}
        if not counts["blocks"]:
            raise ValueError(
                "no block with a labelled slot was scored: the split has no usable sample"
            )
        return {
            **curves(counts),
            "accept_len": 1 + counts["accepted"] / counts["blocks"],
            "accept_len_full_blocks": 1 + counts["full_accepted"] / counts["full_blocks"],
        }


def acceptance_scalars(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what `AcceptanceBySlot.compute` gave as named scalars, without unmeasured ones."""
    scalars = {name: value for name, value in found.items() if value.dim() == 0}
    for curve, name in (("survival", "accept_rate"), ("marginal", "slot_accuracy")):
        for slot, value in enumerate(found[curve], start=1):
            scalars[f"{name}/pos_{slot}"] = value
    return {name: value for name, value in scalars.items() if value.isfinite()}


class WeightedMean(Metric):
    """`sum(w * x) / sum(w)` over everything seen, in float64."""

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self, **kwargs: Any) -> None:
        """Make an empty mean."""
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, weight: Tensor) -> None:
        """Add a numerator and its weight."""
        self.total = self.total + total.detach()
        self.weight = self.weight + weight.detach()

    def compute(self) -> Tensor:
        """Return the mean; NaN if nothing was seen."""
        return (self.total / self.weight).float()
