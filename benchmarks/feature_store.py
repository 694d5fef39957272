"""What storing the target's states saves: a depth sweep with `data.features` online and store.

    python benchmarks/feature_store.py

Five trainings of the quickstart's target that differ in depth, with equal steps, one after the
other in one process: first with the states computed in every step, then with a store that the first
of them fills and all share. Answers are made before and not timed; everything else a trial needs
is, the loading of the target included. Run it alone on the machine.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import auto_cli

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.sources import WordProblems
from dflash_lightning.module import DFlashModule
from dflash_lightning.target_spec import TargetConfig


def main(
    depths: Sequence[int] = (1, 2, 3, 5, 8),
    num_train: int = 160,
    epochs: int = 4,
    max_new_tokens: int = 96,
    target: str | None = None,
    cache_dir: str | None = None,
    out: str | None = None,
) -> None:
    """Measure the wall time of a depth sweep with and without the feature store.

    Args:
        depths: Drafter layers of each trial.
        num_train: Training prompts (word problems); 8 a step.
        epochs: Epochs a trial; the quickstart has 7.
        max_new_tokens: Longest answer, in tokens.
        target: Another target than the quickstart's.
        cache_dir: Keep answers here for another run; its stored states are deleted.
        out: Write the figures here as JSON.
    """
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(cache_dir or scratch)
        shutil.rmtree(cache / "features", ignore_errors=True)
        options: dict[str, Any] = {
            "prompts": WordProblems(num_train, 16, 16),
            "target": TargetConfig(**({"name": target} if target else {})),
            "block_size": 6,
            "anchors": RandomAnchors(20),
            "max_new_tokens": max_new_tokens,
            "max_length": 512,
            "cache_dir": str(cache),
        }
        DFlashDataModule(**options).prepare_data()
        found: dict[str, Any] = {"steps_per_trial": epochs * -(-num_train // 8)}
        for features in ("online", "store"):
            found[features] = sweep(depths, epochs, features, options)
        found["store"]["bytes"] = sum(f.stat().st_size for f in cache.rglob("shard_*.bin"))
    found["ratio"] = found["online"]["seconds"] / found["store"]["seconds"]
    print(json.dumps(found, indent=2))
    print(
        f"{len(depths)} trials of {found['steps_per_trial']} steps: "
        f"online {found['online']['seconds']:.1f} s, store {found['store']['seconds']:.1f} s, "
        f"{found['ratio']:.2f} x"
    )
    if out is not None:
        Path(out).write_text(json.dumps(found, indent=2) + "\n")


def sweep(
    depths: Sequence[int], epochs: int, features: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the seconds and the last training loss of each depth."""
    seconds, losses, steps = [], [], []
    for depth in depths:
        began = time.perf_counter()
        pl.seed_everything(0, verbose=False)
        module = DFlashModule(
            options["target"], block_size=6, num_layers=depth, draft_vocab=1536, lr=1.2e-3
        )
        trainer = pl.Trainer(
            max_epochs=epochs,
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        trainer.fit(module, datamodule=DFlashDataModule(**options, features=features))
        seconds.append(time.perf_counter() - began)
        losses.append(float(trainer.callback_metrics["train/loss"]))
        steps.append(trainer.global_step)
        print(f"{features}: depth {depth}, {steps[-1]} steps in {seconds[-1]:.1f} s", flush=True)
    return {
        "seconds": sum(seconds),
        "seconds_by_depth": seconds,
        "loss_by_depth": losses,
        "steps_by_depth": steps,
    }


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
