"""The summary run for TensorBoard: its x axis is the swept number, its HParams rows are the cells.

The files are written without torch or TensorFlow, into a folder that is replaced as a whole; the
runs' own files are not touched.
"""

import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dflash_lightning.reporting.cells import Axis, Cell, short_names, text_of
from dflash_lightning.reporting.quantities import ACCEPT_LEN, QUANTITIES

SUMMARY = "summary"
CHARTED = {quantity.key for quantity in QUANTITIES}
CURVES = ("train/loss", "val/loss", "val/accept_len", "decode/accept_len", "decode/speedup")
"""Tags of the runs that the layout overlays, over supervised tokens."""


def write_summary(
    folder: Path,
    cells: Sequence[Cell],
    axis: Axis | None,
    pictures: dict[str, bytes],
    text: str,
) -> Path:
    """Write (or replace) the summary run under `folder` and return where it lies.

    Args:
        folder: The study's folder, the root that TensorBoard is pointed at.
        cells: The cells with their estimates.
        axis: The number along which scalars are placed; None places each cell at its rank.
        pictures: PNGs by name.
        text: Shown as Markdown.
    """
    target = folder / SUMMARY
    partial = folder / f".{SUMMARY}.{os.getpid()}.partial"
    for left in folder.glob(f".{SUMMARY}.*"):  # by a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    whole = axis is not None and all(float(x).is_integer() for x in axis.numbers)
    steps = [int(x) for x in axis.numbers] if axis and whole else list(range(len(cells)))
    with _Writer(partial) as writer:
        for step, cell in zip(steps, cells, strict=True):
            for name, estimate in cell.estimates.items():
                writer.scalar(f"{SUMMARY}/{name}", estimate.mean, step)
                if name in CHARTED and not math.isnan(estimate.low):
                    writer.scalar(f"{SUMMARY}/{name}/low", estimate.low, step)
                    writer.scalar(f"{SUMMARY}/{name}/high", estimate.high, step)
        writer.layout(_layout(cells, axis))
        for name, picture in pictures.items():
            writer.image(f"figures/{name}", picture)
        at = ", ".join(f"{s}: {c.label}" for s, c in zip(steps, cells, strict=True))
        writer.text(f"{SUMMARY}/report", f"{'' if whole else f'x axis: {at}'}\n\n{text}")
        writer.raw(_experiment(cells))
    columns = {key: _column([cell.values[key] for cell in cells]) for key in cells[0].values}
    columns["seeds"] = [float(len(cell.runs)) for cell in cells]
    best_first = sorted(range(len(cells)), key=lambda i: -cells[i].estimates[ACCEPT_LEN.key].mean)
    for rank, i in enumerate(best_first, start=1):
        _write_cell(partial, rank, cells[i], {key: column[i] for key, column in columns.items()})
    replaced = folder / f".{SUMMARY}.{os.getpid()}.old"
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def _write_cell(folder: Path, rank: int, cell: Cell, values: dict[str, float | str]) -> None:
    """Write a row of the HParams tab, which orders rows by their group's name: best first."""
    name = cell.label.replace("/", "_")
    with _Writer(folder / "cells" / name) as writer:
        for quantity in QUANTITIES:
            if quantity.key in cell.estimates:
                writer.scalar(f"hp/{quantity.key}", cell.estimates[quantity.key].mean, 0)
        estimate = cell.estimates[ACCEPT_LEN.key]
        writer.scalar("hp/accept_len_low", estimate.low, 0)
        writer.scalar("hp/accept_len_high", estimate.high, 0)
        writer.raw(hparams.hparams_pb(values, trial_id=f"{rank:02d} {name}"))


