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
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_lightning.drafter.chunked import Chunk, attend_chunks

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
AttentionName = Literal["auto", "dense", "chunked", "flex"]

QUERIES_PER_CHUNK = 256


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in a batch of training blocks.

    Args:
        anchors: Place of each block's anchor in its row `[B, N]`.
        block_size: K.
        context_length: S.
        starts: Where the documents of the anchors start `[B, N]`; None means at 0.
        causal: Whether slots see no later slot of their block.
        window: How many positions up to its own a query sees; None means all.
    """

    anchors: Tensor
    block_size: int
    context_length: int
    starts: Tensor | None = None
    causal: bool = False
    window: int | None = None


def dense_mask(sight: Visibility) -> Tensor:
    """Return the specification: visibility `[B, N*K, S + N*K]`, true where a query sees a key."""
    anchors = sight.anchors.repeat_interleave(sight.block_size, dim=1)
    positions = torch.arange(sight.context_length, device=anchors.device)
    context = positions < anchors[:, :, None]
    if sight.starts is not None:
        context &= positions >= sight.starts.repeat_interleave(sight.block_size, dim=1)[:, :, None]
    index = torch.arange(anchors.shape[1], device=anchors.device)
    owner, slot = index // sight.block_size, index % sight.block_size
    block = owner[:, None] == owner[None, :]
    if sight.causal:
        block &= slot[None, :] <= slot[:, None]
    if sight.window is not None:
        context &= positions > (anchors + slot)[:, :, None] - sight.window
        block &= slot[None, :] > slot[:, None] - sight.window
    return torch.cat([context, block.expand(anchors.shape[0], -1, -1)], dim=-1)


def dense_attention(sight: Visibility) -> Attend:
    """Attend under the dense mask, written out.

    Slow, large, and what the other ways are tested against.
    """
    mask = dense_mask(sight)[:, None]

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        keys, values = (
            torch.cat([k_context, k_block], dim=2),
            torch.cat([v_context, v_block], dim=2),
        )
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


def chunked_attention(sight: Visibility, queries_per_chunk: int = QUERIES_PER_CHUNK) -> Attend:
    """Attend chunk of blocks by chunk of blocks (`drafter.chunked`).

    Each sees the context of its documents before its last anchor and its own slots. The
    `(N*K) x (S + N*K)` matrix is never built. Any order of anchors is exact; ascending anchors are
    fast, since a chunk then skips the context before its first document and behind its last anchor.
    """
    all_starts = torch.zeros_like(sight.anchors) if sight.starts is None else sight.starts
    size = sight.block_size
    blocks_of_chunks = cut_blocks(all_starts, max(1, queries_per_chunk // size))
    parts = (x.split(blocks_of_chunks, dim=1) for x in (sight.anchors, all_starts))
    chunks, block = [], 0
    for anchors, starts in zip(*parts, strict=True):
        last = min(int(anchors.max()), sight.context_length)
        seen = starts if sight.window is None else starts.maximum(anchors + 1 - sight.window)
        first = int(torch.where(anchors > seen, seen, last).min())
        # all of them see the context from the last start to the first anchor
        clear = sight.window is None and int(starts.max()) <= first
        begin = max(first, min(last, int(anchors.min()))) if clear else first
        places = torch.arange(begin, last, device=anchors.device)
        hidden = _outside(places, anchors, starts, size, sight.window)
        blocks = slice(block, block + anchors.shape[1])
        chunks.append(Chunk(blocks, slice(first, last), hidden))
        block = blocks.stop
    own = None if not (sight.causal or sight.window) else ~_within(sight)

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        return attend_chunks(chunks, own, q, k_context, v_context, k_block, v_block)

    return attend


def cut_blocks(starts: Tensor, wanted: int) -> list[int]:
    """Return numbers of blocks: about `wanted` each, ending where a document ends if that is near.

    Args:
        starts: Where the documents of the blocks start `[B, N]`.
        wanted: Blocks; a third to half as many again are taken, of few documents if that can be.
    """
    changes = (starts[:, 1:] != starts[:, :-1]).any(dim=0).nonzero()[:, 0] + 1
    ends, last, cuts = [*changes.tolist(), starts.shape[1]], starts.shape[1], [0]
    while cuts[-1] < last:
        at = cuts[-1]
        near = (end for end in ends if at + wanted / 3 <= end <= at + wanted * 1.5)
        cuts.append(min(next(near, at + wanted), last))
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def _outside(
    places: Tensor, anchors: Tensor, starts: Tensor, size: int, window: int | None
) -> Tensor:
    """Return which context places `[s]` blocks `[B, C]` don't see: `[B, C, 1 or K, s]`."""
    at, start = anchors[:, :, None, None], starts[:, :, None, None]
    hidden = (places >= at) | (places < start)
    if window is None:
        return hidden
    slots = torch.arange(size, device=places.device)[:, None]
    return hidden | (places <= at + slots - window)


