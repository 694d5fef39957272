"""The callback that decodes held-out prompts, in fit, validate and test: what a user would see."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from tqdm import tqdm

from dflash_lightning.console import decoding_table
from dflash_lightning.decoding.greedy import Decoded, decode_plain, divergence, speculate
from dflash_lightning.decoding.proposer import DrafterProposer, Proposer, decoding_copy
from dflash_lightning.decoding.report import DecodingReport, Divergence, report
from dflash_lightning.errors import UserError
from dflash_lightning.figures import acceptance_figure
from dflash_lightning.module import DFlashModule
from dflash_lightning.target import Target

log = logging.getLogger(__name__)


def evaluate(
    target: Target, proposer: Proposer, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[DecodingReport, list[Decoded]]:
    """Decode each prompt speculatively and plainly, one right after the other, and report on both.

    Args:
        target: The frozen target.
        proposer: The drafter behind the proposer protocol.
        prompts: Token ids `[P]` of each prompt.
        max_new_tokens: Longest output, in tokens.
    """
    if not prompts:
        raise UserError("data.prompts: there is no held-out prompt to decode")
    speculate(target, proposer, prompts[0], 8, ())  # warm up
    decode_plain(target, prompts[0], 4, ())
    decoded, plain, divergences = [], [], []
    for n, prompt in enumerate(
        tqdm(prompts, desc="decoding held-out prompts", unit="prompt", leave=False)
    ):
        decoded.append(speculate(target, proposer, prompt, max_new_tokens))
        plain.append(decode_plain(target, prompt, max_new_tokens))
        found = divergence(target, prompt, decoded[-1].tokens, plain[-1].tokens)
        if found is not None:
            divergences.append(Divergence(n, *found))
    return report(decoded, plain, divergences, proposer.block_size), decoded


class DecodingEvaluation(pl.Callback):
    """Decodes held-out prompts with the drafter as it is and logs under `decode/`.

    Args:
        every_n_steps: Decode the validation prompts every so many optimizer steps; null: only at
            the end.
        num_prompts: Prompts to decode during fit.
        final_prompts: Prompts to decode at the end of fit, in validate and in test.
        max_new_tokens: Longest output, in tokens.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        num_prompts: int = 8,
        final_prompts: int = 32,
        max_new_tokens: int = 256,
    ) -> None:
        self.every_n_steps, self.num_prompts = every_n_steps, num_prompts
        self.final_prompts, self.max_new_tokens = final_prompts, max_new_tokens
        self._last_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse data without prompts to decode, before anything is trained."""
        split = "test" if stage == "test" else "val"
        if stage != "predict" and not self._prompts(trainer, split, 1):
            raise UserError(f"data.prompts: the {split} split has no prompt to decode")

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
                self._evaluate(trainer, pl_module, "val", self.num_prompts)

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
        folder = Path(trainer.log_dir) if trainer.loggers and trainer.log_dir else None
        if folder is not None and trainer.state.fn == "fit":
            cast(DFlashModule, module).drafter.save_pretrained(folder / "drafter")
        found = self._evaluate(trainer, module, split, self.final_prompts)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figures = json.dumps(found.to_dict(), indent=1)
            (folder / f"decode_{split}.json").write_text(figures + "\n")
        decoding_table(found, split, folder)

    def _evaluate(
        self, trainer: pl.Trainer, module: pl.LightningModule, split: str, num_prompts: int
    ) -> DecodingReport:
        """Decode with a copy of the drafter: the module stays as it is."""
        if not isinstance(module, DFlashModule) or module.target is None:
            raise UserError("decode: DecodingEvaluation needs a DFlashModule")
        target = module.target
        proposer = DrafterProposer(decoding_copy(module.drafter, target.dtype), target)
        prompts = self._prompts(trainer, split, num_prompts)
        with torch.autocast(module.device.type, enabled=False):
            found, decoded = evaluate(target, proposer, prompts, self.max_new_tokens)
        self._log(trainer, found, marked_text(target, prompts[0], decoded[0]))
        return found

    def _prompts(self, trainer: pl.Trainer, split: str, count: int) -> list[Tensor]:
        ids = trainer.datamodule.held_out_prompts[split][:count]  # type: ignore[attr-defined]
        return [torch.tensor(p) for p in ids]

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


def marked_text(target: Target, prompt: Tensor, decoded: Decoded) -> str:
    """Return a decoded sample as Markdown in which accepted drafts are bold."""
    if target.tokenizer is None:
        return ""
    pieces, at = [target.text(decoded.tokens[:1])], 1
    for cycle in decoded.cycles:
        drafts = min(cycle.accepted, cycle.committed)
        pieces.append(_bold(target.text(decoded.tokens[at : at + drafts])))
        pieces.append(target.text(decoded.tokens[at + drafts : at + cycle.committed]))
        at += cycle.committed
    head = f"accept length {decoded.accept_len:.2f}; drafted and accepted tokens are bold\n\n"
    return head + "> " + target.text(prompt) + "\n\n" + "".join(pieces)


def _bold(text: str) -> str:
    inner = text.strip()
    return text.replace(inner, f"**{inner}**", 1) if inner else text
