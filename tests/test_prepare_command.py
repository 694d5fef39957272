"""`prepare` as a user runs it: one YAML, killed at any moment, its summary, no trainer."""

import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dflash_lightning.cli import main
from dflash_lightning.data.answers import LocalAnswers
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.sources import JsonlPrompts
from dflash_lightning.data.summary import QUANTILES
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetConfig


@pytest.fixture(scope="module")
def experiment(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare")
    ask = [{"role": "user", "content": "x" * (n % 23) + f"{n}?"} for n in range(36)]
    rows: list[Any] = [{"messages": [m]} for m in ask]
    rows[7]["messages"] += [{"role": "assistant", "content": ""}, ask[0]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "oops\n")
    config = {
        "model": {
            "target": {"name": str(target_folder), "dtype": "float32", "num_taps": 3},
            "block_size": 4,
            "num_layers": 1,
        },
        "data": {
            "prompts": {
                "class_path": "JsonlPrompts",
                "init_args": {"train": str(folder / "prompts.jsonl"), "held_out": 3},
            },
            "answers": {
                "class_path": "LocalAnswers",
                "init_args": {"batch_size": 2, "temperature": 0.9},
            },
            "max_new_tokens": 12,
        },
        "trainer": {"accelerator": "gpu", "devices": 8, "default_root_dir": str(folder / "runs")},
    }
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def prepare(experiment: Path, cache: Path, *flags: str) -> None:
    main(["prepare", "-c", str(experiment), "--data.cache_dir", str(cache), *flags])


def in_python(experiment: Path, cache: Path) -> None:
    """Prepare the same without the command line, which takes its seconds to start."""
    config = yaml.safe_load(experiment.read_text())
    data, target = config["data"], config["model"]["target"]
    DFlashDataModule(
        JsonlPrompts(**data["prompts"]["init_args"]),
        TargetConfig(**target),
        answers=LocalAnswers(**data["answers"]["init_args"]),
        max_new_tokens=data["max_new_tokens"],
        cache_dir=str(cache),
    ).prepare_data()


def contents(cache: Path) -> dict[str, bytes]:
    """Return all prepared files but leftovers of killed processes."""
    files = [f for f in cache.rglob("*") if f.is_file() and ".partial" not in str(f)]
    return {str(f.relative_to(cache)): f.read_bytes() for f in files if "lock" not in f.name}


@pytest.fixture(scope="module")
def prepared(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("straight")
    prepare(experiment, cache)
    return cache


def killed_at(experiment: Path, cache: Path, shards: int) -> int:
    """Prepare in a process of its own and kill it, -9, once so many shards are there."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            in_python(experiment, cache)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 120
    while len(list(cache.rglob("*.jsonl"))) < shards:
        assert time.monotonic() < deadline
        if os.waitpid(child, os.WNOHANG)[0]:
            return -1
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return len(list(cache.rglob("*.jsonl")))


def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    experiment: Path, prepared: Path, tmp_path: Path
) -> None:
    expected = contents(prepared)
    total = sum(name.endswith(".jsonl") for name in expected)
    assert total > 16
    reached = [killed_at(experiment, tmp_path, shards) for shards in (1, 7, 12)]
    assert all(0 < shards < total for shards in reached), reached
    kept = contents(tmp_path)
    assert all(expected[name] == data for name, data in kept.items()), "whole or not at all"
    in_python(experiment, tmp_path)
    assert contents(tmp_path) == expected


def test_summary_lies_beside_the_shards(prepared: Path) -> None:
    found = {}
    for file in prepared.rglob("summary_*.json"):
        found[file.name.split("_")[1]] = json.loads(file.read_text())
        rows = [
            json.loads(line)
            for shard in file.parent.glob("*.jsonl")
            for line in shard.read_text().splitlines()
        ]
    assert set(found) == {"train", "val", "test"}
    train = found["train"]
    assert train["samples"] == 30
    assert train["answers"] >= 30
    assert sum(part["answers"] for part in found.values()) == len(rows)
    supervised = sum(part["supervised_tokens"] for part in found.values())
    assert supervised == sum(len(row["ids"]) for row in rows)
    cut = sum(part["share_cut_by_limit"] * part["answers"] for part in found.values())
    assert round(cut) == sum(row["finish"] == "length" for row in rows)
    empty = sum(part["share_empty"] * part["answers"] for part in found.values())
    assert round(empty) == sum(row["ids"][0] == 1 for row in rows)
    assert list(train["answer_length"]) == [f"{q:.0%}" for q in QUANTILES]
    assert train["answer_length"]["100%"] == 12


def test_prepare_says_what_it_made(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(experiment, tmp_path, "--data.features", "store")
    out = capsys.readouterr().out
    for word in ("train", "val", "test", "samples", "share cut by limit", "answer length"):
        assert word in out.replace("\n", " ")
    assert list(tmp_path.rglob("features/*")), "states are stored too"
    assert not (experiment.parent / "runs").exists(), "no trainer, no run"


def test_fit_takes_over_what_was_prepared(
    experiment: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(LocalAnswers, "answer", never)
    flags = ["fit", "-c", str(experiment), "--data.cache_dir", str(prepared)]
    flags += ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_steps", "1"]
    flags += ["--trainer.default_root_dir", str(tmp_path), "--trainer.precision", "32-true"]
    flags += ["--trainer.enable_progress_bar", "false", "--decode.final_prompts", "1"]
    main([*flags, "--decode.max_new_tokens", "4", "--trainer.num_sanity_val_steps", "0"])
    config = next(tmp_path.rglob("config.yaml"))
    main(["prepare", "-c", str(config)])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--data.answers.batch_sizes", "1"], "batch_sizes"),
        (["--data.prompts.train", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data.answers", "ServerAnswers", "--data.answers.url", "x:1"], "data.answers.url"),
    ],
)
def test_bad_input_is_one_line(
    experiment: Path, tmp_path: Path, flags: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        prepare(experiment, tmp_path, *flags)
    assert "\n" not in str(caught.value)


def test_share_on_the_command_line(experiment: Path, tmp_path: Path) -> None:
    prepare(experiment, tmp_path, "--data.prompts.held_out", "0.1")
    file = next(tmp_path.rglob("summary_test*"))
    assert json.loads(file.read_text())["samples"] == 4
