"""Speculative decoding of a batch: draft a block, verify it in one target forward, keep what holds.

    prefill -> first token
    cycle:  propose K-1 tokens -> verify K -> accept a prefix + one token
            -> shorten each row to what it committed -> hand the committed positions' states over

Rows have lengths, accepted counts, stops and random numbers of their own; finished rows leave the
batch. Greedy output is the target's own, token for token in float32; in bfloat16 a verify of K
tokens and a one-token step differ in rounding, see `evaluate.divergence`. Sampled output has the
target's own distribution.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_lightning.decoding.cache import RowCache
from dflash_lightning.decoding.outcome import Cycle, Decoded, until_stop
from dflash_lightning.decoding.proposer import Committed, Proposer
from dflash_lightning.decoding.sampling import (
    Sampling,
    accept_matching,
    accept_rejecting,
    distribution,
    draw,
    penalize,
)
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

GREEDY = Sampling()
OnCommit = Callable[[int, list[int], int], None]
"""Called with a prompt's index, its new tokens, and how many of them were accepted drafts."""


@torch.no_grad()
def decode(
    target: Target,
    prompts: Sequence[Tensor],
    proposer: Proposer | None,
    max_new_tokens: int,
    stop_ids: Collection[int] | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    on_commit: OnCommit | None = None,
) -> list[Decoded]:
    """Decode prompts as one batch.

    Args:
        target: Verifies.
        prompts: Token ids `[P]` of each prompt; their lengths may differ.
        proposer: Drafts; None decodes plainly, one token a step.
        max_new_tokens: Longest output, the prefill's token included.
        stop_ids: Tokens that end an output; None takes the target's.
        sampling: How tokens are chosen, by target and drafter alike.
        seed: Prompt i draws from its own generator, seeded with (seed + i).
        on_commit: Told of every commitment as it happens.

    Raises:
        UserError: No prompt, an empty one, or one that does not fit the target's window.
    """
    stops = target.stop_ids if stop_ids is None else frozenset(stop_ids)
    with torch.autocast(target.device.type, enabled=False):
        args = target, prompts, proposer, max_new_tokens, stops, sampling, seed, on_commit
        return _Batch(*args).run()


