"""`report` on made-up studies and runs with a known truth: tables, figures, bad input."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from fake_runs import DEPTH, fake_decoded, fake_prompts, fake_run, fake_study
from optuna.distributions import CategoricalDistribution, FloatDistribution

from dflash_lightning.commands import run_command
from dflash_lightning.errors import UserError
from dflash_lightning.report import report
from dflash_lightning.reporting.cells import make_cells
from dflash_lightning.reporting.output import KEPT
from dflash_lightning.reporting.published import PUBLISHED, published
from dflash_lightning.reporting.runs import find_runs, read_runs
from dflash_lightning.reporting.statistics import Bootstrap
from dflash_lightning.reporting.study import Study, importances

TRUTH = {1: 0.3, 2: 0.5, 3: 0.5}
"""Depth -> acceptance of a draft: 2 over 1 is a wide step, 3 over 2 is none."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "depth"
    return fake_study(
        folder,
        TRUTH,
        failed=[5],
        objectives=[("decode/accept_len", "maximize"), ("decode/draft_ms", "minimize")],
    )


@pytest.fixture(scope="module")
def text(study: Path) -> str:
    return report(str(study)).read_text()


def single(folder: Path, depth: int, acceptance: float, seed: int = 0, **options: object) -> Path:
    """A plain run, without a study."""
    rng = np.random.default_rng([seed, depth])
    names = options.pop("names", None)
    decoded = fake_decoded(fake_prompts(rng, acceptance, names=names))  # type: ignore[arg-type]
    name = f"d{depth}-k6-g3-t5-s{seed}"
    model = {"num_layers": depth, "block_size": 6}
    return fake_run(folder / name / "version_0", decoded, model, seed, **options)  # type: ignore[arg-type]


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


# ---- what it says --------------------------------------------------------------------------------


def test_cells_are_in_order_with_intervals_and_counts(text: str, study: Path) -> None:
    rows = [line for line in section(text, "Cells").splitlines() if line.startswith("| num_layers")]
    assert [row.split("|")[1].strip() for row in rows] == [f"num_layers {d}" for d in (1, 2, 3)]
    values = [
        json.loads((study / f"d2-k6-g3-t5-s{s}" / "decode_val.json").read_text())["accept_len"]
        for s in (0, 1, 2)
    ]
    assert f"| {np.mean(values):.3f} [" in rows[1]
    assert all("| 3 (0, 1, 2) | 16 | 600,000 |" in row for row in rows)


def test_a_conclusion_only_where_the_interval_excludes_zero(text: str) -> None:
    compared = section(text, "Paired comparisons")
    table, _, concluded = compared.partition("Where the interval excludes zero:")
    rows = re.findall(r"\| (.+? over .+?) \| (.+?) \| \S+ \[(\S+), (\S+)\]", table)
    assert len(rows) == 3 * 3  # three quantities; 2 and 3 over 1, 3 over 2
    assert "9 comparisons" in compared
    told = [f"{of}: {pair}:" for pair, of, low, high in rows if float(low) > 0 or float(high) < 0]
    lines = [line.removeprefix("- ") for line in concluded.strip().splitlines()]
    assert len(lines) == len(told)
    assert all(line.startswith(tuple(told)) for line in lines)
    assert any(
        line.startswith("accept length: num_layers 2 over num_layers 1: +") for line in lines
    )
    assert not any("num_layers 3 over num_layers 2" in line for line in lines)
    assert "difference seen" not in text
    assert "no difference" not in text.lower()


def test_figures_sections_and_files(text: str, study: Path) -> None:
    names = ["accept_length", "speedup", "latency", "acceptance_by_position", "pareto"]
    for name in names:
        assert f"](figures/{name}.png)" in text
        assert (study / "figures" / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (study / "figures" / f"{name}.svg").read_text()[:2000]
    assert "trial 9 (num_layers 5, seed 0): fail: out of memory" in text
    assert "Equal budgets: 600,000 supervised tokens" in text
    assert "objectives | decode/accept_len (maximize), decode/draft_ms (minimize)" in text
    assert "arXiv 2602.06036, Table 6" in section(text, "Published numbers of the same ablation")
    assert "Another target" in text
    assert "fake/target" in text
    assert "python -m dflash_lightning fit --seed_everything 2" in text
    front = section(text, "Pareto front")
    assert "num_layers 1" in front
    assert "num_layers 2" in front


def test_again_gives_the_same_bytes(study: Path, text: str) -> None:
    pictures = {p: p.read_bytes() for p in (study / "figures").iterdir()}
    assert report(str(study)).read_text() == text
    assert {p: p.read_bytes() for p in (study / "figures").iterdir()} == pictures


def test_out_and_baseline(study: Path, text: str, tmp_path: Path) -> None:
    before = sorted(p.name for p in study.iterdir())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "sweep.yaml").write_text("of an earlier report")
    elsewhere = report(str(study), out=str(tmp_path / "docs"), baseline="2")
    assert elsewhere == tmp_path / "docs" / "report.md"
    assert (tmp_path / "docs" / "sweep.yaml").read_bytes() == (study / "sweep.yaml").read_bytes()
    compared = section(elsewhere.read_text(), "Paired comparisons")
    assert "over the baseline, num_layers 2" in compared
    assert "num_layers 1 over num_layers 2" in compared
    assert "| speedup, measured |" in compared
    assert sorted(p.name for p in study.iterdir()) == before
    with pytest.raises(UserError, match="--baseline: no cell 7; there are num_layers 1, num_lay"):
        report(str(study), baseline="7")


