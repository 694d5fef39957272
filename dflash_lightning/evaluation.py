"""The callback that decodes held-out prompts, in fit, validate and test: what a user would see."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from dflash_lightning.console import decoding_table
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.decoding.compare import (
    Other,
    check_assistant,
    other_decoders,
    tokens_per_second,
)
from dflash_lightning.decoding.cost import measure_cost
from dflash_lightning.decoding.evaluate import evaluate, marked_text
from dflash_lightning.decoding.loop import check_prompts
from dflash_lightning.decoding.outcome import Decoded
from dflash_lightning.decoding.proposer import DrafterProposer, decoding_copy
from dflash_lightning.decoding.report import DecodingReport
from dflash_lightning.errors import UserError
from dflash_lightning.figures import acceptance_figure
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import Target

log = logging.getLogger(__name__)


class DecodingEvaluation(pl.Callback):
    """Decodes held-out prompts with the drafter as it is and logs under `decode/`.

    Args:
        every_n_steps: Decode the validation prompts every so many optimizer steps; null: only at
            the end.
        num_prompts: Prompts to decode during fit.
        final_prompts: Prompts to decode at the end of fit, in validate and in test.
        max_new_tokens: Longest output, in tokens.
        batch_size: Prompts decoded together; 1 times what a single user sees, more is faster.
        eval_block_sizes: Block sizes to decode with besides the trained one, at the end.
        compare: What else to time on the same prompts at the end: `prompt_lookup`, `assistant`
            (plain decoding always is).
        assistant: Small autoregressive model for `compare: [assistant]`, named as a target is.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        num_prompts: int = 8,
        final_prompts: int = 32,
        max_new_tokens: int = 256,
        batch_size: int = 1,
        eval_block_sizes: list[int] | None = None,
        compare: list[Literal["plain", "prompt_lookup", "assistant"]] | None = None,
        assistant: str | None = None,
    ) -> None:
        counts = {
            "num_prompts": num_prompts,
            "final_prompts": final_prompts,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "every_n_steps": every_n_steps or 1,
        }
        for name, count in counts.items():
            if count < 1:
                raise UserError(f"decode.{name}: needs at least 1, got {count}")
        if min(eval_block_sizes or [2]) < 2:
            raise UserError(
                f"decode.eval_block_sizes: needs 2 or more each, got {eval_block_sizes}"
            )
        if "assistant" in (compare or []) and assistant is None:
            raise UserError("decode.assistant: comparing with an assistant needs the name of one")
        self.every_n_steps, self.num_prompts = every_n_steps, num_prompts
        self.final_prompts, self.max_new_tokens = final_prompts, max_new_tokens
        self.batch_size, self.eval_block_sizes = batch_size, eval_block_sizes or []
        self.compare, self.assistant = compare or [], assistant
        self._last_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't be decoded or compared with, before anything is trained."""
        if stage == "predict":
            return
        split = "test" if stage == "test" else "val"
        count = self.final_prompts if stage != "fit" else max(self.num_prompts, self.final_prompts)
        prompts = self._prompts(trainer, split, count)
        if not prompts:
            raise UserError(f"data.prompts: the {split} split has no prompt to decode")
        data = cast(DFlashDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        try:
            check_prompts(data.spec.config.max_position_embeddings, prompts, self.max_new_tokens)
        except UserError as error:
            raise UserError(f"decode.max_new_tokens: {split} {error}") from error
        if "assistant" in self.compare:
            check_assistant(self.assistant, data.spec.config.vocab_size, data.cache_dir)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Decode when a multiple of `every_n_steps` was just reached."""
        step = trainer.global_step
        due = self.every_n_steps is not None and step % self.every_n_steps == 0
        if due and step != self._last_step and step != trainer.max_steps:
            self._last_step = step
            if trainer.is_global_zero:
                self._evaluate(trainer, *self._parts(trainer, pl_module, "val", self.num_prompts))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Don't decode again right after a resume."""
        self._last_step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decode the validation prompts, print the table, keep drafter and figures with the run."""
        self._conclude(trainer, pl_module, "val")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decode after `validate`."""
        if trainer.state.fn == "validate":
            self._conclude(trainer, pl_module, "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decode the test prompts after `test`."""
        self._conclude(trainer, pl_module, "test")

    def _conclude(self, trainer: pl.Trainer, module: pl.LightningModule, split: str) -> None:
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        if folder is not None and trainer.state.fn == "fit":
            cast(DFlashModule, module).drafter.save_pretrained(folder / "drafter")
        proposer, prompts = self._parts(trainer, module, split, self.final_prompts)
        others = self._others(proposer.target, prompts, trainer)
        found = self._evaluate(trainer, proposer, prompts, others)
        sizes = self._other_block_sizes(proposer, prompts)
        self._log_block_sizes(trainer, sizes)
        cost = measure_cost(proposer.target, proposer, prompts[0])
        figures = {**asdict(cost), "expected_speedup": cost.speedup(found.accept_len)}
        for logger in trainer.loggers:
            logger.log_metrics({f"cost/{k}": v for k, v in figures.items()}, trainer.global_step)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            reports = {f"k{k}": r.to_dict() for k, r in sizes.items()}
            kept = {**found.to_dict(), "cost": figures, "block_sizes": reports}
            (folder / f"decode_{split}.json").write_text(json.dumps(kept, indent=1) + "\n")
        decoding_table(found, split, folder, sizes, cost)

    def _others(
        self, target: Target, prompts: list[Tensor], trainer: pl.Trainer
    ) -> dict[str, float]:
        names: list[Other] = [name for name in self.compare if name != "plain"]
        cache_dir = trainer.datamodule.cache_dir  # type: ignore[attr-defined]
        decoders = other_decoders(names, target, self.assistant, cache_dir)
        return {
            name: tokens_per_second(decoder, prompts, self.max_new_tokens)
            for name, decoder in decoders.items()
        }

    def _other_block_sizes(
        self, trained: DrafterProposer, prompts: list[Tensor]
    ) -> dict[int, DecodingReport]:
        found = {}
        for size in self.eval_block_sizes:
            if size != trained.block_size:
                proposer = DrafterProposer(trained.drafter, trained.target, size, longer=True)
                found[size] = self._decoded(proposer, prompts)[0]
        return found

    def _parts(
        self, trainer: pl.Trainer, module: pl.LightningModule, split: str, num_prompts: int
    ) -> tuple[DrafterProposer, list[Tensor]]:
        """Return a proposer of the drafter's copy, so the module stays as it is, and prompts."""
        if not isinstance(module, DFlashModule) or module.target is None:
            raise UserError("decode: DecodingEvaluation needs a DFlashModule")
        drafter = decoding_copy(module.drafter, module.target.dtype)
        proposer = DrafterProposer(drafter, module.target)
        return proposer, self._prompts(trainer, split, num_prompts)

    def _evaluate(
        self,
        trainer: pl.Trainer,
        proposer: DrafterProposer,
        prompts: list[Tensor],
        others: dict[str, float] | None = None,
    ) -> DecodingReport:
        found, decoded = self._decoded(proposer, prompts, others)
        self._log(trainer, found, marked_text(proposer.target, prompts[0], decoded[0]))
        return found

    def _decoded(
        self,
        proposer: DrafterProposer,
        prompts: list[Tensor],
        others: dict[str, float] | None = None,
    ) -> tuple[DecodingReport, list[Decoded]]:
        return evaluate(
            proposer.target, proposer, prompts, self.max_new_tokens, self.batch_size, others
        )

    def _prompts(self, trainer: pl.Trainer, split: str, count: int) -> list[Tensor]:
        ids = trainer.datamodule.held_out_prompts[split][:count]  # type: ignore[attr-defined]
        return [torch.tensor(p) for p in ids]

    def _log_block_sizes(self, trainer: pl.Trainer, sizes: dict[int, DecodingReport]) -> None:
        values = {
            name.replace("decode/", f"decode_k{size}/"): value
            for size, found in sizes.items()
            for name, value in found.scalars().items()
        }
        for logger in trainer.loggers:
            if values:
                logger.log_metrics(values, step=trainer.global_step)

    def _log(self, trainer: pl.Trainer, found: DecodingReport, sample: str) -> None:
        scores = {"hp/accept_len": found.accept_len, "hp/speedup": found.speedup}
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in found.scalars().items()})
        for logger in trainer.loggers:
            logger.log_metrics({**found.scalars(), **scores}, step=trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                board = logger.experiment
                board.add_figure("decode/acceptance", acceptance_figure(found), trainer.global_step)
                board.add_text("decode/sample", sample, trainer.global_step)
            logger.save()


def run_folder(trainer: pl.Trainer) -> Path | None:
    """Return where the run's files lie, None without a logger.

    Any process may ask alone; `trainer.log_dir` waits until all of them do.
    """
    for logger in trainer.loggers[:1]:
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        return Path(folder) if folder else None
    return None
