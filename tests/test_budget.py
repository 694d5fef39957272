"""A run that ends by what it has used: tokens, minutes, operations."""

import json
import math
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from dflash_lightning import budget
from dflash_lightning.budget import Budget, Schedule
from dflash_lightning.cli import main
from dflash_lightning.errors import UserError
from dflash_lightning.optimizer import warmup_cosine


class Steps(pl.Callback):
    """Keeps what each optimizer step found and left."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lrs: list[float] = []
        self.steps: list[int] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.lrs.append(optimizer.param_groups[0]["lr"])
        self.tokens.append(module.supervised_tokens)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.steps.append(trainer.global_step)


def fitted(experiment: Path, root: Path, *flags: str) -> tuple[Any, Steps]:
    watch = Steps()
    quick = ["--decode.final_prompts", "1", "--decode.every_n_steps", "null"]
    words = ["fit", "-c", str(experiment), *quick, "--trainer.default_root_dir", str(root), *flags]
    return main(words, callbacks=[watch]), watch


def test_tokens_end_a_run_at_the_step_that_reaches_them(experiment: Path, tmp_path: Path) -> None:
    """Beyond the experiment's 4 steps, with the rate following the tokens to 0."""
    limit = 500
    cli, watch = fitted(experiment, tmp_path, "--budget.tokens", str(limit))
    *before, last = watch.tokens
    assert last >= limit > before[-1]
    assert len(watch.tokens) == watch.steps[0] > 6
    used = [0, *watch.tokens]
    expected = [
        1e-3 * warmup_cosine(Schedule(1.0, 0.04, lambda _, u=u: u / limit), 0) for u in used
    ]
    assert watch.lrs == pytest.approx(expected)
    assert watch.lrs[-1] == 0.0 < watch.lrs[-2]
    assert "val/accept_len" in cli.trainer.callback_metrics


def test_operations_end_a_run_at_the_end_of_a_window(experiment: Path, tmp_path: Path) -> None:
    two = ["--trainer.accumulate_grad_batches", "2", "--data.batch_size", "2"]
    cli, watch = fitted(experiment, tmp_path, "--budget.flops", "6e7", *two)
    found = budget.budget_of(cli.trainer)
    assert found is not None
    per_step = found.flops / watch.steps[0]
    assert 6e7 <= found.flops < 6e7 + 1.5 * per_step
    assert len(watch.tokens) == watch.steps[0] > 2


def test_minutes_are_those_of_training_steps(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves a second each time it is read: a step takes 2, validation nothing."""
    ticks = count()
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    always = ["--trainer.val_check_interval", "1"]
    _, watch = fitted(experiment, tmp_path, "--budget.minutes", str(11 / 60), *always)
    assert watch.steps == [6]


def test_a_resumed_run_goes_on_with_its_budget(experiment: Path, tmp_path: Path) -> None:
    cli, _ = fitted(experiment, tmp_path, "--budget.tokens", "300")
    last = Path(cli.trainer.log_dir) / "checkpoints" / "last.ckpt"
    state = torch.load(last, weights_only=True)
    assert state["callbacks"]["Budget"]["seconds"] > 0
    more = ["--budget.tokens", "500", "--ckpt_path", str(last)]
    _, watch = fitted(experiment, tmp_path, *more)
    assert 300 < watch.tokens[0] < watch.tokens[-2] < 500 <= watch.tokens[-1]
    used = state["supervised_tokens"] / 500
    rate = 1e-3 * 0.5 * (1 + math.cos(math.pi * (used - 0.04) / 0.96))
    assert watch.lrs[1] < rate
    assert watch.lrs[-1] == 0.0


@pytest.mark.slow
def test_processes_share_a_budget(experiment: Path, tmp_path: Path) -> None:
    """All stop at the same step, and run.json has the tokens of both."""
    flags = f"""--budget.tokens 1000 --trainer.devices 2 --trainer.strategy ddp
        --decode.final_prompts 1 --trainer.limit_val_batches 1
        --trainer.default_root_dir {tmp_path}"""
    command = [sys.executable, "-m", "dflash_lightning", "fit", "-c", str(experiment)]
    done = subprocess.run(
        [*command, *flags.split()], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (file,) = tmp_path.rglob("run.json")
    found = json.loads(file.read_text())
    assert 1000 <= found["supervised_tokens"] < 1000 + 2 * 4 * 16
    assert found["steps"] < 15


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tokens": 10, "minutes": 1.0}, "budget: one of them, not tokens and minutes"),
        ({"minutes": 0.0}, r"budget\.minutes: needs a positive number, got 0"),
        ({"flops": math.inf}, r"budget\.flops: needs a positive number"),
        ({"tokens": -1}, r"budget\.tokens: needs a positive number"),
    ],
)
def test_bad_budgets_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Budget(**asked)
