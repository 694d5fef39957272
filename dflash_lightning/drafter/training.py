"""The drafter over the blocks of a training batch: every block at once."""

import torch
from torch import Tensor

from dflash_lightning.data.blocks import Batch
from dflash_lightning.drafter.attention import AttentionName, training_attention
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.target import Target


def training_hidden(
    drafter: Drafter, target: Target, batch: Batch, states: Tensor, attention: AttentionName
) -> Tensor:
    """Return the drafter's hidden states `[B, N, K, H]` of a batch's blocks.

    Args:
        drafter: The drafter.
        target: Gives the embedding.
        batch: The blocks.
        states: Tapped target states `[B, S, T*H]` of the batch's rows.
        attention: How the blocks attend.
    """
    starts = batch.document_starts
    positions = torch.arange(starts.shape[1], device=starts.device) - starts
    attend = training_attention(
        attention,
        batch.anchor_positions,
        batch.noise_ids.shape[2],
        starts.shape[1],
        starts.gather(1, batch.anchor_positions),
    )
    context = drafter.context_key_values(states, positions)
    noise = target.embed(batch.noise_ids.flatten(1))
    blocks: Tensor = drafter(noise, batch.position_ids.flatten(1), context, attend)
    return blocks.unflatten(1, batch.noise_ids.shape[1:])
