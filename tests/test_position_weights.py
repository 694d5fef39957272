"""Position weights by the definition, slot by slot."""

import itertools
import math

import pytest
import torch

from dflash_lightning.drafter.axes import Axes
from dflash_lightning.errors import UserError
from dflash_lightning.module import DFlashModule
from dflash_lightning.position_weights import (
    DPaceWeights,
    ExpWeights,
    UniformWeights,
    default_gamma,
)


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_default_gamma_is_the_papers(size: int, gamma: float) -> None:
    assert default_gamma(size) == gamma


def test_default_gamma_is_positive_and_grows() -> None:
    values = [default_gamma(size) for size in range(2, 40)]
    assert values[0] > 0
    assert all(a < b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("gamma", [0.5, 4.0, "auto"])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_exp_weights_decay_from_one_at_slot_one(size: int, gamma: float | str) -> None:
    labelled = torch.ones(3, size - 1, dtype=torch.bool)
    weights = ExpWeights(gamma)(labelled, None)  # type: ignore[arg-type]
    assert weights.dtype == torch.float32
    number = default_gamma(size) if gamma == "auto" else float(gamma)
    for k in range(1, size):
        assert float(weights[k - 1]) == pytest.approx(math.exp(-(k - 1) / number), rel=1e-6)


def test_uniform_weights_are_one() -> None:
    assert UniformWeights()(torch.ones(2, 3, dtype=torch.bool), None).tolist() == [1, 1, 1]


def dpace(alpha: float, said: list[float], labelled: str) -> list[float]:
    mask = torch.tensor([[c == "1" for c in labelled]])
    found = DPaceWeights(alpha)(mask, torch.tensor([said], dtype=torch.float64))
    return [float(w) for w in found[0]]


def test_dpace_by_hand() -> None:
    # s = .75, .5, 1: survival .75, .375, .375
    assert dpace(0.5, [0.5, 0.0, 1.0], "111") == pytest.approx([1.5, 0.75, 0.375])
    assert dpace(0.0, [0.5, 0.5, 0.5], "111") == pytest.approx([0.875, 0.375, 0.125])


def test_dpace_with_alpha_one_counts_the_slots_that_are_left() -> None:
    assert dpace(1.0, [0.1, 0.2, 0.3, 0.9], "1111") == [4, 3, 2, 1]


def test_dpace_ends_a_block_where_labels_end() -> None:
    """What lies behind adds nothing, and the weights are those of the shorter block."""
    long = dpace(0.5, [0.5, 0.25, 0.0, 0.75], "1101")
    assert long[:2] == pytest.approx(dpace(0.5, [0.5, 0.25], "11"))
    assert long[2:] == [0, 0]


def test_dpace_takes_a_token_that_the_drafter_lacks_as_surely_wrong() -> None:
    known = dpace(0.5, [0.5, 0.0, 0.5], "111")
    assert known == pytest.approx([0.75 + 0.375 + 0.28125, 0.375 + 0.28125, 0.28125])


@pytest.mark.parametrize("gamma", [0, -1.0, float("nan"), float("inf")])
def test_a_gamma_that_is_none_is_refused(gamma: float) -> None:
    with pytest.raises(UserError, match=r"position_weights\.gamma: needs a positive number"):
        ExpWeights(gamma)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_alpha_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"position_weights\.alpha: needs 0\.\.1"):
        DPaceWeights(alpha)


def test_dpace_with_partly_shown_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"position_weights: DPaceWeights .*denoising_steps=2"):
        DFlashModule(axes=Axes(denoising_steps=2), position_weights=DPaceWeights())
    DFlashModule(axes=Axes(denoising_steps=2), position_weights=UniformWeights())
