"""How much the slots of a block count, by their position: one class a choice."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash_lightning.errors import UserError


class PositionWeights(ABC):
    """A rule that weighs the slots 1..K-1 of blocks. Slots without a label weigh 0 under any."""

    needs_probabilities: bool = False
    """Whether the rule asks what the drafter says."""

    @abstractmethod
    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        """Return weights of n blocks, `[n, K-1]` or `[K-1]`, finite and not negative.

        Args:
            labelled: Which slots have a label `[n, K-1]` bool.
            probabilities: The drafter's probability of each slot's data token `[n, K-1]`, detached,
                0 where there is none or the drafter can't say it; None unless
                `needs_probabilities`.
        """


def default_gamma(block_size: int) -> float:
    """Return the paper's loss decay for a block size: 16 -> 7, 10 -> 5, 8 -> 4.

    Straight lines between and beyond.

    >>> [default_gamma(k) for k in (4, 8, 10, 16)]
    [2.0, 4.0, 5.0, 7.0]
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


@dataclass(frozen=True)
class ExpWeights(PositionWeights):
    """Slot k weighs `exp(-(k-1)/gamma)` (the paper's).

    Args:
        gamma: Positive; auto is the paper's for the block size: 16 -> 7, 10 -> 5, 8 -> 4.
    """

    gamma: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse a gamma that is none."""
        if self.gamma != "auto" and not (self.gamma > 0 and math.isfinite(self.gamma)):
            raise UserError(
                "model.position_weights.gamma: needs a positive number or auto, got "
                f"{self.gamma}; equal weights are UniformWeights"
            )

    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        """See `PositionWeights`."""
        slots = labelled.shape[-1]
        gamma = default_gamma(slots + 1) if self.gamma == "auto" else self.gamma
        return torch.exp(-torch.arange(slots, device=labelled.device) / gamma)


@dataclass(frozen=True)
class UniformWeights(PositionWeights):
    """All slots weigh 1."""

    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        """See `PositionWeights`."""
        return labelled.new_ones(labelled.shape[-1], dtype=torch.float32)


@dataclass(frozen=True)
class DPaceWeights(PositionWeights):
    """D-PACE: slots weigh by what they add to the accept length, as the drafter stands.

    With `s_i = (1 - alpha) q_i + alpha`, q_i the drafter's probability of the data token of slot i,
    slot j weighs `sum_{m >= j} prod_{i <= m} s_i`. A block ends at its first slot without a label
    (the end of the answer): what lies behind it adds nothing. A token outside the draft vocabulary
    has q = 0.

    Args:
        alpha: 0..1; how much of a later slot's weight stays where an earlier one is surely wrong.
    """

    alpha: float = 0.5
    needs_probabilities = True

    def __post_init__(self) -> None:
        """Refuse an alpha that is none."""
        if not 0 <= self.alpha <= 1:
            raise UserError(f"model.position_weights.alpha: needs 0..1, got {self.alpha}")

    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        """See `PositionWeights`."""
        assert probabilities is not None
        steps = torch.where(labelled, (1 - self.alpha) * probabilities + self.alpha, 0.0)
        survival = steps.cumprod(dim=-1)
        return survival.flip(-1).cumsum(dim=-1).flip(-1)


def check_weights(weights: PositionWeights, denoising_steps: int) -> None:
    """Refuse weights by what the drafter says where training shows it part of the block.

    Raises:
        UserError: They are, and it does.
    """
    if weights.needs_probabilities and denoising_steps > 1:
        raise UserError(
            f"model.position_weights: {type(weights).__name__} asks what the drafter says in a "
            f"whole block, and model.axes.denoising_steps={denoising_steps} shows it some of it; "
            "take ExpWeights or UniformWeights"
        )
