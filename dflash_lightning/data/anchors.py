"""Where blocks start: rules that pick anchors among the candidates of a sample."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lightning.errors import UserError


class Anchors(ABC):
    """A rule that picks anchors among the candidates of one sample."""

    num_anchors: int | None
    """Most anchors of a sample; None where there may be any number."""

    @abstractmethod
    def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
        """Return at most `num_anchors` of the ascending `candidates` `[C]`, ascending.

        Args:
            candidates: Positions that may start a block.
            generator: Depends on (seed, epoch, sample) only; the same in validation.
            block_size: K.
        """


@dataclass
class RandomAnchors(Anchors):
    """Anchors sampled without replacement, fresh every epoch (paper, Table 13).

    Args:
        num_anchors: Blocks per sample; the paper takes 512 for sequences of 3,072 tokens.
    """

    num_anchors: int = 512

    def __post_init__(self) -> None:
        """Refuse a count below 1."""
        _check_count(self.num_anchors)

    def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
        """See `Anchors.choose`."""
        return _some(candidates, self.num_anchors, generator)


@dataclass
class UniformAnchors(Anchors):
    """Each response cut into consecutive blocks of K, from its first token on.

    The baseline that the paper compares random anchors with.

    Args:
        num_anchors: Blocks per sample; where the responses have more, some of them are sampled,
            fresh every epoch. null takes all.
    """

    num_anchors: int | None = None

    def __post_init__(self) -> None:
        """Refuse a count below 1."""
        _check_count(self.num_anchors)

    def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
        """See `Anchors.choose`."""
        order = torch.arange(len(candidates))
        begins = torch.ones(len(candidates), dtype=torch.bool)
        begins[1:] = candidates[1:] != candidates[:-1] + 1
        into_response = order - torch.where(begins, order, 0).cummax(dim=0).values
        return _some(candidates[into_response % block_size == 0], self.num_anchors, generator)


class AllAnchors(Anchors):
    """Every candidate, always; the number of blocks grows with the responses."""

    num_anchors = None

    def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
        """See `Anchors.choose`."""
        return candidates


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Return positions `[C]` whose own token and next token are supervised.

    >>> anchor_candidates(torch.tensor([False, True, True, True, False, True]))
    tensor([1, 2])
    """
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten()


def anchor_generator(seed: int, epoch: int, sample: int) -> torch.Generator:
    """Return a generator that depends on (seed, epoch, sample) only.

    So a resumed run sees the same anchors.
    """
    state = np.random.SeedSequence((seed, epoch, sample)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def _some(positions: Tensor, count: int | None, generator: torch.Generator) -> Tensor:
    """Return `count` of the positions, ascending; all where there are no more or count is None."""
    if count is None:
        return positions
    picked = torch.randperm(len(positions), generator=generator)[:count]
    return positions[picked].sort().values


def _check_count(num_anchors: int | None) -> None:
    if num_anchors is not None and num_anchors < 1:
        raise UserError(f"data.anchors.num_anchors: needs at least 1, got {num_anchors}")
