"""What is done to rows of logits, in as few passes over the vocabulary as CPUs allow."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GROUP = 256
TINY = 1e-30


def cross_entropy(logits: Tensor, rows: Tensor) -> Tensor:
    """Return `-log softmax(logits)[row]` `[m]` of logits `[m, V]` and rows `[m]`, in nats.

    As torch's, which on CPU takes the exponential of everything twice.
    """
    if logits.device.type != "cpu":
        return torch.nn.functional.cross_entropy(logits, rows, reduction="none")
    found: Tensor = _CrossEntropy.apply(logits, rows)
    return found


def argmax(logits: Tensor) -> Tensor:
    """Return the index `[m]` of each row's largest logit, the first of equal ones.

    On CPU torch's own looks at one number at a time; a maximum by groups does not, and leaves it
    little to look at.

    >>> argmax(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])).tolist()
    [1, 0]
    """
    count, size = logits.shape
    whole = size // GROUP * GROUP
    if logits.device.type != "cpu" or not whole or not count:
        return logits.argmax(dim=-1)
    groups = logits[:, :whole].unflatten(1, (-1, GROUP))
    largest = groups.amax(dim=-1)
    group = largest.argmax(dim=-1)
    found = group * GROUP + groups[torch.arange(count), group].argmax(dim=-1)
    if whole < size:
        tail = logits[:, whole:].argmax(dim=-1) + whole
        best = torch.stack([found, tail], dim=-1)
        which = logits.gather(1, best).argmax(dim=-1, keepdim=True)
        found = best.gather(1, which)[:, 0]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor) -> Tensor:
        at = rows[:, None]
        probabilities = logits.softmax(dim=-1)
        ctx.save_for_backward(probabilities, at)
        said = probabilities.gather(1, at)[:, 0]
        if bool((said < TINY).any()):  # its logarithm is as good as none
            total = logits.logsumexp(dim=-1)
            return torch.where(said < TINY, total - logits.gather(1, at)[:, 0], -said.log())
        return -said.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        probabilities, at = ctx.saved_tensors
        by_row = slope[:, None]
        return probabilities.mul_(by_row).scatter_add_(1, at, -by_row), None  # once only
