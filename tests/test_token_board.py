"""Real tiny runs over supervised tokens, compared by `report`, and the summary run it writes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runs import fake_study
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from dflash_lightning.cli import main
from dflash_lightning.report import report
from dflash_lightning.token_board import TokenBoard

SEEDS, DEPTHS = (3, 4), (1, 2)


def fit(experiment: Path, root: Path, depth: int, seed: int, *more: str) -> Path:
    """Train as a sweep's trial does; event files lie directly in the run's folder."""
    name = f"d{depth}-s{seed}"
    flags = {
        "model.num_layers": depth,
        "seed_everything": seed,
        "trainer.default_root_dir": root,
        "trainer.logger": "dflash_lightning.token_board.TokenBoard",
        "trainer.logger.save_dir": root,
        "trainer.logger.name": "",
        "trainer.logger.version": name,
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    main(["fit", "-c", str(experiment), *words, *more])
    return root / name


@pytest.fixture(scope="module")
def root(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    for depth in DEPTHS:
        for seed in SEEDS:
            fit(experiment, folder, depth, seed)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up study of three depths whose report was written twice."""
    folder = fake_study(
        tmp_path_factory.mktemp("fake") / "depth",
        {1: 0.3, 2: 0.6, 5: 0.5},
        seeds=(0, 1),
        curves=True,
    )
    report(str(folder))
    report(str(folder))
    return folder


def events_of(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0, "images": 0})
    found.Reload()
    return found


# ---- over tokens ---------------------------------------------------------------------------------


def test_all_is_placed_by_supervised_tokens(root: Path) -> None:
    run = root / "d1-s3"
    events = events_of(run)
    seen = {int(e.value) for e in events.Scalars("train/supervised_tokens")}
    for event in events.Scalars("train/supervised_tokens"):
        assert event.step == int(event.value)
    total = max(seen)
    assert total > 100  # four steps of some forty answers
    assert len(seen) == 4
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert total == checkpoint["supervised_tokens"]
    for tag in events.Tags()["scalars"]:
        steps = [e.step for e in events.Scalars(tag)]
        assert steps == sorted(steps)
        assert set(steps) <= seen, tag
    assert [e.step for e in events.Scalars("decode/accept_len")] == sorted(seen)[1::2]
    assert events.Scalars("val/loss")[-1].step == total
    assert [e.step for e in events.Images("decode/acceptance")][-1] == total
    assert [e.step for e in events.Tensors("decode/sample/text_summary")][-1] == total


def test_wall_time_is_kept(root: Path) -> None:
    times = [e.wall_time for e in events_of(root / "d1-s3").Scalars("train/loss")]
    assert times == sorted(times)
    assert time.time() - 600 < times[0] < times[-1] <= time.time()


def test_tokens_go_on_after_a_resume(experiment: Path, tmp_path: Path) -> None:
    run = fit(experiment, tmp_path, 1, 3, "--trainer.max_steps", "2")
    before = events_of(run).Scalars("train/loss")[-1].step
    resumed = ("--ckpt_path", str(run / "checkpoints" / "last.ckpt"))
    fit(experiment, tmp_path, 1, 3, *resumed)
    steps = [e.step for e in events_of(run).Scalars("train/loss")]
    assert len(steps) == 4
    assert steps == sorted(set(steps))
    assert steps[1] == before


def test_the_hparams_tab_is_left_to_the_report(root: Path) -> None:
    events = events_of(root / "d1-s3")
    assert not [tag for tag in events.summary_metadata if tag.startswith("_hparams_")]
    assert "model.num_layers: 1" in (root / "d1-s3" / "hparams.yaml").read_text()


def test_a_module_that_counts_no_tokens_keeps_its_steps(tmp_path: Path) -> None:
    board = TokenBoard(str(tmp_path), name="", version="x")
    board.log_metrics({"a": 1.0}, step=7)
    board.log_graph(torch.nn.Linear(1, 1))
    board.log_metrics({"a": 2.0}, step=8)
    board.finalize("success")
    board.log_metrics({"a": 3.0}, step=9)  # a new file after the first was closed
    board.finalize("success")
    assert [(e.step, e.value) for e in events_of(tmp_path / "x").Scalars("a")] == [
        (0, 1.0),  # before there was a module
        (8, 2.0),
        (9, 3.0),
    ]


# ---- real runs compared --------------------------------------------------------------------------


def test_real_runs_are_compared(root: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    text = report(compare=[str(root / "d*")], out=str(tmp_path / "out")).read_text()
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
    assert "| num_layers 1 |" in text
    assert "num_layers 2 over num_layers 1" in text
    assert "| 2 (3, 4) | 3 |" in text  # seeds and prompts
    found = [json.loads((root / f"d2-s{s}" / "decode_val.json").read_text()) for s in SEEDS]
    mean = sum(f["accept_len"] for f in found) / 2
    assert f"{mean:.3f} [" in text
    for report_of_run in found:
        rows = report_of_run["per_prompt"]
        pooled = sum(r["committed"] for r in rows) / sum(r["cycles"] for r in rows)
        assert pooled == pytest.approx(report_of_run["accept_len"])
        speedup = sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows)
        speedup /= sum(r["plain_tokens"] for r in rows) / sum(r["plain_seconds"] for r in rows)
        assert speedup == pytest.approx(report_of_run["speedup"])
    assert [r["prompt"] for r in found[0]["per_prompt"]] == [
        r["prompt"] for r in found[1]["per_prompt"]
    ]


