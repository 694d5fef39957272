"""Which checkpoints an experiment takes: those of its architecture, target and vocabulary."""

import logging
from typing import Any

import torch

from dflash_lightning.drafter.config import DrafterConfig, architecture_differences
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)


def check_checkpoint(checkpoint: dict[str, Any], drafter: Drafter, resuming: bool) -> None:
    """Refuse a checkpoint that does not fit the experiment's drafter, by naming the keys.

    Args:
        checkpoint: As Lightning loaded it.
        drafter: The drafter that the experiment built.
        resuming: Training goes on, so the draft vocabulary must be the same too; otherwise the
            checkpoint's is taken.

    Raises:
        UserError: Not ours, or architecture, target or draft vocabulary differ.
    """
    if "drafter_config" not in checkpoint:
        raise UserError("ckpt_path: this checkpoint was not written by dflash_lightning")
    saved = DrafterConfig.from_dict(checkpoint["drafter_config"])
    differing = architecture_differences(saved, drafter.config)
    if differing:
        raise UserError(
            "ckpt_path: the checkpoint's drafter differs from this experiment's in "
            + "; ".join(differing)
            + ". Set these keys as saved, or start without ckpt_path"
        )
    ids = checkpoint["state_dict"].get("drafter.draft_ids")
    if ids is None or torch.equal(ids.cpu(), drafter.draft_ids.cpu()):
        return
    if resuming:
        raise UserError(
            "ckpt_path: the draft vocabulary differs: the training answers are not those of the "
            "checkpoint"
        )
    log.info("draft vocabulary: taken from the checkpoint")
