"""Losses over block slots, computed in float32 and in chunks.

So logits over the vocabulary never exist at once. The loss of a step is `sum(w * loss) / sum(w)`.
`chunked_loss` returns the numerator; the module divides by the denominator of the whole
accumulation window, over all ranks, so that grouping samples differently changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

SlotLoss = Callable[[Tensor, Tensor], Tensor]
Head = Callable[[Tensor], Tensor]


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy `[M]` in nats of float32 logits `[M, Vd]` for label rows `[M]`."""
    return cross_entropy(logits, labels, reduction="none")


@dataclass(frozen=True)
class LossOutput:
    """`numerator` is `sum(w * loss)`, differentiable.

    `slot_loss` `[M]` and `predictions` `[M]` are detached.
    """

    numerator: Tensor
    slot_loss: Tensor
    predictions: Tensor


def chunked_loss(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: Head,
    slot_loss: SlotLoss = token_cross_entropy,
    chunk: int = 1024,
) -> LossOutput:
    """Return the weighted loss of M slots, holding the logits of only `chunk` slots at a time.

    The gradient with respect to `hidden` is formed in the forward pass, chunk by chunk; backward
    only scales it. The head is frozen and gets none.

    Args:
        hidden: Final-normed drafter states `[M, H]`.
        labels: Row of the head that each slot should say `[M]`.
        weights: Loss weight of each slot `[M]`, float32.
        head: Frozen map from `[m, H]` to logits `[m, Vd]`.
        slot_loss: Map from float32 logits `[m, Vd]` and labels `[m]` to losses `[m]`.
        chunk: Slots per chunk; memory grows with it, results don't change.
    """
    numerator, losses, predictions = _ChunkedLoss.apply(
        hidden, labels, weights, head, slot_loss, chunk
    )
    return LossOutput(numerator, losses, predictions)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        head: Head,
        slot_loss: SlotLoss,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        losses, predictions = [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            states = hidden[part].detach().requires_grad_(gradient is not None)
            loss, said, slope = _chunk(states, labels[part], weights[part], head, slot_loss)
            if gradient is not None and slope is not None:
                gradient[part] = slope
            losses.append(loss)
            predictions.append(said)
        if not losses:
            empty = hidden.new_zeros(0, dtype=torch.float32)
            losses, predictions = [empty], [labels[:0]]
        ctx.save_for_backward(gradient)
        slot_losses, spoken = torch.cat(losses), torch.cat(predictions)
        ctx.mark_non_differentiable(slot_losses, spoken)
        return (slot_losses * weights).sum(), slot_losses, spoken

    @staticmethod
    def backward(ctx: Any, grad_numerator: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = None if gradient is None else gradient * grad_numerator.to(gradient.dtype)
        return scaled, None, None, None, None, None


def _chunk(
    states: Tensor, labels: Tensor, weights: Tensor, head: Head, slot_loss: SlotLoss
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses, predictions and the gradient to `states`; the logits end with the call."""
    with torch.enable_grad():
        logits = head(states).to(torch.promote_types(states.dtype, torch.float32))
        loss = slot_loss(logits, labels)
        weighted = (loss * weights).sum()
    slope = torch.autograd.grad(weighted, states)[0] if states.requires_grad else None
    return loss.detach(), logits.detach().argmax(dim=-1), slope
