"""Anchored masked blocks.

Where blocks start, what the drafter sees in them, and what it should say.

A block is `[anchor token, MASK x (K-1)]` at positions `a .. a+K-1`. Slot `k` predicts the token AT
position `a + k`; slot 0 predicts nothing, so K=16 drafts 15 tokens (arXiv 2602.06036, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dflash_lightning.data.anchors import Anchors, anchor_candidates, anchor_generator
from dflash_lightning.data.samples import Sample
from dflash_lightning.errors import UserError


class Batch(NamedTuple):
    """What the drafter is trained on; B rows of at most S tokens, N blocks of K slots each.

    A row is one sample, or several that are packed one after the other: its documents.
    """

    input_ids: Tensor
    """Token ids `[B, S]`, right-padded with 0."""
    attention_mask: Tensor
    """True for real tokens `[B, S]`."""
    loss_mask: Tensor
    """True for supervised tokens `[B, S]`."""
    anchor_positions: Tensor
    """Place of each block's anchor in its row `[B, N]`, ascending; 0 for dead blocks."""
    block_keep_mask: Tensor
    """True for real blocks, false for dead ones that only fill the shape `[B, N]`."""
    noise_ids: Tensor
    """Input ids of the blocks `[B, N, K]`: the anchor's token, then mask tokens (or, as `Noise`
    says, the data's)."""
    labels: Tensor
    """The data's token at each slot's position `[B, N, K]`; 0 beyond the document and in dead
    blocks."""
    label_mask: Tensor
    """True for slots to predict `[B, N, K]`: not slot 0, and the token at the slot's position is
    there and supervised."""
    position_ids: Tensor
    """Position of each slot within its document `[B, N, K]`."""
    document_starts: Tensor
    """Where in its row the document of each token starts `[B, S]`: 0 in a row of one document.
    Padding is a document of its own."""
    target_hidden: Tensor | None = None
    """Tapped target states `[B, S, T*H]` where they come from the store; with the final ones
    behind them, `[B, S, (T+1)*H]`, where the loss needs those."""


Noise = Literal["masked", "random", "tokens"]
"""What the slots behind the anchor hold in training: mask tokens; the data's tokens in a random
share of them, which then have no label (iterative denoising); or all of the data's tokens
(autoregressive drafting)."""


def shown_slots(count: int, block_size: int, generator: torch.Generator) -> Tensor:
    """Return which slots `[count, K]` hold the data's tokens: a random share, one at least hidden.

    The share is uniform, so that every state of denoising occurs.
    """
    share = torch.rand(count, 1, generator=generator)
    numbers = torch.rand(count, block_size, generator=generator)
    numbers[:, 0] = torch.inf  # the anchor is shown anyway
    return (numbers < share) & (numbers < numbers[:, 1:].amax(dim=1, keepdim=True))