def _within(sight: Visibility) -> Tensor:
    """Return which slots of its block a slot sees `[K, K]`."""
    slot = torch.arange(sight.block_size, device=sight.anchors.device)
    seen = torch.ones(len(slot), len(slot), dtype=torch.bool, device=slot.device)
    if sight.causal:
        seen &= slot <= slot[:, None]
    if sight.window is not None:
        seen &= slot > slot[:, None] - sight.window
    return seen


def flex_mask(sight: Visibility) -> Callable[..., Tensor]:
    """Return the mask as flex attention wants it: `(batch, head, query, key) -> visible`.

    Flex rounds lengths up to its tile size, so indices beyond the last query or key occur; they see
    nothing.
    """
    block_size, context_length, window = sight.block_size, sight.context_length, sight.window
    num_blocks = sight.anchors.shape[1]
    queries = num_blocks * block_size
    starts = torch.zeros_like(sight.anchors) if sight.starts is None else sight.starts

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = (q // block_size).clamp(max=num_blocks - 1)
        anchor = sight.anchors[b, block]
        in_context = (kv < context_length) & (kv >= starts[b, block]) & (kv < anchor)
        slot = kv - context_length
        in_block = (slot >= 0) & (slot < queries) & (slot // block_size == block)
        if sight.causal:
            in_block = in_block & (slot <= q)
        if window is not None:
            in_context = in_context & (kv > anchor + q % block_size - window)
            in_block = in_block & (slot > q - window)
        return (q < queries) & (in_context | in_block)

    return visible


def flex_attention(sight: Visibility) -> Attend:
    """Attend with compiled flex attention (CUDA; torch has no backward for it on CPU)."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, num_blocks = sight.anchors.shape
    queries = num_blocks * sight.block_size
    keys = sight.context_length + queries
    device = str(sight.anchors.device)
    compiled = _compiled_flex()
    make_mask = _compiled_mask() if sight.anchors.is_cuda else create_block_mask
    mask = make_mask(flex_mask(sight), batch, None, queries, keys, device=device)

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
    """Return flex attention, compiled once a shape: new anchors are new inputs, not new code."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, dynamic=False)


@functools.cache
def _compiled_mask() -> Callable[..., Any]:
    """Return the maker of flex attention's masks; compiled it never holds all pairs at once."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def attention_name(name: AttentionName, device: torch.device) -> AttentionName:
    """Return what `auto` stands for: flex on CUDA, chunked elsewhere."""
    return ("flex" if device.type == "cuda" else "chunked") if name == "auto" else name


def training_attention(name: AttentionName, sight: Visibility) -> Attend:
    """Return the attention of a training batch."""
    makers: dict[str, Callable[[Visibility], Attend]] = {
        "dense": dense_attention,
        "chunked": chunked_attention,
        "flex": flex_attention,
    }
    return makers[attention_name(name, sight.anchors.device)](sight)


def full_attention(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
) -> Tensor:
    """Attend to everything: decoding, where all context lies before the one block."""
    keys, values = torch.cat([k_context, k_block], dim=2), torch.cat([v_context, v_block], dim=2)
    return scaled_dot_product_attention(q, keys, values, enable_gqa=True)
