"""The loss of blocks, chunk by chunk, with the gradient formed in the forward pass.

So logits over the vocabulary never exist at once. The loss of a step is `sum(w * loss) / sum(w)`.
`chunked_loss` returns numerator and denominator; the module divides by the denominator of the whole
accumulation window, over all ranks, so that grouping samples differently changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.logits import argmax, cross_entropy
from dflash_lightning.position_weights import PositionWeights, UniformWeights
from dflash_lightning.slot_losses import DataToken, Labels, Loss, Wanted, slot_losses

Head = Callable[[Tensor, Tensor | None], Tensor]
"""Drafter states `[m, H]` and the target token ids before the slots `[m]` -> logits `[m, Vd]`.

If it has `parameters()`, those that are trainable get their gradient.
"""

PIECE = 1 << 20
"""Logits that the loss takes at once on CPU: 4 MB, which two cores' second-level caches hold."""


@dataclass(frozen=True)
class TargetView:
    """What the target would say in the slots.

    Attributes:
        states: The target's final states `[P, H]`.
        places: Which of them is that of the position before each slot `[..., k]`.
        read: Map from states `[m, H]` to its argmax and its logits `[m, Vd]`, None for what isn't
            needed.
    """

    states: Tensor
    places: Tensor
    read: Callable[[Tensor], tuple[Labels | None, Tensor | None]]


class LossOutput(NamedTuple):
    """`numerator` is `sum(w * loss)`, differentiable; all others are detached.

    `denominator` is `sum(w)`; `slot_loss`, `weights` and `predictions` (row of the head) are
    `[..., k]`: 0, 0 and -1 in slots without a label.
    """

    numerator: Tensor
    denominator: Tensor
    slot_loss: Tensor
    weights: Tensor
    predictions: Tensor


def chunked_loss(
    hidden: Tensor,
    labels: Labels,
    label_mask: Tensor,
    head: Head,
    loss: Loss | None = None,
    position_weights: PositionWeights | None = None,
    context: Tensor | None = None,
    target: TargetView | None = None,
    chunk: int = 1024,
) -> LossOutput:
    """Return the weighted loss of blocks of k slots, with the logits of few slots at a time.

    The gradient to `hidden` and to the head's parameters is formed in the forward pass, chunk by
    chunk; backward only scales it. Chunks end where blocks end, so that weights may depend on what
    the drafter says in a whole block.

    Args:
        hidden: Final-normed drafter states `[..., k, H]`.
        labels: The data's tokens as rows of the head, `[..., k]` both.
        label_mask: Which slots have a label `[..., k]`.
        head: The drafter's head.
        loss: What a slot should say; None takes the cross-entropy of the data's token.
        position_weights: How much slots count; None weighs all alike.
        context: Target token id before each slot `[..., k]`, for heads that look at it.
        target: Given if the loss needs the target's argmax or distribution.
        chunk: Slots per chunk, at least one block; memory grows with it, results don't change.
    """
    loss, position_weights = loss or DataToken(), position_weights or UniformWeights()
    blocks, at = label_mask.flatten(0, -2), label_mask.nonzero(as_tuple=True)
    work = _Work(
        head,
        loss,
        position_weights,
        blocks,
        blocks.nonzero(as_tuple=True),
        Labels(labels.rows[at], labels.known[at]),
        None if context is None else context[at],
        None if target is None else replace(target, places=target.places[at]),
    )
    parameters = [p for p in getattr(head, "parameters", list)() if p.requires_grad]
    counts = blocks.sum(dim=-1).tolist()
    numerator, denominator, *of_slots = _GradientInForward.apply(
        work, _cut(counts, chunk), counts, torch.is_grad_enabled(), hidden[at], *parameters
    )
    slot_loss, weights, predictions = (
        torch.full_like(label_mask, empty, dtype=x.dtype).masked_scatter(label_mask, x)
        for x, empty in zip(of_slots, (0, 0, -1), strict=True)
    )
    return LossOutput(numerator, denominator, slot_loss, weights, predictions)


class _Part(NamedTuple):
    """Some blocks and their labelled slots."""

    blocks: slice
    slots: slice


def _cut(counts: Sequence[int], most: int, within: _Part | None = None) -> list[_Part]:
    """Cut blocks of `counts` labelled slots into parts of at most `most`, or of one block.

    >>> [(p.blocks.stop, p.slots.stop) for p in _cut([2, 0, 3, 1, 0], 4)]
    [(2, 2), (5, 6)]
    """
    parts: list[_Part] = []
    block, stop = (within.blocks.start, within.slots.start) if within else (0, 0)
    last = within.blocks.stop if within else len(counts)
    first, start = block, stop
    for block in range(first, last):
        if stop > start and stop + counts[block] - start > most:
            parts.append(_Part(slice(first, block), slice(start, stop)))
            first, start = block, stop
        stop += counts[block]
    if stop > start:
        parts.append(_Part(slice(first, last), slice(start, stop)))
    return parts


class _Sums(NamedTuple):
    numerator: Tensor
    denominator: Tensor
    slot_loss: Tensor
    weights: Tensor
    predictions: Tensor