def make_blocks(
    row: Sample,
    document_starts: Tensor,
    anchors: Tensor,
    num_blocks: int,
    mask_token_id: int,
    block_size: int,
    noise: Noise = "masked",
    shown: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the blocks of one row, padded with dead ones to `num_blocks`.

    Args:
        row: The documents one after the other, S tokens.
        document_starts: Where the document of each token starts `[S]`.
        anchors: Places of the chosen anchors in the row `[n]`, `n <= num_blocks`.
        num_blocks: N.
        mask_token_id: Fills slots 1..K-1.
        block_size: K.
        noise: What the slots hold.
        shown: With `random` noise, which slots hold the data's token `[n, K]`.

    Returns:
        `anchor_positions`, `block_keep_mask` `[N]`; `noise_ids`, `labels`, `label_mask`,
        `position_ids` `[N, K]`.
    """
    keep = torch.arange(num_blocks) < len(anchors)
    starts = torch.zeros(num_blocks, dtype=torch.int64)
    starts[: len(anchors)] = anchors
    places = starts[:, None] + torch.arange(block_size)
    clamped = places.clamp(max=len(row.ids) - 1)
    first = document_starts[starts][:, None]
    inside = (places == clamped) & (document_starts[clamped] == first) & keep[:, None]
    open_ = torch.zeros_like(inside)
    if shown is not None:
        open_[: len(shown)] = shown & inside[: len(shown)]
    label_mask = inside & row.loss_mask[clamped] & ~open_
    label_mask[:, 0] = False
    open_ |= inside & (noise == "tokens")
    noise_ids = torch.where(open_, row.ids[clamped], mask_token_id)
    noise_ids[:, 0] = row.ids[starts]
    return {
        "anchor_positions": starts,
        "block_keep_mask": keep,
        "noise_ids": noise_ids,
        "labels": torch.where(inside, row.ids[clamped], 0),
        "label_mask": label_mask,
        "position_ids": places - first,
    }


Document = tuple[int, int, Sample, Tensor | None]
"""Sample index, epoch, sample, and its tapped states `[S, T*H]` where they are stored."""


@dataclass(frozen=True)
class BlockCollator:
    """Rows of documents -> `Batch`; a row that is not packed has one document."""

    anchors: Anchors
    block_size: int
    mask_token_id: int
    seed: int
    noise: Noise = "masked"

    def __call__(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Return one batch.

        Anchors depend on (seed, epoch, sample index) only, and each document has as many as it
        would have by itself.
        """
        joined = [_joined([sample for _, _, sample, _ in row]) for row in rows]
        starts = [_document_starts([len(sample.ids) for _, _, sample, _ in row]) for row in rows]
        chosen = [self._anchors(row) for row in rows]
        room = self._room(max(len(anchors) for anchors, _ in chosen))
        size, mask, noise = self.block_size, self.mask_token_id, self.noise
        blocks = [
            make_blocks(row, first, anchors, room, mask, size, noise, shown)
            for row, first, (anchors, shown) in zip(joined, starts, chosen, strict=True)
        ]
        hidden = [_states(row) for row in rows]
        width = max(len(row.ids) for row in joined)
        return Batch(
            input_ids=_padded([row.ids for row in joined]),
            attention_mask=_padded([torch.ones_like(row.loss_mask) for row in joined]),
            loss_mask=_padded([row.loss_mask for row in joined]),
            **{key: torch.stack([b[key] for b in blocks]) for key in blocks[0]},
            document_starts=torch.stack([_extended(row, width) for row in starts]),
            target_hidden=_padded([h for h in hidden if h is not None])
            if hidden[0] is not None
            else None,
        )

    def _anchors(self, row: Sequence[Document]) -> tuple[Tensor, Tensor | None]:
        """Return the places of a row's anchors, document by document, and their shown slots."""
        found, shown, start = [], [], 0
        for index, epoch, sample, _ in row:
            candidates = anchor_candidates(sample.loss_mask)
            generator = anchor_generator(self.seed, epoch, index)
            chosen = self.anchors.choose(candidates, generator, self.block_size)
            most = self.anchors.num_anchors
            if most is not None and len(chosen) > most:
                raise UserError(
                    f"data.anchors: {len(chosen)} anchors of one sample, and num_anchors is {most}"
                )
            if self.noise == "random":
                shown.append(shown_slots(len(chosen), self.block_size, generator))
            found.append(start + chosen)
            start += len(sample.ids)
        return torch.cat(found), torch.cat(shown) if shown else None

    def _room(self, count: int) -> int:
        """Return the number of blocks that holds `count`: few sizes, so that kernels fit again.

        Multiples of `num_anchors`, or powers of two where a sample may have any number.
        """
        most = self.anchors.num_anchors
        if most is None:
            return max(8, 1 << (count - 1).bit_length())
        return most * max(1, -(-count // most))


def _joined(samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    return Sample(torch.cat([s.ids for s in samples]), torch.cat([s.loss_mask for s in samples]))


def _states(row: Sequence[Document]) -> Tensor | None:
    """Return the states `[S, T*H]` of a row's documents, None where they are not stored."""
    states = [s for _, _, _, s in row if s is not None]
    return torch.cat(states) if states else None


def _document_starts(lengths: Sequence[int]) -> Tensor:
    """Return the start of each token's document `[S]`.

    >>> _document_starts([2, 3])
    tensor([0, 0, 2, 2, 2])
    """
    counts = torch.tensor(lengths)
    return (counts.cumsum(0) - counts).repeat_interleave(counts)


def _extended(starts: Tensor, width: int) -> Tensor:
    """Make the padding behind a row a document of its own."""
    return pad(starts, (0, width - len(starts)), value=len(starts))


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
