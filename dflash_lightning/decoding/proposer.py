"""Who proposes tokens to the target.

The protocol of the decoding loop, and the DFlash drafter behind it.
"""

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_lightning.drafter.attention import full_attention
from dflash_lightning.drafter.model import Drafter, KeyValue
from dflash_lightning.errors import UserError
from dflash_lightning.target import OutputHead, Target


class Proposer(Protocol):
    """Drafts blocks for one sequence at a time."""

    block_size: int

    def reset(self) -> None:
        """Forget the sequence."""

    def observe(self, hidden: Tensor) -> None:
        """Take the tapped target states `[1, n, T*H]` of the next n committed positions."""

    def propose(self, anchor: int) -> Tensor:
        """Return K-1 target token ids `[K-1]` to follow the last committed token `anchor`."""


class DrafterProposer:
    """Proposes with a `Drafter`, greedily.

    Its cache holds the context's keys and values only, never the block's.

    Args:
        drafter: In eval mode, in the target's dtype; see `decoding_copy`.
        target: Gives the embedding and, row by row of the draft vocabulary, the head.
        block_size: K at decoding; null takes the trained one.
    """

    def __init__(self, drafter: Drafter, target: Target, block_size: int | None = None) -> None:
        check_same_target(drafter, target)
        self.drafter, self.target = drafter, target
        self.block_size = block_size or drafter.config.block_size
        self.draft_ids: Tensor | None = getattr(drafter, "draft_ids", None)
        self.head: OutputHead = (
            target.head if self.draft_ids is None else target.head.rows(self.draft_ids)
        )
        self._slots = torch.arange(self.block_size, device=target.device)
        self.reset()

    def reset(self) -> None:
        """See `Proposer.reset`."""
        self._context: list[KeyValue] = []
        self._length = 0

    def observe(self, hidden: Tensor) -> None:
        """See `Proposer.observe`."""
        positions = torch.arange(
            self._length, self._length + hidden.shape[1], device=hidden.device
        )[None]
        new = self.drafter.context_key_values(hidden, positions)
        self._length += hidden.shape[1]
        if not self._context:
            self._context = new
            return
        self._context = [
            (torch.cat([k, k_new], dim=2), torch.cat([v, v_new], dim=2))
            for (k, v), (k_new, v_new) in zip(self._context, new, strict=True)
        ]

    def block_hidden(self, anchor: int) -> Tensor:
        """Return the drafter's hidden states `[1, K, H]` of the block that starts at `anchor`."""
        ids = torch.full(
            (1, self.block_size), self.drafter.config.mask_token_id, device=self.target.device
        )
        ids[0, 0] = anchor
        positions = (self._length + self._slots)[None]
        hidden: Tensor = self.drafter(
            self.target.embed(ids), positions, self._context, full_attention
        )
        return hidden

    def propose(self, anchor: int) -> Tensor:
        """See `Proposer.propose`."""
        rows = self.head(self.block_hidden(anchor)[0, 1:]).argmax(dim=-1)
        return rows if self.draft_ids is None else self.draft_ids[rows]


def decoding_copy(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """Return the drafter in eval mode and `dtype`.

    It is a copy, so that training weights and mode stay as they are.
    """
    copied: Any = copy.deepcopy(drafter)
    ready: Drafter = copied.to(dtype).eval().requires_grad_(False)
    return ready


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
