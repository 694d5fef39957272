"""What drafted blocks are trained to say: labels as rows of the drafter's head, and weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.draft_vocab import to_draft_rows
from dflash_lightning.drafter.model import Drafter, MarkovHead
from dflash_lightning.errors import UserError
from dflash_lightning.losses import Head, LossOutput, TargetView, chunked_loss
from dflash_lightning.position_weights import PositionWeights
from dflash_lightning.slot_losses import Labels, Loss
from dflash_lightning.target import Target
from dflash_lightning.target_head import OutputHead


class Objective:
    """The loss of a drafter's blocks; keeps the target's head over the draft vocabulary.

    Args:
        drafter: Says which target tokens it can draft.
        target: Gives the head.
        loss: What a slot should say.
        position_weights: How much slots count by their position.
        chunk: Slots whose logits exist at once.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        loss: Loss,
        position_weights: PositionWeights,
        chunk: int,
    ) -> None:
        self.loss, self.position_weights, self.chunk = loss, position_weights, chunk
        ids: Tensor | None = getattr(drafter, "draft_ids", None)
        self.tapped_size = drafter.config.num_taps * drafter.config.hidden_size
        self.target_head = target.head
        self.draft_head = target.head if ids is None else target.head.rows(ids)
        markov = drafter.markov
        self.head: Head = self.draft_head if markov is None else BiasedHead(self.draft_head, markov)
        self.draft_rows = None if ids is None else to_draft_rows(ids, target.num_embeddings)

    def __call__(
        self, hidden: Tensor, batch: Batch, states: Tensor | None
    ) -> tuple[LossOutput, Tensor, Tensor]:
        """Return the loss of a batch's labelled slots, its denominator, and which slots are right.

        Right is who says the data's token, whatever the loss asks for.

        Args:
            hidden: Final-normed drafter states `[B, N, K, H]`.
            batch: The blocks. Whether each slot is right is `[B, N, K-1]` bool.
            states: The target's tapped states `[B, S, T*H]`, with its final ones behind them,
                `[B, S, (T+1)*H]`, if the loss needs the target.
        """
        labels = self._labels(batch.labels[..., 1:])
        output = chunked_loss(
            hidden[..., 1:, :],
            labels,
            batch.label_mask[..., 1:],
            self.head,
            self.loss,
            self.position_weights,
            batch.labels[..., :-1],
            self._target_view(batch, states),
            self.chunk,
        )
        right = (output.predictions == labels.rows) & labels.known & batch.label_mask[..., 1:]
        return output, output.denominator, right

    def _labels(self, tokens: Tensor) -> Labels:
        """Return target token ids as rows of the drafter's head."""
        if self.draft_rows is None:
            return Labels(tokens, torch.ones_like(tokens, dtype=torch.bool))
        rows = self.draft_rows[tokens]
        return Labels(rows.clamp(min=0), rows >= 0)

    def _target_view(self, batch: Batch, states: Tensor | None) -> TargetView | None:
        if not self.loss.needs:
            return None
        assert states is not None
        final = states[..., self.tapped_size :].flatten(0, 1)
        if not final.shape[-1]:
            raise UserError("data.final_states: model.loss needs the target's final states stored")
        return TargetView(final, before(batch), self._read)

    def _read(self, states: Tensor) -> tuple[Labels | None, Tensor | None]:
        """Return what the target says in states `[m, H]`, as far as the loss needs it."""
        argmax, logits, needs = None, None, self.loss.needs
        if "distribution" in needs:
            logits = self.draft_head(states)
        if "argmax" in needs:
            whole = logits if logits is not None and self.draft_rows is None else None
            whole = self.target_head(states) if whole is None else whole
            argmax = self._labels(whole.argmax(dim=-1))
        return argmax, logits


@dataclass(frozen=True)
class BiasedHead:
    """The target's head, and a learned bias by the token before."""

    head: OutputHead
    bias: MarkovHead

    def __call__(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Return logits `[m, Vd]` for states `[m, H]` after target tokens `[m]`."""
        logits: Tensor = self.head(hidden) + self.bias(previous)
        return logits

    def parameters(self) -> Iterator[Parameter]:
        """Return what is learned."""
        return self.bias.parameters()


def before(batch: Batch) -> Tensor:
    """Return where, in all rows one after the other, the position before each slot lies.

    `[B, N, K-1]`. Slots without a label may point anywhere within the batch.
    """
    rows, width = batch.input_ids.shape
    slots = torch.arange(batch.labels.shape[-1] - 1, device=batch.labels.device)
    places = (batch.anchor_positions[..., None] + slots).clamp(max=width - 1)
    first = torch.arange(rows, device=batch.labels.device) * width
    return places + first[:, None, None]
