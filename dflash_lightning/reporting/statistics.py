"""Means, 95% intervals and paired differences over seeds and prompts.

What is estimated is the mean over seeds of a run's pooled figure. Its variance has two parts that
are sampled apart: seeds (the spread of the runs, over their number) and prompts (a bootstrap, in
which all seeds and all cells see the same resampled prompts, so that what a prompt does to all of
them counts once within a cell and cancels between two). Few seeds make a normal or percentile
interval too narrow (with three it can hold 77% instead of 95%), hence Student's t, with
Satterthwaite's degrees of freedom; and where all cells have the same seeds, the spread over seeds
is taken from all of them together, as in a two-way analysis of variance.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sums = Mapping[str, Floats]
Figure = Callable[[Sums], Floats]
"""From sums over prompts `[...]` to a figure `[...]`, e.g. committed / cycles."""
LEVEL = 0.95


@dataclass(frozen=True)
class Measured:
    """What one run measured: per prompt, the numbers whose sums its figures are made of."""

    seed: int
    prompts: tuple[str, ...]
    columns: Mapping[str, Floats]
    """Name -> `[P]`."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval."""

    mean: float
    low: float
    high: float
    by_seed: dict[int, float]
    prompts: int
    p_value: float
    """Two-sided, of the mean being 0."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval says that there is a difference."""
        return self.low > 0 or self.high < 0


class Bootstrap:
    """Resampled prompts: runs that decoded the same prompts get the same resamples."""

    def __init__(self, draws: int = 4000, seed: int = 0) -> None:
        self.draws, self.seed = draws, seed
        self._counts: dict[tuple[str, ...], Floats] = {}

    def counts(self, prompts: tuple[str, ...]) -> Floats:
        """Return how often each prompt was drawn, `[draws, P]`; the first row is all ones."""
        if prompts not in self._counts:
            name = hashlib.sha256(" ".join(prompts).encode()).digest()[:8]
            rng = np.random.default_rng([self.seed, int.from_bytes(name, "big")])
            number = len(prompts)
            drawn = rng.multinomial(number, np.full(number, 1 / number), size=self.draws)
            self._counts[prompts] = np.vstack([np.ones((1, number)), drawn])
        return self._counts[prompts]

    def figures(self, run: Measured, figure: Figure) -> Floats:
        """Return a run's figure for all its prompts, then for each resample, `[1 + draws]`."""
        counts = self.counts(run.prompts)
        with np.errstate(divide="ignore", invalid="ignore"):
            return figure({name: counts @ column for name, column in run.columns.items()})


