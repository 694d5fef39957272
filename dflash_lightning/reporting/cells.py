"""Runs -> cells: what is compared. A cell's runs differ by their seed only."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_lightning.errors import UserError
from dflash_lightning.reporting.quantities import ACCEPT_LEN, QUANTITIES, Quantity, accepted_up_to
from dflash_lightning.reporting.runs import Run
from dflash_lightning.reporting.statistics import Bootstrap, Estimate, estimate, seed_spreads

NOT_COMPARED = (
    "seed_everything",
    "ckpt_path",
    "weights_only",
    "base",
    "trainer.logger",
    "trainer.callbacks",
    "trainer.default_root_dir",
    "trainer.enable_",
    "trainer.log_every_n_steps",
    "trainer.devices",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch",
    "decode.every_n_steps",
    "decode.num_prompts",
)
"""Keys (and what they begin) that don't change what a run is."""


@dataclass(frozen=True)
class Cell:
    """A setting and its runs, one a seed."""

    values: dict[str, Any]
    """What is varied: dotted key -> value; None where the setting has no such key."""
    label: str
    runs: list[Run] = field(repr=False)
    estimates: Mapping[str, Estimate] = field(default_factory=dict, repr=False)
    """By the quantities' keys."""

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.seed for run in self.runs]

    @property
    def block_size(self) -> int:
        """K that its prompts were decoded with."""
        return self.runs[0].block_size


@dataclass(frozen=True)
class Axis:
    """The one number that is varied."""

    key: str
    name: str
    numbers: list[float]
    """One a cell, rising."""


def make_cells(runs: Sequence[Run], bootstrap: Bootstrap) -> tuple[list[Cell], dict[str, str]]:
    """Return the cells with their estimates, in order, and why runs were left out, by run.

    In order means by number where all cells differ in one, as asked where they differ in another
    thing, and by accept length, longest first, where they differ in several.
    """
    values = _values(runs)
    grouped: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        grouped.setdefault(_plain(value), []).append(i)
    names = short_names([key for value in values for key in value])
    left_out: dict[str, str] = {}
    cells = []
    for members in grouped.values():
        kept: dict[int, Run] = {}
        for run in sorted((runs[i] for i in members), key=lambda r: r.folder.stat().st_mtime):
            if run.seed in kept:
                reason = f"{run.name} is a newer run of the same cell and seed"
                left_out[f"{kept[run.seed].name} ({kept[run.seed].folder})"] = reason
            kept[run.seed] = run
        value = values[members[0]]
        cells.append(Cell(value, label_of(value, names), [kept[s] for s in sorted(kept)]))
    axis = axis_of(cells)
    if axis is not None:
        cells.sort(key=lambda cell: number(cell.values[axis.key]))
    cells = _estimated(cells, bootstrap)
    if is_search(cells):
        cells.sort(key=lambda cell: -cell.estimates[ACCEPT_LEN.key].mean)
    return cells, left_out


def is_search(cells: Sequence[Cell]) -> bool:
    """Whether several things were varied, so that cells have no order but how good they are."""
    return len(cells[0].values) > 1 and axis_of(cells) is None


def axis_of(cells: Sequence[Cell]) -> Axis | None:
    """Return the one number that tells all cells apart; None where there is none.

    Other keys may be varied with it if they rise or fall with it, as gamma does with K.
    """
    names = short_names([key for cell in cells for key in cell.values])
    columns = {key: [cell.values.get(key) for cell in cells] for key in cells[0].values}
    numeric = [isinstance(v, int | float) and v is not True for c in columns.values() for v in c]
    if len(cells) < 2 or not columns or not all(numeric):
        return None
    key, *others = sorted(columns, key=lambda k: -len(set(columns[k])))
    order = sorted(range(len(cells)), key=lambda i: number(columns[key][i]))
    for other in others:
        along = [number(columns[other][i]) for i in order]
        if along not in (sorted(along), sorted(along, reverse=True)):
            return None
    numbers = [number(columns[key][i]) for i in order]
    return Axis(key, names[key], numbers) if len(set(numbers)) == len(cells) else None


def find_cell(cells: Sequence[Cell], asked: str) -> Cell:
    """Return the cell with this label, or with this value.

    Raises:
        UserError: None, or several.
    """
    exact = [cell for cell in cells if asked in (cell.label, cell.label.replace(" ", "="))]
    by_value = [
        cell for cell in cells if asked in {text_of(value) for value in cell.values.values()}
    ]
    for found in (exact, by_value):
        if len(found) == 1:
            return found[0]
    raise UserError(f"--baseline: no cell {asked}; there are {', '.join(c.label for c in cells)}")


