"""How fast a run is, logged as it goes: tokens, blocks, waiting for data, memory.

Lightning's ThroughputMonitor makes the GPU finish every step to time it; here nothing waits between
two logged steps.
"""

import logging
import resource
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dflash_lightning.module import DFlashModule

log = logging.getLogger(__name__)


class Throughput(pl.Callback):
    """Logs `throughput/`, over the steps since it last did, at the trainer's logging interval.

    `supervised_tokens_per_s` and `anchors_per_s` of all processes together; `data_wait_share`, the
    share of the time that this process waited for its next batch; `peak_memory_gb` so far: on CUDA
    of tensors, else of the process. Validation and decoding don't count as time.
    """

    def __init__(self) -> None:
        self._seconds = self._began = self._waited_before = 0.0
        self._tokens_before, self._last_step = 0, 0
        self._anchors: Tensor | int = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count."""
        self._last_step = trainer.global_step
        self._begin(_tokens(pl_module), _waited(trainer))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop the clock; log if it is time to."""
        self._anchors = self._anchors + batch.block_keep_mask.sum()
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 1)
        if step != self._last_step and every and step % every == 0:
            self._last_step = step
            self._log(trainer, pl_module)
        else:
            self._seconds += time.perf_counter() - self._began

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say how long the target ran, where its states aren't stored."""
        if isinstance(pl_module, DFlashModule) and pl_module.target_time.uses:
            log.info("data.features=online: the target's states took %s", pl_module.target_time)

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        tokens, anchors = _tokens(module), int(self._anchors)  # on CUDA, waits for the step
        self._seconds += time.perf_counter() - self._began
        waited = _waited(trainer) - self._waited_before
        seconds = self._seconds + waited
        rates = {
            "supervised_tokens_per_s": (tokens - self._tokens_before) / seconds,
            "anchors_per_s": anchors / seconds,
        }
        others = {"data_wait_share": waited / seconds, "peak_memory_gb": _peak(trainer) / 1e9}
        for found, how in ((rates, "sum"), (others, "max")):
            named = {f"throughput/{name}": value for name, value in found.items()}
            module.log_dict(named, reduce_fx=how, sync_dist=trainer.world_size > 1)
        self._begin(tokens, _waited(trainer))

    def _begin(self, tokens: int, waited: float) -> None:
        self._tokens_before, self._waited_before = tokens, waited
        self._seconds, self._anchors = 0.0, 0


def _tokens(module: pl.LightningModule) -> int:
    return int(getattr(module, "supervised_tokens", 0))


def _waited(trainer: pl.Trainer) -> float:
    return float(getattr(trainer.train_dataloader, "waited", 0.0))


def _peak(trainer: pl.Trainer) -> int:
    """Return bytes."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
