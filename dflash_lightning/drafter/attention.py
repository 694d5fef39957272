"""Who sees whom: one mask as the specification, and exact ways to attend under it.

For a query in block `(a, k)`: context position `p` is visible iff `s <= p < a`, where `s` is where
the anchor's document starts in its row (strictly before the anchor, by position: at inference its
own feature does not exist yet), and a block's slot is visible iff it belongs to the same block.
Dead blocks keep their own slots, so no row is ever empty. Two options, the same in decoding: inside
a causal block, slot `j` is visible iff `j <= k`; in a sliding layer, whatever lies at or before
position `a + k - window` is hidden.

An attention is a function `(q, k_context, v_context, k_block, v_block) -> output` over
`[B, heads, length, head_dim]`; the layers don't know which one they were given.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
AttentionName = Literal["auto", "dense", "chunked", "flex"]

QUERIES_PER_CHUNK = 128


def dense_mask(
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Return the specification: visibility `[B, N*K, S + N*K]`, true where a query sees a key.

    Args:
        anchor_positions: `[B, N]`.
        block_size: K.
        context_length: S.
        context_starts: Where the documents of the anchors start `[B, N]`; None means at 0.
        causal: Whether slots see no later slot of their block.
        window: How many positions up to its own a query sees; None means all.
    """
    anchors = anchor_positions.repeat_interleave(block_size, dim=1)
    positions = torch.arange(context_length, device=anchors.device)
    context = positions < anchors[:, :, None]
    if context_starts is not None:
        context &= positions >= context_starts.repeat_interleave(block_size, dim=1)[:, :, None]
    index = torch.arange(anchors.shape[1], device=anchors.device)
    owner, slot = index // block_size, index % block_size
    block = owner[:, None] == owner[None, :]
    if causal:
        block &= slot[None, :] <= slot[:, None]
    if window is not None:
        context &= positions > (anchors + slot)[:, :, None] - window
        block &= slot[None, :] > slot[:, None] - window
    return torch.cat([context, block.expand(anchors.shape[0], -1, -1)], dim=-1)


def dense_attention(
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Attend:
    """Attend under the dense mask, written out.

    Slow, large, and what the other ways are tested against.
    """
    mask = dense_mask(anchor_positions, block_size, context_length, context_starts, causal, window)[
        :, None
    ]

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        keys, values = (
            torch.cat([k_context, k_block], dim=2),
            torch.cat([v_context, v_block], dim=2),
        )
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


@dataclass(frozen=True)
class _Chunk:
    """Blocks handled together.

    Their slots, the context that any of them sees, and the mask over just that.
    """

    slots: slice
    context: slice
    mask: Tensor


def chunked_attention(
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    queries_per_chunk: int = QUERIES_PER_CHUNK,
) -> Attend:
    """Attend chunk of blocks by chunk of blocks.

    Each sees the context of its documents before its last anchor and its own slots. The
    `(N*K) x (S + N*K)` matrix is never built. Any order of anchors is exact; ascending anchors are
    fast, since a chunk then skips the context before its first document and behind its last anchor.
    """
    if context_starts is None:
        context_starts = torch.zeros_like(anchor_positions)
    per_chunk = max(1, queries_per_chunk // block_size)
    chunks = []
    for n, (anchors, starts) in enumerate(
        zip(
            anchor_positions.split(per_chunk, dim=1),
            context_starts.split(per_chunk, dim=1),
            strict=True,
        )
    ):
        last = min(int(anchors.max()), context_length)
        seen = starts if window is None else torch.maximum(starts, anchors + 1 - window)
        first = int(torch.where(anchors > seen, seen, last).min())
        mask = dense_mask(anchors - first, block_size, last - first, starts - first, causal, window)
        slot = n * per_chunk * block_size
        slots = slice(slot, slot + anchors.shape[1] * block_size)
        chunks.append(_Chunk(slots, slice(first, last), mask[:, None]))

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        return torch.cat(
            [_attend_chunk(c, q, k_context, v_context, k_block, v_block) for c in chunks], dim=2
        )

    return attend


def _attend_chunk(
    chunk: _Chunk, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
) -> Tensor:
    keys = torch.cat([k_context[:, :, chunk.context], k_block[:, :, chunk.slots]], dim=2)
    values = torch.cat([v_context[:, :, chunk.context], v_block[:, :, chunk.slots]], dim=2)
    return scaled_dot_product_attention(
        q[:, :, chunk.slots], keys, values, attn_mask=chunk.mask, enable_gqa=True
    )


def flex_mask(
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Callable[..., Tensor]:
    """Return the mask as flex attention wants it: `(batch, head, query, key) -> visible`.

    Flex rounds lengths up to its tile size, so indices beyond the last query or key occur; they see
    nothing.
    """
    num_blocks = anchor_positions.shape[1]
    queries = num_blocks * block_size
    starts = torch.zeros_like(anchor_positions) if context_starts is None else context_starts

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = (q // block_size).clamp(max=num_blocks - 1)
        anchor = anchor_positions[b, block]
        in_context = (kv < context_length) & (kv >= starts[b, block]) & (kv < anchor)
        slot = kv - context_length
        in_block = (slot >= 0) & (slot < queries) & (slot // block_size == block)
        if causal:
            in_block = in_block & (slot <= q)
        if window is not None:
            in_context = in_context & (kv > anchor + q % block_size - window)
            in_block = in_block & (slot > q - window)
        return (q < queries) & (in_context | in_block)

    return visible


def flex_attention(
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Attend:
    """Attend with compiled flex attention (CUDA; torch has no backward for it on CPU)."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, num_blocks = anchor_positions.shape
    queries = num_blocks * block_size
    compiled = _compiled_flex()
    mask = create_block_mask(
        flex_mask(anchor_positions, block_size, context_length, context_starts, causal, window),
        batch,
        None,
        queries,
        context_length + queries,
        device=str(anchor_positions.device),
    )

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        keys, values = (
            torch.cat([k_context, k_block], dim=2),
            torch.cat([v_context, v_block], dim=2),
        )
        return compiled(q, keys, values, block_mask=mask, enable_gqa=True)

    return attend


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, dynamic=False)


def training_attention(
    name: AttentionName,
    anchor_positions: Tensor,
    block_size: int,
    context_length: int,
    context_starts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Attend:
    """Return the attention of a training batch; `auto` is flex on CUDA, chunked elsewhere."""
    if name == "auto":
        name = "flex" if anchor_positions.is_cuda else "chunked"
    makers: dict[str, Callable[..., Attend]] = {
        "dense": dense_attention,
        "chunked": chunked_attention,
        "flex": flex_attention,
    }
    return makers[name](
        anchor_positions, block_size, context_length, context_starts, causal, window
    )


def full_attention(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
) -> Tensor:
    """Attend to everything: decoding, where all context lies before the one block."""
    keys, values = torch.cat([k_context, k_block], dim=2), torch.cat([v_context, v_block], dim=2)
    return scaled_dot_product_attention(q, keys, values, enable_gqa=True)
