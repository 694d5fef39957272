"""Which tokens are drafted, given the drafter's scores of a block's slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lightning.decoding.sampling import Sampling, distribution, draw, penalize


@dataclass(frozen=True)
class Proposal:
    """Drafted target token ids `[B, K-1]`, and what they were sampled from `[B, K-1, V]`.

    `q` is None where the drafts are a point mass (the drafter's argmax).
    """

    tokens: Tensor
    q: Tensor | None = None


class Choice:
    """Chooses drafts slot by slot: argmax or sample, penalties by the drafts before included.

    Args:
        draft_ids: Target tokens that the scores are of `[Vd]`; None means all.
        vocab_size: V, the target's vocabulary.
        sampling: How tokens are chosen.
        uniform: Numbers in [0, 1) to draw with `[B, K]`.
        seen: Tokens that occurred `[B, V]`, for the repetition penalty.
    """

    def __init__(
        self,
        draft_ids: Tensor | None,
        vocab_size: int,
        sampling: Sampling,
        uniform: Tensor,
        seen: Tensor | None,
    ) -> None:
        self.ids, self.vocab_size = draft_ids, vocab_size
        self.sampling, self.uniform = sampling, uniform
        self.sampled = not sampling.greedy and sampling.rule == "rejection"
        self.here = seen
        if seen is not None:
            self.here = seen[:, :vocab_size].clone() if draft_ids is None else seen[:, draft_ids]
        self.rows: list[Tensor] = []
        self.q: list[Tensor] = []

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the target tokens `[B]` chosen by scores `[B, Vd]` of the next slot."""
        scores = scores.float()
        if self.here is not None:
            scores = penalize(scores, self.here, self.sampling.repetition_penalty)
        if self.sampled:
            self.q.append(distribution(scores, self.sampling))
            rows = draw(self.q[-1], self.uniform[:, len(self.rows)])
        else:
            rows = scores.argmax(dim=-1)
        if self.here is not None:
            self.here[torch.arange(len(rows), device=rows.device), rows] = True
        self.rows.append(rows)
        return self._target_ids(rows)

    def proposal(self) -> Proposal:
        """Return what was chosen, with its distributions over the target's vocabulary."""
        tokens = self._target_ids(torch.stack(self.rows, dim=1))
        if not self.sampled:
            return Proposal(tokens)
        q = torch.stack(self.q, dim=1)
        if self.ids is None:
            return Proposal(tokens, q)
        whole = q.new_zeros(*q.shape[:-1], self.vocab_size)
        whole[..., self.ids] = q
        return Proposal(tokens, whole)

    def _target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.ids is None else self.ids[rows]
