"""`report`: a study, or any runs, -> report.md, figures, and a summary run for TensorBoard.

python -m dflash_lightning report sweeps/results/depth
python -m dflash_lightning report --compare runs/quickstart/d1-* runs/quickstart/d3-*
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.errors import UserError
from dflash_lightning.reporting import tables
from dflash_lightning.reporting.cells import (
    Axis,
    Cell,
    axis_of,
    find_cell,
    is_search,
    make_cells,
    usual_baseline,
)
from dflash_lightning.reporting.comparisons import Comparison, compare_cells
from dflash_lightning.reporting.output import keep_runs, write
from dflash_lightning.reporting.quantities import (
    ACCEPT_LEN,
    DRAFT_MS,
    MODELLED,
    SPEEDUP,
    VERIFY_MS,
    Quantity,
)
from dflash_lightning.reporting.runs import Run, expand, find_runs, read_runs
from dflash_lightning.reporting.statistics import Bootstrap
from dflash_lightning.reporting.study import Study, importances, load_study, pareto

log = logging.getLogger(__name__)
MOST_SAID = 8
"""Conclusions that are printed; all are in the report."""
BY_METRIC = {
    "decode/accept_len": ACCEPT_LEN,
    "decode/speedup": SPEEDUP,
    "cost/expected_speedup": MODELLED,
    "decode/draft_ms": DRAFT_MS,
    "cost/draft_ms": DRAFT_MS,
    "decode/verify_ms": VERIFY_MS,
}
"""The objectives of a study that a report measures again, with intervals."""


@dataclass(frozen=True)
class Found:
    """All that a report is made of."""

    title: str
    cells: list[Cell]
    axis: Axis | None
    baseline: Cell
    comparisons: list[Comparison]
    unpaired: list[str]
    skipped: dict[str, str]
    study: Study | None
    importances: dict[str, dict[str, float]]
    trade_off: tuple[Quantity, Quantity, list[bool]] | None
    bootstrap: Bootstrap
    command: str

    @property
    def runs(self) -> list[Run]:
        """All runs, cell by cell."""
        return [run for cell in self.cells for run in cell.runs]


def report(
    folder: str | None = None,
    compare: list[str] | None = None,
    out: str | None = None,
    baseline: str | None = None,
) -> Path:
    """Compare the runs of a study (`report DIR`), or any runs (`report --compare RUN...`).

    Writes report.md, figures, and a summary run for TensorBoard.

    Args:
        folder: A study's folder, as in `sweeps/results/depth`, or any folder of runs.
        compare: Run folders or globs instead of a study; cells are the keys in which they differ.
        out: Where report.md and figures go, and of a study what its runs measured, so that the
            report can be made again from there; null is the study's folder, and for `--compare`
            `comparison` beside the runs.
        baseline: The cell that the others are compared with; null is the paper's, else the first.

    Returns:
        The file `report.md`.
    """
    if (folder is None) == (compare is None):
        raise UserError("report: needs a study's folder, or --compare with run folders")
    root, found = _from_folder(Path(folder)) if folder is not None else _from_runs(compare or [])
    target = Path(out) if out is not None else root
    made = _analyse(found, baseline, _command(folder, compare, out, baseline))
    return _write(made, target, target if folder is None else root)


def _from_folder(folder: Path) -> tuple[Path, tuple[str, list[Path], Study | None]]:
    return folder, (folder.resolve().name, find_runs(folder), load_study(folder))


def _from_runs(patterns: list[str]) -> tuple[Path, tuple[str, list[Path], Study | None]]:
    folders = expand(patterns)
    beside = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    return beside / "comparison", ("comparison", folders, None)


def _analyse(
    source: tuple[str, list[Path], Study | None], baseline: str | None, command: str
) -> Found:
    title, folders, study = source
    runs, skipped = read_runs(folders)
    runs.sort(key=lambda run: int(run.trial.get("trial", 0)))
    bootstrap = Bootstrap()
    cells, older = make_cells(runs, bootstrap)
    skipped.update(older)
    if skipped:
        listed = "; ".join(_reasons(skipped))
        log.info("report: %d of %d runs left out: %s", len(skipped), len(folders), listed)
    first = find_cell(cells, baseline) if baseline is not None else usual_baseline(cells)
    comparisons, unpaired = compare_cells(cells, first, bootstrap)
    return Found(
        title=title,
        cells=cells,
        axis=axis_of(cells),
        baseline=first,
        comparisons=comparisons,
        unpaired=unpaired,
        skipped=skipped,
        study=study,
        importances=importances(study) if study is not None else {},
        trade_off=_trade_off(cells, study),
        bootstrap=bootstrap,
        command=command,
    )


def _trade_off(
    cells: list[Cell], study: Study | None
) -> tuple[Quantity, Quantity, list[bool]] | None:
    """Return two of a study's objectives, a time first, and which cells are on their front."""
    if study is None or len(cells) < 2:
        return None
    known = [
        (BY_METRIC[name], direction)
        for name, direction in zip(study.metrics, study.directions, strict=True)
        if name in BY_METRIC and all(BY_METRIC[name].key in cell.estimates for cell in cells)
    ]
    costs = [pair for pair in known if pair[0] in (DRAFT_MS, VERIFY_MS)]
    gains = [pair for pair in known if pair not in costs]
    chosen = [*costs[:1], *gains][:2]
    if len(chosen) < 2:
        return None
    (x, _), (y, _) = chosen
    points = [[cell.estimates[q.key].mean for q in (x, y)] for cell in cells]
    return x, y, pareto(points, [direction for _, direction in chosen])


