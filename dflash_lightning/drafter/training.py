"""The drafter over the blocks of a training batch: every block at once."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dflash_lightning.data.blocks import Batch
from dflash_lightning.drafter.attention import (
    Attend,
    AttentionName,
    Visibility,
    attention_name,
    training_attention,
)
from dflash_lightning.drafter.model import Drafter, KeyValue
from dflash_lightning.target import Target


def training_hidden(
    drafter: Drafter, target: Target, batch: Batch, states: Tensor | None, attention: AttentionName
) -> Tensor:
    """Return the drafter's hidden states `[B, N, K, H]` of a batch's blocks; slot k says token k.

    Args:
        drafter: The drafter.
        target: Gives the embedding.
        batch: The blocks.
        states: Tapped target states `[B, S, T*H]` of the batch's rows; None without injection.
        attention: How the blocks attend.
    """
    config = drafter.config
    chunked = attention_name(attention, batch.noise_ids.device) == "chunked"
    if chunked and config.injection != "kv":
        batch, states = up_to_last_anchor(batch, states)
    elif chunked:
        keep, live, seen = only_needed(batch, states)
        if live is not batch:
            found = training_hidden(drafter, target, live, seen, "chunked")[0]
            whole = found.new_zeros(*batch.noise_ids.shape, found.shape[-1])
            whole[keep] = found
            return whole
    starts, anchors = batch.document_starts, batch.anchor_positions
    positions = torch.arange(starts.shape[1], device=starts.device) - starts
    known: Tensor | None = None
    if config.injection == "kv":
        assert states is not None
        context = drafter.context_key_values(states, positions)
    else:
        if config.injection == "input":
            assert states is not None
            known = last_known(drafter.fused(states), positions)
        inputs = drafter.enter(target.embed(batch.input_ids), known)
        over_itself = [_causal_attention(starts, window) for window in config.windows()]
        context = drafter.stream_key_values(
            inputs, positions, lambda layer, *qkv: over_itself[layer](*qkv)
        )
    tokens = target.embed(batch.noise_ids)
    entering = None if known is None else _at(known, anchors)
    if config.autoregressive and entering is not None:
        return _unrolled(drafter, batch, tokens, entering, context)
    if entering is not None:
        entering = entering[:, :, None].expand(-1, -1, tokens.shape[2], -1)
    sight = Visibility(
        anchors, tokens.shape[2], starts.shape[1], starts.gather(1, anchors), config.causal
    )
    kinds = {
        window: training_attention(attention, replace(sight, window=window))
        for window in set(config.windows())
    }
    attends = [kinds[window] for window in config.windows()]
    inputs = drafter.enter(tokens, entering).flatten(1, 2)
    blocks: Tensor = drafter(inputs, batch.position_ids.flatten(1), context, attends)
    blocks = blocks.unflatten(1, batch.noise_ids.shape[1:])
    return pad(blocks[:, :, :-1], (0, 0, 1, 0)) if config.autoregressive else blocks


def only_needed(batch: Batch, states: Tensor | None) -> tuple[Tensor, Batch, Tensor | None]:
    """Return which blocks are kept `[B, N]`, and all of them in one row behind each other.

    Left out are dead blocks and the context that no block sees: padding, and what lies behind the
    last anchor of a row. The row's documents stay apart as those of a packed row do. The batch is
    the same where nothing can be left out; of the other one only what blocks and their places
    are is meant.

    Args:
        batch: The blocks.
        states: Tapped target states `[B, S, T*H]`; they come back as `[1, s, T*H]`.
    """
    keep, width = batch.block_keep_mask, batch.document_starts.shape[1]
    if not bool(keep.any()):
        keep = torch.zeros_like(keep)
        keep[0, 0] = True  # a rank without blocks takes part all the same
    lengths = torch.where(keep, batch.anchor_positions, -1).amax(dim=1) + 1
    if bool(keep.all()) and len(keep) == 1 and int(lengths) == width:
        return keep, batch, states
    seen = torch.arange(width, device=keep.device) < lengths[:, None]
    moved = (lengths.cumsum(0) - lengths)[:, None]
    needed = batch._replace(
        block_keep_mask=torch.ones_like(keep[keep])[None],
        anchor_positions=(batch.anchor_positions + moved)[keep][None],
        noise_ids=batch.noise_ids[keep][None],
        position_ids=batch.position_ids[keep][None],
        document_starts=(batch.document_starts + moved)[seen][None],
    )
    return keep, needed, None if states is None else states[seen][None]


def up_to_last_anchor(batch: Batch, states: Tensor | None) -> tuple[Batch, Tensor | None]:
    """Return a batch without the places behind its last anchor, which no block sees.

    Of the batch only what blocks and their context are is meant.
    """
    width = int(batch.anchor_positions.max()) + 1
    needed = batch._replace(
        input_ids=batch.input_ids[:, :width], document_starts=batch.document_starts[:, :width]
    )
    return needed, None if states is None else states[:, :width]


def last_known(fused: Tensor, positions: Tensor) -> Tensor:
    """Return what each position enters with: the fused state `[B, S, H]` of the one before it.

    A document's first position enters with zeros.
    """
    return pad(fused[:, :-1], (0, 0, 1, 0)) * (positions > 0)[..., None]


def _at(known: Tensor, anchors: Tensor) -> Tensor:
    return known.gather(1, anchors[..., None].expand(-1, -1, known.shape[-1]))


def _causal_attention(starts: Tensor, window: int | None) -> Attend:
    """Attend causally within each document of a row; starts are `[B, S]`."""
    place = torch.arange(starts.shape[1], device=starts.device)
    visible = (place <= place[:, None]) & (place >= starts[..., None])
    if window is not None:
        visible &= place > place[:, None] - window
    mask = visible[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def _unrolled(
    drafter: Drafter, batch: Batch, tokens: Tensor, entering: Tensor, context: Sequence[KeyValue]
) -> Tensor:
    """Draft token by token, as in decoding: the drafter's own last state enters with each token.

    The tokens are the data's: what follows a wrong one is never used.

    Args:
        drafter: The drafter.
        batch: The blocks.
        tokens: Embeddings of the blocks' tokens `[B, N, K, H]`.
        entering: What enters with the anchors `[B, N, H]`.
        context: Each layer's keys and values of the context.
    """
    steps = [_SlotBySlot(batch, window) for window in drafter.config.windows()]
    found = [torch.zeros_like(entering)]
    for slot in range(tokens.shape[2] - 1):
        inputs = drafter.enter(tokens[:, :, slot], entering)
        entering = drafter(inputs, batch.position_ids[:, :, slot], context, steps)
        found.append(entering)
    return torch.stack(found, dim=2)


class _SlotBySlot:
    """Attention of one slot of every block at a time, which remembers the slots before."""

    def __init__(self, batch: Batch, window: int | None) -> None:
        self.window, self.anchors = window, batch.anchor_positions[..., None]
        self.starts = batch.document_starts.gather(1, batch.anchor_positions)[..., None]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(
        self, q: Tensor, k_context: Tensor, v_context: Tensor, k_slot: Tensor, v_slot: Tensor
    ) -> Tensor:
        self.keys.append(k_slot)
        self.values.append(v_slot)
        slot, first = len(self.keys) - 1, 0
        place = torch.arange(k_context.shape[2], device=q.device)
        visible = (place < self.anchors) & (place >= self.starts)
        if self.window is not None:
            visible &= place > self.anchors + slot - self.window
            first = max(0, slot - self.window + 1)
        groups = q.shape[1] // k_slot.shape[1]
        keys, values = (torch.stack(x[first:], dim=3) for x in (self.keys, self.values))
        keys, values, k_context, v_context = (
            x.repeat_interleave(groups, dim=1) for x in (keys, values, k_context, v_context)
        )
        scores = (q @ k_context.transpose(-1, -2)).masked_fill(~visible[:, None], -torch.inf)
        own = (keys @ q[..., None])[..., 0]
        weights = (torch.cat([scores, own], dim=-1).float() * q.shape[-1] ** -0.5).softmax(dim=-1)
        far, near = weights.to(v_slot.dtype).split([scores.shape[-1], own.shape[-1]], dim=-1)
        output: Tensor = far @ v_context + (near[..., None, :] @ values)[..., 0, :]
        return output
