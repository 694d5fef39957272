"""Prompts -> samples on disk, once for every run on the same prompts, tokenizer and answers.

One stretch of the data is in memory at a time.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from dflash_lightning.data.anchors import anchor_candidates
from dflash_lightning.data.answers import Answers
from dflash_lightning.data.chats import target_samples, user_turns
from dflash_lightning.data.files import only_writer, write_whole
from dflash_lightning.data.prepare import AnswerBook, cache_key, windows
from dflash_lightning.data.prompts import Prompt, PromptSource, Split
from dflash_lightning.data.rows import BadRows, good_rows
from dflash_lightning.data.sample_store import SampleStore, opened, write_samples
from dflash_lightning.data.samples import (
    Sample,
    chat_samples,
    prompt_ids,
    text_samples,
    turns_apart,
)
from dflash_lightning.data.summary import Summary
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_spec import TargetSpec

log = logging.getLogger(__name__)

PROMPTS_PER_CHUNK = 64
FORMAT = 1
"""Raise it when the same prompts give other samples than before."""


@dataclass(frozen=True)
class Recipe:
    """How samples are made of prompts; its fields are those of the data module."""

    prompts: PromptSource
    spec: TargetSpec
    responses: Literal["target", "given"]
    answers: Answers
    max_new_tokens: int
    max_length: int
    cache_dir: Path

    def build(self, split: Split, load_target: Callable[[], Target]) -> tuple[SampleStore, Summary]:
        """Return a split's samples, and what making them gave; made now if the cache lacks them.

        A source without a fingerprint is read every time; the store is then named by what it holds.

        Raises:
            UserError: Too many prompts are bad, or no sample has a possible anchor.
        """
        identity = self.prompts.fingerprint()
        answered = [self.answers.identity(), self.max_new_tokens]
        key = cache_key(
            FORMAT,
            identity,
            split,
            self.spec.fingerprint,
            self.max_length,
            answered if self.responses == "target" else "given",
        )
        folder = self.cache_dir / "samples" / key
        found = None if identity is None else opened(folder / "whole")
        if found is None:
            with only_writer(folder, "samples"):
                found = None if identity is None else opened(folder / "whole")
                if found is None:
                    found = self._write(split, load_target, folder, named=identity is not None)
        if found.left_out:
            log.info(
                "%s: %d of %d samples have no possible anchor and are left out",
                split,
                found.left_out,
                found.left_out + len(found),
            )
        return found, Summary.read(found.folder / "summary.json")

    def _write(
        self, split: Split, load_target: Callable[[], Target], folder: Path, named: bool
    ) -> SampleStore:
        """Write the samples into `folder`; without a name of its own, into one named by content."""
        partial, summary = folder / "whole.partial", Summary()
        held_out = () if split == "train" else self._decodable(split)
        made = write_samples(partial, self._usable(split, load_target, summary), held_out)
        if made.left_out and not len(made):
            shutil.rmtree(partial)
            raise UserError(
                f"data: no {split} sample has two supervised tokens in a row within "
                f"data.max_length={self.max_length}; raise max_length or max_new_tokens, or check "
                "where the answers lie"
            )
        summary.write(partial / "summary.json")
        home = (folder if named else folder.with_name(made.content)) / "whole"
        home.parent.mkdir(exist_ok=True)
        if not named and (found := opened(home)) is not None:
            shutil.rmtree(partial)
            return found
        if home.is_dir():
            log.warning("%s is damaged and is made again", home)
            shutil.rmtree(home)
        partial.rename(home)
        return SampleStore(home)

    def _usable(
        self, split: Split, load_target: Callable[[], Target], summary: Summary
    ) -> Iterator[Sample | None]:
        """Yield the samples, None for one that has no possible anchor within `max_length`."""
        prompts = self.prompts.stream(split)
        bad = BadRows(self.prompts.max_bad_share, log.warning)
        if self.responses == "given":
            made = tqdm(
                self._given(prompts, bad, summary), f"{split} samples", unit="sample", delay=5
            )
        else:
            made = self._own(prompts, split, load_target, bad, summary)
        for sample in made:
            cut = sample.cut(self.max_length)
            yield cut if len(anchor_candidates(cut.loss_mask)) else None

    def _own(
        self,
        prompts: Iterator[Prompt],
        split: Split,
        load_target: Callable[[], Target],
        bad: BadRows,
        summary: Summary,
    ) -> Iterator[Sample]:
        """Yield the prompts with the target's answers."""
        book = AnswerBook(
            self.answers,
            self.spec,
            load_target,
            self.max_new_tokens,
            self.cache_dir,
            self.prompts.count(split),
        )
        try:
            yield from target_samples(prompts, book, self.spec, self.max_length, bad, summary)
            file = book.summary_file(split)
            if summary.answers and (book.made or not file.is_file()):
                write_whole(file, (json.dumps(summary.plain(), indent=2) + "\n").encode())
        finally:
            book.close()

    def _given(self, prompts: Iterator[Prompt], bad: BadRows, summary: Summary) -> Iterator[Sample]:
        """Yield the prompts with the answers they came with."""
        spec = self.spec
        for chunk in windows(prompts, PROMPTS_PER_CHUNK):
            texts = [p.text for p in chunk if p.text is not None]
            chats = [p.messages for p in chunk if p.text is None]
            of_texts = iter(text_samples(spec.tokenizer, texts, self.max_length))
            of_chats = iter(chat_samples(spec.tokenizer, chats, spec.stop_ids, self.max_length))
            for prompt in chunk:
                made = next(of_chats if prompt.text is None else of_texts)
                samples = self._apart(prompt, made) if isinstance(made, UserError) else [made]
                if isinstance(samples, UserError):
                    bad.add(UserError(f"{prompt.source}: {samples}"))
                    continue
                bad.good()
                for sample in samples:
                    summary.sample(sample)
                    yield sample
        bad.end()
        summary.bad_rows += bad.bad

    def _apart(self, prompt: Prompt, error: UserError) -> list[Sample] | UserError:
        """Return a chat that could not be told as one sample as several, or why that fails too."""
        if prompt.text is not None:
            return error
        try:
            chats = turns_apart(self.spec.tokenizer, prompt.messages)
        except UserError as refused:
            return refused
        parts, since = [chat for chat, _ in chats], [first for _, first in chats]
        made = chat_samples(self.spec.tokenizer, parts, self.spec.stop_ids, self.max_length, since)
        good = [sample for sample in made if isinstance(sample, Sample)]
        return good if len(good) == len(made) > 0 else error

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        messages = list(prompt.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        user_turns(prompt)
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
