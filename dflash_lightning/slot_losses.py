"""The axis of labels: what a drafted slot should say, one class a choice, computed in float32.

Which slots count, and how much by their position, is not decided here (`position_weights.py`), nor
how logits are kept small (`losses.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from dflash_lightning.errors import UserError
from dflash_lightning.logits import cross_entropy

Need = Literal["argmax", "distribution"]


class Labels(NamedTuple):
    """Rows of the drafter's head that m slots should say.

    `known` `[m]` is false where the drafter lacks the token; `rows` `[m]` is 0 there.
    """

    rows: Tensor
    known: Tensor


@dataclass(frozen=True)
class Wanted:
    """What m slots should say.

    Attributes:
        data: The token of the data.
        argmax: The target's most probable token, where the loss needs `argmax`.
        logits: The target's logits `[m, Vd]` in float32, over the tokens that the drafter can say,
            where the loss needs `distribution`.
    """

    data: Labels
    argmax: Labels | None = None
    logits: Tensor | None = None

    def rows(self, at: slice, dtype: torch.dtype) -> "Wanted":
        """Return what some of the slots should say, logits as `dtype`."""
        argmax = None if self.argmax is None else Labels(*(x[at] for x in self.argmax))
        logits = None if self.logits is None else self.logits[at].to(dtype)
        return Wanted(Labels(*(x[at] for x in self.data)), argmax, logits)


class Loss(ABC):
    """A loss of slots, each by itself."""

    needs: AbstractSet[Need] = frozenset()
    """What of the target it needs: nothing, `argmax` or `distribution`."""

    @abstractmethod
    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """Return the losses `[m]` of float32 logits `[m, Vd]`.

        Where `share` is 0 they may be anything.
        """

    def share(self, wanted: Wanted) -> Tensor:
        """Return `[m]`, 0..1: how much of each slot counts in the denominator of the mean.

        A slot whose label is beyond the draft vocabulary doesn't; a target distribution over the
        draft vocabulary always is one.
        """
        if wanted.argmax is not None and "argmax" in self.needs:
            return wanted.argmax.known.float()
        if "distribution" in self.needs:
            return torch.ones_like(wanted.data.known, dtype=torch.float32)
        return wanted.data.known.float()


class DataToken(Loss):
    """Cross-entropy of the data's token, in nats (the paper's)."""

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        return cross_entropy(logits, wanted.data.rows)


class TargetArgmax(Loss):
    """Cross-entropy of the target's most probable token.

    It has weight 0 where that token is outside the draft vocabulary.
    """

    needs = frozenset({"argmax"})

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        assert wanted.argmax is not None
        return cross_entropy(logits, wanted.argmax.rows)


class TargetKL(Loss):
    """`KL(target || drafter)` in nats.

    With a draft vocabulary the target's distribution is restricted to it and renormalised.
    """

    needs = frozenset({"distribution"})

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        assert wanted.logits is not None
        drafted, target = logits.log_softmax(dim=-1), wanted.logits.log_softmax(dim=-1)
        return kl_div(drafted, target, reduction="none", log_target=True).sum(dim=-1)


class TargetTV(Loss):
    """Total variation `sum |p - q| / 2`: the probability that rejection sampling refuses the draft.

    With a draft vocabulary the target's distribution p is restricted to it and renormalised.
    """

    needs = frozenset({"distribution"})

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        assert wanted.logits is not None
        apart = logits.softmax(dim=-1) - wanted.logits.softmax(dim=-1)
        return apart.abs().sum(dim=-1) / 2


@dataclass(frozen=True)
class Term:
    """A part of a mixed loss.

    Attributes:
        loss: A loss class.
        weight: What it is multiplied by; positive.
    """

    loss: Loss
    weight: float = 1.0


class Mix(Loss):
    """The weighted sum of several losses.

    A slot that counts for some of the terms only (their labels are within the draft vocabulary)
    counts in the denominator by the share of these terms' weights.

    Args:
        terms: Terms by name.
    """

    def __init__(self, terms: dict[str, Term]) -> None:
        for name, term in terms.items():
            if not 0 < term.weight < float("inf"):
                raise UserError(
                    f"model.loss.terms.{name}.weight: needs a positive number, got {term.weight}"
                )
        if not terms:
            raise UserError("model.loss.terms: a mixed loss needs at least one term")
        self.terms = terms
        self.needs = frozenset(need for term in terms.values() for need in term.loss.needs)

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        total = logits.new_zeros(len(logits))
        for term in self.terms.values():
            losses, _ = slot_losses(term.loss, logits, wanted)
            total = total + term.weight * losses
        return total

    def share(self, wanted: Wanted) -> Tensor:
        """See `Loss`."""
        shares = [term.weight * term.loss.share(wanted) for term in self.terms.values()]
        return torch.stack(shares).sum(dim=0) / sum(term.weight for term in self.terms.values())


def slot_losses(loss: Loss, logits: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Return the losses `[m]`, 0 where nothing counts, and the shares `[m]`."""
    share = loss.share(wanted).to(logits.dtype)
    return torch.where(share > 0, loss(logits, wanted), 0), share
