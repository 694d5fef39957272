"""Anchors, blocks, labels and weights against slow loops and cases that can be checked by eye."""

import random

import pytest
import torch
from tiny import MASK
from torch import Tensor

from dflash_lightning.data.anchors import (
    AllAnchors,
    Anchors,
    RandomAnchors,
    UniformAnchors,
    anchor_candidates,
    anchor_generator,
)
from dflash_lightning.data.blocks import (
    Batch,
    BlockCollator,
    make_blocks,
)
from dflash_lightning.data.samples import Sample
from dflash_lightning.errors import UserError

BLOCK_KEYS = ["anchor_positions", "block_keep_mask", "noise_ids", "labels", "label_mask"]


def sample_of(mask: str, first_id: int = 10) -> Sample:
    """Return a sample with ids 10, 11, ..., supervised where `mask` has a 1."""
    ids = torch.arange(first_id, first_id + len(mask))
    return Sample(ids, torch.tensor([c == "1" for c in mask], dtype=torch.bool))


def random_mask(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("0111") for _ in range(length))


def collator(
    num_anchors: int = 4, block_size: int = 4, seed: int = 0, rule: Anchors | None = None
) -> BlockCollator:
    return BlockCollator(rule or RandomAnchors(num_anchors), block_size, MASK, seed=seed)


def batch_of(samples: list[Sample], collate: BlockCollator, epoch: int = 0) -> Batch:
    return collate([[(i, epoch, sample, None)] for i, sample in enumerate(samples)])


def slow_candidates(mask: list[bool]) -> list[int]:
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def alone(sample: Sample) -> Tensor:
    """Return the document starts of a row of one document."""
    return torch.zeros_like(sample.ids)


