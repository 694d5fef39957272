"""What drafted blocks are trained to say: labels as rows of the drafter's head, and weights."""

import torch
from torch import Tensor

from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.draft_vocab import to_draft_rows
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.losses import LossOutput, chunked_loss
from dflash_lightning.target import Target


class Objective:
    """The loss of a drafter's blocks; keeps the target's head over the draft vocabulary.

    Args:
        drafter: Says which target tokens it can draft.
        target: Gives the head.
        chunk: Slots whose logits exist at once.
    """

    def __init__(self, drafter: Drafter, target: Target, chunk: int) -> None:
        self.chunk = chunk
        ids: Tensor | None = getattr(drafter, "draft_ids", None)
        self.head = target.head if ids is None else target.head.rows(ids)
        self.draft_rows = None if ids is None else to_draft_rows(ids, target.num_embeddings)

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[LossOutput, Tensor, Tensor]:
        """Return the loss of a batch's labelled slots, its denominator, and which slots are right.

        Args:
            hidden: Final-normed drafter states `[B, N, K, H]`.
            batch: The blocks. Whether each slot is right is `[B, N, K-1]` bool.
        """
        scored = batch.weights > 0
        labels, weights = batch.labels[scored], batch.weights[scored]
        if self.draft_rows is not None:
            rows = self.draft_rows[labels]
            weights = weights * (rows >= 0)
            labels = rows.clamp(min=0)
        output = chunked_loss(hidden[scored], labels, weights, self.head, chunk=self.chunk)
        right = (output.predictions == labels) & (weights > 0)
        correct = torch.zeros_like(scored).masked_scatter(scored, right)
        return output, weights.sum(), correct[..., 1:]
