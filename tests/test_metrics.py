"""Acceptance by slot against plain Python loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.metrics import AcceptanceBySlot, WeightedMean, curves, leading, slot_counts

SLOTS = 5


def random_blocks(
    blocks: int = 200, slots: int = SLOTS, seed: int = 0, full: bool = False
) -> tuple[Tensor, Tensor]:
    """Random `correct` and `valid`; validity has holes, not only short tails."""
    generator = torch.Generator().manual_seed(seed)
    correct = torch.rand(blocks, slots, generator=generator) < 0.7
    valid = torch.rand(blocks, slots, generator=generator) < 0.85
    return correct, torch.ones_like(valid) if full else valid


def prefix(correct: list[bool], valid: list[bool]) -> int:
    """Leading slots that have a label and are right."""
    length = 0
    while length < len(correct) and correct[length] and valid[length]:
        length += 1
    return length


def by_loops(correct: Tensor, valid: Tensor) -> dict[str, Any]:
    """The sums of `slot_counts`, counted with loops."""
    slots = correct.shape[1]
    sums: dict[str, Any] = {k: [0] * slots for k in ("right", "scored", "survived", "reached")}
    sums |= dict.fromkeys(("accepted", "blocks", "full_accepted", "full_blocks"), 0)
    for c, v in zip(correct.tolist(), valid.tolist(), strict=True):
        length = prefix(c, v)
        for k in range(slots):
            sums["scored"][k] += v[k]
            sums["right"][k] += v[k] and c[k]
            sums["reached"][k] += all(v[: k + 1])
            sums["survived"][k] += length > k
        if any(v):
            sums["blocks"] += 1
            sums["accepted"] += length
        if all(v):
            sums["full_blocks"] += 1
            sums["full_accepted"] += length
    return sums


def measured(*batches: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    metric = AcceptanceBySlot(batches[0][0].shape[-1])
    for correct, valid in batches:
        metric.update(correct, valid)
    return metric.compute()


@pytest.mark.parametrize("seed", range(5))
def test_counts_and_curves_are_those_of_a_plain_loop(seed: int) -> None:
    correct, valid = random_blocks(seed=seed)
    sums = by_loops(correct, valid)
    counts = slot_counts(correct, valid)
    assert {key: value.tolist() for key, value in counts.items()} == sums
    found = curves(counts)
    survival = [s / r for s, r in zip(sums["survived"], sums["reached"], strict=True)]
    assert found["survival"].tolist() == pytest.approx(survival)
    marginal = [r / s for r, s in zip(sums["right"], sums["scored"], strict=True)]
    assert found["marginal"].tolist() == pytest.approx(marginal)
    conditional = [s / b for s, b in zip(survival, [1.0, *survival], strict=False)]
    assert found["conditional"].tolist() == pytest.approx(conditional)
    metric = measured((correct, valid))
    assert metric["accept_len"].item() == pytest.approx(1 + sums["accepted"] / sums["blocks"])
    full = 1 + sums["full_accepted"] / sums["full_blocks"]
    assert metric["accept_len_full_blocks"].item() == pytest.approx(full)
    assert metric["survival"].tolist() == pytest.approx(survival)


def test_leading_stops_at_the_first_wrong_or_unlabelled_slot() -> None:
    correct = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert leading(correct, valid).long().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_correlated_slots_are_not_a_product_of_marginals() -> None:
    correct = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    found = measured((correct, torch.ones_like(correct)))
    assert found["marginal"].tolist() == [0.5, 1.0, 0.5]
    assert found["survival"].tolist() == [0.5, 0.5, 0.0]
    assert found["conditional"].tolist() == [0.5, 1.0, 0.0]
    assert found["accept_len"] == 2.0
    of_marginals = 1 + found["marginal"].cumprod(dim=0).sum()
    assert of_marginals == 2.25 != found["accept_len"]


@pytest.mark.parametrize("sizes", [[200], [1, 199], [50, 50, 50, 50], [1] * 200])
def test_splitting_into_batches_changes_nothing(sizes: list[int]) -> None:
    correct, valid = random_blocks()
    parts = zip(correct.split(sizes), valid.split(sizes), strict=True)
    whole, split = measured((correct, valid)), measured(*parts)
    assert whole.keys() == split.keys()
    for key, value in whole.items():
        assert torch.equal(value, split[key]), key


def test_batch_dimensions_are_flattened() -> None:
    correct, valid = random_blocks()
    shaped = measured((correct.view(4, 50, SLOTS), valid.view(4, 50, SLOTS)))
    for key, value in measured((correct, valid)).items():
        assert torch.equal(value, shaped[key]), key


def test_unscored_slots_count_nowhere() -> None:
    correct, valid = random_blocks()
    lies = torch.where(valid, correct, ~correct)
    assert not torch.equal(lies, correct)
    dead = torch.zeros(30, SLOTS, dtype=torch.bool)
    plain = measured((correct, valid))
    padded = measured((lies, valid), (~dead, dead), (dead, dead))
    for key, value in plain.items():
        assert torch.equal(value, padded[key]), key


def test_full_blocks_and_all_blocks_are_told_apart() -> None:
    correct = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    found = measured((correct, valid))
    assert found["accept_len"].item() == pytest.approx(1 + (3 + 1 + 1) / 3)
    assert found["accept_len_full_blocks"].item() == pytest.approx(1 + (3 + 1) / 2)
    assert found["survival"].tolist() == pytest.approx([1.0, 0.5, 0.5])


def test_full_blocks_have_one_plus_the_sum_of_survivals() -> None:
    found = measured(random_blocks(full=True))
    assert found["accept_len"].item() == pytest.approx(1 + found["survival"].sum().item())
    assert torch.equal(found["accept_len"], found["accept_len_full_blocks"])
    assert found["accept_len"] > 1.5


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("batches", [0, 1])
def test_nothing_scored_is_a_clear_error(batches: int) -> None:
    metric = AcceptanceBySlot(SLOTS)
    for _ in range(batches):
        metric.update(torch.ones(4, SLOTS).bool(), torch.zeros(4, SLOTS).bool())
    with pytest.raises(ValueError, match="no block with a labelled slot was scored"):
        metric.compute()


def test_a_slot_never_scored_is_nan_and_spoils_no_other() -> None:
    correct = torch.ones(3, 2, dtype=torch.bool)
    valid = torch.tensor([[True, False]]).expand(3, 2)
    found = measured((correct, valid))
    assert found["marginal"][0] == found["survival"][0] == 1
    assert math.isnan(found["marginal"][1])
    assert math.isnan(found["survival"][1])
    assert found["accept_len"] == 2
    assert math.isnan(found["accept_len_full_blocks"])


def test_first_batch_all_right_then_mixed() -> None:
    """A MetricCollection of one metric per slot reports 1/1/1 here."""
    first = torch.ones(2, 3, dtype=torch.bool)
    second = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    found = measured((first, first), (second, torch.ones_like(second)))
    assert found["marginal"].tolist() == [1.0, 0.75, 0.5]
    assert found["survival"].tolist() == [1.0, 0.75, 0.5]


def test_reset_forgets_everything() -> None:
    metric = AcceptanceBySlot(SLOTS)
    metric.update(*random_blocks(seed=1))
    metric.compute()
    metric.reset()
    metric.update(*random_blocks(seed=2))
    for key, value in measured(random_blocks(seed=2)).items():
        assert torch.equal(value, metric.compute()[key]), key


def test_compute_twice_with_an_update_between_sees_the_update() -> None:
    metric = AcceptanceBySlot(SLOTS)
    metric.update(*random_blocks(seed=1))
    metric.compute()
    metric.update(*random_blocks(seed=2))
    both = measured(random_blocks(seed=1), random_blocks(seed=2))
    assert torch.equal(metric.compute()["accept_len"], both["accept_len"])


def test_counters_are_exact_beyond_what_float32_holds() -> None:
    metric = AcceptanceBySlot(3)
    names = list(metric._defaults)
    for name in names:
        setattr(metric, name, getattr(metric, name) + 2**24)
    metric.update(torch.ones(1, 3).bool(), torch.ones(1, 3).bool())
    metric.update(torch.ones(1, 3).bool(), torch.ones(1, 3).bool())
    for name in names:
        state = getattr(metric, name)
        grown = 6 if name in ("accepted", "full_accepted") else 2
        assert state.dtype == torch.int64
        assert (state == 2**24 + grown).all(), name


def test_states_of_ranks_add_up() -> None:
    """Every state is reduced by a sum, so two ranks' sums are the sums of one."""
    ranks = []
    for seed in (1, 2):
        metric = AcceptanceBySlot(SLOTS)
        metric.update(*random_blocks(seed=seed))
        ranks.append(metric)
    merged = AcceptanceBySlot(SLOTS)
    for name, reduce in merged._reductions.items():
        states = torch.stack([getattr(metric, name) for metric in ranks])
        setattr(merged, name, reduce(states))  # type: ignore[operator]
    merged._update_count = 1
    both = measured(random_blocks(seed=1), random_blocks(seed=2))
    for key, value in merged.compute().items():
        assert torch.equal(value, both[key]), key


