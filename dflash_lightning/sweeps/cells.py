"""Cells of a sweep, and the command lines that train them."""

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from dflash_lightning.commands import PROG
from dflash_lightning.errors import UserError
from dflash_lightning.sweeps.spec import EXPERIMENT, Spec, name_of

Cell = dict[str, Any]
"""Key -> value, one a dimension."""

LOGGER = "dflash_lightning.token_board.TokenBoard"


def dimensions(spec: Spec) -> dict[str, BaseDistribution]:
    """Return the dimensions: several experiments first, then the space's."""
    several = len(spec.experiments) > 1
    labels = {EXPERIMENT: CategoricalDistribution(list(spec.experiments))} if several else {}
    return {**labels, **spec.space}


def all_cells(spec: Spec) -> list[Cell]:
    """Return every cell of a finite space.

    Raises:
        UserError: A dimension has no end.
    """
    found = dimensions(spec)
    values = [values_of(key, distribution) for key, distribution in found.items()]
    return [dict(zip(found, cell, strict=True)) for cell in itertools.product(*values)]


def edges(spec: Spec) -> list[Cell]:
    """Return cells that hold every choice, and both ends of every range, at least once."""
    found = dimensions(spec)
    values = [ends_of(distribution) for distribution in found.values()]
    first = dict(zip(found, (v[0] for v in values), strict=True))
    moved = [{**first, key: v} for key, ends in zip(found, values, strict=True) for v in ends[1:]]
    return [first, *moved]


def values_of(key: str, distribution: BaseDistribution) -> list[Any]:
    """Return all values of a distribution, in order.

    Raises:
        UserError: There is no end of them.
    """
    if isinstance(distribution, CategoricalDistribution):
        as_floats = isinstance(stored(distribution), FloatDistribution)
        choices: Sequence[Any] = distribution.choices
        return [float(v) if as_floats else v for v in choices]
    low, high, step = (getattr(distribution, name) for name in ("low", "high", "step"))
    if step is None:
        raise UserError(
            f"space: {key}: a range without step has no end of values: give it choices or a step, "
            "or take a sampler that searches"
        )
    count = math.floor((high - low) / step + 1e-9) + 1
    return [low + n * step for n in range(count)]


def ends_of(distribution: BaseDistribution) -> list[Any]:
    """Return the choices of a distribution, or the two ends of its range."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    return [getattr(distribution, "low"), getattr(distribution, "high")]  # noqa: B009


def stored(distribution: BaseDistribution) -> BaseDistribution:
    """Return what a study keeps of a distribution whose every value is wanted.

    Optuna freezes choices; numbers are kept as a range, so that they may be added to.
    """
    if not isinstance(distribution, CategoricalDistribution):
        return distribution
    choices: Sequence[Any] = distribution.choices
    if all(isinstance(v, int) and not isinstance(v, bool) for v in choices):
        return IntDistribution(min(choices), max(choices))
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in choices):
        return FloatDistribution(min(choices), max(choices))
    return distribution


def label(cell: Mapping[str, Any]) -> str:
    """Return a cell in words.

    >>> label({"model.num_layers": 3, "data.anchors": "all"})
    'num_layers=3 anchors=all'
    """
    return " ".join(f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in cell.items())


def flags(spec: Spec, cell: Mapping[str, Any]) -> list[str]:
    """Return settings, a cell and the budget as words of the command line; one device a trial."""
    chosen: dict[str, Any] = {"trainer.devices": 1, **spec.settings}
    for key, value in cell.items():
        if key != EXPERIMENT:
            alias = spec.aliases.get(name_of(value))
            named = alias is not None and isinstance(value, str)
            chosen |= {**({} if named else {key: value}), **(alias or {})}
    chosen |= {f"budget.{key}": value for key, value in spec.budget.items()}
    return [word for key, value in chosen.items() for word in (f"--{key}", text(value))]


def experiment_of(spec: Spec, cell: Mapping[str, Any]) -> str:
    """Return the file of a cell's experiment."""
    default = next(iter(spec.experiments))
    return spec.experiments[cell.get(EXPERIMENT, default)]


def command(spec: Spec, cell: Mapping[str, Any], seed: int, run: str) -> list[str]:
    """Return the words that train a cell with a seed into a run's folder."""
    logger = {"save_dir": str(spec.folder), "name": "", "version": run, "default_hp_metric": False}
    return [
        "fit",
        "-c",
        experiment_of(spec, cell),
        *flags(spec, cell),
        *("--seed_everything", str(seed)),
        *("--trainer.enable_progress_bar", "false", "--trainer.logger", LOGGER),
        *(w for k, v in logger.items() for w in (f"--trainer.logger.init_args.{k}", text(v))),
    ]


def pasteable(words: Sequence[str]) -> str:
    """Return words as a shell takes them."""
    return f"{PROG} {shlex.join(words)}"


def text(value: Any) -> str:
    """Return a value as the command line takes it.

    >>> [text(v) for v in (3, 1e-3, True, None, [1, 9], "x")]
    ['3', '0.001', 'true', 'null', '[1, 9]', 'x']
    """
    return value if isinstance(value, str) else json.dumps(value)


def run_names(names: Sequence[str], cells: Sequence[Cell]) -> list[str]:
    """Return names of runs, without seed, made different where cells share one.

    >>> run_names(["d3", "d3", "d5"], [{"model.lr": 0.1}, {"model.lr": 0.2}, {"model.lr": 0.1}])
    ['d3-lr0.1', 'd3-lr0.2', 'd5']
    """
    return [
        f"{name}-{_suffix(cell)}" if names.count(name) > 1 else name
        for name, cell in zip(names, cells, strict=True)
    ]


def full_name(name: str, cell: Mapping[str, Any]) -> str:
    """Return a run's name with all of its cell in it, for spaces without end."""
    return f"{name}-{_suffix(cell)}"


def _suffix(cell: Mapping[str, Any]) -> str:
    parts = [f"{key.rpartition('.')[2]}{_short(value)}" for key, value in cell.items()]
    return "-".join(parts)


def _short(value: Any) -> str:
    return "".join(c for c in Path(_shown(value)).name if c.isalnum() or c in ".+")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