def check_against_loop(
    sample: Sample, anchors: list[int], blocks: dict[str, Tensor], size: int
) -> None:
    num_blocks, length = len(blocks["block_keep_mask"]), len(sample.ids)
    assert blocks["labels"].shape == (num_blocks, size)
    for n in range(num_blocks):
        live = n < len(anchors)
        anchor = anchors[n] if live else 0
        assert bool(blocks["block_keep_mask"][n]) == live
        assert int(blocks["anchor_positions"][n]) == anchor
        assert blocks["position_ids"][n].tolist() == [anchor + k for k in range(size)]
        assert blocks["noise_ids"][n].tolist() == [int(sample.ids[anchor])] + [MASK] * (size - 1)
        for k in range(size):
            inside = live and anchor + k < length
            label = int(sample.ids[anchor + k]) if inside else 0
            asked = inside and k > 0 and bool(sample.loss_mask[anchor + k])
            assert int(blocks["labels"][n, k]) == label, (n, k)
            assert bool(blocks["label_mask"][n, k]) == asked, (n, k)


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
    chosen = RandomAnchors(8).choose(candidates, anchor_generator(0, 0, 0), 4).tolist()
    assert len(chosen) == min(8, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(candidates.tolist())


def test_every_candidate_can_be_an_anchor() -> None:
    candidates = torch.arange(10)
    seen = {
        p
        for epoch in range(100)
        for p in RandomAnchors(2).choose(candidates, anchor_generator(0, epoch, 0), 4).tolist()
    }
    assert seen == set(range(10))


def test_anchors_follow_seed_epoch_and_sample() -> None:
    def chosen(seed: int, epoch: int, index: int) -> list[int]:
        candidates = torch.arange(1000)
        return RandomAnchors(8).choose(candidates, anchor_generator(seed, epoch, index), 4).tolist()

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


# ---- other rules -------------------------------------------------------------


def chosen_by(rule: Anchors, mask: str, size: int, epoch: int = 0) -> list[int]:
    candidates = anchor_candidates(sample_of(mask).loss_mask)
    return rule.choose(candidates, anchor_generator(0, epoch, 0), size).tolist()


@pytest.mark.parametrize(
    ("mask", "size", "expected"),
    [
        ("0011111111", 4, [2, 6]),
        ("0011111111", 3, [2, 5, 8]),
        ("001111111", 3, [2, 5]),  # the last block would be its anchor alone
        ("0111110011111", 3, [1, 4, 8, 11]),  # each response by itself
        ("1111111", 16, [0]),
        ("0100010", 4, []),
        ("", 4, []),
    ],
)
def test_uniform_anchors_cut_each_response_into_blocks(
    mask: str, size: int, expected: list[int]
) -> None:
    assert chosen_by(UniformAnchors(), mask, size) == expected
    assert chosen_by(UniformAnchors(), mask, size, epoch=1) == expected


def test_uniform_anchors_cover_every_response_token_once() -> None:
    rng = random.Random(4)
    for _ in range(50):
        runs = [rng.randrange(1, 12) for _ in range(3)]
        mask, size = "".join("0" * 6 + "1" * n for n in runs), rng.randrange(2, 6)
        covered = [a + k for a in chosen_by(UniformAnchors(), mask, size) for k in range(size)]
        inside = [p for p in covered if p < len(mask) and mask[p] == "1"]
        assert len(inside) == len(set(inside))
        # what isn't covered is the last token of a response that would be a block of one
        assert sum(map(int, mask)) - len(inside) == sum(n % size == 1 for n in runs)


def test_a_count_takes_some_of_the_partition_afresh_each_epoch() -> None:
    everything = chosen_by(UniformAnchors(), "1" * 100, 4)
    found = [chosen_by(UniformAnchors(5), "1" * 100, 4, epoch) for epoch in range(20)]
    assert all(len(some) == 5 and some == sorted(set(some)) for some in found)
    assert len({tuple(some) for some in found}) > 10
    assert {p for some in found for p in some} <= set(everything)
    assert chosen_by(UniformAnchors(5), "1" * 20, 4) == [0, 4, 8, 12, 16]


def test_all_anchors_are_all_candidates() -> None:
    mask = "0111011"
    assert chosen_by(AllAnchors(), mask, 4) == slow_candidates([c == "1" for c in mask])


@pytest.mark.parametrize("rule", [UniformAnchors, AllAnchors])
def test_rules_without_a_count_have_rooms_of_few_sizes(rule: type[Anchors]) -> None:
    collate = BlockCollator(rule(), 2, MASK, seed=0)
    rooms = {
        batch_of([sample_of("0" + "1" * n)], collate).block_keep_mask.shape[1]
        for n in range(2, 200)
    }
    assert rooms <= {8, 16, 32, 64, 128, 256}
    for n in (2, 50, 199):
        batch = batch_of([sample_of("0" + "1" * n), sample_of("000")], collate)
        expected = len(chosen_by(rule(), "0" + "1" * n, 2))
        assert batch.block_keep_mask.sum(1).tolist() == [expected, 0]


@pytest.mark.parametrize("rule", [RandomAnchors, UniformAnchors])
def test_a_count_below_one_is_refused(rule: type[Anchors]) -> None:
    with pytest.raises(UserError, match=r"data\.anchors\.num_anchors: needs at least 1, got 0"):
        rule(0)  # type: ignore[call-arg]


# ---- blocks ------------------------------------------------------------------


def test_block_by_hand() -> None:
    sample = sample_of("00111011")  # ids 10..17
    blocks = make_blocks(sample, alone(sample), torch.tensor([3, 6]), 3, MASK, 4)
    assert blocks["noise_ids"][:, 0].tolist() == [13, 16, 10]
    assert (blocks["noise_ids"][:, 1:] == MASK).all()
    assert blocks["labels"].tolist() == [[13, 14, 15, 16], [16, 17, 0, 0], [0, 0, 0, 0]]
    assert blocks["label_mask"].long().tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert blocks["position_ids"].tolist() == [[3, 4, 5, 6], [6, 7, 8, 9], [0, 1, 2, 3]]
    assert blocks["anchor_positions"].tolist() == [3, 6, 0]
    assert blocks["block_keep_mask"].tolist() == [True, True, False]


def test_blocks_against_loop() -> None:
    rng = random.Random(1)
    for _ in range(60):
        sample = sample_of(random_mask(rng, rng.randrange(2, 25)))
        candidates = slow_candidates(sample.loss_mask.tolist())
        anchors = sorted(rng.sample(candidates, min(len(candidates), rng.randrange(5))))
        size = rng.randrange(2, 9)
        chosen = torch.tensor(anchors, dtype=torch.int64)
        blocks = make_blocks(sample, alone(sample), chosen, 5, MASK, size)
        check_against_loop(sample, anchors, blocks, size)


def test_supervised_span_of_two_tokens_at_the_end() -> None:
    batch = batch_of([sample_of("0000000011")], collator(num_anchors=3))
    assert batch.block_keep_mask.tolist() == [[True, False, False]]
    assert batch.anchor_positions[0, 0] == 8
    assert batch.labels[0, 0].tolist() == [18, 19, 0, 0]
    assert batch.label_mask[0, 0].tolist() == [False, True, False, False]


@pytest.mark.parametrize("mask", ["11", "111", "1111"], ids=["two", "S<K", "S==K"])
def test_sequences_not_longer_than_a_block(mask: str) -> None:
    sample = sample_of(mask)
    batch = batch_of([sample], collator(num_anchors=6))
    anchors = list(range(len(mask) - 1))
    assert batch.anchor_positions[0, : len(anchors)].tolist() == anchors
    blocks = {key: getattr(batch, key)[0] for key in [*BLOCK_KEYS, "position_ids"]}
    check_against_loop(sample, anchors, blocks, 4)


def test_no_possible_anchor_gives_dead_blocks_with_finite_zeros() -> None:
    for mask in ("0000000", "0000001", "0"):
        batch = batch_of([sample_of(mask)], collator(num_anchors=3))
        assert not batch.block_keep_mask.any()
        assert torch.equal(batch.label_mask, torch.zeros(1, 3, 4, dtype=torch.bool))
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
    assert batch.noise_ids.shape == batch.labels.shape == batch.label_mask.shape == (4, 5, 6)
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
        check_against_loop(sample, anchors, blocks, 6)


def test_labels_never_come_from_padding_or_another_row() -> None:
    """A block at the end of the short row must not take padding or the long row as labels."""
    short, long = sample_of("0011"), sample_of("0" * 3 + "1" * 20, first_id=50)
    batch = batch_of([short, long], collator(num_anchors=1, block_size=8))
    assert batch.labels[0, 0].tolist() == [12, 13, 0, 0, 0, 0, 0, 0]
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
        def choose(self, candidates: Tensor, generator: torch.Generator, block_size: int) -> Tensor:
            return candidates

    with pytest.raises(UserError, match=r"data\.anchors: 3 anchors of one sample.* is 2"):
        batch_of([sample_of("1111")], BlockCollator(Greedy(2), 4, MASK, seed=0))


# ---- packed rows -------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [RandomAnchors(3), UniformAnchors(), UniformAnchors(2), AllAnchors()]
)
def test_packed_documents_have_the_blocks_they_have_alone(rule: Anchors) -> None:
    """Same anchors, labels, weights and positions; only their place in the row differs."""
    rng = random.Random(3)
    for trial in range(20):
        samples = [sample_of(random_mask(rng, rng.randrange(2, 25)), 10 * i) for i in range(5)]
        collate = collator(block_size=5, seed=trial, rule=rule)
        apart = batch_of(samples, collate)
        documents = [(i, 0, sample, None) for i, sample in enumerate(samples)]
        packed = collate([documents[:3], documents[3:]])
        for row, inside in enumerate([range(3), range(3, 5)]):
            keep, start, found = packed.block_keep_mask[row], 0, 0
            for i in inside:
                live = apart.block_keep_mask[i]
                part = slice(found, found + int(live.sum()))
                for key in ("noise_ids", "labels", "label_mask", "position_ids"):
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
        assert packed.noise_ids.shape[1] % (rule.num_anchors or 8) == 0


def test_labels_end_with_the_document() -> None:
    first, second = sample_of("0111"), sample_of("1111", first_id=50)
    collate = collator(num_anchors=3, block_size=4)
    batch = collate([[(0, 0, first, None), (1, 0, second, None)]])
    assert batch.anchor_positions[0, :5].tolist() == [1, 2, 4, 5, 6]
    assert batch.labels[0, 1].tolist() == [12, 13, 0, 0]
    assert batch.position_ids[0, 2].tolist() == [0, 1, 2, 3]
    assert batch.labels[0, 4].tolist() == [52, 53, 0, 0]


def test_states_of_packed_documents_lie_one_after_the_other() -> None:
    states = [torch.randn(n, 6) for n in (3, 5, 2)]
    items = [(i, 0, sample_of("1" * len(s)), s) for i, s in enumerate(states)]
    hidden = collator()([items[:2], items[2:]]).target_hidden
    assert hidden is not None
    assert hidden.shape == (2, 8, 6)
    assert torch.equal(hidden[0], torch.cat(states[:2]))
    assert torch.equal(hidden[1, :2], states[2])
    assert not hidden[1, 2:].any()