def test_metrics_put_nothing_into_a_state_dict() -> None:
    metric = AcceptanceBySlot(SLOTS)
    metric.update(*random_blocks())
    assert not metric.state_dict()
    assert not WeightedMean().state_dict()


def test_weighted_mean_is_of_everything_seen() -> None:
    mean = WeightedMean()
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(100, generator=generator, dtype=torch.float64)
    weights = torch.rand(100, generator=generator, dtype=torch.float64)
    for part in torch.arange(100).split([1, 2, 30, 67]):
        mean.update((values * weights)[part].sum(), weights[part].sum())
    expected = (values * weights).sum() / weights.sum()
    assert mean.compute().item() == pytest.approx(expected.item(), rel=1e-6)
    assert mean.compute().dtype == torch.float32
    mean.reset()
    mean.update(torch.tensor(6.0), torch.tensor(2.0))
    assert mean.compute() == 3


def test_weighted_mean_does_not_saturate() -> None:
    mean = WeightedMean()
    mean.update(torch.tensor(2.0**25), torch.tensor(2.0**25))
    for _ in range(3):
        mean.update(torch.tensor(1.0), torch.tensor(1.0))
    assert mean.weight.item() == 2**25 + 3
    assert mean.total.item() == 2**25 + 3


def test_weighted_mean_keeps_no_graph() -> None:
    mean = WeightedMean()
    mean.update(torch.tensor(1.0, requires_grad=True), torch.tensor(1.0))
    assert not mean.total.requires_grad


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_weighted_mean_of_nothing_is_nan() -> None:
    mean = WeightedMean()
    assert math.isnan(mean.compute())
    mean.update(torch.tensor(0.0), torch.tensor(0.0))
    assert math.isnan(mean.compute())
