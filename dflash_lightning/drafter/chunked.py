"""Attention of training blocks on CPU, as matrix products over just what is visible.

Blocks are handled chunk by chunk. A chunk's queries attend to the context before its last anchor,
and each block to its own slots: no block's scores with another's slots are ever computed. The heads
that share a key are folded into the queries, so keys and values are never repeated. Scores and
softmax are float32 whatever the inputs are; backward computes them again, so memory is that of one
chunk. (torch's own fused attention for CPU takes several times as long backward.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


@dataclass(frozen=True)
class Chunk:
    """C blocks of K slots handled together.

    Attributes:
        slots: Their slots.
        context: The context that any of them sees, s positions.
        hidden: Which of its last h positions each block (or slot) does not see,
            `[B, C, 1 or K, h]` bool; those before are seen by all.
    """

    slots: slice
    context: slice
    hidden: Tensor


def attend_chunks(
    chunks: Sequence[Chunk],
    hidden_slots: Tensor | None,
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
) -> Tensor:
    """Return the attention output `[B, heads, N*K, head_dim]`.

    Args:
        chunks: All blocks.
        hidden_slots: Which slots of its own block a slot does not see `[K, K]`; None: it sees all.
        q: Queries `[B, heads, N*K, head_dim]`.
        k_context: Keys of the context `[B, kv_heads, S, head_dim]`.
        v_context: Its values, likewise.
        k_block: Keys of the blocks `[B, kv_heads, N*K, head_dim]`.
        v_block: Their values, likewise.
    """
    found: Tensor = _Attend.apply(chunks, hidden_slots, q, k_context, v_context, k_block, v_block)
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunks: Sequence[Chunk], hidden_slots: Tensor | None, q: Tensor, *keyed: Tensor
    ) -> Tensor:
        ctx.chunks, ctx.hidden_slots = chunks, hidden_slots
        output = torch.empty_like(q)
        sums = q.new_empty((*q.shape[:-1], 1), dtype=_wide(q.dtype))
        with torch.autocast(q.device.type, enabled=False):
            for part in (_Part(chunk, q, *keyed) for chunk in chunks):
                far, near = part.scores(hidden_slots)
                top = near.amax(dim=-1, keepdim=True).view(*far.shape[:-1], 1)
                if far.shape[-1]:
                    top = torch.maximum(top, far.amax(dim=-1, keepdim=True))
                far, near = far.sub_(top).exp_(), near.sub_(part.by_block(top)).exp_()
                total = far.sum(dim=-1, keepdim=True)
                total += near.sum(dim=-1, keepdim=True).view(total.shape)
                mixed = part.far(far.to(q.dtype), part.v.mT).to(total.dtype)
                mixed += part.near(near.to(q.dtype), part.v_own.mT).view(mixed.shape)
                part.put(output, mixed.div_(total))
                part.put(sums, total.log_().add_(top))
        ctx.save_for_backward(q, *keyed, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, *keyed, output, sums = ctx.saved_tensors
        to_q = torch.empty_like(q)
        to_context = [torch.zeros_like(x, dtype=sums.dtype) for x in keyed[:2]]
        to_block = [torch.empty_like(x) for x in keyed[2:]]
        with torch.autocast(q.device.type, enabled=False):
            along = (slope.to(sums.dtype) * output).sum(dim=-1, keepdim=True)
            for chunk in ctx.chunks:
                part = _Part(chunk, q, *keyed)
                far, near = part.scores(ctx.hidden_slots, minus=part.take(sums))
                weights = far.exp_(), near.exp_()
                part.backward(
                    weights, part.take(slope), part.take(along), to_q, to_context, to_block
                )
        return None, None, to_q, *(x.to(q.dtype) for x in to_context), *to_block


class _Part:
    """The queries, keys and values of a chunk, heads that share a key folded into the queries.

    R = B * kv_heads, G query heads share a key, M = C * G * K queries: `[R, M, D]`. Far are the
    keys of the context, near those of the own block.
    """

    def __init__(
        self, chunk: Chunk, q: Tensor, k_context: Tensor, v_context: Tensor, *block: Tensor
    ) -> None:
        self.chunk, self.kv_heads = chunk, k_context.shape[1]
        self.blocks, self.scale = chunk.hidden.shape[1], q.shape[-1] ** -0.5
        self.q = self.take(q)
        self.k, self.v = (x[:, :, chunk.context].flatten(0, 1) for x in (k_context, v_context))
        own = (x[:, :, chunk.slots].unflatten(2, (self.blocks, -1)) for x in block)
        self.k_own, self.v_own = (x.flatten(0, 2) for x in own)

    def _unfolded(self, x: Tensor) -> Tensor:
        """View `[B, heads, N*K, n]` as this chunk's `[B, kv_heads, C, G, K, n]`."""
        x = x[:, :, self.chunk.slots].unflatten(1, (self.kv_heads, -1))
        return x.unflatten(3, (self.blocks, -1)).transpose(2, 3)

    def take(self, x: Tensor) -> Tensor:
        """Return this chunk's `[R, M, n]` of `[B, heads, N*K, n]`."""
        return self._unfolded(x).flatten(2, 4).flatten(0, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write `[R, M, n]` into this chunk's part of `[B, heads, N*K, n]`."""
        place = self._unfolded(x)
        place.copy_(values.view(place.shape))

    def by_block(self, x: Tensor) -> Tensor:
        """View `[R, M, n]` as `[R*C, G*K, n]`."""
        return x.unflatten(1, (self.blocks, -1)).flatten(0, 1)

    def far(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return `[R, M, n] x [R, s, n] -> [R, M, s]`."""
        return x @ keys.mT

    def near(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return `[R, M or R*C, ., n] x [R*C, K, n] -> [R*C, G*K, K]`."""
        return (x if len(x) == len(keys) else self.by_block(x)) @ keys.mT

    def scores(
        self, hidden_slots: Tensor | None, minus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores `[R, M, s]` and `[R*C, G*K, K]`, -inf where nothing is seen.

        Less `minus` `[R, M, 1]` a query, if it is given.
        """
        q = self.q.to(_wide(self.q.dtype)) * self.scale
        far, near = self._products(q, self.k, self.k_own, minus)
        size, hidden = near.shape[-1], self.chunk.hidden[:, None, :, None]
        by_slot = far.unflatten(1, (self.blocks, near.shape[1] // size, size))
        by_slot = by_slot.unflatten(0, (hidden.shape[0], self.kv_heads))
        by_slot[..., far.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
        if hidden_slots is not None:
            near.unflatten(1, (-1, size)).masked_fill_(hidden_slots, -torch.inf)
        return far, near

    def backward(
        self,
        weights: tuple[Tensor, Tensor],
        slope: Tensor,
        along: Tensor,
        to_q: Tensor,
        to_context: Sequence[Tensor],
        to_block: Sequence[Tensor],
    ) -> None:
        """Add this chunk's gradients; `along` is the sum of slope times output."""
        far, near = weights
        wide, narrow = far.dtype, slope.dtype
        far_slope, near_slope = self._products(slope.to(wide), self.v, self.v_own, along)
        far_slope.mul_(far)
        near_slope.mul_(near)
        far, near, far_slope, near_slope = (
            x.to(narrow) for x in (far, near, far_slope, near_slope)
        )
        to_queries = self.far(far_slope, self.k.mT).to(wide)
        to_queries += self.near(near_slope, self.k_own.mT).view(to_queries.shape)
        self.put(to_q, to_queries.mul_(self.scale))
        q = self.q * self.scale
        for total, by_pair, x in ((to_context[0], far_slope, q), (to_context[1], far, slope)):
            place = total[:, :, self.chunk.context]
            place += (by_pair.mT @ x).view(place.shape)
        for total, by_pair, x in ((to_block[0], near_slope, q), (to_block[1], near, slope)):
            place = total[:, :, self.chunk.slots]
            place.copy_((by_pair.mT @ self.by_block(x)).view(place.shape))

    def _products(
        self, x: Tensor, far: Tensor, near: Tensor, minus: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `x @ far.T` and `x @ near.T`, less `minus`: one more column, no pass over them."""
        far, near = far.to(x.dtype), near.to(x.dtype)
        if minus is not None:
            x, far, near = (
                torch.cat([x, -minus], dim=-1),
                pad(far, (0, 1), value=1.0),
                pad(near, (0, 1), value=1.0),
            )
        return self.far(x, far), self.near(x, near)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
