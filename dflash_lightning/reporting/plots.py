"""Figures of a report: PNG for reading, SVG for documents. Colours differ in lightness too."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from dflash_lightning.reporting.cells import Axis, Cell, short_names, text_of
from dflash_lightning.reporting.output import write
from dflash_lightning.reporting.quantities import (
    ACCEPT_LEN,
    DRAFT_MS,
    MODELLED,
    SPEEDUP,
    VERIFY_MS,
    Quantity,
    accepted_up_to,
)
from dflash_lightning.reporting.statistics import Estimate

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"
CATEGORIES = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
NAMES = {
    "model.num_layers": "depth of the drafter [layers]",
    "model.block_size": "block size K [tokens, anchor included]",
    "model.position_weights.init_args.gamma": "gamma of the position weights [positions]",
    "model.target.num_taps": "tapped layers of the target [layers]",
    "data.anchors.init_args.num_anchors": "anchors [per sample and epoch]",
    "model.axes.denoising_steps": "denoising steps [passes]",
    "model.axes.markov_rank": "rank of the markov head [dimensions]",
    "model.lr": "learning rate [1/step]",
}
"""Axis labels; other keys go by their last word."""
MOST_CURVES = 7
"""Cells in the figure of acceptance by position; of more, those of the longest accept length."""
LONG_LABEL = 24
"""Characters from which a legend goes below the axes."""


def draw_all(
    cells: Sequence[Cell],
    axis: Axis | None,
    importances: dict[str, dict[str, float]],
    trade_off: tuple[Quantity, Quantity, list[bool]] | None,
) -> dict[str, Canvas]:
    """Return the report's figures by file name."""
    known = set.intersection(*(set(cell.estimates) for cell in cells))
    wanted = {
        "accept_length": (ACCEPT_LEN,),
        "speedup": (SPEEDUP, MODELLED),
        "latency": (DRAFT_MS, VERIFY_MS),
    }
    figures: dict[str, Canvas] = {}
    for name, group in wanted.items():
        shown = [quantity for quantity in group if quantity.key in known]
        if shown:
            draw = _curve(axis) if axis is not None else _dots
            figures[name] = draw(cells, shown)
    figures["acceptance_by_position"] = by_position(cells, axis)
    if importances:
        figures["importances"] = _importances(importances)
    if trade_off is not None:
        figures["pareto"] = _pareto(cells, *trade_off)
    return figures


def save(figures: dict[str, Canvas], folder: Path) -> dict[str, bytes]:
    """Write each figure as `folder/NAME.png` and `.svg`, and return the PNGs.

    The same figure gives the same bytes.
    """
    pictures = {}
    for name, figure in figures.items():
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=144, metadata={"Software": None})
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure.savefig(svg, format="svg", metadata={"Date": None})
        write(folder / f"{name}.svg", svg.getvalue())
        write(folder / f"{name}.png", png.getvalue())
        pictures[name] = png.getvalue()
    return pictures


def by_position(cells: Sequence[Cell], axis: Axis | None) -> Canvas:
    """Return the share of cycles that accepted at least k drafts, a curve a cell."""
    cells = shown_by_position(cells)
    long = axis is None and max(len(cell.label) for cell in cells) > LONG_LABEL
    figure, ax = _canvas(6.4, 4.0 + 0.2 * len(cells) * long)
    for i, cell in enumerate(cells):
        found = [cell.estimates[accepted_up_to(k).key] for k in range(1, cell.block_size)]
        if axis is None:
            colour: Any = CATEGORIES[i % len(CATEGORIES)]
        else:
            colour = colormaps["viridis"](0.9 * (1 - i / max(len(cells) - 1, 1)))
        places = [k + 0.06 * (i - (len(cells) - 1) / 2) for k in range(1, cell.block_size)]
        ax.errorbar(
            places,
            [e.mean for e in found],
            _whiskers(found),
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
            label=cell.label if axis is None else text_of(cell.values[axis.key]),
        )
    ax.set(
        xlabel="position in the block [drafted token]",
        ylabel="accepted up to here [share of cycles]",
    )
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _say_what(ax, cells, points=False)
    if long:
        figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    else:
        ax.legend(title=None if axis is None else axis.name, frameon=False)
    return figure