def test_a_report_elsewhere_can_be_made_again_from_there(tmp_path: Path) -> None:
    objectives = [("decode/accept_len", "maximize"), ("decode/draft_ms", "minimize")]
    study = fake_study(tmp_path / "depth", {1: 0.3, 3: 0.5}, objectives=objectives)
    (study / "d3-k6-g3-t5-s0" / "checkpoints").mkdir()
    (study / "d3-k6-g3-t5-s0" / "checkpoints" / "last.ckpt").write_text("large")
    first = report(str(study), out=str(tmp_path / "docs"))
    kept = {str(p.relative_to(tmp_path / "docs")) for p in (tmp_path / "docs/runs").rglob("*.*")}
    run = "runs/d3-k6-g3-t5-s0"
    assert {f"{run}/config.yaml", f"{run}/run.json", f"{run}/decode_val.json"} <= kept
    assert all(Path(name).name in KEPT for name in kept)
    again = report(str(tmp_path / "docs"), out=str(tmp_path / "again"))
    for heading in ("Cells", "Paired comparisons", "Acceptance by position", "Pareto front"):
        assert section(first.read_text(), heading)
        assert section(again.read_text(), heading) == section(first.read_text(), heading)


def test_categories_unequal_budgets_and_workers(tmp_path: Path) -> None:
    folder = fake_study(
        tmp_path / "injection", {"input_fusion": 0.4, "dflash": 0.5}, key="experiment"
    )
    record = json.loads((folder / "dflash-s0" / "run.json").read_text())
    record["supervised_tokens"], record["environment"]["workers"] = 900_000, 2
    (folder / "dflash-s0" / "run.json").write_text(json.dumps(record))
    text = report(str(folder)).read_text()
    assert "over the baseline, dflash," in text  # the paper's, though it is second
    assert "input_fusion over dflash: -" in text
    assert "**The budgets are not equal**: dflash was trained on 700,000" in text
    assert "**The speeds are not to be trusted**" in text
    compared = section(text, "Paired comparisons")
    assert "| accept length |" in compared
    assert "speedup" not in compared
    assert "Table 9" in text
    assert "Table 10" in text


def test_speeds_of_unlike_machines_are_not_compared(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "depth", {1: 0.4, 2: 0.5})
    file = folder / "d1-k6-g3-t5-s0" / "run.json"
    record = json.loads(file.read_text())
    for machine, compared in (("other-host: fake", True), ("host: faster", False)):
        record["environment"]["machine"] = machine
        file.write_text(json.dumps(record))
        text = report(str(folder)).read_text()
        assert ("speedup" in section(text, "Paired comparisons")) == compared
        assert ("different hardware (fake / faster)" in text) != compared


def test_three_objectives_show_accept_length_against_draft(tmp_path: Path) -> None:
    """1 drafts fastest, 2 accepts most; 3 is slower than 2 and accepts less."""
    objectives = [
        ("decode/accept_len", "maximize"),
        ("decode/speedup", "maximize"),
        ("decode/draft_ms", "minimize"),
    ]
    folder = fake_study(tmp_path / "s", {1: 0.3, 2: 0.6, 3: 0.4}, (0,), objectives=objectives)
    front = section(report(str(folder)).read_text(), "Pareto front")
    assert [row.split("|")[1].strip() for row in front.strip().splitlines()[2:]] == [
        "num_layers 1",
        "num_layers 2",
    ]


