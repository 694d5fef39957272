"""Training equals inference: what the drafter sees in a training block is what it sees when it
decodes, and nothing more.
"""

from pathlib import Path

import pytest
import torch
from reference import (
    block_hidden,
    every_block,
    greedy,
    observe,
    propose,
    token_ids,
    training_module,
)
from tiny import ARCHITECTURES, tiny_drafter, tiny_target
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.draft_vocab import most_frequent
from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import Target

K = 4
PIECES = [1, 4, 1, 2, 3, 1, 1, 4]
"""How the decoding loop may feed the context: accepted counts vary from cycle to cycle."""


def inference_blocks(target: Target, drafter: Drafter, ids: Tensor) -> dict[int, Tensor]:
    """Return the block's hidden states `[K, H]` at each position the uneven feeding stops at.

    The target runs with its own cache, piece by piece, as in `speculate`.
    """
    proposer = DrafterProposer(drafter, target)
    cache = DynamicCache(config=target.config)
    found: dict[int, Tensor] = {}
    at = 0
    with torch.no_grad():
        for size in PIECES:
            hidden = target.forward(ids[None, at : at + size], cache=cache).hidden
            assert hidden is not None
            observe(proposer, hidden)
            at += size
            if at < len(ids):
                found[at] = block_hidden(proposer, int(ids[at]))
    return found


def every_inference_block(target: Target, drafter: Drafter, ids: Tensor) -> dict[int, Tensor]:
    """Return the block at every position but the first, its context fed in three uneven pieces."""
    proposer = DrafterProposer(drafter, target)
    hidden = target.forward(ids[None]).hidden
    assert hidden is not None
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for anchor in range(1, len(ids)):
            proposer.begin(1)
            for piece in hidden[:, :anchor].tensor_split(
                [anchor // 3, anchor - anchor // 2], dim=1
            ):
                observe(proposer, piece)
            found[anchor] = block_hidden(proposer, int(ids[anchor]))
    return found


def training_blocks(module: DFlashModule, batch: Batch) -> Tensor:
    """Return the training path's hidden states `[B, N, K, H]`."""
    with torch.no_grad():
        return module.block_hidden(batch)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["chunked", "dense"])
def test_training_blocks_equal_decoding_blocks(
    architecture: str, attention: str, tmp_path: Path
) -> None:
    """Every anchor of a row in one batch, against the re-loaded drafter fed in uneven pieces.

    A mask that lets in the anchor's own feature, a position off by one, another RoPE base, a
    skipped norm, or a block's keys left in the cache: each shows here.
    """
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, block_size=K)
    ids, other = token_ids(22, seed=1), token_ids(29, seed=2)
    batch = every_block([ids, other], K, target.mask_token_id)
    blocks = training_blocks(training_module(target, drafter, attention), batch)[0]
    assert batch.anchor_positions[0].tolist()[:21] == list(range(21))
    drafter.save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path).eval()
    found = every_inference_block(target, loaded, ids)
    for anchor in range(1, 21):
        torch.testing.assert_close(blocks[anchor], found[anchor], rtol=1e-5, atol=1e-5)
        logits = (target.head(blocks[anchor, 1:]), target.head(found[anchor][1:]))
        scale = max(1.0, float(logits[0].abs().max()))
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5 * scale)
    assert (blocks[1:21] - blocks[:20]).abs().amax((1, 2)).min() > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_blocks_equal_decoding_blocks_through_the_targets_cache(
    architecture: str, tmp_path: Path
) -> None:
    """The same with features that the target computed piece by piece: equal up to its own
    rounding.
    """
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, block_size=K)
    ids = token_ids(22, seed=3)
    batch = every_block([ids], K, target.mask_token_id)
    blocks = training_blocks(training_module(target, drafter), batch)[0]
    drafter.save_pretrained(tmp_path)
    found = inference_blocks(target, Drafter.from_pretrained(tmp_path).eval(), ids)
    assert sorted(found) == [1, 5, 6, 8, 11, 12, 13, 17]
    for anchor, hidden in found.items():
        torch.testing.assert_close(blocks[anchor], hidden, rtol=1e-3, atol=1e-3)


