"""The parts of `report.md`."""

import math
import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dflash_lightning.reporting.cells import Cell, label_of, quantities, short_names, text_of
from dflash_lightning.reporting.comparisons import Comparison
from dflash_lightning.reporting.published import published
from dflash_lightning.reporting.quantities import Quantity, accepted_up_to
from dflash_lightning.reporting.runs import Run, void_speeds
from dflash_lightning.reporting.statistics import Bootstrap, Estimate, estimate

ASKED = (
    *("experiments", "space", "aliases", "settings", "seeds", "objectives", "sampler", "pruner"),
    *("monitor", "trials", "budget"),
)
"""Keys of a sweep's file that are repeated in its report."""
STEPS = "trainer.max_steps"
UNEQUAL = 0.01
"""Relative difference of two cells' supervised tokens from which it is said."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: bool = True) -> str:
    """Return a Markdown table; columns after the first are set right, for numbers."""
    lines = [header, [":--", *["--:" if right else ":--"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(c).replace('|', '/') for c in line)} |" for line in lines)


def interval(found: Estimate, digits: int = 3) -> str:
    """Return `1.853 [1.801, 1.905]`, without an interval where there is none."""
    if math.isnan(found.low):
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def cells_table(cells: Sequence[Cell]) -> str:
    """Return the cells with their intervals, seeds and prompts, and the budget of each."""
    known = quantities(cells)
    header = ["cell", *(f"{q.words} [{q.unit}]" for q in known), "seeds", "prompts", "tokens", "M"]
    rows = []
    for cell in cells:
        first = next(iter(cell.estimates.values()))
        tokens = [run.supervised_tokens for run in cell.runs]
        parameters = [run.decoded.get("cost", {}).get("parameters") for run in cell.runs]
        rows.append(
            [
                cell.label,
                *(interval(cell.estimates[q.key], 1 if "ms" in q.unit else 3) for q in known),
                f"{len(cell.runs)} ({', '.join(map(str, cell.seeds))})",
                str(first.prompts),
                "?" if None in tokens else f"{fmean(t for t in tokens if t is not None):,.0f}",
                "?" if None in parameters else f"{parameters[0] / 1e6:.3g}",
            ]
        )
    return table(header, rows)


def uncertainty(cells: Sequence[Cell]) -> str:
    """Say what the intervals are of."""
    counts = sorted({len(cell.runs) for cell in cells})
    if counts == [1]:
        return (
            "One seed a cell: the 95% intervals are over prompts only. How much another seed would "
            "change is not in them, nor, for speeds, another hour of the machine."
        )
    words = (
        "95% intervals of the mean over seeds, from the spread of the seeds and a bootstrap over "
        "prompts (all seeds and cells see the same resamples), with Student's t for so few seeds. "
        "The spread over seeds is taken as alike in all cells, where all have the same seeds."
    )
    if counts[0] == 1:
        single = ", ".join(cell.label for cell in cells if len(cell.runs) == 1)
        words += f" One seed only, so over prompts only: {single}."
    return words


def by_position_table(cells: Sequence[Cell]) -> str:
    """Return the share of cycles that accepted at least k drafts, a row a cell."""
    most = max(cell.block_size for cell in cells) - 1
    header = ["cell", *(f"{k}" for k in range(1, most + 1))]
    rows = [
        [
            cell.label,
            *(
                interval(cell.estimates[key], 2) if key in cell.estimates else ""
                for key in (accepted_up_to(k).key for k in range(1, most + 1))
            ),
        ]
        for cell in cells
    ]
    return table(header, rows)


def block_sizes_table(
    cells: Sequence[Cell], quantity: Quantity, bootstrap: Bootstrap
) -> str | None:
    """Return a quantity by trained cell and decoded K; None where no other K was decoded."""
    sizes = {
        int(name[1:])
        for c in cells
        for run in c.runs
        for name in run.decoded.get("block_sizes", {})
    }
    if not sizes:
        return None
    sizes |= {cell.block_size for cell in cells}
    rows = []
    for cell in cells:
        row = [cell.label]
        for size in sorted(sizes):
            measured = [run.at_block_size(size) for run in cell.runs]
            found = [m for m in measured if m is not None]
            usable = len(found) == len(measured) and quantity.known(found)
            row.append(interval(estimate(found, quantity.figure, bootstrap)) if usable else "")
        rows.append(row)
    return table(["trained", *(f"decoded with K={size}" for size in sorted(sizes))], rows)


def comparisons_table(made: Sequence[Comparison]) -> str:
    """Return all paired differences."""
    rows = [
        [
            f"{c.cell.label} over {c.other.label}",
            c.quantity.words,
            f"{c.estimate.mean:+.3f} [{c.estimate.low:.3f}, {c.estimate.high:.3f}]",
            f"{c.estimate.p_value:.2g}",
            str(len(c.estimate.by_seed)),
            "yes" if c.survives else "",
        ]
        for c in made
    ]
    return table(["comparison", "of", "difference", "p", "seeds", "holds with all (Holm)"], rows)


def conclusions(made: Sequence[Comparison]) -> list[str]:
    """Return a line for each comparison whose interval excludes zero."""
    return [f"{c.quantity.words}: {c}{' *' if c.survives else ''}" for c in made if c.conclusive]


def budget(cells: Sequence[Cell]) -> list[str]:
    """Say whether the cells had the same budget."""
    tokens = {
        cell.label: fmean(run.supervised_tokens or 0 for run in cell.runs)
        for cell in cells
        if all(run.supervised_tokens is not None for run in cell.runs)
    }
    lines = []
    records = [run.record for cell in cells for run in cell.runs]
    asked = {_listed(record["budget"]) for record in records if record.get("budget")}
    if asked:
        lines.append(f"Budget asked for: {', '.join(sorted(asked))}.")
    if len(tokens) < len(cells):
        lines.append("How many supervised tokens each run saw was not recorded for all of them.")
    if not tokens:
        return lines
    low, high = min(tokens, key=tokens.__getitem__), max(tokens, key=tokens.__getitem__)
    if tokens[high] > (1 + UNEQUAL) * tokens[low]:
        lines.append(
            f"**The budgets are not equal**: {high} was trained on {tokens[high]:,.0f} supervised "
            f"tokens, {low} on {tokens[low]:,.0f}. Differences between cells may be the budget's."
        )
    else:
        lines.append(f"Equal budgets: {tokens[high]:,.0f} supervised tokens a run.")
    return lines


def setting(runs: Sequence[Run]) -> list[list[str]]:
    """Return what the runs have in common: target, data, decoding, machine, versions."""
    keys = {
        "target": "model.target.name",
        "precision of the target": "model.target.dtype",
        "precision of training": "trainer.precision",
        "prompts": "data.prompts.class_path",
        "drafter layers": "model.num_layers",
        "K": "model.block_size",
        "decoded, new tokens a prompt": "decode.max_new_tokens",
    }
    rows = [[name, _common([run.config.get(key) for run in runs])] for name, key in keys.items()]
    rows.append(["steps", _common([r.record.get("steps", r.config.get(STEPS)) for r in runs])])
    rows.append(["held-out prompts decoded", _common([run.decoded["prompts"] for run in runs])])
    rows.append(["decoded together", _common([run.decoded.get("batch_size") for run in runs])])
    environments = [run.record.get("environment", {}) for run in runs]
    for name in ("machine", "cores", "threads", "workers", "commit"):
        if any(name in environment for environment in environments):
            rows.append([name, _common([environment.get(name) for environment in environments])])
    versions: dict[str, set[str]] = {}
    for environment in environments:
        for package, version in environment.get("versions", {}).items():
            versions.setdefault(package, set()).add(str(version))
    if versions:
        texts = [f"{package} {'/'.join(sorted(found))}" for package, found in versions.items()]
        rows.append(["versions", ", ".join(texts)])
    return rows


def warning_of_speeds(runs: Sequence[Run]) -> str | None:
    """Warn of speeds that can't be compared."""
    why = void_speeds(runs)
    if why is None:
        return None
    return (
        f"**The speeds are not to be trusted**, and not compared: {why}. Accept lengths are not "
        "touched by that."
    )