def _write(found: Found, target: Path, board_root: Path) -> Path:
    from dflash_lightning.reporting.board import write_summary
    from dflash_lightning.reporting.plots import draw_all, save

    figures = draw_all(found.cells, found.axis, found.importances, found.trade_off)
    pictures = save(figures, target / "figures")
    text = markdown(found, list(figures))
    write(target / "report.md", text)
    sweep = board_root / "sweep.yaml"
    if sweep.is_file() and target.resolve() != board_root.resolve():
        write(target / "sweep.yaml", sweep.read_bytes())
        keep_runs([run.folder for run in found.runs], target / "runs")
    write_summary(board_root, found.cells, found.axis, pictures, _short(found))
    lines = tables.conclusions(found.comparisons)
    for line in lines[:MOST_SAID]:
        log.info("%s", line)
    if len(lines) > MOST_SAID:
        log.info("and %d more conclusions in the report", len(lines) - MOST_SAID)
    log.info("report: %s (tensorboard --logdir %s)", target / "report.md", board_root)
    return target / "report.md"


def markdown(found: Found, figures: list[str]) -> str:
    """Return the report as Markdown."""
    cells = found.cells
    parts = [f"# {found.title}", *_asked(found), "## Cells", tables.cells_table(cells)]
    parts += [tables.uncertainty(cells) + " M: trained parameters in millions."]
    if warning := tables.warning_of_speeds(found.runs):
        parts.append(warning)
    parts += ["## Paired comparisons", *_compared(found)]
    if figures:
        parts += [
            "## Figures",
            *(f"![{name.replace('_', ' ')}](figures/{name}.png)" for name in figures),
        ]
    parts += ["## Acceptance by position", tables.by_position_table(cells)]
    for quantity in (ACCEPT_LEN, SPEEDUP):
        by_size = tables.block_sizes_table(cells, quantity, found.bootstrap)
        if by_size is not None:
            parts += [
                f"## {quantity.words.capitalize()} by trained and decoded block size",
                by_size,
            ]
    if found.importances:
        parts += ["## Parameter importances", tables.importances_table(found.importances)]
    if found.trade_off is not None:
        parts += ["## Pareto front", tables.pareto_table(cells, *found.trade_off)]
    unfinished = found.study.unfinished if found.study is not None else []
    if unfinished or found.skipped:
        lines = unfinished + _reasons(found.skipped)
        counts = f"{len(unfinished)} trials, {len(found.skipped)} run folders:"
        parts += ["## Not in here", counts, _listed(lines)]
    if beside := tables.published_parts(cells):
        note = "Another target, another budget, other prompts: only the direction compares."
        parts += ["## Published numbers of the same ablation", note, *beside]
    parts += ["## To repeat it", *_repeated(found)]
    return "\n\n".join(parts) + "\n"


def _asked(found: Found) -> list[str]:
    rows = tables.asked_for(found.study.sweep) if found.study is not None else []
    rows += tables.setting(found.runs)
    return [tables.table(["what", "value"], rows, right=False), *tables.budget(found.cells)]


def _compared(found: Found) -> list[str]:
    made = found.comparisons
    if not made:
        return [_listed(found.unpaired) if found.unpaired else "One cell: nothing to compare."]
    lines = tables.conclusions(made)
    kept = sum(c.survives for c in made)
    parts = [
        f"Each cell over the baseline, {found.baseline.label}"
        f"{', and over its neighbour' if found.axis is not None else ''}, on the same prompts and "
        f"seeds. {len(made)} comparisons; * marks the {kept} that hold for all of them together "
        "(Holm, 5%)."
        + (
            " Only the best cells are compared; the best of all was picked by these same prompts, "
            "which flatters its lead."
            if is_search(found.cells)
            else ""
        ),
        tables.comparisons_table(made),
    ]
    if lines:
        parts += ["Where the interval excludes zero:", _listed(lines)]
    if found.unpaired:
        parts.append(_listed(found.unpaired))
    return parts


def _repeated(found: Found) -> list[str]:
    lines = tables.commands(found.cells)
    block = "\n".join([found.command, *lines])
    return [f"```sh\n{block}\n```"]


def _short(found: Found) -> str:
    lines = tables.conclusions(found.comparisons)
    return "\n\n".join(
        [tables.cells_table(found.cells), tables.uncertainty(found.cells), _listed(lines)]
    )


def _reasons(skipped: dict[str, str]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in skipped.items()]


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _command(*asked: Any) -> str:
    words = ["python -m dflash_lightning report"]
    for name, value in zip(("", "--compare", "--out", "--baseline"), asked, strict=True):
        if value is not None:
            text = " ".join(value) if isinstance(value, list) else str(value)
            words.append(f"{name} {text}".strip())
    return " ".join(words)
