"""Anchors, blocks, labels and weights against slow loops and cases that can be checked by eye."""

import itertools
import math
import random

import pytest
import torch
from tiny import MASK
from torch import Tensor

from dflash_lightning.data.blocks import (
    Batch,
    BlockCollator,
    RandomAnchors,
    anchor_candidates,
    anchor_generator,
    default_gamma,
    make_blocks,
    position_weights,
)
from dflash_lightning.data.samples import Sample
from dflash_lightning.errors import UserError

BLOCK_KEYS = ["anchor_positions", "block_keep_mask", "noise_ids", "labels", "weights"]


def sample_of(mask: str, first_id: int = 10) -> Sample:
    """Return a sample with ids 10, 11, ..., supervised where `mask` has a 1."""
    ids = torch.arange(first_id, first_id + len(mask))
    return Sample(ids, torch.tensor([c == "1" for c in mask], dtype=torch.bool))


def random_mask(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("0111") for _ in range(length))


def collator(num_anchors: int = 4, block_size: int = 4, seed: int = 0) -> BlockCollator:
    return BlockCollator(RandomAnchors(num_anchors), block_size, MASK, seed=seed)


def batch_of(samples: list[Sample], collate: BlockCollator, epoch: int = 0) -> Batch:
    return collate([[(i, epoch, sample, None)] for i, sample in enumerate(samples)])


def slow_candidates(mask: list[bool]) -> list[int]:
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def alone(sample: Sample) -> Tensor:
    """Return the document starts of a row of one document."""
    return torch.zeros_like(sample.ids)


def slow_slot(sample: Sample, anchor: int, k: int, gamma: float | None) -> tuple[int, float]:
    """Return the label and the weight of slot `k` of a live block, by the definition."""
    position = anchor + k
    if k == 0 or position >= len(sample.ids) or not sample.loss_mask[position]:
        return 0, 0.0
    weight = 1.0 if gamma is None else math.exp(-(k - 1) / gamma)
    return int(sample.ids[position]), weight


def check_against_loop(
    sample: Sample, anchors: list[int], blocks: dict[str, Tensor], size: int, gamma: float | None
) -> None:
    num_blocks = len(blocks["block_keep_mask"])
    assert blocks["labels"].shape == (num_blocks, size)
    for n in range(num_blocks):
        live = n < len(anchors)
        anchor = anchors[n] if live else 0
        assert bool(blocks["block_keep_mask"][n]) == live
        assert int(blocks["anchor_positions"][n]) == anchor
        assert blocks["position_ids"][n].tolist() == [anchor + k for k in range(size)]
        assert blocks["noise_ids"][n].tolist() == [int(sample.ids[anchor])] + [MASK] * (size - 1)
        for k in range(size):
            label, weight = slow_slot(sample, anchor, k, gamma) if live else (0, 0.0)
            assert int(blocks["labels"][n, k]) == label, (n, k)
            assert float(blocks["weights"][n, k]) == pytest.approx(weight, abs=1e-7), (n, k)


# ---- weights -----------------------------------------------------------------


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_default_gamma_is_the_papers(size: int, gamma: float) -> None:
    assert default_gamma(size) == gamma


def test_default_gamma_is_positive_and_grows() -> None:
    values = [default_gamma(size) for size in range(2, 40)]
    assert values[0] > 0
    assert all(a < b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("gamma", [0.5, 4.0, 7.0])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_position_weights_decay_from_one_at_slot_one(size: int, gamma: float) -> None:
    weights = position_weights(size, gamma)
    assert weights.dtype == torch.float32
    assert weights[0] == 0
    assert weights[1] == 1
    for k in range(1, size):
        assert float(weights[k]) == pytest.approx(math.exp(-(k - 1) / gamma), rel=1e-6)


def test_uniform_weights_spare_slot_zero_only() -> None:
    assert position_weights(5, None).tolist() == [0, 1, 1, 1, 1]


# ---- candidates --------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("0000", []),
        ("", []),
        ("1", []),
        ("11", [0]),
        ("00011", [3]),
        ("00001", []),
        ("1111", [0, 1, 2]),
        ("0110100111", [1, 7, 8]),
    ],
)
def test_candidates_by_hand(mask: str, expected: list[int]) -> None:
    assert anchor_candidates(sample_of(mask).loss_mask).tolist() == expected