@dataclass(frozen=True)
class Spread:
    """How much a figure, or the difference of two cells, varies from seed to seed."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Spreads:
    """The spread over seeds, taken as alike in all cells."""

    of_cell: Spread
    of_difference: Spread


def seed_spreads(
    cells: Sequence[Sequence[Measured]], figure: Figure, bootstrap: Bootstrap
) -> Spreads | None:
    """Return the spread over seeds from all cells together: what seed, and cell and seed, add.

    None where the cells don't all have the same prompts and seeds, two or more.
    """
    seeds = {tuple(run.seed for run in runs) for runs in cells}
    prompts = {run.prompts for runs in cells for run in runs}
    if len(seeds) != 1 or len(prompts) != 1 or len(cells) < 2 or len(cells[0]) < 2:
        return None
    found = np.array([[bootstrap.figures(run, figure)[0] for run in runs] for runs in cells])
    many, number = found.shape
    left = found - found.mean(axis=0) - found.mean(axis=1, keepdims=True) + found.mean()
    freedom = (many - 1) * (number - 1)
    both = float((left**2).sum()) / freedom
    of_seed = many * float(found.mean(axis=0).var(ddof=1))
    parts = of_seed / many, both * (many - 1) / many
    squares = parts[0] ** 2 / (number - 1) + parts[1] ** 2 / freedom
    of_cell = Spread(sum(parts), sum(parts) ** 2 / squares if squares else freedom)
    return Spreads(of_cell, Spread(2 * both, freedom))


def estimate(
    runs: Sequence[Measured], figure: Figure, bootstrap: Bootstrap, spread: Spread | None = None
) -> Estimate:
    """Return the mean of a figure over runs that differ by their seed.

    Without `spread`, the spread over seeds is these runs' own.
    """
    drawn = np.stack([bootstrap.figures(run, figure) for run in runs])
    return _estimate(drawn, [run.seed for run in runs], min(len(r.prompts) for r in runs), spread)


def difference(
    runs: Sequence[Measured],
    others: Sequence[Measured],
    figure: Figure,
    bootstrap: Bootstrap,
    spread: Spread | None = None,
) -> Estimate | None:
    """Return how far a figure of `others` is above that of `runs`, paired by seed and prompt.

    Args:
        runs: Runs of a cell, one a seed.
        others: Those of another.
        figure: What is compared.
        bootstrap: The resampled prompts.
        spread: Of a difference; without it, the two cells' own.

    Returns:
        None where they have no seed in common, or the runs of a seed decoded other prompts.
    """
    first, second = {r.seed: r for r in runs}, {r.seed: r for r in others}
    seeds = sorted(first.keys() & second.keys())
    if not seeds or any(first[s].prompts != second[s].prompts for s in seeds):
        return None
    drawn = np.stack(
        [bootstrap.figures(second[s], figure) - bootstrap.figures(first[s], figure) for s in seeds]
    )
    return _estimate(drawn, seeds, min(len(first[s].prompts) for s in seeds), spread)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which of several comparisons hold at 5% for all of them together (Holm).

    >>> holm([0.04, 0.001, 0.02])
    [True, True, True]
    >>> holm([0.04, 0.001, 0.03])
    [False, True, False]
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]
    kept = [False] * len(known)
    for rank, at in enumerate(sorted(range(len(known)), key=known.__getitem__)):
        if not known[at] <= (1 - LEVEL) / (len(p_values) - rank):
            break
        kept[at] = True
    return kept


def t_tail(t: float, freedom: float) -> float:
    """Return P(|T| >= t) of Student's t with any positive degrees of freedom.

    >>> round(t_tail(4.302653, 2), 6), round(t_tail(1.959964, 1e6), 4)
    (0.05, 0.05)
    """
    if not t < math.inf:
        return 0.0 if t == math.inf else math.nan
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angles = np.linspace(0, math.atan(t / math.sqrt(freedom)), 801)
    heights = np.cos(angles) ** (freedom - 1)
    simpson = np.ones(801)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    return max(0.0, float(1 - 2 * scale * (simpson @ heights) * angles[1] / 3))


def t_quantile(freedom: float) -> float:
    """Return the t that |T| exceeds in 5% of all cases.

    >>> round(t_quantile(2), 3), round(t_quantile(9), 3)
    (4.303, 2.262)
    """
    low, high = 1.9, 13.0  # of 1 and of no end of degrees of freedom
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - LEVEL else (low, middle)
    return low


def _estimate(
    drawn: Floats, seeds: Sequence[int], prompts: int, spread: Spread | None = None
) -> Estimate:
    """Return the estimate from `[S, 1 + draws]`: each seed's figure, then its resampled ones."""
    by_seed, resampled = drawn[:, 0], drawn[:, 1:]
    resampled = resampled[:, np.isfinite(resampled).all(axis=0)]
    mean = float(by_seed.mean())
    if not math.isfinite(mean) or resampled.shape[1] < 2 or prompts < 2:
        found: dict[str, Any] = {"low": math.nan, "high": math.nan, "p_value": math.nan}
    else:
        variance, freedom = _variance(by_seed, resampled, prompts, spread)
        error = math.sqrt(variance)
        reach = t_quantile(freedom) * error
        t = abs(mean) / error if error else (math.inf if mean else 0.0)
        found = {"low": mean - reach, "high": mean + reach, "p_value": t_tail(t, freedom)}
    values = dict(zip(seeds, by_seed.tolist(), strict=True))
    return Estimate(mean=mean, by_seed=values, prompts=prompts, **found)


def _variance(
    by_seed: Floats, resampled: Floats, prompts: int, spread: Spread | None
) -> tuple[float, float]:
    """Return the variance of the mean over seeds and its degrees of freedom.

    The spread over seeds holds what is a seed's own, and its share of the noise of prompt and seed
    together; the covariance of two seeds' resampled figures holds what prompts do to both. Together
    they are never taken for less than the prompts alone show.
    """
    number, unbias = len(by_seed), prompts / (prompts - 1)
    over_prompts = float(resampled.mean(axis=0).var()) * unbias
    if number == 1:
        return over_prompts, prompts - 1
    spread = spread or Spread(float(by_seed.var(ddof=1)), number - 1)
    of_seeds = spread.variance / number
    covariance = np.cov(resampled)
    shared = float(covariance.sum() - covariance.trace()) / (number * (number - 1)) * unbias
    shared = max(shared, 0.0)
    if of_seeds + shared <= over_prompts:
        return over_prompts, prompts - 1
    squares = of_seeds**2 / spread.freedom + shared**2 / (prompts - 1)
    return of_seeds + shared, (of_seeds + shared) ** 2 / squares
