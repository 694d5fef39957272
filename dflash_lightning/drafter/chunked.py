"""Attention of training blocks on CPU, as matrix products over just what is visible.

Each block attends to its own slots, all blocks at once: no block's scores with another's slots are
ever computed. To the context they attend chunk by chunk, each as far as its last anchor sees. The
heads that share a key are folded into the queries, so keys and values are never repeated. Scores
and softmax are float32 whatever the inputs are; backward computes them again, so memory is that of
one chunk. (torch's own fused attention for CPU takes several times as long backward.)
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
    """C blocks of K slots that attend to the context together.

    Attributes:
        blocks: Which blocks.
        context: The context that any of them sees, s positions.
        hidden: Which of its last h positions each block (or slot) does not see,
            `[B, C, 1 or K, h]` bool; those before are seen by all.
    """

    blocks: slice
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
    shape = _Shape(k_context.shape[1], sum(chunk.hidden.shape[1] for chunk in chunks))
    found: Tensor = _Attend.apply(
        shape, chunks, hidden_slots, q, k_context, v_context, k_block, v_block
    )
    return found


@dataclass(frozen=True)
class _Shape:
    """Where blocks and shared heads are in the tensors.

    R = B * kv_heads, G query heads share a key, M = G * K queries a block.
    """

    kv_heads: int
    num_blocks: int

    def fold(self, x: Tensor) -> Tensor:
        """Return `[R, N, M, n]` of `[B, heads, N*K, n]`."""
        x = x.unflatten(2, (self.num_blocks, -1)).unflatten(1, (self.kv_heads, -1))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 1)

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Return `[B, heads, N*K, n]`, shape and dtype of `like`, of `[R, N, M, n]`."""
        x = x.unflatten(0, (-1, self.kv_heads)).unflatten(3, (-1, like.shape[2] // x.shape[1]))
        return torch.empty_like(like).copy_(x.transpose(2, 3).flatten(3, 4).flatten(1, 2))

    def hide(self, chunk: Chunk, far: Tensor) -> Tensor:
        """Set to -inf what a chunk's blocks don't see in their scores `[R, C*M, s]`."""
        hidden = chunk.hidden[:, None, :, None]  # [B, 1, C, 1, 1 or K, h]
        size = hidden.shape[-2]
        scores = far.unflatten(1, (hidden.shape[2], -1, size))
        scores = scores.unflatten(0, (hidden.shape[0], self.kv_heads))
        scores[..., far.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
        return far


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: _Shape,
        chunks: Sequence[Chunk],
        hidden_slots: Tensor | None,
        q: Tensor,
        *keyed: Tensor,
    ) -> Tensor:
        ctx.shape, ctx.chunks, ctx.hidden_slots = shape, chunks, hidden_slots
        wide, narrow = _wide(q.dtype), q.dtype
        with torch.autocast(q.device.type, enabled=False):
            k, v, k_own, v_own = _keys(shape, keyed)
            queries = shape.fold(q).to(wide) * q.shape[-1] ** -0.5
            near = _near(queries, k_own.to(wide), hidden_slots)
            top = near.amax(dim=-1, keepdim=True)
            mixed, total = torch.zeros_like(queries), torch.zeros_like(top)
            k = k.to(wide)
            for chunk in chunks:
                if chunk.context.stop > chunk.context.start:
                    part = _rows(queries, chunk)
                    far = shape.hide(chunk, part @ k[:, chunk.context].mT)
                    highest = _rows(top, chunk)
                    torch.maximum(highest, far.amax(dim=-1, keepdim=True), out=highest)
                    far.sub_(highest).exp_()
                    torch.sum(far, dim=-1, keepdim=True, out=_rows(total, chunk))
                    _rows(mixed, chunk).copy_(far.to(narrow) @ v[:, chunk.context])
            near.sub_(top).exp_()
            total += near.sum(dim=-1, keepdim=True)
            mixed += near.to(narrow) @ v_own
            output = shape.unfold(mixed.div_(total), q)
        ctx.save_for_backward(q, *keyed, output, total.log_().add_(top))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, *keyed, output, sums = ctx.saved_tensors
        shape: _Shape = ctx.shape
        wide, narrow, scale = sums.dtype, q.dtype, q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):
            k, v, k_own, v_own = _keys(shape, keyed)
            along = shape.fold((slope.to(wide) * output).sum(dim=-1, keepdim=True))
            queries, slope = shape.fold(q), shape.fold(slope.to(narrow))
            # one more column subtracts: `x @ keys.T - minus` without a pass over it
            scored = torch.cat([queries.to(wide) * scale, -sums], dim=-1)
            sloped = torch.cat([slope.to(wide), -along], dim=-1)
            k_one, v_one, k_own_one, v_own_one = (
                pad(x.to(wide), (0, 1), value=1.0) for x in (k, v, k_own, v_own)
            )
            queries = queries * scale
            near = _near(scored, k_own_one, ctx.hidden_slots).exp_()
            near_slope = (sloped @ v_own_one.mT).mul_(near).to(narrow)
            to_q = (near_slope @ k_own).to(wide)
            to_own = near_slope.mT @ queries, near.to(narrow).mT @ slope
            to_context = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
            for chunk in ctx.chunks:
                at = chunk.context
                if at.stop > at.start:
                    far = shape.hide(chunk, _rows(scored, chunk) @ k_one[:, at].mT).exp_()
                    far_slope = (_rows(sloped, chunk) @ v_one[:, at].mT).mul_(far).to(narrow)
                    _rows(to_q, chunk).add_(far_slope @ k[:, at])
                    to_context[0][:, at] += far_slope.mT @ _rows(queries, chunk)
                    to_context[1][:, at] += far.to(narrow).mT @ _rows(slope, chunk)
            to_keyed = [*to_context, *(x.flatten(1, 2) for x in to_own)]
        slopes = (x.view(y.shape).to(y.dtype) for x, y in zip(to_keyed, keyed, strict=True))
        return None, None, None, shape.unfold(to_q.mul_(scale), q), *slopes


def _keys(shape: _Shape, keyed: Sequence[Tensor]) -> list[Tensor]:
    """Return keys and values of the context `[R, S, D]`, and of the blocks `[R, N, K, D]`."""
    *context, k_own, v_own = (x.flatten(0, 1) for x in keyed)
    return [*context, *(x.unflatten(1, (shape.num_blocks, -1)) for x in (k_own, v_own))]


def _near(queries: Tensor, keys: Tensor, hidden_slots: Tensor | None) -> Tensor:
    """Return the scores `[R, N, M, K]` of queries with their own block's keys."""
    near = queries @ keys.mT
    if hidden_slots is not None:
        near.unflatten(2, (-1, keys.shape[2])).masked_fill_(hidden_slots, -torch.inf)
    return near


def _rows(x: Tensor, chunk: Chunk) -> Tensor:
    """View a chunk's `[R, C*M, n]` of `[R, N, M, n]`."""
    return x[:, chunk.blocks].flatten(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