def test_candidates_against_loop() -> None:
    rng = random.Random(0)
    for length in range(1, 30):
        mask = torch.tensor([c == "1" for c in random_mask(rng, length)])
        before = mask.clone()
        assert anchor_candidates(mask).tolist() == slow_candidates(mask.tolist())
        assert torch.equal(mask, before), "the caller's mask must not be changed"


# ---- anchors -----------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 8, 50])
def test_anchors_are_ascending_distinct_and_at_most_n(count: int) -> None:
    candidates = torch.arange(count) * 3 + 1
    chosen = RandomAnchors(8).choose(candidates, anchor_generator(0, 0, 0)).tolist()
    assert len(chosen) == min(8, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(candidates.tolist())


def test_every_candidate_can_be_an_anchor() -> None:
    candidates = torch.arange(10)
    seen = {
        p
        for epoch in range(100)
        for p in RandomAnchors(2).choose(candidates, anchor_generator(0, epoch, 0)).tolist()
    }
    assert seen == set(range(10))


def test_anchors_follow_seed_epoch_and_sample() -> None:
    def chosen(seed: int, epoch: int, index: int) -> list[int]:
        candidates = torch.arange(1000)
        return RandomAnchors(8).choose(candidates, anchor_generator(seed, epoch, index)).tolist()

    keys = [(s, e, i) for s in range(3) for e in range(3) for i in range(3)]
    assert len({tuple(chosen(*key)) for key in keys}) == len(keys)
    assert all(chosen(*key) == chosen(*key) for key in keys)


def test_anchors_neither_use_nor_move_global_randomness() -> None:
    samples = [sample_of("1" * 60), sample_of("0" * 10 + "1" * 40)]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = batch_of(samples, collator())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = batch_of(samples, collator())
    assert torch.equal(first.anchor_positions, second.anchor_positions)


def test_anchors_do_not_depend_on_the_rest_of_the_batch() -> None:
    samples = [sample_of("1" * n) for n in (40, 50, 60)]
    together = batch_of(samples, collator())
    alone = collator()([[(2, 0, samples[2], None)]])
    assert torch.equal(together.anchor_positions[2], alone.anchor_positions[0])


def test_equal_samples_have_their_own_anchors() -> None:
    batch = batch_of([sample_of("1" * 200)] * 2, collator())
    assert not torch.equal(batch.anchor_positions[0], batch.anchor_positions[1])


@pytest.mark.parametrize("change", ["epoch", "seed"])
def test_batches_change_with_epoch_and_seed(change: str) -> None:
    samples = [sample_of("1" * 200)]
    base = batch_of(samples, collator())
    other = (
        batch_of(samples, collator(), epoch=1)
        if change == "epoch"
        else batch_of(samples, collator(seed=1))
    )
    assert not torch.equal(base.anchor_positions, other.anchor_positions)


# ---- blocks ------------------------------------------------------------------


def test_block_by_hand() -> None:
    sample = sample_of("00111011")  # ids 10..17
    weights = position_weights(4, None)
    blocks = make_blocks(sample, alone(sample), torch.tensor([3, 6]), 3, MASK, weights)
    assert blocks["noise_ids"][:, 0].tolist() == [13, 16, 10]
    assert (blocks["noise_ids"][:, 1:] == MASK).all()
    assert blocks["labels"].tolist() == [[0, 14, 0, 16], [0, 17, 0, 0], [0, 0, 0, 0]]
    assert blocks["weights"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert blocks["position_ids"].tolist() == [[3, 4, 5, 6], [6, 7, 8, 9], [0, 1, 2, 3]]
    assert blocks["anchor_positions"].tolist() == [3, 6, 0]
    assert blocks["block_keep_mask"].tolist() == [True, True, False]


@pytest.mark.parametrize("gamma", [None, 3.0])
def test_blocks_against_loop(gamma: float | None) -> None:
    rng = random.Random(1)
    for _ in range(60):
        sample = sample_of(random_mask(rng, rng.randrange(2, 25)))
        candidates = slow_candidates(sample.loss_mask.tolist())
        anchors = sorted(rng.sample(candidates, min(len(candidates), rng.randrange(5))))
        size = rng.randrange(2, 9)
        weights = position_weights(size, gamma)
        chosen = torch.tensor(anchors, dtype=torch.int64)
        blocks = make_blocks(sample, alone(sample), chosen, 5, MASK, weights)
        check_against_loop(sample, anchors, blocks, size, gamma)


def test_supervised_span_of_two_tokens_at_the_end() -> None:
    batch = batch_of([sample_of("0000000011")], collator(num_anchors=3))
    assert batch.block_keep_mask.tolist() == [[True, False, False]]
    assert batch.anchor_positions[0, 0] == 8
    assert batch.labels[0, 0].tolist() == [0, 19, 0, 0]
    assert batch.weights[0, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("mask", ["11", "111", "1111"], ids=["two", "S<K", "S==K"])
def test_sequences_not_longer_than_a_block(mask: str) -> None:
    sample = sample_of(mask)
    batch = batch_of([sample], collator(num_anchors=6))
    anchors = list(range(len(mask) - 1))
    assert batch.anchor_positions[0, : len(anchors)].tolist() == anchors
    blocks = {key: getattr(batch, key)[0] for key in [*BLOCK_KEYS, "position_ids"]}
    check_against_loop(sample, anchors, blocks, 4, 2.0)


def test_no_possible_anchor_gives_dead_blocks_with_finite_zeros() -> None:
    for mask in ("0000000", "0000001", "0"):
        batch = batch_of([sample_of(mask)], collator(num_anchors=3))
        assert not batch.block_keep_mask.any()
        assert torch.equal(batch.weights, torch.zeros(1, 3, 4))
        assert not batch.labels.any()
        assert batch.noise_ids[0].tolist() == [[10, MASK, MASK, MASK]] * 3


def test_mixed_batch_keeps_shapes_and_padding() -> None:
    samples = [
        sample_of("0011"),
        sample_of("000000"),
        sample_of("0" * 5 + "1" * 15),
        sample_of("11"),
    ]
    batch = batch_of(samples, collator(num_anchors=5, block_size=6))
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.loss_mask.shape == (4, 20)
    assert batch.noise_ids.shape == batch.labels.shape == batch.weights.shape == (4, 5, 6)
    assert batch.attention_mask.sum(1).tolist() == [4, 6, 20, 2]
    assert batch.block_keep_mask.sum(1).tolist() == [1, 0, 5, 1]
    assert batch.target_hidden is None
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        assert torch.equal(batch.input_ids[row, :n], sample.ids)
        assert torch.equal(batch.loss_mask[row, :n], sample.loss_mask)
        assert batch.attention_mask[row, :n].all()
        assert not batch.input_ids[row, n:].any()
        assert not batch.loss_mask[row, n:].any()
        keep = batch.block_keep_mask[row]
        blocks = {key: getattr(batch, key)[row] for key in [*BLOCK_KEYS, "position_ids"]}
        anchors = batch.anchor_positions[row][keep].tolist()
        check_against_loop(sample, anchors, blocks, 6, 2.0)
    assert torch.isfinite(batch.weights).all()


def test_labels_never_come_from_padding_or_another_row() -> None:
    """A block at the end of the short row must not take padding or the long row as labels."""
    short, long = sample_of("0011"), sample_of("0" * 3 + "1" * 20, first_id=50)
    batch = batch_of([short, long], collator(num_anchors=1, block_size=8))
    assert batch.labels[0, 0].tolist() == [0, 13, 0, 0, 0, 0, 0, 0]
    assert int((batch.label_mask[0]).sum()) == 1


def test_stored_states_are_padded_with_zeros() -> None:
    states = [torch.randn(3, 6), torch.randn(5, 6)]
    items = [[(i, 0, sample_of("1" * len(s)), s)] for i, s in enumerate(states)]
    hidden = collator()(items).target_hidden
    assert hidden is not None
    assert hidden.shape == (2, 5, 6)
    assert torch.equal(hidden[0, :3], states[0])
    assert torch.equal(hidden[1], states[1])
    assert not hidden[0, 3:].any()


def test_too_many_anchors_are_refused() -> None:
    class Greedy(RandomAnchors):
        def choose(
        self, candidates: Tensor, generator: torch.Generator, block_size: int
    ) -> Tensor:
            return candidates

    with pytest.raises(UserError, match=r"data\.anchors: 3 anchors of one sample.* is 2"):
        batch_of([sample_of("1111")], BlockCollator(Greedy(2), 4, MASK, seed=0))


# ---- packed rows -------------------------------------------------------------


def test_packed_documents_have_the_blocks_they_have_alone() -> None:
    """Same anchors, labels, weights and positions; only their place in the row differs."""
    rng = random.Random(3)
    for trial in range(20):
        samples = [sample_of(random_mask(rng, rng.randrange(2, 25)), 10 * i) for i in range(5)]
        collate = collator(num_anchors=3, block_size=5, seed=trial)
        apart = batch_of(samples, collate)
        documents = [(i, 0, sample, None) for i, sample in enumerate(samples)]
        packed = collate([documents[:3], documents[3:]])
        for row, inside in enumerate([range(3), range(3, 5)]):
            keep, start, found = packed.block_keep_mask[row], 0, 0
            for i in inside:
                live = apart.block_keep_mask[i]
                part = slice(found, found + int(live.sum()))
                for key in ("noise_ids", "labels", "weights", "position_ids"):
                    assert torch.equal(
                        getattr(packed, key)[row][part], getattr(apart, key)[i][live]
                    )
                expected = apart.anchor_positions[i][live] + start
                assert torch.equal(packed.anchor_positions[row][part], expected)
                length = len(samples[i].ids)
                assert torch.equal(packed.input_ids[row, start : start + length], samples[i].ids)
                assert (packed.document_starts[row, start : start + length] == start).all()
                start, found = start + length, part.stop
            assert keep.tolist() == [True] * found + [False] * (len(keep) - found)
            assert (packed.document_starts[row, start:] == start).all(), "padding"
            assert not packed.attention_mask[row, start:].any()
        assert packed.noise_ids.shape[1] % 3 == 0


def test_labels_end_with_the_document() -> None:
    first, second = sample_of("0111"), sample_of("1111", first_id=50)
    collate = collator(num_anchors=3, block_size=4)
    batch = collate([[(0, 0, first, None), (1, 0, second, None)]])
    assert batch.anchor_positions[0, :5].tolist() == [1, 2, 4, 5, 6]
    assert batch.labels[0, 1].tolist() == [0, 13, 0, 0]
    assert batch.position_ids[0, 2].tolist() == [0, 1, 2, 3]
    assert batch.labels[0, 4].tolist() == [0, 53, 0, 0]


def test_states_of_packed_documents_lie_one_after_the_other() -> None:
    states = [torch.randn(n, 6) for n in (3, 5, 2)]
    items = [(i, 0, sample_of("1" * len(s)), s) for i, s in enumerate(states)]
    hidden = collator()([items[:2], items[2:]]).target_hidden
    assert hidden is not None
    assert hidden.shape == (2, 8, 6)
    assert torch.equal(hidden[0], torch.cat(states[:2]))
    assert torch.equal(hidden[1, :2], states[2])
    assert not hidden[1, 2:].any()
