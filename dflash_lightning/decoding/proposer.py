"""Who proposes tokens to the target: the decoding loop's protocol, and the drafter behind it."""

import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dflash_lightning.decoding.choice import Choice, Proposal
from dflash_lightning.decoding.context import DraftContext, slot_attention
from dflash_lightning.decoding.sampling import Sampling, penalize
from dflash_lightning.drafter.attention import Attend
from dflash_lightning.drafter.model import Drafter, KeyValue
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_head import OutputHead


class Committed(NamedTuple):
    """What a proposer is to observe next; see `Proposer.observe`. No states in plain decoding."""

    hidden: Tensor | None
    counts: Tensor
    tokens: Tensor

    def keep(self, index: Tensor) -> "Committed":
        """Return the rows in `index`."""
        hidden = None if self.hidden is None else self.hidden[index]
        return Committed(hidden, self.counts[index], self.tokens[index])


class Proposer(Protocol):
    """Drafts blocks for the rows of one batch at a time."""

    block_size: int

    def begin(self, batch: int) -> None:
        """Forget everything and expect a batch of so many rows."""

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        """Take newly committed positions, following what was observed before.

        Args:
            hidden: Their tapped target states `[B, n, T*H]`.
            counts: How many of the n positions each row committed `[B]`.
            tokens: Their tokens `[B, n]`.
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
    """Proposes with a `Drafter`, in the way it was trained to draft.

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
        self.begin(1)

    def begin(self, batch: int) -> None:
        """See `Proposer.begin`."""
        self.context = DraftContext(self.drafter, self.target, batch)

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        """See `Proposer.observe`."""
        self.context.observe(hidden, counts, tokens)

    def keep(self, index: Tensor) -> None:
        """See `Proposer.keep`."""
        self.context.keep(index)

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        """See `Proposer.propose`.

        Raises:
            UserError: Rejection sampling from a drafter that drafts out of order.
        """
        config = self.drafter.config
        if config.denoising_steps > 1:
            return self._by_confidence(anchors, sampling, seen)
        if config.autoregressive:
            return self._token_by_token(anchors, self._choice(sampling, uniform, seen))
        logits = self.head(self.block_hidden(self.block_ids(anchors))[:, 1:])
        argmax = sampling.greedy or sampling.rule == "match"
        if seen is None and argmax and self.drafter.markov is None:
            return Proposal(self.target_ids(logits.argmax(dim=-1)))
        choice, previous = self._choice(sampling, uniform, seen), anchors
        for slot in range(logits.shape[1]):
            scores = logits[:, slot]
            if self.drafter.markov is not None:
                scores = scores + self.drafter.markov(previous)
            previous = choice(scores)
        return choice.proposal()

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Return the blocks' input ids `[B, K]`: anchors `[B]`, then mask tokens."""
        shape = (len(anchors), self.block_size)
        ids = torch.full(shape, self.drafter.config.mask_token_id, device=self.target.device)
        ids[:, 0] = anchors
        return ids

    def block_hidden(self, ids: Tensor) -> Tensor:
        """Return the drafter's states `[B, K, H]` of blocks with input ids `[B, K]`."""
        context, count = self.context, ids.shape[1]
        places = context.rows.lengths[:, None] + torch.arange(count, device=ids.device)
        attends = [
            slot_attention(context.rows, 0, count, self.drafter.config.causal, window)
            for window in context.windows
        ]
        known = context.known
        known = None if known is None else known[:, None].expand(-1, count, -1)
        inputs = self.drafter.enter(self.target.embed(ids), known)
        hidden: Tensor = self.drafter(inputs, places, context.key_values(), attends)
        return hidden

    def target_ids(self, rows: Tensor) -> Tensor:
        """Return the target tokens of rows of the draft vocabulary."""
        return rows if self.draft_ids is None else self.draft_ids[rows]

    def _choice(self, sampling: Sampling, uniform: Tensor, seen: Tensor | None) -> Choice:
        vocab_size = self.target.head.weight.shape[0]
        return Choice(self.draft_ids, vocab_size, sampling, uniform, seen)

    def _token_by_token(self, anchors: Tensor, choice: Choice) -> Proposal:
        walk, token = TokenWalk(self), anchors
        for _ in range(self.block_size - 1):
            token = choice(self.head(walk.step(token)))
        return choice.proposal()

    def _by_confidence(self, anchors: Tensor, sampling: Sampling, seen: Tensor | None) -> Proposal:
        """Fix the most confident slots pass by pass: the argmax of each, whatever the sampling."""
        if not sampling.greedy and sampling.rule == "rejection":
            raise UserError(
                "rule: rejection needs drafts sampled in order, and this drafter denoises out of "
                "order; take match"
            )
        ids = self.block_ids(anchors)
        open_ = torch.ones(len(ids), self.block_size - 1, dtype=torch.bool, device=ids.device)
        steps = self.drafter.config.denoising_steps
        for step in range(steps):
            logits = self.head(self.block_hidden(ids)[:, 1:]).float()
            if seen is not None:
                here = seen[:, None, :] if self.draft_ids is None else seen[:, None, self.draft_ids]
                logits = penalize(logits, here, sampling.repetition_penalty)
            best, rows = logits.softmax(dim=-1).max(dim=-1)
            left = self.block_size - 1 - (self.block_size - 1) * step // steps
            after = self.block_size - 1 - (self.block_size - 1) * (step + 1) // steps
            fix = best.masked_fill(~open_, -1.0).topk(left - after, dim=1).indices
            ids[:, 1:].scatter_(1, fix, self.target_ids(rows).gather(1, fix))
            open_.scatter_(1, fix, False)
        return Proposal(ids[:, 1:])


class TokenWalk:
    """A block drafted token by token: one causal pass each, which sees the ones before.

    Args:
        proposer: Gives drafter, target and context.
    """

    def __init__(self, proposer: DrafterProposer) -> None:
        self.proposer, self.context = proposer, proposer.context
        self.entering, self.slot = self.context.known, 0
        self._key_values = self.context.key_values()
        self._slots: list[KeyValue | None] = [None] * len(self._key_values)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the state `[B, H]` that says what follows `tokens` `[B]` in the next slot."""
        drafter, rows = self.proposer.drafter, self.context.rows
        entering = None if self.entering is None else self.entering[:, None]
        inputs = drafter.enter(self.proposer.target.embed(tokens[:, None]), entering)
        attends = [self._attend(layer) for layer in range(len(self._slots))]
        places = rows.lengths[:, None] + self.slot
        hidden: Tensor = drafter(inputs, places, self._key_values, attends)[:, 0]
        self.slot += 1
        if self.entering is not None:
            self.entering = hidden
        return hidden

    def _attend(self, layer: int) -> Attend:
        over = slot_attention(self.context.rows, self.slot, 1, True, self.context.windows[layer])

        def attend(q: Tensor, k_context: Tensor, v_context: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before = self._slots[layer]
            if before is not None:
                k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
            self._slots[layer] = (k, v)
            return over(q, k_context, v_context, k, v)

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
