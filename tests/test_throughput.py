"""What a run logs of its speed while it goes."""

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import RandomSampler

from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.loading import EpochSampler, ResumableLoader
from dflash_lightning.throughput import Throughput

NAMES = ("supervised_tokens_per_s", "anchors_per_s", "data_wait_share", "peak_memory_gb")
STEP, LOAD, VALIDATE = 0.03, 0.02, 1.0


def batch() -> Batch:
    def mask(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    keep = mask(1, 4)
    keep[0, 3] = False
    ids = torch.zeros(1, 10, dtype=torch.int64)
    blocks = torch.zeros(1, 4, 2, dtype=torch.int64)
    return Batch(ids, mask(1, 10), mask(1, 10), blocks[..., 0], keep, blocks, blocks, mask(1, 4, 2),
                 blocks, ids)  # fmt: skip


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: Any) -> int:
        time.sleep(LOAD)
        return 0


class Sleeper(pl.LightningModule):
    """Steps that take as long as they say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.supervised_tokens = 0

    def training_step(self, batch: Batch, index: int) -> Tensor:
        time.sleep(STEP)
        self.supervised_tokens += int(batch.loss_mask.sum())
        return 0 * self.weight

    def validation_step(self, batch: Batch, index: int) -> None:
        time.sleep(VALIDATE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> ResumableLoader:
    data = Slow()
    sampler = EpochSampler([1] * len(data), 1, 0, shuffle=True)
    return ResumableLoader(data, batch_size=1, sampler=sampler, collate_fn=lambda rows: batch())


def logged(folder: Path, accumulate: int = 1) -> tuple[list[dict[str, float]], ResumableLoader]:
    logger, given = CSVLogger(folder), loader()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=4,
        val_check_interval=8,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        logger=logger,
        callbacks=[Throughput()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Sleeper(), given, loader())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        {key: float(value) for key, value in row.items() if value}
        for row in rows
        if row["throughput/anchors_per_s"]
    ], given


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rates_are_of_the_steps_since_the_last_log(tmp_path: Path, accumulate: int) -> None:
    """Time of steps and of waiting counts, time of validation doesn't."""
    rows, given = logged(tmp_path, accumulate)
    assert [row["step"] + 1 for row in rows] == list(range(4, 24 // accumulate + 1, 4))
    for row in rows:
        found = {name: row[f"throughput/{name}"] for name in NAMES}
        assert found["anchors_per_s"] == pytest.approx(
            0.3 * found["supervised_tokens_per_s"], rel=1e-4
        ), "3 live blocks and 10 tokens a batch"
        assert 2.5 / (STEP + LOAD) < found["supervised_tokens_per_s"] <= 10 / (STEP + LOAD)
        assert 0.1 < found["data_wait_share"] < 0.75
        assert 0.05 < found["peak_memory_gb"] < 64
    assert given.waited >= 24 * LOAD


def test_a_loader_of_another_kind_waits_for_nothing(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=4, log_every_n_steps=2, logger=CSVLogger(tmp_path),
        callbacks=[Throughput()], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = Slow()
    plain = torch.utils.data.DataLoader(
        data, sampler=RandomSampler(data), collate_fn=lambda _: batch()
    )
    trainer.fit(Sleeper(), plain)
    assert float(trainer.callback_metrics["throughput/data_wait_share"]) == 0
