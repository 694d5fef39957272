"""The LightningDataModule: prompts -> the target's answers -> samples -> anchored masked blocks."""

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from dflash_lightning.data.anchors import Anchors, RandomAnchors
from dflash_lightning.data.answers import Answers, LocalAnswers
from dflash_lightning.data.blocks import BlockCollator, Noise
from dflash_lightning.data.building import Recipe
from dflash_lightning.data.features import FeatureStore, build_store
from dflash_lightning.data.loading import (
    EpochSampler,
    PromptDataset,
    ResumableLoader,
    Row,
    RowDataset,
    only_item,
)
from dflash_lightning.data.packing import pack
from dflash_lightning.data.prompts import SPLITS, PromptSource, Split
from dflash_lightning.data.sample_store import SampleStore, TokenLists
from dflash_lightning.data.server import ServerAnswers as ServerAnswers
from dflash_lightning.data.sources import WordProblems
from dflash_lightning.data.stdlib import StdlibPrompts as StdlibPrompts
from dflash_lightning.data.summary import Summary
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_rules import FINAL
from dflash_lightning.target_spec import TargetConfig, TargetSpec, inspect_target

log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return `$DFLASH_CACHE`, else `~/.cache/dflash_lightning`."""
    return Path(os.environ.get("DFLASH_CACHE", "~/.cache/dflash_lightning")).expanduser()


class DFlashDataModule(pl.LightningDataModule):
    """Anchored masked blocks of the target's own answers.

    Args:
        prompts: Where prompts come from; a class of `data.prompts` or your own `PromptSource`.
        target: The target; linked to `model.target`, say it there.
        block_size: Linked to `model.block_size`, say it there.
        final_states: Whether the store holds the target's final states too; follows from
            `model.loss`.
        noise: Follows from `model.axes`.
        responses: `target`: the frozen target answers the prompts, once (the paper's way); of a
            chat it answers each user turn in turn, and all its answers are supervised. `given`:
            supervise the answers that the prompts come with, or all of a plain text.
        answers: Who makes the target's answers: `LocalAnswers` here, or `ServerAnswers` behind an
            OpenAI-compatible server.
        max_new_tokens: Longest answer of the target, in tokens.
        max_length: Longest sample, in tokens; the rest is cut off.
        anchors: The rule that picks anchors, and how many a sample: `RandomAnchors`,
            `UniformAnchors`, `AllAnchors`, or your own.
        batch_size: Rows per step and process: samples, or with packing rows of up to max_length
            tokens.
        packing: Put several samples into one row, up to max_length tokens. None sees another, each
            has its own positions and anchors, so its loss is the same; less of a batch is padding.
        features: `store`: the target's tapped states are computed once and kept on disk for all
            runs on the same target and data. `online`: the target runs in every step.
        cache_dir: Where answers, states and converted targets are kept; null takes $DFLASH_CACHE or
            ~/.cache/dflash_lightning.
        seed: Seed of the order of samples and of the anchors.
        num_workers: Processes that load batches; 0 loads in the main process.
    """

    def __init__(
        self,
        prompts: PromptSource = WordProblems(),  # noqa: B008
        target: TargetConfig = TargetConfig(),  # noqa: B008
        block_size: int = 16,
        final_states: bool = False,
        noise: Noise = "masked",
        responses: Literal["target", "given"] = "target",
        answers: Answers = LocalAnswers(),  # noqa: B008
        max_new_tokens: int = 2048,
        max_length: int = 3072,
        anchors: Anchors = RandomAnchors(),  # noqa: B008
        batch_size: int = 8,
        packing: bool = False,
        features: Literal["online", "store"] = "online",
        cache_dir: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.prompts, self.target = prompts, target
        self.responses: Literal["target", "given"] = responses
        self.answers, self.features, self.packing = answers, features, packing
        self.block_size, self.anchors, self.batch_size = block_size, anchors, batch_size
        self.max_new_tokens, self.max_length = max_new_tokens, max_length
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.seed, self.num_workers = seed, num_workers
        self.final_states = final_states
        self.noise: Noise = noise
        self.summaries: dict[Split, Summary] = {}
        self.samples: dict[Split, SampleStore] = {}
        self.held_out_prompts: dict[Split, TokenLists] = {}
        self.stores: dict[Split, FeatureStore | None] = dict.fromkeys(SPLITS)

    @cached_property
    def spec(self) -> TargetSpec:
        """The target on disk: folder, tokenizer, tapped layers, mask token."""
        return inspect_target(self.target, self.cache_dir)

    def prepare_data(self) -> None:
        """Make what the cache lacks: samples, and the target's tapped states where stored."""
        log.info("cache: %s (set data.cache_dir or DFLASH_CACHE to move it)", self.cache_dir)
        if self.features == "online":
            log.info("data.features=online: the target runs in every step")
        self._build(check=True)

    def setup(self, stage: str) -> None:
        """Open the samples of every split (nothing is left to be made)."""
        if not self.samples:
            self._build(check=False)

    def _build(self, check: bool) -> None:
        target: list[Target] = []

        def loaded() -> Target:
            if not target:
                target.append(load_target(self.spec, self._device()))
            return target[0]

        recipe = Recipe(
            self.prompts,
            self.spec,
            self.responses,
            self.answers,
            self.max_new_tokens,
            self.max_length,
            self.cache_dir,
        )
        for split in SPLITS:
            self.samples[split], self.summaries[split] = recipe.build(split, loaded)
            self.held_out_prompts[split] = TokenLists(self.samples[split].folder, "prompts")
            if self.features == "store":
                self.stores[split] = build_store(
                    loaded,
                    self.spec.fingerprint,
                    self.samples[split],
                    [*self.spec.target_layer_ids, *([FINAL] if self.final_states else [])],
                    self.spec.config.hidden_size,
                    getattr(torch, self.spec.dtype),
                    self.cache_dir,
                    check,
                )

    def _device(self) -> torch.device:
        if self.trainer:
            return self.trainer.strategy.root_device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def train_dataloader(self) -> DataLoader[Row]:
        """Return shuffled batches; order and anchors depend on (seed, epoch) only."""
        if not len(self.samples["train"]):
            raise UserError("data.prompts: the train split is empty")
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Row]:
        """Return validation batches, always with the same anchors."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader[Row]:
        """Return test batches, always with the same anchors."""
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> DataLoader[list[int]]:
        """Return the test prompts, one a batch, as lists of token ids."""
        return DataLoader(
            PromptDataset(self.held_out_prompts["test"]), batch_size=1, collate_fn=only_item
        )

    def _loader(self, split: Split, shuffle: bool) -> DataLoader[Row]:
        samples = self.samples[split]
        rows = pack(samples.lengths, self.max_length, self.seed) if self.packing else None
        collate = BlockCollator(
            self.anchors,
            self.block_size,
            self.spec.mask_token_id,
            self.seed,
            "masked" if self.noise == "random" and not shuffle else self.noise,
        )
        rank, world = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        sampler = EpochSampler(
            samples.lengths if rows is None else rows.lengths(samples.lengths),
            self.batch_size,
            self.seed,
            shuffle,
            rank,
            world,
        )
        return ResumableLoader(
            RowDataset(samples, self.stores[split], rows),
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
