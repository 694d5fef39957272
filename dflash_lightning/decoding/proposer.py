"""Who proposes tokens to the target: the decoding loop's protocol, and the drafter behind it."""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_lightning.decoding.cache import RowBuffer, Rows
from dflash_lightning.decoding.sampling import Sampling, distribution, draw, penalize
from dflash_lightning.drafter.attention import Attend, full_attention
from dflash_lightning.drafter.model import Drafter, KeyValue
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_head import OutputHead


@dataclass(frozen=True)
class Proposal:
    """Drafted target token ids `[B, K-1]`, and what they were sampled from `[B, K-1, V]`.

    `q` is None where the drafts are a point mass (the drafter's argmax).
    """

    tokens: Tensor
    q: Tensor | None = None


class Proposer(Protocol):
    """Drafts blocks for the rows of one batch at a time."""

    block_size: int

    def begin(self, batch: int) -> None:
        """Forget everything and expect a batch of so many rows."""

    def observe(self, hidden: Tensor, counts: Tensor) -> None:
        """Take target states of newly committed positions.

        Args:
            hidden: Tapped target states `[B, n, T*H]`, following what was observed before.
            counts: How many of the n positions each row committed `[B]`.
        """

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        """Draft what follows each row's last committed token.

        Args:
            anchors: These tokens `[B]`.
            sampling: How tokens are chosen.
            uniform: Numbers in [0, 1) to draw with `[B, K]`; unused when greedy.
            seen: Tokens that occurred `[B, V]`, for the repetition penalty.
        """

    def keep(self, index: Tensor) -> None:
        """Keep only the rows in `index`."""