def usual_baseline(cells: Sequence[Cell]) -> Cell:
    """Return the paper's own system where it is one of the cells, else the first."""
    return next((c for c in cells if c.values.get("experiment") == "dflash"), cells[0])


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the keys' last words, longer ones where two would be the same.

    >>> short_names(["model.num_layers", "data.anchors.class_path"])
    {'model.num_layers': 'num_layers', 'data.anchors.class_path': 'anchors'}
    """
    words = {
        key: [w for w in key.split(".") if w not in ("init_args", "class_path", "dict_kwargs")]
        for key in dict.fromkeys(keys)
    }
    found = {}
    for key, parts in words.items():
        rivals = [other for k, other in words.items() if k != key]
        length = next(
            (n for n in range(1, len(parts) + 1) if all(r[-n:] != parts[-n:] for r in rivals)), 0
        )
        found[key] = ".".join(parts[-length:]) if length else key
    return found


def label_of(values: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return a cell's name, as in `num_layers 3`."""
    if list(values) == ["experiment"]:
        return text_of(values["experiment"])
    parts = [f"{names[key]} {text_of(v)}" for key, v in values.items() if v is not None]
    return ", ".join(parts) or "all runs"


def text_of(value: Any) -> str:
    """Return a value as short text.

    >>> text_of({"class_path": "my.code.ExpWeights", "init_args": {"gamma": 3.0}})
    'ExpWeights(gamma=3)'
    """
    if isinstance(value, dict) and "class_path" in value:
        args = value.get("init_args") or {}
        inner = ", ".join(f"{k}={text_of(v)}" for k, v in args.items())
        return str(value["class_path"]).rpartition(".")[2] + (f"({inner})" if inner else "")
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value.rpartition(".")[2] if value.startswith("dflash_lightning.") else value
    return "null" if value is None else str(value)


def number(value: Any) -> float:
    """Return a number for sorting."""
    return float(value)


def quantities(cells: Sequence[Cell]) -> list[Quantity]:
    """Return the quantities that every run measured."""
    measured = [run.measured for cell in cells for run in cell.runs]
    return [q for q in QUANTITIES if q.known(measured)]


def _values(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what is varied, per run: as the study says, else what differs in the config."""
    if all(run.trial.get("cell") for run in runs) and len({r.trial["study"] for r in runs}) == 1:
        ordered = sorted(runs, key=lambda run: int(run.trial["trial"]))
        keys = list(dict.fromkeys(key for run in ordered for key in run.trial["cell"]))
        asked = [{key: run.trial["cell"].get(key) for key in keys} for run in runs]
        varied = [key for key in keys if len({_plain(cell[key]) for cell in asked}) > 1]
        return [{key: cell[key] for key in varied or keys} for cell in asked]
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    compared = [
        key
        for key in keys
        if not key.startswith(NOT_COMPARED)
        and len({_plain(run.config.get(key)) for run in runs}) > 1
    ]
    return [{key: run.config.get(key) for key in compared} for run in runs]


def _estimated(cells: Sequence[Cell], bootstrap: Bootstrap) -> list[Cell]:
    """Return the cells with their estimates; all quantities are 0 or more, shares at most 1."""
    measured = [[run.measured for run in cell.runs] for cell in cells]
    most = max(run.block_size for cell in cells for run in cell.runs)
    shares = [accepted_up_to(k) for k in range(1, most)]
    made: list[dict[str, Estimate]] = [{} for _ in cells]
    for q in (*QUANTITIES, *shares):
        in_all = all(q.known(runs) for runs in measured)
        spreads = seed_spreads(measured, q.figure, bootstrap) if in_all else None
        for runs, estimates in zip(measured, made, strict=True):
            if q.known(runs):
                spread = spreads.of_cell if spreads is not None else None
                found = estimate(runs, q.figure, bootstrap, spread)
                if not math.isnan(found.low):
                    high = min(found.high, 1.0) if q in shares else found.high
                    found = replace(found, low=max(found.low, 0.0), high=high)
                estimates[q.key] = found
    return [replace(c, estimates=found) for c, found in zip(cells, made, strict=True)]


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
