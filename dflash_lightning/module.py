"""The LightningModule: the frozen target and the trainable drafter meet here, and nowhere else."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from dflash_lightning.budget import schedule_of
from dflash_lightning.checkpoints import check_checkpoint
from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.draft_vocab import choose_draft_vocab
from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Decoded
from dflash_lightning.decoding.proposer import DrafterProposer, decoding_copy
from dflash_lightning.drafter.attention import AttentionName
from dflash_lightning.drafter.axes import Axes
from dflash_lightning.drafter.config import drafter_config
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.training import training_hidden
from dflash_lightning.errors import UserError
from dflash_lightning.initialisation import Layers, check_count, copy_target_layers
from dflash_lightning.losses import LossOutput
from dflash_lightning.memory import keep_freed_memory
from dflash_lightning.metrics import AcceptanceBySlot, WeightedMean, acceptance_scalars
from dflash_lightning.objective import Objective
from dflash_lightning.optimizer import adamw_with_cosine, check_betas, scale_gradients
from dflash_lightning.position_weights import ExpWeights, PositionWeights, check_weights
from dflash_lightning.slot_losses import DataToken, Loss
from dflash_lightning.stopwatch import Stopwatch
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_spec import TargetConfig


class DFlashModule(pl.LightningModule):
    """A DFlash drafter in training, with the target it drafts for.

    Checkpoints hold the drafter only: the target is a plain attribute that Lightning neither saves
    nor casts.

    Args:
        target: Which language model is drafted for, and where it is tapped.
        block_size: K: the anchor and the K-1 tokens drafted after it (16 drafts 15).
        num_layers: Drafter layers (depth); independent of the taps.
        axes: The architecture's other axes; the defaults are DFlash as published.
        draft_vocab: How many target tokens the drafter can say, the most frequent in the training
            answers; null means all.
        loss: What a slot should say: `DataToken` of the data's token, `TargetArgmax`,
            `TargetKL`, `TargetTV`, `Mix` of several, or your own `Loss`.
        position_weights: How much slots count: `ExpWeights(gamma)`, `UniformWeights`,
            `DPaceWeights(alpha)`, or your own.
        init_from_layers: Target layers that the drafter's layers start from, one each, or `last`:
            as many of its last; null starts at random.
        intermediate_size: Width of the drafter's MLP; null takes the target's.
        lr: Peak learning rate of AdamW.
        betas: Its averages of gradients and of their squares.
        weight_decay: Decay of matrices; norms never decay.
        warmup_ratio: Share of the run in which the rate rises; then it falls as a cosine to 0.
        attention: Of training blocks: auto (flex on CUDA, else chunked), dense, chunked or flex.
        loss_chunk: Slots whose logits exist at once; bounds memory, changes no result.
        gradient_checkpointing: Keep only what enters each drafter layer, and run the layer again
            for its gradients; saves memory, takes time, changes no result.
    """

    def __init__(
        self,
        target: TargetConfig = TargetConfig(),  # noqa: B008
        block_size: int = 16,
        num_layers: int = 5,
        axes: Axes = Axes(),  # noqa: B008
        draft_vocab: int | None = None,
        loss: Loss = DataToken(),  # noqa: B008
        position_weights: PositionWeights = ExpWeights(),  # noqa: B008
        init_from_layers: Layers | None = None,
        intermediate_size: int | None = None,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.04,
        attention: AttentionName = "auto",
        loss_chunk: int = 512,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.target_config, self.block_size, self.num_layers = target, block_size, num_layers
        self.axes = axes.check(num_layers, block_size, gradient_checkpointing)
        self.draft_vocab, self.loss, self.position_weights = draft_vocab, loss, position_weights
        check_weights(position_weights, axes.denoising_steps)
        self.init_from_layers = check_count(init_from_layers, num_layers)
        self.needs_final_states = bool(loss.needs)
        self.intermediate_size, self.betas = intermediate_size, check_betas(betas)
        self.lr, self.weight_decay, self.warmup_ratio = lr, weight_decay, warmup_ratio
        self.attention: AttentionName = attention
        self.loss_chunk, self.gradient_checkpointing = loss_chunk, gradient_checkpointing
        self.drafter: Drafter
        self.target: Target | None = None
        self.train_loss, self.val_loss = WeightedMean(), WeightedMean()
        self.acceptance = AcceptanceBySlot(block_size - 1)
        self.target_time = Stopwatch()
        self._supervised_tokens: Tensor | int = 0
        self._objective: Objective | None = None
        self._train_position: dict[str, int] | None = None

    @property
    def supervised_tokens(self) -> int:
        """Supervised tokens trained on so far, by this process (on CUDA, reading it waits)."""
        return int(self._supervised_tokens)

    # ---- building --------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target onto the training device and build the drafter to its measure.

        Runs after the data is there.
        """
        if self.target is not None:
            return
        data = self._datamodule()
        self.target = load_target(data.spec, self.trainer.strategy.root_device)
        self.drafter = Drafter(
            drafter_config(
                self.target.config,
                num_layers=self.num_layers,
                block_size=self.block_size,
                mask_token_id=self.target.mask_token_id,
                target_layer_ids=self.target.target_layer_ids,
                draft_vocab_size=self.draft_vocab,
                intermediate_size=self.intermediate_size,
                target_name=self.target_config.name,
                target_revision=self.target_config.revision,
                target_dtype=self.target_config.dtype,
                target_fingerprint=self.target.fingerprint,
                axes=self.axes,
            )
        )
        self.drafter.gradient_checkpointing = self.gradient_checkpointing
        if self.draft_vocab is not None:
            size = self.target.num_embeddings
            ids = choose_draft_vocab(data.samples["train"], size, self.draft_vocab)
            self.drafter.draft_ids.copy_(ids)
        if self.init_from_layers is not None:
            copy_target_layers(self.drafter, self.target, self.init_from_layers)

    def _datamodule(self) -> DFlashDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, DFlashDataModule):
            raise UserError("data: DFlashModule needs a DFlashDataModule")
        return data

    # ---- one step --------------------------------------------------------------------------------

    def target_states(self, batch: Batch) -> Tensor | None:
        """Return the tapped states `[B, S, T*H]`; behind them the final ones, if the loss asks."""
        if batch.target_hidden is not None:
            return batch.target_hidden
        assert self.target is not None
        if not self.needs_final_states and self.drafter.config.injection == "none":
            return None
        rows = (batch.input_ids, batch.attention_mask, batch.document_starts)
        with self.target_time, torch.autocast(self.device.type, enabled=False):
            return self.target.document_states(*rows, final=self.needs_final_states)

    def block_hidden(self, batch: Batch, states: Tensor | None = None) -> Tensor:
        """Return the drafter's hidden states `[B, N, K, H]` of a batch's blocks.

        The target's `states` are computed where they aren't given.
        """
        assert self.target is not None
        states = self.target_states(batch) if states is None else states
        if states is not None:
            states = states[..., : self.drafter.config.num_taps * self.drafter.config.hidden_size]
        return training_hidden(self.drafter, self.target, batch, states, self.attention)

    def block_loss(self, batch: Batch) -> tuple[LossOutput, Tensor, Tensor]:
        """Return the loss of a batch's labelled slots, its denominator, and which slots are right.

        Whether each slot is right is `[B, N, K-1]` bool.
        """
        if self._objective is None:
            assert self.target is not None
            self._objective = Objective(
                self.drafter, self.target, self.loss, self.position_weights, self.loss_chunk
            )
        states = self.target_states(batch)
        return self._objective(self.block_hidden(batch, states), batch, states)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss's numerator.

        `on_before_optimizer_step` divides by the denominator of the whole window.
        """
        output, denominator, _ = self.block_loss(batch)
        self.train_loss.update(output.numerator, denominator)
        self._supervised_tokens = self._supervised_tokens + batch.loss_mask.sum()
        self.log("train/padding_share", 1 - batch.attention_mask.float().mean())
        return output.numerator

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turn the accumulated gradient of `sum(w * loss)` into that of `sum(w * loss) / sum(w)`.

        Before clipping.
        """
        sums = torch.stack([self.train_loss.total, self.train_loss.weight])
        window = cast(Tensor, self.all_gather(sums))
        total, weight = window.reshape(-1, 2).sum(dim=0)
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        scale_gradients(self.drafter, torch.where(weight > 0, undo / weight, 0.0))
        if weight > 0:
            self.log("train/loss", (total / weight).float(), prog_bar=True)
        self.log("train/supervised_tokens", torch.as_tensor(self._supervised_tokens).float())
        self.train_loss.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Score a batch against the target's own tokens (teacher-forced)."""
        output, denominator, correct = self.block_loss(batch)
        self.val_loss.update(output.numerator, denominator)
        self.acceptance.update(correct, batch.label_mask[..., 1:])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Score a batch of the test split."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[int], batch_idx: int) -> dict[str, Any]:
        """Decode one prompt with the drafter; returns text, token ids and accept length."""
        assert self.target is not None
        decoded = self.decode(torch.tensor(batch), self._datamodule().max_new_tokens)
        return {
            "prompt": self.target.text(batch),
            "text": self.target.text(decoded.tokens, skip_special_tokens=True),
            "token_ids": decoded.tokens,
            "accept_len": decoded.accept_len,
        }

    def decode(self, prompt: Tensor, max_new_tokens: int) -> Decoded:
        """Decode one prompt `[P]` with the current drafter, in the target's dtype."""
        assert self.target is not None
        proposer = DrafterProposer(decoding_copy(self.drafter, self.target.dtype), self.target)
        return decode(self.target, [prompt], proposer, max_new_tokens)[0]

    # ---- epochs ----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Forget a window that an earlier fit left unfinished, and place a resumed train loader.

        Lightning places it only if nothing has asked for the number of batches before it resumes.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        self.train_loss.reset()
        loader = self.trainer.train_dataloader
        if self._train_position is not None and loader is not None:
            loader.load_state_dict(self._train_position)
        self._train_position = None

    def on_validation_epoch_end(self) -> None:
        """Log teacher-forced loss and acceptance under `val/`."""
        self._log_acceptance("val")

    def on_test_epoch_end(self) -> None:
        """Log teacher-forced loss and acceptance under `test/`."""
        self._log_acceptance("test")

    def _log_acceptance(self, split: str) -> None:
        scalars = acceptance_scalars(self.acceptance.compute())
        self.log(f"{split}/accept_len", scalars.pop("accept_len"), prog_bar=True)
        self.log_dict({f"{split}/{name}": value for name, value in scalars.items()})
        self.log(f"{split}/loss", self.val_loss.compute())
        self.val_loss.reset()
        self.acceptance.reset()

    # ---- optimizer -------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW on the drafter; linear warm-up, then a cosine to 0 over the run."""
        schedule = schedule_of(self.trainer, self.warmup_ratio)
        return adamw_with_cosine(self.drafter, self.lr, self.betas, self.weight_decay, schedule)

    # ---- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the drafter's configuration and the tokens seen beside its weights."""
        checkpoint["drafter_config"] = self.drafter.config.to_dict()
        checkpoint["supervised_tokens"] = self.supervised_tokens
        loader = self.trainer.train_dataloader
        if loader is not None:
            checkpoint["train_position"] = loader.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture; take its weights, tokens and place.

        Raises:
            UserError: Architecture, target or draft vocabulary differ from the experiment's.
        """
        check_checkpoint(checkpoint, self.drafter, resuming=bool(self.trainer.training))
        self._objective = None
        self._supervised_tokens = checkpoint["supervised_tokens"]
        self._train_position = checkpoint.get("train_position") if self.trainer.training else None
