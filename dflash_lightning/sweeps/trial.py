"""One trial: its command line, run in this process, and what came of it."""

import gc
import json
import logging
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from optuna import TrialPruned

from dflash_lightning.budget import budget_of
from dflash_lightning.cli import main
from dflash_lightning.data.files import write_whole
from dflash_lightning.errors import UserError

GRID = 5
"""Per cent of the training between which the pruner's steps are told apart."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: with metrics, pruned, or failed for a reason."""

    metrics: dict[str, float]
    reason: str | None = None
    pruned: bool = False
    copied_from: str | None = None


class Watch(pl.Callback):
    """Sees a trial train: how far it is, whether its loss is a number, whether to prune it.

    Args:
        monitor: What the pruner sees; None prunes nothing.
        hopeless: Told (per cent done, value), says whether to end the trial.
    """

    def __init__(
        self, monitor: str | None = None, hopeless: Callable[[int, float], bool] | None = None
    ) -> None:
        self.monitor, self.hopeless = monitor, hopeless
        self.progress = 0.0
        self._last = 0
        self._seen: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Follow the progress; end a trial whose loss is no number."""
        self.progress = progress_of(trainer)
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None and not math.isfinite(loss):
            raise UserError(f"train/loss is {float(loss)} after {trainer.global_step} steps")
        if self.monitor is not None and self.monitor.startswith("decode/"):
            self._report(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the pruner how the trial does."""
        validates = trainer.state.fn == "fit" and not trainer.sanity_checking
        if validates and self.monitor is not None and self.monitor.startswith("val/"):
            if self.monitor not in trainer.callback_metrics:
                raise UserError(f"monitor: this run logs no {self.monitor}")
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Tell a value once, and one in each part of the training."""
        value = trainer.callback_metrics.get(self.monitor or "")
        step = GRID * round(100 * progress_of(trainer) / GRID)
        if value is None or value is self._seen or self.hopeless is None:
            return
        if not self._last < step < 100:  # nothing is saved at the end
            return
        self._last, self._seen = step, value
        if self.hopeless(step, float(value)):
            raise TrialPruned(f"{self.monitor} is {float(value):.4g} at {step}%")


def progress_of(trainer: pl.Trainer) -> float:
    """Return the share of the training that is done."""
    budget = budget_of(trainer)
    if budget is not None and budget.asked:
        return budget.progress
    steps = trainer.estimated_stepping_batches
    return 0.0 if math.isinf(steps) else trainer.global_step / steps


def train(words: Sequence[str], folder: Path, watch: Watch, workers: int) -> Outcome:
    """Run a trial's command line; what it prints goes to `log.txt` in its folder.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a signal to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _printing_to(folder / "log.txt"):
        try:
            cli = main(list(words), callbacks=[watch], workers=workers)
            metrics = _metrics(cli.trainer, folder)
            del cli
            return Outcome(metrics)
        except TrialPruned as pruned:
            return Outcome({}, str(pruned), pruned=True)
        except UserError as error:
            return Outcome({}, str(error))
        except (KeyboardInterrupt, SystemExit):  # Lightning makes the first the second
            raise KeyboardInterrupt from None
        except Exception as error:
            if _interrupted(error):
                raise KeyboardInterrupt from None
            traceback.print_exc()
            return Outcome({}, _reason(error))
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _interrupted(error: BaseException | None) -> bool:
    """Whether an error came of cleaning up after an interruption, as torch's mode stack's does."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate" in str(error):
        return f"out of memory: {_line(error)}"
    return f"{type(error).__name__}: {_line(error)}"


def _metrics(trainer: pl.Trainer, folder: Path) -> dict[str, float]:
    """Return the finite figures of a run's end."""
    found = {key: float(value) for key, value in trainer.callback_metrics.items()}
    decoded = folder / "decode_val.json"
    if decoded.is_file():
        cost = json.loads(decoded.read_text()).get("cost", {})
        found |= {f"cost/{key}": float(value) for key, value in cost.items()}
    return {key: value for key, value in found.items() if math.isfinite(value)}


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Send everything that is printed or logged into a file."""
    names = ("", "dflash_lightning", "lightning", "lightning.pytorch", "lightning.fabric")
    handlers = [
        handler
        for name in names
        for handler in logging.getLogger(name or None).handlers
        if type(handler) is logging.StreamHandler
    ]
    before = [handler.stream for handler in handlers]
    with file.open("a", buffering=1) as stream:
        for handler in handlers:
            handler.setStream(stream)
        try:
            with redirect_stdout(stream), redirect_stderr(stream):
                yield
        finally:
            for handler, old in zip(handlers, before, strict=True):
                handler.setStream(old)
            sys.stdout.flush()


# ---- what finished trials leave behind -----------------------------------------------------------


def record(folder: Path, **found: Any) -> None:
    """Write a finished trial's trial.json: the last file of its folder."""
    write_whole(folder / "trial.json", (json.dumps(found, indent=1) + "\n").encode())


def finished(folder: Path, identity: str) -> dict[str, float] | None:
    """Return the metrics of a folder whose trial finished and trained the same; None otherwise."""
    run, trial = _json(folder / "run.json"), _json(folder / "trial.json")
    if run is None or trial is None or run.get("config_hash") != identity:
        return None
    metrics: dict[str, float] | None = trial.get("metrics")
    return metrics


def find_finished(results: Path, identity: str) -> tuple[Path, dict[str, float]] | None:
    """Return a finished run of any study below `results` that trained the same."""
    for file in sorted(results.glob("*/*/trial.json")):
        metrics = finished(file.parent, identity)
        if metrics is not None:
            return file.parent, metrics
    return None


def copy_run(source: Path, folder: Path) -> None:
    """Copy a run's folder by hard links where the disk allows; its trial.json stays behind."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("trial.json")
    shutil.copytree(source, folder, copy_function=link, ignore=ignored)


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