def test_one_seed_is_said(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "one", {1: 0.3, 3: 0.5}, seeds=(0,))
    text = report(str(folder)).read_text()
    assert "One seed a cell: the 95% intervals are over prompts only." in text
    assert "num_layers 3 over num_layers 1: +" in text


def test_trained_and_decoded_block_sizes(tmp_path: Path) -> None:
    for size in (4, 8):
        rng = np.random.default_rng(size)
        decoded = fake_decoded(fake_prompts(rng, 0.5, block_size=size))
        other = fake_decoded(fake_prompts(rng, 0.5, block_size=12 - size))
        decoded["block_sizes"] = {f"k{12 - size}": other}
        fake_run(tmp_path / f"k{size}", decoded, {"num_layers": 3, "block_size": size})
    text = report(compare=[str(tmp_path / "k*")]).read_text()
    assert "Accept length by trained and decoded block size" in text
    assert "| trained | decoded with K=4 | decoded with K=8 |" in text
    assert "Table 8" in text


# ---- plain runs ----------------------------------------------------------------------------------


def test_plain_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    for depth, acceptance in ((1, 0.3), (3, 0.5)):
        for seed in (0, 1):
            single(tmp_path, depth, acceptance, seed, tokens=None)
    found = report(compare=[str(tmp_path / "d1-*" / "*"), str(tmp_path / "d3-*")])
    assert found == tmp_path / "comparison" / "report.md"
    text = found.read_text()
    assert "| num_layers 1 |" in text
    assert "accept length: num_layers 3 over num_layers 1: +" in text
    assert "was not recorded" in text
    assert (tmp_path / "comparison" / "summary").is_dir()
    assert "Table 6" in text


def test_different_prompts_cannot_be_paired_and_it_is_said(tmp_path: Path) -> None:
    single(tmp_path, 1, 0.3)
    single(tmp_path, 3, 0.5, names=[f"other{i}" for i in range(16)])
    text = report(compare=[str(tmp_path / "d*")]).read_text()
    assert "num_layers 3 and num_layers 1 can't be paired: their runs decoded different" in text
    assert "over num_layers 1:" not in text


def test_the_newest_of_two_equal_runs_counts(tmp_path: Path) -> None:
    old = single(tmp_path, 1, 0.3)
    new = single(tmp_path / "x", 1, 0.5)
    runs, _ = read_runs([new, old])
    import os

    os.utime(old, (1, 1))
    cells, left_out = make_cells(runs, Bootstrap(100))
    assert [run.folder for run in cells[0].runs] == [new]
    assert len(left_out) == 1
    assert "newer" in next(iter(left_out.values()))


# ---- bad input -----------------------------------------------------------------------------------


def empty_study(tmp_path: Path) -> str:
    (tmp_path / "sweep.yaml").write_text("seeds: [0]\n")
    return str(tmp_path)


def only_unfinished(tmp_path: Path) -> str:
    (single(tmp_path, 1, 0.3) / "decode_val.json").unlink()
    (single(tmp_path, 3, 0.3) / "decode_val.json").unlink()
    return str(tmp_path)


def older_version(tmp_path: Path) -> str:
    file = single(tmp_path, 1, 0.3) / "decode_val.json"
    decoded = json.loads(file.read_text())
    del decoded["per_prompt"]
    file.write_text(json.dumps(decoded))
    return str(tmp_path)


def damaged(tmp_path: Path) -> str:
    (single(tmp_path, 1, 0.3) / "decode_val.json").write_text('{"per_pro')
    return str(tmp_path)


def lacking(tmp_path: Path) -> str:
    file = single(tmp_path, 1, 0.3) / "decode_val.json"
    decoded = json.loads(file.read_text())
    del decoded["per_prompt"][3]["committed"]
    file.write_text(json.dumps(decoded))
    return str(tmp_path)