def test_first_block_has_no_context_in_training_and_decoding() -> None:
    """At anchor 0 both see the block alone."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=K)
    ids = token_ids(9)
    batch = every_block([ids], K, target.mask_token_id)
    blocks = training_blocks(training_module(target, drafter), batch)[0]
    proposer = DrafterProposer(drafter, target)
    observe(proposer, torch.empty(1, 0, 96))
    with torch.no_grad():
        torch.testing.assert_close(blocks[0], block_hidden(proposer, int(ids[0])))


def test_proposals_are_the_training_predictions() -> None:
    """Slot k of the training loss is token a + k of the proposal, draft vocabulary included."""
    target = tiny_target()
    ids = torch.cat([torch.tensor([5, 9]), torch.tensor(greedy(target, torch.tensor([5, 9]), 18))])
    for draft_vocab in (None, 30):
        drafter = tiny_drafter(target, block_size=K, draft_vocab_size=draft_vocab)
        if draft_vocab:
            counts = torch.bincount(ids, minlength=96)
            drafter.draft_ids.copy_(most_frequent(counts, draft_vocab))
        module = training_module(target, drafter)
        batch = every_block([ids], K, target.mask_token_id)
        output, _, _ = module.block_loss(batch)
        predicted = output.predictions[0]
        if draft_vocab:
            predicted = drafter.draft_ids[predicted.clamp(min=0)]
        proposer = DrafterProposer(drafter, target)
        hidden = target.forward(ids[None]).hidden
        assert hidden is not None
        for anchor in range(1, len(ids) - K):
            proposer.begin(1)
            observe(proposer, hidden[:, :anchor])
            assert propose(proposer, int(ids[anchor])).tolist() == predicted[anchor].tolist()
            assert batch.labels[0, anchor, 1:].tolist() == ids[anchor + 1 : anchor + K].tolist()


# ---- leaks ---------------------------------------------------------------------------------------


def batch_with_anchors(target: Target, ids: Tensor, anchors: list[int]) -> Batch:
    """Return the batch of one row with chosen anchors, its features attached."""
    batch = every_block([ids], K, target.mask_token_id)
    index = torch.tensor(anchors)
    parts = {
        name: getattr(batch, name)[:, index]
        for name in (
            "anchor_positions",
            "block_keep_mask",
            "noise_ids",
            "labels",
            "label_mask",
            "position_ids",
        )
    }
    return batch._replace(**parts, target_hidden=target.forward(ids[None]).hidden)


@pytest.mark.parametrize("attention", ["chunked", "dense"])
@pytest.mark.parametrize("anchors", [[3, 4, 5], list(range(12)), [9, 2, 5, 5]])
def test_a_block_depends_on_the_features_before_its_anchor_and_on_no_other(
    attention: str, anchors: list[int]
) -> None:
    """Every (anchor, position): exactly no effect at and after the anchor, some before it.

    Overlapping blocks are what betrays a comparison of block indices.
    """
    target = tiny_target()
    module = training_module(target, tiny_drafter(target, block_size=K), attention)
    ids = token_ids(13)
    batch = batch_with_anchors(target, ids, anchors)
    hidden = batch.target_hidden
    assert hidden is not None
    before = training_blocks(module, batch)[0]
    for position in range(len(ids)):
        changed = hidden.clone()
        changed[:, position] += torch.linspace(-3, 3, hidden.shape[-1])
        after = training_blocks(module, batch._replace(target_hidden=changed))[0]
        moved = (after - before).abs().amax(dim=-1)
        for row, anchor in enumerate(anchors):
            if position >= anchor:
                assert (moved[row] == 0).all(), (anchor, position)
            else:
                assert (moved[row] > 1e-5).all(), (anchor, position)


@pytest.mark.parametrize("attention", ["chunked", "dense"])
def test_a_block_does_not_see_another_blocks_tokens(attention: str) -> None:
    """Changing one block's anchor token changes that whole block and no other,
    overlapping or not.
    """
    target = tiny_target()
    module = training_module(target, tiny_drafter(target, block_size=K), attention)
    batch = batch_with_anchors(target, token_ids(13), [3, 4, 5, 5, 9])
    before = training_blocks(module, batch)[0]
    for block in range(5):
        noise = batch.noise_ids.clone()
        noise[0, block, 0] = (noise[0, block, 0] + 1) % 90
        moved = (
            (training_blocks(module, batch._replace(noise_ids=noise))[0] - before).abs().amax(-1)
        )
        assert (moved[block] > 1e-5).all()
        moved[block] = 0
        assert (moved == 0).all()


def test_a_row_does_not_see_another_rows_tokens_or_its_padding() -> None:
    """Blocks read their own row's features only, and none of the padding behind it."""
    target = tiny_target()
    module = training_module(target, tiny_drafter(target, block_size=K))
    short, long = token_ids(9, seed=1), token_ids(16, seed=2)
    alone = training_blocks(module, every_block([short], K, target.mask_token_id))[0]
    both = training_blocks(module, every_block([short, long], K, target.mask_token_id))[0]
    torch.testing.assert_close(both[:8], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["chunked", "dense"])
def test_attention_inside_a_block_is_bidirectional(attention: str) -> None:
    """A change of slot 3's input reaches slot 1, and the other way round."""
    target = tiny_target()
    module = training_module(target, tiny_drafter(target, block_size=K), attention)
    batch = batch_with_anchors(target, token_ids(13), [3, 6])
    before = training_blocks(module, batch)[0]
    for source in range(K):
        noise = batch.noise_ids.clone()
        noise[0, :, source] = 7
        moved = (
            (training_blocks(module, batch._replace(noise_ids=noise))[0] - before).abs().amax(-1)
        )
        assert (moved > 1e-5).all(), source