# ---- the summary run -----------------------------------------------------------------------------


def test_the_x_axis_of_the_summary_is_the_swept_number(study: Path) -> None:
    events = events_of(study / "summary")
    for name in ("accept_len", "speedup", "model_speedup", "draft_ms", "accept_rate/pos_1"):
        assert [e.step for e in events.Scalars(f"summary/{name}")] == [1, 2, 5]
    values = {e.step: e.value for e in events.Scalars("summary/accept_len")}
    low = {e.step: e.value for e in events.Scalars("summary/accept_len/low")}
    high = {e.step: e.value for e in events.Scalars("summary/accept_len/high")}
    assert all(low[x] < values[x] < high[x] for x in values)
    assert values[2] > values[5] > values[1]
    images = events.Tags()["images"]
    assert "figures/acceptance_by_position" in images
    assert not set(images) & set(events.Tags()["scalars"])  # one tag, one kind


def test_it_is_replaced_and_the_runs_are_not_touched(study: Path) -> None:
    assert len(list((study / "summary").glob("events.*"))) == 1
    assert len(events_of(study / "summary").Scalars("summary/accept_len")) == 3
    assert not list(study.glob("*partial*"))
    assert not list(study.glob("*.old"))
    files = {p: p.read_bytes() for p in study.glob("d*/*")}
    (study / ".summary.1.partial").mkdir()  # TensorBoard would show it as a run
    report(str(study))
    assert not list(study.glob(".summary*"))
    assert {p: p.read_bytes() for p in study.glob("d*/*")} == files


def test_custom_scalars_overlay_runs_and_show_intervals(study: Path) -> None:
    tensor = events_of(study / "summary").Tensors("custom_scalars__config__")[0]
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    margins = [c.margin.series[0] for k in layout.category for c in k.chart if c.margin.series]
    scalars = set(events_of(study / "summary").Tags()["scalars"])
    assert {"summary/accept_len", "summary/speedup", "summary/draft_ms"} <= {
        m.value for m in margins
    }
    assert all({m.value, m.lower, m.upper} <= scalars for m in margins)
    lines = [tag for k in layout.category for c in k.chart for tag in c.multiline.tag]
    assert {"^train/loss$", "^val/accept_len$", "^decode/accept_len$"} <= set(lines)


def test_hparams_has_a_row_a_cell_and_the_best_first(study: Path) -> None:
    def content(folder: Path, tag: str) -> Any:
        return events_of(folder).summary_metadata[tag].plugin_data.content

    experiment = metadata.parse_experiment_plugin_data(
        content(study / "summary", "_hparams_/experiment")
    )
    assert [h.name for h in experiment.hparam_infos] == ["model.num_layers", "seeds"]
    assert [m.name.tag for m in experiment.metric_infos][:1] == ["hp/accept_len"]
    assert "hp/speedup" in [m.name.tag for m in experiment.metric_infos]
    rows = {}
    for cell in (study / "summary" / "cells").iterdir():
        start = metadata.parse_session_start_info_plugin_data(
            content(cell, "_hparams_/session_start_info")
        )
        value = events_of(cell).Scalars("hp/accept_len")[-1].value
        rows[start.group_name] = (value, start.hparams["model.num_layers"].number_value)
    ordered = [rows[name] for name in sorted(rows)]  # as the tab orders them
    assert [depth for _, depth in ordered] == [2, 5, 1]
    assert ordered == sorted(ordered, reverse=True)


def test_categories_are_placed_by_rank(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "i", {"dflash": 0.5, "eagle3": 0.4}, (0,), key="experiment")
    report(str(folder))
    events = events_of(folder / "summary")
    assert [e.step for e in events.Scalars("summary/accept_len")] == [0, 1]
    words = events.Tensors("summary/report")[0].tensor_proto.string_val[0].decode()
    assert "x axis: 0: dflash, 1: eagle3" in words


def test_numbers_and_words_in_one_column(tmp_path: Path) -> None:
    """As in a sweep over gamma that ends in `uniform`: the column is text, in all rows."""
    key = "model.position_weights.init_args.gamma"
    folder = fake_study(tmp_path / "gamma", {3: 0.5, 5: 0.4, "uniform": 0.3}, (0,), key=key)
    text = report(str(folder)).read_text()
    assert "| gamma 3 |" in text
    assert "Figure 5" in text
    content = events_of(folder / "summary").summary_metadata["_hparams_/experiment"].plugin_data
    info = metadata.parse_experiment_plugin_data(content.content).hparam_infos[0]
    assert [v.string_value for v in info.domain_discrete.values] == ["3", "5", "uniform"]
    for name in ("gamma 3", "gamma uniform"):
        found = events_of(folder / "summary" / "cells" / name).summary_metadata
        data = found["_hparams_/session_start_info"].plugin_data.content
        start = metadata.parse_session_start_info_plugin_data(data)
        assert start.hparams[key].string_value == name.removeprefix("gamma ")