class DrafterProposer:
    """Proposes with a `Drafter`. Its cache holds the context's keys and values only, no block's.

    Args:
        drafter: In eval mode, in the target's dtype; see `decoding_copy`.
        target: Gives the embedding and, row by row of the draft vocabulary, the head.
        block_size: K at decoding; None takes the trained one.
        longer: Permit a block size beyond the trained one.
    """

    def __init__(
        self, drafter: Drafter, target: Target, block_size: int | None = None, longer: bool = False
    ) -> None:
        check_same_target(drafter, target)
        self.drafter, self.target = drafter, target
        self.block_size = check_block_size(drafter, block_size, longer)
        self.draft_ids: Tensor | None = getattr(drafter, "draft_ids", None)
        whole = self.draft_ids is None
        self.head: OutputHead = target.head if whole else target.head.rows(drafter.draft_ids)
        self._slots = torch.arange(self.block_size, device=target.device)
        self.begin(1)

    def begin(self, batch: int) -> None:
        """See `Proposer.begin`."""
        self.rows = Rows(batch, self.target.device)
        self._buffers = [
            (RowBuffer(), RowBuffer()) for _ in range(self.drafter.config.num_hidden_layers)
        ]

    def observe(self, hidden: Tensor, counts: Tensor) -> None:
        """See `Proposer.observe`."""
        steps = torch.arange(hidden.shape[1], device=hidden.device)
        new = self.drafter.context_key_values(hidden, self.rows.lengths[:, None] + steps)
        for buffers, states in zip(self._buffers, new, strict=True):
            for buffer, state in zip(buffers, states, strict=True):
                buffer.write(state, self.rows)
        self.rows.set(self.rows.lengths + counts)

    def context(self) -> list[KeyValue]:
        """Return each layer's keys and values of the context `[B, kv_heads, longest, head_dim]`."""
        return [(k.read(self.rows), v.read(self.rows)) for k, v in self._buffers]

    def block_hidden(self, anchors: Tensor) -> Tensor:
        """Return the drafter's states `[B, K, H]` of the blocks that start at `anchors` `[B]`."""
        shape = (len(anchors), self.block_size)
        ids = torch.full(shape, self.drafter.config.mask_token_id, device=self.target.device)
        ids[:, 0] = anchors
        positions = self.rows.lengths[:, None] + self._slots
        attend = full_attention if self.rows.even else ragged_attention(self.rows, self.block_size)
        hidden: Tensor = self.drafter(self.target.embed(ids), positions, self.context(), attend)
        return hidden

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        """See `Proposer.propose`."""
        logits = self.head(self.block_hidden(anchors)[:, 1:])
        if seen is None and (sampling.greedy or sampling.rule == "match"):
            return Proposal(self._target_ids(logits.argmax(dim=-1)))
        return self._slot_by_slot(logits.float(), sampling, uniform, seen)

    def keep(self, index: Tensor) -> None:
        """See `Proposer.keep`."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.keep(index)
        self.rows.set(self.rows.lengths[index])

    def _slot_by_slot(
        self, logits: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        """Choose one slot after the other, since penalties depend on the drafts before."""
        sampled = not sampling.greedy and sampling.rule == "rejection"
        here = None if seen is None else seen[:, self._all_ids()].clone()
        rows, chosen, q = torch.arange(len(logits), device=logits.device), [], []
        for slot in range(logits.shape[1]):
            scores = logits[:, slot]
            if here is not None:
                scores = penalize(scores, here, sampling.repetition_penalty)
            if sampled:
                q.append(distribution(scores, sampling))
                chosen.append(draw(q[-1], uniform[:, slot]))
            else:
                chosen.append(scores.argmax(dim=-1))
            if here is not None:
                here[rows, chosen[-1]] = True
        tokens = self._target_ids(torch.stack(chosen, dim=1))
        return Proposal(
            tokens, self._over_target_vocabulary(torch.stack(q, dim=1)) if sampled else None
        )

    def _all_ids(self) -> Tensor:
        if self.draft_ids is not None:
            return self.draft_ids
        return torch.arange(self.head.weight.shape[0], device=self.target.device)

    def _target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.draft_ids is None else self.draft_ids[rows]

    def _over_target_vocabulary(self, q: Tensor) -> Tensor:
        if self.draft_ids is None:
            return q
        whole = q.new_zeros(*q.shape[:-1], self.target.head.weight.shape[0])
        whole[..., self.draft_ids] = q
        return whole


def ragged_attention(rows: Rows, block_size: int) -> Attend:
    """Attend to each row's own context length and to its block."""
    keys = torch.arange(rows.longest, device=rows.lengths.device)
    context = (keys < rows.lengths[:, None])[:, None, None].expand(-1, 1, block_size, -1)
    mask = torch.cat([context, context.new_ones(len(context), 1, block_size, block_size)], dim=-1)

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        keys = torch.cat([k_context, k_block], dim=2)
        values = torch.cat([v_context, v_block], dim=2)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


def decoding_copy(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """Return a copy in eval mode and `dtype`; training weights and mode stay as they are."""
    copied: Any = copy.deepcopy(drafter)
    result: Drafter = copied.to(dtype).eval().requires_grad_(False)
    return result


def check_block_size(drafter: Drafter, block_size: int | None, longer: bool = False) -> int:
    """Return the block size to decode with.

    Raises:
        UserError: Below 2, or beyond the trained one without permission.
    """
    trained = int(drafter.config.block_size)
    size = trained if block_size is None else block_size
    if size < 2:
        raise UserError(f"block_size: needs at least 2 (an anchor and one slot), got {size}")
    if size > trained and not longer:
        raise UserError(
            f"block_size: the drafter was trained with {trained}; {size} needs permission "
            "(longer: true)"
        )
    return size


def check_same_target(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        UserError: Width, mask token, tapped layers or fingerprint differ.
    """
    config = drafter.config
    pairs = {
        "hidden_size": (config.hidden_size, target.config.hidden_size),
        "target_layer_ids": (list(config.target_layer_ids or []), target.target_layer_ids),
        "mask_token_id": (config.mask_token_id, target.mask_token_id),
        "target_fingerprint": (config.target_fingerprint, target.fingerprint),
    }
    differing = [f"{key} {was} != {now}" for key, (was, now) in pairs.items() if was != now]
    if differing:
        raise UserError(
            f"the drafter was trained for another target ({config.target_name or 'unnamed'}): "
            + ", ".join(differing)
        )