def published_parts(cells: Sequence[Cell]) -> list[str]:
    """Return the published tables of the same ablation, each with where it comes from."""
    parts = []
    for found in published(list(cells[0].values)):
        parts += [f"{found.source}: {found.setting}.", table(found.columns, found.rows)]
    return parts


def importances_table(found: dict[str, dict[str, float]]) -> str:
    """Return how much each parameter matters, by objective."""
    keys = list(dict.fromkeys(key for shares in found.values() for key in shares))
    names = short_names(keys)
    rows = [[names[k], *(f"{shares.get(k, 0):.2f}" for shares in found.values())] for k in keys]
    return table(["parameter", *found], rows)


def pareto_table(cells: Sequence[Cell], x: Quantity, y: Quantity, front: Sequence[bool]) -> str:
    """Return the cells that no other beats in both quantities."""
    rows = [
        [cell.label, interval(cell.estimates[x.key]), interval(cell.estimates[y.key])]
        for cell, best in zip(cells, front, strict=True)
        if best
    ]
    return table(["cell", x.words, y.words], rows)


def commands(cells: Sequence[Cell]) -> list[str]:
    """Return the command line of each run that recorded one."""
    found = []
    for run in (run for cell in cells for run in cell.runs):
        words = [str(word) for word in run.record.get("command") or []]
        if words:
            start = [] if "dflash_lightning" in words else ["python", "-m", "dflash_lightning"]
            found.append(shlex.join(start + words))
    return found


def asked_for(sweep: dict[str, Any]) -> list[list[str]]:
    """Return what a sweep's file said, key by key."""
    rows = []
    for key in ASKED:
        value = sweep.get(key)
        if value is None or value == {}:
            continue
        if key == "objectives" and isinstance(value, list):
            value = [f"{o['metric']} ({o['direction']})" for o in value]
        if key == "space" and isinstance(value, dict):
            names = {k: k for k in value}
            rows += [
                [f"space: {k}", label_of({k: v}, names).removeprefix(k).strip()]
                for k, v in value.items()
            ]
        else:
            rows.append([key, _common([value])])
    return rows


def _common(values: Sequence[Any]) -> str:
    texts = list(dict.fromkeys(_listed(value) for value in values if value is not None))
    several = "varies: " if len(texts) > 1 else ""
    return several + ", ".join(texts[:6]) + (" ..." if len(texts) > 6 else "") or "?"


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_listed, value))
    if isinstance(value, dict) and "class_path" not in value:
        return ", ".join(f"{k} {_listed(v)}" for k, v in value.items())
    return text_of(value)
