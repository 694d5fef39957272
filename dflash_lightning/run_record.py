"""What a run keeps of itself: config.yaml, run.json, HParams, and what a resume compares."""

import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from dflash_lightning import __version__
from dflash_lightning.budget import budget_of
from dflash_lightning.data.files import write_whole
from dflash_lightning.evaluation import run_folder

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "jsonargparse", "optuna", "tensorboard", "numpy")
PLACES = (
    "base",
    "ckpt_path",
    "config",
    "data.cache_dir",
    "data.num_workers",
    "model.gradient_checkpointing",
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.logger",
    "weights_only",
)
"""Keys that say where and how a run is computed, shown and loaded, not what is trained."""


class RunRecord(SaveConfigCallback):
    """Keeps the configuration: config.yaml, HParams tab, and checkpoints to compare on resume.

    Args:
        parser: Made the configuration.
        config: The configuration.
        command: The command line.
        workers: Processes that train on this machine side by side.
    """

    def __init__(
        self, parser: Any, config: Any, command: Sequence[str] = (), workers: int = 1, **_: Any
    ) -> None:
        super().__init__(parser, config, save_to_log_dir=False)
        self.command, self.workers = list(command), workers

    @property
    def plain(self) -> dict[str, Any]:
        """The configuration as plain types."""
        found = plain(self.parser, self.config)
        found.pop("base", None)  # its keys are all here
        return found

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write config.yaml into the run's folder and fill the HParams tab."""
        folder = run_folder(trainer)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = "config.yaml" if stage == "fit" else f"config_{stage}.yaml"
        (folder / name).write_text(yaml.safe_dump(self.plain, sort_keys=False))
        if stage != "fit":
            return
        self._write(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(
                    hyperparameters(self.plain), {"hp/accept_len": 1.0, "hp/speedup": 0.0}
                )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write run.json again, with what the run came to."""
        if trainer.is_global_zero:
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        folder, budget = run_folder(trainer), budget_of(trainer)
        if folder is None:
            return
        found = {
            "command": self.command,
            "config_hash": config_hash(self.plain),
            "seed": self.plain["seed_everything"],
            "supervised_tokens": 0 if budget is None else budget.tokens,
            "steps": trainer.global_step,
            "train_seconds": None if budget is None else round(budget.seconds, 3),
            "budget": (budget.asked or None) if budget else None,
            "environment": environment(self.workers),
        }
        write_whole(folder / "run.json", (json.dumps(found, indent=1) + "\n").encode())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the configuration in the checkpoint."""
        checkpoint["experiment"] = self.plain

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say which keys differ from the checkpoint's experiment."""
        saved, asked = flat(checkpoint.get("experiment", {})), flat(self.plain)
        for key in sorted(saved.keys() & asked.keys() - {"ckpt_path"}):
            if saved[key] != asked[key]:
                kept = (
                    " (the checkpoint's optimizer state keeps the old value)"
                    if key in _IN_OPTIMIZER
                    else ""
                )
                log.info(
                    "differs from the checkpoint: %s: %s -> %s%s", key, saved[key], asked[key], kept
                )


_IN_OPTIMIZER = ("model.lr", "model.betas", "model.weight_decay")


def plain(parser: Any, config: Any) -> dict[str, Any]:
    """Return a parsed configuration as plain types."""
    found: dict[str, Any] = json.loads(parser.dump(config, skip_none=False, format="json"))
    return found


def config_hash(config: dict[str, Any], package: str = __version__) -> str:
    """Return the identity of what a configuration trains: the same wherever and however it runs.

    Folders, logger, cache and loader processes don't count; the package's version does.
    """
    kept = {
        key: value
        for key, value in flat(config).items()
        if not any(key == place or key.startswith(f"{place}.") for place in PLACES)
    }
    text = json.dumps([package, kept], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment(workers: int = 1) -> dict[str, Any]:
    """Return what a run ran on: versions, commit, machine, cores, threads, workers beside it."""
    return {
        "versions": _versions(),
        "commit": _commit(),
        "machine": _machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "workers": workers,
    }


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dflash_lightning": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def _commit() -> str | None:
    """Return the commit of the package's own repository; None where it isn't in one."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def _machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    if torch.cuda.is_available():
        name += f", {torch.cuda.get_device_name()}"
    return f"{platform.node()}: {name}, {platform.system()}"


def hyperparameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the model's, the data's and the seed's values for the HParams tab, flat."""
    return {
        k: v
        for k, v in flat(config).items()
        if k.split(".")[0] in ("model", "data", "seed_everything")
    }


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys joined by dots; lists become text.

    >>> flat({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': 1, 'c': '[1, 2]'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = str(value) if isinstance(value, list) else value
    return found
