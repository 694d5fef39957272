"""Slow and obvious counterparts of what the package does fast, shared by the tests."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from dflash_lightning.data.anchors import Anchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.samples import Sample
from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Decoded
from dflash_lightning.decoding.proposer import DrafterProposer, Proposer
from dflash_lightning.decoding.sampling import Sampling
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import Target

PROMPT = torch.tensor([5, 9, 17, 30])


class EveryAnchor(Anchors):
    """Takes every candidate."""

    def __init__(self, num_anchors: int) -> None:
        self.num_anchors = num_anchors

    def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
        return candidates


def token_ids(length: int, seed: int = 0) -> Tensor:
    """Return random ordinary tokens `[length]` (no pad, bos, eos or mask)."""
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed))


def greedy(target: Target, prompt: Tensor, count: int, penalty: float = 1.0) -> list[int]:
    """Return `generate`'s greedy continuation, running past stop tokens."""
    output = target.model.generate(
        prompt[None],
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=2,
    )
    return output[0, len(prompt) :].tolist()


def varied(tokens: list[int]) -> list[int]:
    """Return the tokens, after checking that they could tell a right from a wrong decoder."""
    assert len(set(tokens)) >= 6
    return tokens


def training_module(target: Target, drafter: Drafter, attention: str = "chunked") -> DFlashModule:
    """Return a training module around ready-made parts."""
    module = DFlashModule(block_size=drafter.config.block_size, attention=attention)
    module.target, module.drafter = target, drafter
    return module


def every_block(rows: list[Tensor], block_size: int, mask_token_id: int) -> Batch:
    """Return a training batch with a block at every position that has a next token."""
    samples = [Sample(row, torch.ones(len(row), dtype=torch.bool)) for row in rows]
    anchors = EveryAnchor(max(map(len, rows)) - 1)
    collate = BlockCollator(anchors, block_size, mask_token_id, seed=0)
    return collate([[(i, 0, sample, None)] for i, sample in enumerate(samples)])


def hook_count(model: nn.Module) -> int:
    """Return how many forward hooks hang on a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def wrap_layers(target: Target, change: Callable[[int, Tensor], Tensor]) -> None:
    """Replace each decoder layer's output `[B, S, H]` by `change(layer index, output)`, inside its
    forward.
    """
    for index, layer in enumerate(target._layers):
        layer.forward = _changed(layer.forward, index, change)


def _changed(
    forward: Callable[..., object], index: int, change: Callable[[int, Tensor], Tensor]
) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return change(index, output)
        assert isinstance(output, tuple)
        return change(index, output[0]), *output[1:]

    return run


def speculate(
    target: Target,
    proposer: Proposer,
    prompt: Tensor,
    count: int,
    stop_ids: Collection[int] | None = None,
) -> Decoded:
    """Decode one prompt greedily with a proposer."""
    return decode(target, [prompt], proposer, count, stop_ids)[0]


def decode_plain(
    target: Target, prompt: Tensor, count: int, stop_ids: Collection[int] | None = None
) -> Decoded:
    """Decode one prompt greedily with the target alone."""
    return decode(target, [prompt], None, count, stop_ids)[0]


def observe(proposer: DrafterProposer, hidden: Tensor, tokens: Tensor | None = None) -> None:
    """Hand states `[1, n, T*H]` and tokens `[n]` of committed positions to a proposer of one row.

    Drafters with KV injection don't look at the tokens.
    """
    count = hidden.shape[1]
    known = torch.zeros(1, count, dtype=torch.int64) if tokens is None else tokens[None]
    proposer.observe(hidden, torch.tensor([count]), known)


def propose(proposer: DrafterProposer, anchor: int) -> Tensor:
    """Return one row's greedy drafts `[K-1]`."""
    uniform = torch.zeros(1, proposer.block_size)
    return proposer.propose(torch.tensor([anchor]), Sampling(), uniform, None).tokens[0]


def block_hidden(proposer: DrafterProposer, anchor: int) -> Tensor:
    """Return one row's block states `[K, H]`."""
    return proposer.block_hidden(proposer.block_ids(torch.tensor([anchor])))[0]
