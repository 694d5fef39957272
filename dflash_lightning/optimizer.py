"""The drafter's optimizer and schedule (paper, section 5: AdamW, cosine, warm-up ratio 0.04)."""

import math

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup

from dflash_lightning.errors import UserError


def adamw_with_cosine(
    model: nn.Module, lr: float, weight_decay: float, warmup_ratio: float, steps: float
) -> OptimizerLRSchedulerConfig:
    """Return AdamW over the trainable parameters with linear warm-up and a cosine to 0, by step.

    Args:
        model: Its matrices decay, its norms never do.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_ratio: Share of the steps over which the rate rises.
        steps: Optimizer steps of the whole run.

    Raises:
        UserError: The run has no end.
    """
    if math.isinf(steps):
        raise UserError("trainer.max_epochs: the cosine needs an end; set it or trainer.max_steps")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=lr, fused=True)
    # Lightning would refuse to clip: it takes every fused optimizer for one that unscales gradients
    # itself. This one is never given a scale.
    optimizer._step_supports_amp_scaling = False
    schedule: LambdaLR = get_cosine_schedule_with_warmup(
        optimizer, round(warmup_ratio * steps), int(steps)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def scale_gradients(model: nn.Module, scale: Tensor) -> None:
    """Multiply the gradients of a model by a number, in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