class _Batch:
    """A running batch: which prompts are still in it, and what is known of each row."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Tensor],
        proposer: Proposer | None,
        max_new_tokens: int,
        stops: frozenset[int],
        sampling: Sampling,
        seed: int,
        on_commit: OnCommit | None,
    ) -> None:
        self.cache = RowCache(target.model, len(prompts))
        check_prompts(int(target.config.max_position_embeddings), prompts, max_new_tokens)
        self.target, self.proposer, self.sampling = target, proposer, sampling
        self.max_new_tokens, self.stops, self.on_commit = max_new_tokens, stops, on_commit
        self.prompts = prompts
        self.decoded = [Decoded() for _ in prompts]
        self.active = list(range(len(prompts)))
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        self.seen: Tensor | None = None
        self.slots = 1 if proposer is None else proposer.block_size

    def run(self) -> list[Decoded]:
        """Decode until every row has stopped."""
        start = self._now()
        news = self._prefill()
        spent = self._now() - start
        self._spend("prefill_s", spent)
        self._spend("total_s", spent)
        keep = self._drop_finished()
        news = news if keep is None else news.keep(keep)
        while self.active:
            news = self._cycle(news)
        return self.decoded

    # ---- steps ----------------------------------------------------------------------------------

    def _prefill(self) -> Committed:
        device = self.target.device
        lengths = torch.tensor([len(p) for p in self.prompts], device=device)
        ids = pad_sequence([p.to(device) for p in self.prompts], batch_first=True)
        last, column = (lengths - 1).unique(return_inverse=True)
        even = len(last) == 1
        output = self.target.forward(
            ids,
            None if even else self.cache.masks(ids.shape[1], self.target.dtype),
            self.cache.positions(ids.shape[1]),
            self.cache,
            logits_to_keep=1 if even else last,
            tap=self.proposer is not None,
        )
        self.cache.rows.set(lengths)
        if self.proposer is not None:
            self.proposer.begin(len(ids))
        logits = output.logits[torch.arange(len(ids), device=device), column]
        if self.sampling.repetition_penalty != 1.0:
            self.seen = _seen(self.prompts, logits.shape[-1], device)
        tokens = self._choose(
            logits[:, None], torch.empty(len(ids), 0, dtype=torch.int64, device=device)
        )
        for row, token in enumerate(tokens[:, 0].tolist()):
            self._commit(row, [token], None)
        return Committed(output.hidden, lengths, ids)

    def _cycle(self, news: Committed) -> Committed:
        began = self._now()
        device = self.target.device
        room = torch.tensor(
            [self.max_new_tokens - len(self.decoded[i].tokens) for i in self.active], device=device
        )
        anchors = torch.tensor([self.decoded[i].tokens[-1] for i in self.active], device=device)
        drafts = torch.empty(len(self.active), 0, dtype=torch.int64, device=device)
        q: Tensor | None = None
        uniform = self._uniform()
        if self.proposer is not None and int(room.max()) > 1:
            self.proposer.observe(cast(Tensor, news.hidden), news.counts, news.tokens)
            count = min(self.slots, int(room.max())) - 1
            proposal = self.proposer.propose(anchors, self.sampling, uniform[..., 2], self.seen)
            drafts = proposal.tokens[:, :count]
            q = None if proposal.q is None else proposal.q[:, :count]
        drafted = self._now()
        block = torch.cat([anchors[:, None], drafts], dim=1)
        width = block.shape[1]
        output = self.target.forward(
            block,
            None if self.cache.rows.even else self.cache.masks(width, self.target.dtype),
            self.cache.positions(width),
            self.cache,
            logits_to_keep=0,
            tap=self.proposer is not None,
        )
        verified = self._now()
        accepted, following = self._verify(output.logits, drafts, q, uniform[:, :width], room - 1)
        self.cache.rows.set(self.cache.rows.lengths + accepted + 1)
        done = zip(
            accepted.tolist(), following.tolist(), drafts.tolist(), room.tolist(), strict=True
        )
        for row, (kept, token, draft, left) in enumerate(done):
            self._commit(
                row, [*draft[:kept], token], Cycle(min(drafts.shape[1], left - 1), kept, 0, draft)
            )
        ended = self._now()
        self._spend("draft_s", drafted - began)
        self._spend("verify_s", verified - drafted)
        self._spend("total_s", ended - began)
        keep = self._drop_finished()
        news = Committed(output.hidden, accepted + 1, block)
        return news if keep is None else news.keep(keep)

    def _verify(
        self, logits: Tensor, drafts: Tensor, q: Tensor | None, uniform: Tensor, room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return accepted drafts `[B]` and the token after them `[B]`."""
        if q is not None:
            p = distribution(self._penalized(logits, drafts), self.sampling)
            return accept_rejecting(drafts, q, p, uniform[..., :2], room)
        choices = self._choose(logits, drafts, uniform[..., 1])
        accepted = accept_matching(drafts, choices, room)
        return accepted, choices.gather(1, accepted[:, None])[:, 0]

    def _choose(self, logits: Tensor, drafts: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Return the target's own choice `[B, n]` at each position of logits `[B, n, V]`."""
        logits = self._penalized(logits, drafts)
        if self.sampling.greedy:
            return logits.argmax(dim=-1)
        if uniform is None:
            uniform = self._uniform()[:, :1, 1]
        return draw(distribution(logits, self.sampling), uniform)

    def _penalized(self, logits: Tensor, drafts: Tensor) -> Tensor:
        if self.seen is None:
            return logits
        seen = self.seen[:, None].expand(-1, logits.shape[1], -1).clone()
        for slot in range(drafts.shape[1]):
            seen[torch.arange(len(seen))[:, None], slot + 1 :, drafts[:, slot : slot + 1]] = True
        return penalize(logits.float(), seen, self.sampling.repetition_penalty)

    def _uniform(self) -> Tensor:
        """Return each row's own uniform numbers `[B, K, 3]`.

        Of the three, the first is to accept with, the second to draw with, the third to draft with.
        """
        shape = (self.slots, 3)
        if self.sampling.greedy:
            return torch.zeros(len(self.active), *shape)
        rows = [
            torch.rand(shape, generator=self.generators[i], dtype=torch.float64)
            for i in self.active
        ]
        return torch.stack(rows).to(self.target.device)

    # ---- rows -----------------------------------------------------------------------------------

    def _commit(self, row: int, tokens: list[int], cycle: Cycle | None) -> None:
        index = self.active[row]
        new = until_stop(tokens, self.stops)
        decoded = self.decoded[index]
        decoded.tokens += new
        if cycle is not None:
            cycle.committed = len(new)
            decoded.cycles.append(cycle)
        if self.seen is not None:
            self.seen[row, new] = True
        if self.on_commit is not None:
            self.on_commit(index, new, 0 if cycle is None else min(cycle.accepted, len(new)))

    def _drop_finished(self) -> Tensor | None:
        """Let finished rows leave; returns the rows that stay, or None if all do."""
        stay = [
            row
            for row, index in enumerate(self.active)
            if self.decoded[index].tokens[-1] not in self.stops
            and len(self.decoded[index].tokens) < self.max_new_tokens
        ]
        if len(stay) == len(self.active):
            return None
        self.active = [self.active[row] for row in stay]
        keep = torch.tensor(stay, dtype=torch.int64, device=self.target.device)
        self.cache.keep(keep)
        if self.seen is not None:
            self.seen = self.seen[keep]
        if self.proposer is not None:
            self.proposer.keep(keep)
        return keep

    def _spend(self, part: str, seconds: float) -> None:
        for index in self.active:
            decoded = self.decoded[index]
            setattr(decoded, part, getattr(decoded, part) + seconds / len(self.active))

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def check_prompts(window: int, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
    """Check that there is something to decode and that it fits a context window, in tokens.

    Raises:
        UserError: No prompt, an empty one, nothing to generate, or a sequence beyond the window.
    """
    if not prompts:
        raise UserError("there is no prompt to decode: give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: needs at least 1, got {max_new_tokens}")
    for n, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise UserError(f"prompt {n} is empty: it needs at least one token")
        if prompt.numel() + max_new_tokens > window:
            raise UserError(
                f"prompt {n}: its {prompt.numel()} tokens and max_new_tokens={max_new_tokens} "
                f"exceed the target's context window of {window}"
            )


def _seen(prompts: Sequence[Tensor], vocabulary: int, device: torch.device) -> Tensor:
    seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, prompt.to(device)] = True
    return seen
