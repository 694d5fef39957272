"""Prompts -> samples on disk, once for every run on the same prompts, tokenizer and answers.

One stretch of the data is in memory at a time.
"""

import itertools
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from dflash_lightning.data.blocks import anchor_candidates
from dflash_lightning.data.files import only_writer
from dflash_lightning.data.prepare import cache_key
from dflash_lightning.data.prompts import Prompt, PromptSource, Split
from dflash_lightning.data.rows import BadRows, good_rows
from dflash_lightning.data.sample_store import SampleStore, write_samples
from dflash_lightning.data.samples import (
    Sample,
    chat_samples,
    prompt_ids,
    response_sample,
    text_samples,
)
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetSpec

log = logging.getLogger(__name__)

PROMPTS_PER_CHUNK = 64

Answer = Callable[[Iterable[list[int]]], Iterator[list[int]]]
"""Prompts' token ids -> the target's answers to them, in order."""


@dataclass(frozen=True)
class Recipe:
    """How samples are made of prompts.

    Args:
        prompts: Where they come from.
        spec: The target whose tokenizer, template and stop ids are used.
        responses: `target` or `given`, as in the data module.
        max_length: Longest sample, in tokens.
        answer: Lets the target answer; unused for given responses.
        answer_key: What the answers depend on beside target and prompts.
    """

    prompts: PromptSource
    spec: TargetSpec
    responses: Literal["target", "given"]
    max_length: int
    answer: Answer
    answer_key: str

    def build(self, split: Split, cache_dir: Path) -> SampleStore:
        """Return the split's samples; they are made now if the cache lacks them.

        A source without a fingerprint is read every time; the store is then named by what it holds.

        Raises:
            UserError: A prompt can't be used, or no sample has a possible anchor.
        """
        identity = self.prompts.fingerprint()
        key = cache_key(
            identity,
            split,
            self.spec.fingerprint,
            self.responses,
            self.max_length,
            self.answer_key if self.responses == "target" else "",
        )
        root = cache_dir / "samples"
        folder = root / key
        if identity is None or not (folder / "whole").is_dir():
            with only_writer(folder, "samples"):
                if identity is None or not (folder / "whole").is_dir():
                    held_out = () if split == "train" else self._decodable(split)
                    partial = folder / "partial"
                    made = write_samples(partial, self._usable(split), held_out)
                    self._check(split, made)
                    folder = folder if identity is not None else root / made.content
                    folder.mkdir(exist_ok=True)
                    if (folder / "whole").is_dir():
                        shutil.rmtree(partial)
                    else:
                        partial.rename(folder / "whole")
        found = SampleStore(folder / "whole")
        self._check(split, found)
        return found

    def _check(self, split: Split, found: SampleStore) -> None:
        if found.left_out and not len(found):
            shutil.rmtree(found.folder)
            raise UserError(
                f"data: no {split} sample has two supervised tokens in a row within "
                f"data.max_length={self.max_length}; raise max_length or max_new_tokens, or check "
                "where the answers lie"
            )
        if found.left_out:
            log.info(
                "%s: %d of %d samples have no possible anchor and are left out",
                split,
                found.left_out,
                found.left_out + len(found),
            )

    def _usable(self, split: Split) -> Iterator[Sample | None]:
        """Yield the samples, None for one that has no possible anchor within `max_length`."""
        prompts = self.prompts.stream(split)
        bad = BadRows(self.prompts.max_bad_share, log.warning)
        made = self._given(prompts, bad) if self.responses == "given" else self._own(prompts, bad)
        for sample in tqdm(made, desc=f"{split} samples", unit=" samples", delay=5):
            cut = sample.cut(self.max_length)
            yield cut if len(anchor_candidates(cut.loss_mask)) else None

    def _own(self, prompts: Iterator[Prompt], bad: BadRows) -> Iterator[Sample]:
        """Yield the prompts with the target's answers."""
        asked, again = itertools.tee(good_rows(prompts, self._prompt_ids, bad))
        for prompt, answer in zip(again, self.answer(asked), strict=True):
            yield response_sample(prompt, answer)

    def _given(self, prompts: Iterator[Prompt], bad: BadRows) -> Iterator[Sample]:
        """Yield the prompts with the answers they came with."""
        while chunk := list(itertools.islice(prompts, PROMPTS_PER_CHUNK)):
            texts = [p.text for p in chunk if p.text is not None]
            chats = [p.messages for p in chunk if p.text is None]
            spec = self.spec
            of_texts = iter(text_samples(spec.tokenizer, texts, self.max_length))
            of_chats = iter(chat_samples(spec.tokenizer, chats, spec.stop_ids, self.max_length))
            for prompt in chunk:
                made = next(of_chats if prompt.text is None else of_texts)
                if isinstance(made, UserError):
                    bad.add(UserError(f"{prompt.source}: {made}"))
                else:
                    bad.good()
                    yield made
        bad.end()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.text is not None:
            raise UserError(
                f"{prompt.source}: plain text has no prompt to answer; set data.responses=given"
            )
        messages = list(prompt.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UserError(f"{prompt.source}: the chat has no user turn to answer")
        try:
            return prompt_ids(self.spec.tokenizer, messages)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error

    def _decodable(self, split: Split) -> Iterator[list[int]]:
        """Yield the prompts that evaluation decodes.

        Chats up to the last answer, texts up to their middle.
        """

        def use(prompt: Prompt) -> list[int]:
            if prompt.text is None:
                return self._prompt_ids(prompt)
            ids = list(self.spec.tokenizer(prompt.text).input_ids)
            return ids[: max(1, len(ids) // 2)]

        found = good_rows(self.prompts.stream(split), use, BadRows(1.0, log.debug))
        return (ids for ids in found if ids)
