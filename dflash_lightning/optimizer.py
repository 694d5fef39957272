"""The drafter's optimizer and schedule (paper, section 5: AdamW, cosine, warm-up ratio 0.04)."""

import math

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning.budget import Schedule
from dflash_lightning.errors import UserError


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return AdamW's two averages.

    Raises:
        UserError: One is not within 0..1.
    """
    for beta in betas:
        if not 0 <= beta < 1:
            raise UserError(f"model.betas: each is 0 or more and below 1, got {beta}")
    return betas


def adamw_with_cosine(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    schedule: Schedule,
) -> OptimizerLRSchedulerConfig:
    """Return AdamW over the trainable parameters with linear warm-up and a cosine to 0, by step.

    Args:
        model: Its matrices decay, its norms never do.
        lr: Peak learning rate.
        betas: How slowly the averages of gradients and of their squares forget.
        weight_decay: Decay of matrices.
        schedule: How far a run is after so many steps.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=lr, betas=betas, fused=True)
    # Lightning would refuse to clip: it takes every fused optimizer for one that unscales gradients
    # itself. This one is never given a scale.
    optimizer._step_supports_amp_scaling = False
    rates = LambdaLR(optimizer, lambda step: warmup_cosine(schedule, step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def warmup_cosine(schedule: Schedule, step: int) -> float:
    """Return the rate after a number of steps, as a share of its peak: a line up, a cosine to 0.

    >>> [round(warmup_cosine(Schedule(6, 2, float), n), 2) for n in range(8)]
    [0.0, 0.5, 1.0, 0.85, 0.5, 0.15, 0.0, 0.0]
    """
    done = schedule.done(step)
    if done < schedule.warmup:
        return done / schedule.warmup
    share = (done - schedule.warmup) / max(schedule.total - schedule.warmup, 1e-9)
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def scale_gradients(model: nn.Module, scale: Tensor) -> None:
    """Multiply the gradients of a model by a number, in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