@dataclass(frozen=True)
class _Work:
    """Everything about the slots but their states.

    `blocks` `[n, k]` says which slots have a label, `at` `[M]` where they are, the others are
    `[M, ...]` of these slots.
    """

    head: Head
    loss: Loss
    position_weights: PositionWeights
    blocks: Tensor
    at: tuple[Tensor, ...]
    labels: Labels
    context: Tensor | None
    target: TargetView | None

    def logits(self, states: Tensor, part: _Part) -> Tensor:
        """Return the logits `[m, Vd]` of a part's slots with states `[m, H]`."""
        return self.head(states, None if self.context is None else self.context[part.slots])

    def wanted(self, part: _Part) -> Wanted:
        """Return what a part's slots should say; the target's logits in its head's dtype."""
        data = Labels(self.labels.rows[part.slots], self.labels.known[part.slots])
        if self.target is None:
            return Wanted(data)
        with torch.no_grad():
            return Wanted(
                data, *self.target.read(self.target.states[self.target.places[part.slots]])
            )

    def sums(self, logits: Tensor, wanted: Wanted, part: _Part) -> _Sums:
        """Return the loss of slots with logits `[m, Vd]`; the numerator has a graph."""
        with torch.autocast(logits.device.type, enabled=False):
            losses, share = slot_losses(self.loss, logits, wanted)
            weights = self._weights(part, logits.detach(), wanted.data)
            numerator, denominator = (losses * weights).sum(), (share * weights).sum()
        return _Sums(numerator, denominator, losses.detach(), weights, argmax(logits.detach()))

    def _weights(self, part: _Part, logits: Tensor, data: Labels) -> Tensor:
        """Return the weights `[m]` of a part's slots."""
        labelled, probabilities = self.blocks[part.blocks], None
        at = self.at[0][part.slots] - part.blocks.start, self.at[1][part.slots]
        if self.position_weights.needs_probabilities:
            said = torch.exp(-cross_entropy(logits, data.rows)) * data.known
            probabilities = torch.zeros_like(labelled, dtype=logits.dtype)
            probabilities[at] = said
        weights = self.position_weights(labelled, probabilities).to(logits.dtype)
        return weights.expand(labelled.shape)[at]


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        work: _Work,
        parts: Sequence[_Part],
        counts: Sequence[int],
        with_gradient: bool,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        to_hidden = with_gradient and hidden.requires_grad
        gradient = torch.zeros_like(hidden) if to_hidden else None
        learned = parameters if with_gradient else ()
        slopes = [torch.zeros_like(p, dtype=_wide(p.dtype)) for p in learned]
        found: list[_Sums] = []
        for part in parts:
            states = hidden[part.slots].detach().requires_grad_(to_hidden)
            sought = [states, *learned] if to_hidden else list(learned)
            sums, more = _with_gradient(work, states, part, counts, sought)
            found += sums
            if gradient is not None:
                gradient[part.slots] = cast(Tensor, more.pop(0))
            for total, one in zip(slopes, more, strict=True):
                if one is not None:
                    total += one
        ctx.save_for_backward(gradient, *slopes)
        ctx.dtypes = [p.dtype for p in learned]
        return _joined(ctx, found, hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_numerator: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradient, *slopes = ctx.saved_tensors
        scaled = None if gradient is None else gradient * grad_numerator.to(gradient.dtype)
        to_parameters = [
            (slope * grad_numerator).to(dtype)
            for slope, dtype in zip(slopes, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, scaled, *to_parameters


def _with_gradient(
    work: _Work, states: Tensor, part: _Part, counts: Sequence[int], sought: Sequence[Tensor]
) -> tuple[list[_Sums], list[Tensor | None]]:
    """Return detached sums and the gradients to what is sought; the logits end here.

    The head takes the whole part at once, since matrix products want many rows; the loss takes few
    rows at a time, in float32, so that what it reads and writes stays in the processor's cache.
    """
    with torch.set_grad_enabled(bool(sought)):
        logits = work.logits(states, part)
        wanted = work.wanted(part)
    said, wide = logits.detach(), _wide(states.dtype)
    keep = getattr(work.head, "needs_logits", True)
    slope = None if not sought else torch.empty_like(said) if keep else said
    found = []
    for piece in _cut(counts, _rows_at_once(said), part):
        at = slice(piece.slots.start - part.slots.start, piece.slots.stop - part.slots.start)
        rows = said[at].to(wide)
        if slope is None:
            found.append(work.sums(rows, wanted.rows(at, wide), piece))
            continue
        with torch.enable_grad():
            sums = work.sums(rows.requires_grad_(), wanted.rows(at, wide), piece)
        (slope[at],) = torch.autograd.grad(sums.numerator, rows)
        found.append(sums._replace(numerator=sums.numerator.detach()))
    if slope is None:
        return found, []
    return found, list(torch.autograd.grad(logits, sought, slope, allow_unused=True))


def _rows_at_once(logits: Tensor) -> int:
    """Return how many rows of logits the loss takes at once: on CPU, what fits its cache."""
    return max(1, PIECE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)


def _joined(ctx: Any, found: list[_Sums], hidden: Tensor) -> tuple[Tensor, ...]:
    wide = _wide(hidden.dtype)
    if not found:
        zero, none = hidden.new_zeros((), dtype=wide), hidden.new_zeros(0, dtype=wide)
        found = [_Sums(zero, zero, none, none, none.long())]
    sums = _Sums(*zip(*found, strict=True))  # type: ignore[arg-type]
    numerator, denominator = (torch.stack(list(x)).sum() for x in sums[:2])
    of_slots = [torch.cat(list(x)) for x in sums[2:]]
    ctx.mark_non_differentiable(denominator, *of_slots)
    return numerator, denominator, *of_slots


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
