"""Anchored masked blocks.

Where blocks start, what the drafter sees in them, what it should say, and how much it counts.

A block is `[anchor token, MASK x (K-1)]` at positions `a .. a+K-1`. Slot `k` predicts the token AT
position `a + k`; slot 0 predicts nothing, so K=16 drafts 15 tokens (arXiv 2602.06036, section 4).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_lightning.data.samples import Sample
from dflash_lightning.errors import UserError


class Batch(NamedTuple):
    """What the drafter is trained on; B samples of at most S tokens, N blocks of K slots each."""

    input_ids: Tensor
    """Token ids `[B, S]`, right-padded with 0."""
    attention_mask: Tensor
    """True for real tokens `[B, S]`."""
    loss_mask: Tensor
    """True for supervised tokens `[B, S]`."""
    anchor_positions: Tensor
    """Position of each block's anchor `[B, N]`, ascending; 0 for dead blocks."""
    block_keep_mask: Tensor
    """True for real blocks, false for dead ones that only fill the shape `[B, N]`."""
    noise_ids: Tensor
    """Input ids of the blocks `[B, N, K]`: the anchor's token, then mask tokens."""
    labels: Tensor
    """Token at each slot's position `[B, N, K]`; 0 where the weight is 0."""
    weights: Tensor
    """Loss weight of each slot `[B, N, K]`, float32; 0 for slot 0, dead blocks and unsupervised
    labels."""
    position_ids: Tensor
    """Absolute position of each slot `[B, N, K]`."""
    target_hidden: Tensor | None = None
    """Tapped target states `[B, S, T*H]` where they come from the store."""


class Anchors(ABC):
    """A rule that picks anchors among the candidates of one sample."""

    num_anchors: int

    @abstractmethod
    def choose(self, candidates: Tensor, generator: torch.Generator) -> Tensor:
        """Return at most `num_anchors` of the ascending `candidates` `[C]`, ascending."""


@dataclass
class RandomAnchors(Anchors):
    """Anchors sampled without replacement, fresh every epoch (paper, Table 13).

    Args:
        num_anchors: Blocks per sample; the paper takes 512 for sequences of 3,072 tokens.
    """

    num_anchors: int = 512

    def choose(self, candidates: Tensor, generator: torch.Generator) -> Tensor:
        """See `Anchors.choose`."""
        picked = torch.randperm(len(candidates), generator=generator)[: self.num_anchors]
        return candidates[picked].sort().values


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Return positions `[C]` whose own token and next token are supervised (in the same document).

    >>> anchor_candidates(torch.tensor([False, True, True, True, False, True]))
    tensor([1, 2])
    """
    follows = loss_mask[:-1] & loss_mask[1:]
    if document_ids is not None:
        follows &= document_ids[:-1] == document_ids[1:]
    return follows.nonzero().flatten()


def anchor_generator(seed: int, epoch: int, sample: int) -> torch.Generator:
    """Return a generator that depends on (seed, epoch, sample) only.

    So a resumed run sees the same anchors.
    """
    state = np.random.SeedSequence((seed, epoch, sample)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def default_gamma(block_size: int) -> float:
    """Return the paper's loss decay for a block size: 16 -> 7, 10 -> 5, 8 -> 4.

    Straight lines between and beyond.

    >>> [default_gamma(k) for k in (4, 8, 10, 16)]
    [2.0, 4.0, 5.0, 7.0]
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def position_weights(block_size: int, gamma: float | None) -> Tensor:
    """Return the slots' loss weights `[K]`.

    0 for slot 0, then `exp(-(k - 1) / gamma)`, or 1 where gamma is None.

    >>> position_weights(3, None)
    tensor([0., 1., 1.])
    """
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.ones(block_size) if gamma is None else torch.exp(-(slots - 1) / gamma)
    weights[0] = 0.0
    return weights


def make_blocks(
    sample: Sample, anchors: Tensor, num_blocks: int, mask_token_id: int, weights: Tensor
) -> dict[str, Tensor]:
    """Return the blocks of one sample, padded with dead ones to `num_blocks`.

    Args:
        sample: The sequence, S tokens.
        anchors: Chosen anchor positions `[n]`, `n <= num_blocks`.
        num_blocks: N.
        mask_token_id: Fills slots 1..K-1.
        weights: Position weights `[K]`.

    Returns:
        `anchor_positions`, `block_keep_mask` `[N]`; `noise_ids`, `labels`, `weights`,
        `position_ids` `[N, K]`.
    """
    if len(anchors) > num_blocks:
        raise UserError(f"data.anchors: {len(anchors)} anchors do not fit into {num_blocks} blocks")
    keep = torch.arange(num_blocks) < len(anchors)
    starts = torch.zeros(num_blocks, dtype=torch.int64)
    starts[: len(anchors)] = anchors
    positions = starts[:, None] + torch.arange(len(weights))
    inside = (positions < len(sample.ids)) & keep[:, None]
    clamped = positions.clamp(max=len(sample.ids) - 1)
    supervised = inside & sample.loss_mask[clamped]
    noise_ids = torch.full_like(positions, mask_token_id)
    noise_ids[:, 0] = sample.ids[starts]
    slot_weights = weights * supervised
    return {
        "anchor_positions": starts,
        "block_keep_mask": keep,
        "noise_ids": noise_ids,
        "labels": torch.where(slot_weights > 0, sample.ids[clamped], 0),
        "weights": slot_weights,
        "position_ids": positions,
    }


@dataclass(frozen=True)
class BlockCollator:
    """Samples -> `Batch`.

    Each item is (sample index, epoch, sample, tapped states `[S, T*H]` or None).
    """

    anchors: Anchors
    block_size: int
    mask_token_id: int
    gamma: float | None
    seed: int

    def __call__(self, items: list[tuple[int, int, Sample, Tensor | None]]) -> Batch:
        """Return one batch; anchors depend on (seed, epoch, sample index) only."""
        weights = position_weights(self.block_size, self.gamma)
        blocks = [self._blocks(index, epoch, sample, weights) for index, epoch, sample, _ in items]
        samples = [sample for _, _, sample, _ in items]
        hidden = [states for _, _, _, states in items if states is not None]
        return Batch(
            input_ids=_padded([s.ids for s in samples]),
            attention_mask=_padded([torch.ones_like(s.loss_mask) for s in samples]),
            loss_mask=_padded([s.loss_mask for s in samples]),
            **{key: torch.stack([b[key] for b in blocks]) for key in blocks[0]},
            target_hidden=_padded(hidden) if hidden else None,
        )

    def _blocks(self, index: int, epoch: int, sample: Sample, weights: Tensor) -> dict[str, Tensor]:
        candidates = anchor_candidates(sample.loss_mask)
        chosen = self.anchors.choose(candidates, anchor_generator(self.seed, epoch, index))
        return make_blocks(sample, chosen, self.anchors.num_anchors, self.mask_token_id, weights)


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
