"""Paired comparisons of cells: with the baseline, and of neighbours on the axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.reporting.cells import Cell, axis_of, is_search, quantities
from dflash_lightning.reporting.quantities import ACCEPT_LEN, MODELLED, SPEEDUP, Quantity
from dflash_lightning.reporting.runs import void_speeds
from dflash_lightning.reporting.statistics import (
    Bootstrap,
    Estimate,
    difference,
    holm,
    seed_spreads,
)

MOST_OF_A_SEARCH = 10
"""Cells of a search that are compared with the baseline."""


@dataclass(frozen=True)
class Comparison:
    """How far `cell` is above `other` in a quantity."""

    quantity: Quantity
    cell: Cell
    other: Cell
    estimate: Estimate
    survives: bool
    """Whether it holds with all comparisons of the report together (Holm, 5%)."""

    @property
    def conclusive(self) -> bool:
        """Whether the interval excludes zero."""
        return self.estimate.excludes_zero

    def __str__(self) -> str:
        """Return `num_layers 3 over num_layers 2: +0.12 [0.05, 0.19]`."""
        e = self.estimate
        return (
            f"{self.cell.label} over {self.other.label}: {e.mean:+.3f} [{e.low:.3f}, {e.high:.3f}]"
        )


def compare_cells(
    cells: Sequence[Cell], baseline: Cell, bootstrap: Bootstrap
) -> tuple[list[Comparison], list[str]]:
    """Return all comparisons, and the pairs that can't be made, each with its reason.

    Speeds that were measured while other workers ran, or on unlike machines, are not compared.
    """
    known = quantities(cells)
    void = void_speeds([run for cell in cells for run in cell.runs])
    wanted = (ACCEPT_LEN, SPEEDUP, MODELLED) if void is None else (ACCEPT_LEN,)
    found: list[tuple[Quantity, Cell, Cell, Estimate]] = []
    impossible: dict[str, None] = {}
    for quantity in (q for q in wanted if q in known):
        measured = [[run.measured for run in cell.runs] for cell in cells]
        spreads = seed_spreads(measured, quantity.figure, bootstrap)
        spread = spreads.of_difference if spreads is not None else None
        for cell, other in pairs(cells, baseline):
            first, second = ([run.measured for run in c.runs] for c in (other, cell))
            estimate = difference(first, second, quantity.figure, bootstrap, spread)
            if estimate is None:
                common = set(cell.seeds) & set(other.seeds)
                why = "their runs decoded different prompts" if common else "no seed in common"
                impossible[f"{cell.label} and {other.label} can't be paired: {why}"] = None
            elif math.isnan(estimate.low):
                impossible["one prompt was decoded: there is no interval"] = None
            else:
                found.append((quantity, cell, other, estimate))
    kept = holm([estimate.p_value for *_, estimate in found])
    made = [Comparison(*parts, survives) for parts, survives in zip(found, kept, strict=True)]
    return made, list(impossible)


def pairs(cells: Sequence[Cell], baseline: Cell) -> list[tuple[Cell, Cell]]:
    """Return the pairs to compare: each with the baseline, then neighbours on the axis.

    Of a search, only the best cells.
    """
    shown = cells[:MOST_OF_A_SEARCH] if is_search(cells) else cells
    found = [(cell, baseline) for cell in shown if cell is not baseline]
    if axis_of(cells) is not None:
        neighbours = zip(cells[1:], cells[:-1], strict=True)
        found += [pair for pair in neighbours if baseline not in pair]
    return found