def shown_by_position(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose curves are drawn, in order."""
    best = sorted(cells, key=lambda cell: -cell.estimates[ACCEPT_LEN.key].mean)[:MOST_CURVES]
    return [cell for cell in cells if any(cell is b for b in best)]


def _curve(axis: Axis) -> Callable[[Sequence[Cell], Sequence[Quantity]], Canvas]:
    """Return how quantities are drawn over a number."""

    def draw(cells: Sequence[Cell], quantities: Sequence[Quantity]) -> Canvas:
        figure, ax = _canvas(6.4, 4.0)
        for i, q in enumerate(quantities):
            found = [cell.estimates[q.key] for cell in cells]
            means, colour = [e.mean for e in found], CATEGORIES[i]
            style: dict[str, Any] = {"color": colour, "marker": MARKERS[i], "label": q.words}
            if i == 0:
                lows, highs = [e.low for e in found], [e.high for e in found]
                ax.fill_between(axis.numbers, lows, highs, color=colour, alpha=0.18, linewidth=0)
                ax.plot(axis.numbers, means, linewidth=1.8, **style)
            else:  # a second band over the first could not be told from it
                whiskers = _whiskers(found)
                ax.errorbar(axis.numbers, means, whiskers, linestyle="--", capsize=3, **style)
            for x, e in zip(axis.numbers, found, strict=True):
                if len(e.by_seed) > 1:
                    values = list(e.by_seed.values())
                    ax.scatter([x] * len(values), values, s=14, color=colour, alpha=0.6, zorder=3)
        ax.set(xlabel=NAMES.get(axis.key, axis.name), ylabel=_shared_label(quantities))
        if min(axis.numbers) > 0 and max(axis.numbers) > 50 * min(axis.numbers):
            ax.set_xscale("log")
        ax.set_xticks(axis.numbers, [f"{x:g}" for x in axis.numbers])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_minor_formatter(NullFormatter())
        _finish(ax, cells, quantities, ax.axhline)
        return figure

    return draw


def _dots(cells: Sequence[Cell], quantities: Sequence[Quantity]) -> Canvas:
    """Return a dot a cell with its interval, for cells without an order."""
    names = max(len(cell.label) for cell in cells)
    figure, ax = _canvas(5.0 + 0.08 * names, 1.4 + 0.36 * len(cells))
    for i, q in enumerate(quantities):
        shift = 0.22 * (i - (len(quantities) - 1) / 2)
        found = [cell.estimates[q.key] for cell in cells]
        places = [n + shift for n in range(len(cells))]
        ax.errorbar(
            [e.mean for e in found],
            places,
            xerr=_whiskers(found),
            fmt=MARKERS[i],
            color=CATEGORIES[i],
            markersize=6,
            capsize=3,
            label=q.words,
        )
        for place, e in zip(places, found, strict=True):
            if len(e.by_seed) > 1:
                values = list(e.by_seed.values())
                ax.scatter(values, [place] * len(values), s=10, color=CATEGORIES[i], alpha=0.5)
    ax.set_yticks(range(len(cells)), [cell.label for cell in cells])
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.set_xlabel(_shared_label(quantities))
    _finish(ax, cells, quantities, ax.axvline)
    return figure


def _importances(found: dict[str, dict[str, float]]) -> Canvas:
    keys = list(next(iter(found.values())))
    names = list(short_names(keys).values())
    figure, ax = _canvas(6.4, 1.2 + 0.4 * len(names) * len(found))
    height = 0.8 / len(found)
    for i, (metric, shares) in enumerate(found.items()):
        places = [n + (i - (len(found) - 1) / 2) * height for n in range(len(names))]
        widths = [shares.get(key, 0.0) for key in keys]
        ax.barh(places, widths, height, color=CATEGORIES[i], label=metric)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("importance [share, PED-ANOVA]")
    ax.legend(frameon=False)
    return figure


def _pareto(cells: Sequence[Cell], x: Quantity, y: Quantity, front: list[bool]) -> Canvas:
    figure, ax = _canvas(6.4, 4.2)
    for cell, best in zip(cells, front, strict=True):
        a, b = cell.estimates[x.key], cell.estimates[y.key]
        colour = BLUE if best else GREY
        ax.errorbar(
            a.mean,
            b.mean,
            yerr=_whiskers([b]),
            xerr=_whiskers([a]),
            fmt="o" if best else "s",
            color=colour,
            mfc=colour if best else "white",
            capsize=2,
            elinewidth=1,
        )
        ax.annotate(
            cell.label,
            (a.mean, b.mean),
            (6, -11),
            textcoords="offset points",
            fontsize=8,
            color=colour,
        )
    points = sorted(
        (cell.estimates[x.key].mean, cell.estimates[y.key].mean)
        for cell, best in zip(cells, front, strict=True)
        if best
    )
    ax.plot(*zip(*points, strict=True), color=BLUE, linewidth=1, label="Pareto front")
    ax.set(xlabel=x.label, ylabel=y.label)
    _say_what(ax, cells, points=False)
    ax.legend(frameon=False)
    return figure


def _canvas(width: float, height: float) -> tuple[Canvas, Axes]:
    figure = Canvas(figsize=(width, height), layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    return figure, ax


def _finish(
    ax: Axes, cells: Sequence[Cell], quantities: Sequence[Quantity], line: Callable[..., Any]
) -> None:
    """Add what plain decoding is, a legend above the axes, and what the marks are."""
    if SPEEDUP in quantities or MODELLED in quantities:
        line(1, color=GREY, linewidth=1, linestyle="--", label="plain decoding")
    if len(quantities) > 1 or SPEEDUP in quantities:
        place: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1, 1),
            "borderaxespad": 0.2,
        }
        ax.legend(frameon=False, ncols=3, fontsize=8, **place)
        ax.set_title(" ", fontsize=9)  # room for the legend
    _say_what(ax, cells)


def _say_what(ax: Axes, cells: Sequence[Cell], points: bool = True) -> None:
    """Say below the axes what means and intervals are of."""
    seeds = sorted({len(cell.runs) for cell in cells})
    prompts = sorted({found.prompts for cell in cells for found in cell.estimates.values()})
    many, asked = (" to ".join(dict.fromkeys(map(str, (n[0], n[-1])))) for n in (seeds, prompts))
    over = "prompts" if seeds == [1] else "seeds and prompts"
    over += "; small points: seeds" if points and seeds != [1] else ""
    words = f"{many} seed{'s' * (many != '1')}, {asked} prompts; 95% intervals over {over}"
    ax.annotate(words, (0, 0), (0, -44), "axes fraction", "offset points", fontsize=7, color=GREY)


def _shared_label(quantities: Sequence[Quantity]) -> str:
    if len(quantities) == 1:
        return quantities[0].label
    words = "speedup" if SPEEDUP in quantities else "time"
    return f"{words} [{quantities[0].unit}]"


def _whiskers(found: Sequence[Estimate]) -> list[list[float]]:
    reach = [(e.mean - e.low, e.high - e.mean) for e in found]
    return [[0.0 if math.isnan(r[side]) else r[side] for r in reach] for side in (0, 1)]
