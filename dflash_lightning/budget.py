"""How much a run is trained: so many supervised tokens, minutes or operations, instead of steps."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch

from dflash_lightning.data.blocks import Batch
from dflash_lightning.errors import UserError
from dflash_lightning.flops import batch_flops


class Budget(pl.Callback):
    """Ends training once a budget is used up, and counts what was used.

    The last step is the one that reaches it. The learning rate follows the share that is used. At
    most one of the three may be given; with none, `trainer.max_steps` or `max_epochs` ends a run.

    Args:
        tokens: Supervised tokens, over all processes.
        minutes: Time of training steps; loading, validation and decoding don't count.
        flops: Useful operations of the drafter's training steps (see `flops.py`), over all
            processes.
    """

    def __init__(
        self, tokens: int | None = None, minutes: float | None = None, flops: float | None = None
    ) -> None:
        asked = {"tokens": tokens, "minutes": minutes, "flops": flops}
        self.asked = {name: value for name, value in asked.items() if value is not None}
        if len(self.asked) > 1:
            raise UserError(f"budget: one of them, not {' and '.join(self.asked)}")
        for name, value in self.asked.items():
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"budget.{name}: needs a positive number, got {value}")
        self.progress, self.tokens = 0.0, 0
        self.seconds, self.flops = 0.0, 0.0
        self._began: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take up what a resumed run had used."""
        self.progress = self._progress(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start the clock; count the batch's operations where they are the budget."""
        self._began = time.perf_counter()
        if "flops" in self.asked:
            self.flops += batch_flops(cast(Any, pl_module).drafter.config, batch)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Find what is used, this step included."""
        self.progress = self._progress(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Stop the clock; stop training if the budget is used up."""
        if "minutes" in self.asked and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.seconds, self._began = self._elapsed(), None
        if self.progress >= 1:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, float]:
        """Return what was used, for a checkpoint."""
        return {"seconds": self._elapsed(), "flops": self.flops}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Take up what was used before a checkpoint."""
        self.seconds, self.flops = state_dict["seconds"], state_dict["flops"]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up the tokens of all processes."""
        self.tokens = int(_total(trainer, pl_module, cast(Any, pl_module).supervised_tokens))

    def _progress(self, trainer: pl.Trainer, module: pl.LightningModule) -> float:
        """Return the share of the budget that is used, the same in all processes."""
        for name, limit in self.asked.items():
            if name == "minutes":
                used = _total(trainer, module, self._elapsed() / 60) / trainer.world_size
            else:
                own = cast(Any, module).supervised_tokens if name == "tokens" else self.flops
                used = _total(trainer, module, own)
            return used / limit
        return 0.0

    def _elapsed(self) -> float:
        running = 0.0 if self._began is None else time.perf_counter() - self._began
        return self.seconds + running


def _total(trainer: pl.Trainer, module: pl.LightningModule, value: float) -> float:
    """Return the sum of a value over all processes."""
    if trainer.world_size == 1:
        return float(value)
    own = torch.tensor(float(value), dtype=torch.float64, device=module.device)
    return float(trainer.strategy.reduce(own, reduce_op="sum"))


class Schedule(NamedTuple):
    """Where the learning rate stands: `done(steps)` of `total`, the first `warmup` of it rising."""

    total: float
    warmup: float
    done: Callable[[int], float]


def budget_of(trainer: pl.Trainer) -> Budget | None:
    """Return a trainer's budget."""
    return next((c for c in trainer.callbacks if isinstance(c, Budget)), None)  # type: ignore[attr-defined]


def schedule_of(trainer: pl.Trainer, warmup_ratio: float) -> Schedule:
    """Return the schedule of a run: by its budget if it has one, else by its steps.

    Raises:
        UserError: The run has no end.
    """
    budget = budget_of(trainer)
    if budget is not None and budget.asked:
        return Schedule(1.0, warmup_ratio, lambda _: budget.progress)
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise UserError(
            "trainer.max_epochs: the cosine needs an end; set it, trainer.max_steps or a budget"
        )
    return Schedule(int(steps), round(warmup_ratio * steps), float)