def _experiment(cells: Sequence[Cell]) -> Summary:
    """Return what the HParams tab shows: the varied keys, then accept length and speed."""
    keys = list(cells[0].values)
    names = short_names(keys)
    columns = {key: _column([cell.values[key] for cell in cells]) for key in keys}
    shown = [hparams.HParam(key, _domain(columns[key]), names[key]) for key in keys]
    counts = sorted({len(cell.runs) for cell in cells})
    shown.append(hparams.HParam("seeds", hparams.Discrete(counts), "seeds"))
    metrics = [
        hparams.Metric("hp/accept_len", display_name="accept length"),
        hparams.Metric("hp/accept_len_low", display_name="accept length, low"),
        hparams.Metric("hp/accept_len_high", display_name="accept length, high"),
    ]
    metrics += [
        hparams.Metric(f"hp/{q.key}", display_name=q.words)
        for q in QUANTITIES
        if q is not ACCEPT_LEN and all(q.key in cell.estimates for cell in cells)
    ]
    return hparams.hparams_config_pb(shown, metrics)


def _domain(values: Sequence[float | str]) -> Any:
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) == len(values) and len(set(numbers)) > 1:
        return hparams.RealInterval(min(numbers), max(numbers))
    return hparams.Discrete(sorted(set(values), key=str))


def _column(values: Sequence[Any]) -> list[float | str]:
    """Return a key's values as numbers, or all as text where one is none."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return [float(v) for v in values]
    return [text_of(value) for value in values]


def _layout(cells: Sequence[Cell], axis: Axis | None) -> layout_pb2.Layout:
    """Return the Custom Scalars tab: intervals along the swept number, curves over tokens."""
    along = "cell" if axis is None else axis.name
    margins = [
        layout_pb2.Chart(
            title=f"{quantity.label} by {along}",
            margin=layout_pb2.MarginChartContent(
                series=[
                    layout_pb2.MarginChartContent.Series(
                        value=f"{SUMMARY}/{quantity.key}",
                        lower=f"{SUMMARY}/{quantity.key}/low",
                        upper=f"{SUMMARY}/{quantity.key}/high",
                    )
                ]
            ),
        )
        for quantity in QUANTITIES
        if all(quantity.key in cell.estimates for cell in cells)
    ]
    margins.reverse()  # TensorBoard 2.21 shows a category's margin charts last to first
    positions = f"^{SUMMARY}/accept_rate/pos_\\d+$"
    curves = [(tag, f"^{tag}$") for tag in CURVES]
    return layout_pb2.Layout(
        category=[
            layout_pb2.Category(title=f"by {along}, with 95% intervals", chart=margins),
            layout_pb2.Category(title="runs over supervised tokens", chart=_lines(curves)),
            layout_pb2.Category(
                title="acceptance by position",
                chart=_lines([(f"accepted up to each position by {along}", positions)]),
            ),
        ]
    )


def _lines(tags: Sequence[tuple[str, str]]) -> list[layout_pb2.Chart]:
    """Return a chart for each title and pattern of tags, all runs overlaid."""
    return [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))
        for title, pattern in tags
    ]


class _Writer:
    """Events without torch."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))
        self._now = time.time()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def raw(self, summary: Any, step: int = 0) -> None:
        """Write a summary."""
        self._writer.add_event(Event(wall_time=self._now, step=step, summary=summary))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write a number."""
        self.raw(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step)

    def image(self, tag: str, data: bytes) -> None:
        """Write a PNG."""
        image = Summary.Image(encoded_image_string=data)
        self.raw(Summary(value=[Summary.Value(tag=tag, image=image)]))

    def text(self, tag: str, words: str) -> None:
        """Write Markdown."""
        self._bytes(tag, words.encode(), text_metadata.create_summary_metadata(tag, ""))

    def layout(self, layout: layout_pb2.Layout) -> None:
        """Write what the Custom Scalars tab shows."""
        found = layout_metadata.create_summary_metadata()
        self._bytes(layout_metadata.CONFIG_SUMMARY_TAG, layout.SerializeToString(), found)

    def _bytes(self, tag: str, data: bytes, metadata: Any) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[data], tensor_shape=TensorShapeProto())
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self.raw(Summary(value=[value]))
