"""The LightningDataModule: prompts -> the target's answers -> samples -> anchored masked blocks."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from dflash_lightning.data.answers import Answers, LocalAnswers
from dflash_lightning.data.blocks import (
    Anchors,
    BlockCollator,
    RandomAnchors,
    anchor_candidates,
    default_gamma,
)
from dflash_lightning.data.chats import target_samples, user_turns
from dflash_lightning.data.features import FeatureStore, build_store
from dflash_lightning.data.loading import (
    EpochSampler,
    Item,
    PromptDataset,
    ResumableLoader,
    SampleDataset,
    only_item,
)
from dflash_lightning.data.prepare import AnswerBook, write_whole
from dflash_lightning.data.prompts import SPLITS, Prompt, PromptSource, Split
from dflash_lightning.data.rows import BadRows, good_rows
from dflash_lightning.data.samples import (
    Sample,
    chat_sample,
    prompt_ids,
    text_sample,
)
from dflash_lightning.data.server import ServerAnswers as ServerAnswers
from dflash_lightning.data.sources import WordProblems
from dflash_lightning.data.summary import Summary
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, load_target
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
        loss_decay_gamma: Linked to `model.loss_decay_gamma`, say it there.
        responses: `target`: the frozen target answers the prompts, once (the paper's way); of a
            chat it answers each user turn in turn, and all its answers are supervised. `given`:
            supervise the answers that the prompts come with, or all of a plain text.
        answers: Who makes the target's answers: `LocalAnswers` here, or `ServerAnswers` behind an
            OpenAI-compatible server.
        max_new_tokens: Longest answer of the target, in tokens.
        max_length: Longest sample, in tokens; the rest is cut off.
        anchors: The rule that picks anchors, and how many a sample.
        batch_size: Samples per step.
        features: `store`: the target's tapped states are computed once and kept on disk. `online`:
            the target runs in every step.
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
        loss_decay_gamma: float | Literal["auto", "uniform"] = "auto",
        responses: Literal["target", "given"] = "target",
        answers: Answers = LocalAnswers(),  # noqa: B008
        max_new_tokens: int = 2048,
        max_length: int = 3072,
        anchors: Anchors = RandomAnchors(),  # noqa: B008
        batch_size: int = 8,
        features: Literal["online", "store"] = "online",
        cache_dir: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.prompts, self.target = prompts, target
        self.responses, self.answers, self.features = responses, answers, features
        self.block_size, self.anchors, self.batch_size = block_size, anchors, batch_size
        self.max_new_tokens, self.max_length = max_new_tokens, max_length
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.seed, self.num_workers = seed, num_workers
        self.gamma = resolve_gamma(loss_decay_gamma, block_size)
        self.summaries: dict[Split, Summary] = {}
        self.samples: dict[Split, list[Sample]] = {}
        self.held_out_prompts: dict[Split, list[list[int]]] = {}
        self.stores: dict[Split, FeatureStore | None] = dict.fromkeys(SPLITS)

    @cached_property
    def spec(self) -> TargetSpec:
        """The target on disk: folder, tokenizer, tapped layers, mask token."""
        return inspect_target(self.target, self.cache_dir)

    def prepare_data(self) -> None:
        """Make what the cache lacks: the target's answers, and its tapped states where stored."""
        log.info("cache: %s (set data.cache_dir or DFLASH_CACHE to move it)", self.cache_dir)
        self._build()

    def setup(self, stage: str) -> None:
        """Read samples of every split from the cache (nothing is left to be made there)."""
        if not self.samples:
            self._build()

    def _build(self) -> None:
        target: list[Target] = []

        def loaded() -> Target:
            if not target:
                target.append(load_target(self.spec, self._device()))
            return target[0]

        for split in SPLITS:
            prompts = list(self.prompts.stream(split))
            self.samples[split] = self._usable(split, list(self._samples(split, loaded)))
            if self.features == "store":
                self.stores[split] = build_store(
                    loaded,
                    self.spec.fingerprint,
                    self.samples[split],
                    self.spec.target_layer_ids,
                    self.spec.config.hidden_size,
                    getattr(torch, self.spec.dtype),
                    self.cache_dir,
                )
            self.held_out_prompts[split] = [] if split == "train" else self._decodable(prompts)

    def _device(self) -> torch.device:
        if self.trainer:
            return self.trainer.strategy.root_device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _samples(self, split: Split, loaded: Callable[[], Target]) -> Iterator[Sample]:
        prompts, bad = self.prompts.stream(split), self._bad_rows()
        summary = self.summaries[split] = Summary()
        if self.responses == "given":
            for sample in good_rows(prompts, self._given, bad):
                summary.sample(sample)
                yield sample
            summary.bad_rows += bad.bad
            return
        total = self.prompts.count(split)
        book = AnswerBook(
            self.answers, self.spec, loaded, self.max_new_tokens, self.cache_dir, total
        )
        try:
            yield from target_samples(prompts, book, self.spec, self.max_length, bad, summary)
            file = book.summary_file(split)
            if summary.answers and (book.made or not file.is_file()):
                write_whole(file, json.dumps(summary.plain(), indent=2) + "\n")
        finally:
            book.close()

    def _bad_rows(self) -> BadRows:
        return BadRows(self.prompts.max_bad_share, log.warning)

    def _given(self, prompt: Prompt) -> Sample:
        try:
            if prompt.text is not None:
                return text_sample(self.spec.tokenizer, prompt.text)
            return chat_sample(self.spec.tokenizer, prompt.messages, self.spec.stop_ids)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        messages = list(prompt.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        user_turns(prompt)
        try:
            return prompt_ids(self.spec.tokenizer, messages)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error

    def _decodable(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the prompts that evaluation decodes.

        Chats up to the last answer, texts up to their middle.
        """
        asked = (p for p in prompts if p.text is None)
        chats = list(good_rows(asked, self._prompt_ids, BadRows(1.0, log.debug)))
        texts = [list(self.spec.tokenizer(p.text).input_ids) for p in prompts if p.text is not None]
        return chats + [ids[: max(1, len(ids) // 2)] for ids in texts if ids]

    def _usable(self, split: Split, samples: list[Sample]) -> list[Sample]:
        """Cut samples to `max_length` and drop those that have no possible anchor."""
        cut = [s.cut(self.max_length) for s in samples]
        kept = [s for s in cut if len(anchor_candidates(s.loss_mask))]
        if len(kept) < len(cut):
            log.info(
                "%s: %d of %d samples have no possible anchor and are left out",
                split,
                len(cut) - len(kept),
                len(cut),
            )
        if cut and not kept:
            raise UserError(
                f"data: no {split} sample has two supervised tokens in a row within "
                f"data.max_length={self.max_length}; raise max_length or max_new_tokens, or check "
                "where the answers lie"
            )
        return kept

    def train_dataloader(self) -> DataLoader[Item]:
        """Return shuffled batches; order and anchors depend on (seed, epoch) only."""
        if not self.samples["train"]:
            raise UserError("data.prompts: the train split is empty")
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Item]:
        """Return validation batches, always with the same anchors."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader[Item]:
        """Return test batches, always with the same anchors."""
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> DataLoader[list[int]]:
        """Return the test prompts, one a batch, as lists of token ids."""
        return DataLoader(
            PromptDataset(self.held_out_prompts["test"]), batch_size=1, collate_fn=only_item
        )

    def _loader(self, split: Split, shuffle: bool) -> DataLoader[Item]:
        samples = self.samples[split]
        collate = BlockCollator(
            self.anchors, self.block_size, self.spec.mask_token_id, self.gamma, self.seed
        )
        lengths = [len(s.ids) for s in samples]
        rank, world = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        sampler = EpochSampler(lengths, self.batch_size, self.seed, shuffle, rank, world)
        return ResumableLoader(
            SampleDataset(samples, self.stores[split]),
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def resolve_gamma(gamma: float | str, block_size: int) -> float | None:
    """Return the loss decay: `auto` is the paper's value for the block size, `uniform` is None.

    Raises:
        UserError: Not a positive number.
    """
    if gamma == "auto":
        return default_gamma(block_size)
    if gamma == "uniform":
        return None
    if isinstance(gamma, str) or not gamma > 0:
        raise UserError(
            f"model.loss_decay_gamma: needs a positive number, auto or uniform, got {gamma}"
        )
    return float(gamma)