def bad_sweep(tmp_path: Path) -> str:
    single(tmp_path, 1, 0.3)
    (tmp_path / "sweep.yaml").write_text("seeds: [0\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty_study, "is an empty study: none of its trials has a run folder"),
        (str, "is no study and no run: neither it nor its folders hold a config.yaml"),
        (lambda tmp_path: str(tmp_path / "none"), "report: no such folder: "),
        (only_unfinished, r"no decode_val.json: it did not reach its end \(and 1 more\)"),
        (older_version, "has no figures per prompt: it is of an older version"),
        (damaged, "decode_val.json can't be read"),
        (lacking, "decode_val.json is damaged"),
        (bad_sweep, "sweep.yaml: can't be read"),
    ],
)
def test_bad_folders(make: Callable[[Path], str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as raised:
        report(make(tmp_path))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "report.md").exists()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a study's folder, or --compare"):
        report()
    with pytest.raises(UserError, match="--compare: no such run: "):
        report(compare=[str(tmp_path / "d*")])


def test_unfinished_runs_are_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fake_study(tmp_path / "s", {1: 0.3, 3: 0.5}, seeds=(0, 1))
    (folder / "d3-k6-g3-t5-s1" / "decode_val.json").unlink()
    text = report(str(folder)).read_text()
    assert "d3-k6-g3-t5-s1: no decode_val.json: it did not reach its end" in text
    assert "0 trials, 1 run folders:" in text
    assert "| 1 (0) |" in text
    assert "One seed only, so over prompts only: num_layers 3." in text


def test_shares_and_times_are_never_below_zero(tmp_path: Path) -> None:
    runs, _ = read_runs(find_runs(fake_study(tmp_path / "s", {1: 0.1, 3: 0.1}, (0, 1), prompts=4)))
    cells, _ = make_cells(runs, Bootstrap(200))
    for cell in cells:
        assert cell.estimates["accept_rate/pos_3"].mean < 0.01
        assert all(0 <= e.low <= e.mean <= e.high for e in cell.estimates.values())


def test_one_run_and_one_prompt_have_nothing_to_compare(tmp_path: Path) -> None:
    run = single(tmp_path / "a", 1, 0.3)
    assert "One cell: nothing to compare." in report(str(run)).read_text()
    text = report(str(fake_study(tmp_path / "s", {1: 0.3, 3: 0.5}, (0,), prompts=1))).read_text()
    assert "one prompt was decoded: there is no interval" in text
    assert "nan" not in text


def test_no_study_storage_leaves_the_runs(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", {1: 0.3, 3: 0.5}, seeds=(0,))
    (folder / "journal.log").write_text("not a journal\n")
    assert "num_layers 3 over num_layers 1" in report(str(folder)).read_text()


# ---- parts ---------------------------------------------------------------------------------------


def test_a_plain_command_with_a_folder_first(study: Path, tmp_path: Path) -> None:
    found = run_command("report", [str(study), "--out", str(tmp_path)])
    assert found == tmp_path / "report.md"
    runs = sorted(str(p) for p in study.glob("d*-s0"))
    found = run_command("report", ["--compare", *runs, "--out", str(tmp_path / "c")])
    assert "num_layers 3 over num_layers 1" in found.read_text()


def test_help_and_bad_input_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from dflash_lightning.report import report; "
        f"report({str(fake_study(tmp_path / 's', {1: 0.3, 3: 0.5}, seeds=(0,)))!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importances_need_two_parameters_and_enough_trials() -> None:
    def trials(number: int, keys: tuple[str, ...]) -> list[optuna.trial.FrozenTrial]:
        rng = np.random.default_rng(0)
        found = []
        for _ in range(number):
            params = {"lr": float(rng.random()), "anchors": int(rng.choice([4, 8, 16]))}
            kinds = {"lr": FloatDistribution(0, 1), "anchors": CategoricalDistribution([4, 8, 16])}
            found.append(
                optuna.trial.create_trial(
                    params={k: params[k] for k in keys},
                    distributions={k: kinds[k] for k in keys},
                    value=params["lr"] + 0.01 * float(rng.random()),
                )
            )
        return found

    def shares(number: int, keys: tuple[str, ...]) -> dict[str, dict[str, float]]:
        return importances(Study("s", {}, trials(number, keys), ["maximize"], ["decode/speedup"]))

    assert shares(40, ("lr",)) == {}
    assert shares(8, ("lr", "anchors")) == {}
    found = shares(40, ("lr", "anchors"))["decode/speedup"]
    assert found["lr"] > 0.8
    assert sum(found.values()) == pytest.approx(1)


def test_published_tables_are_whole() -> None:
    for table in PUBLISHED:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [t.source.rpartition(" ")[2] for t in published(["model.num_layers"])] == ["6"]
    assert not published(["model.lr"])
    systems = [t.source for t in published(["experiment"])]
    assert [t.source for t in published(["model.axes"])] == systems  # choices that are aliases


def test_runs_are_found_in_versions_too(tmp_path: Path) -> None:
    run = single(tmp_path, 1, 0.3)
    assert find_runs(tmp_path) == [run]
    assert find_runs(run) == [run]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["num_layers"] == 1
    assert DEPTH == "model.num_layers"
    shutil.rmtree(run)
    with pytest.raises(UserError):
        find_runs(tmp_path)
