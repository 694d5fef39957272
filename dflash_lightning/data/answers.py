"""Who answers the prompts: the target loaded here, or one behind a server."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_spec import TargetSpec

Finish = Literal["stop", "length", "refused"]


@dataclass(frozen=True)
class Answer:
    """An answer as the target's own token ids, the stop token included where it gave one."""

    ids: list[int]
    finish: Finish
    """`stop`: by a stop token; `length`: cut by the limit; `refused`: a server won't answer it."""
    exact: bool = True
    """False where a server gave only text and its token count is not that of these ids."""


@dataclass(frozen=True)
class Question:
    """Token ids to go on from, and how many tokens the answer may have."""

    ids: Sequence[int]
    limit: int


class Answers(ABC):
    """Makes the target's answers; a class that an experiment names in `data.answers`."""

    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    shard_size: int
    window: int

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return all settings that an answer depends on, as plain types."""

    @abstractmethod
    def answer(
        self, spec: TargetSpec, load_target: Callable[[], Target], questions: Sequence[Question]
    ) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) for each question once, in any order, as they come."""

    def order(self, questions: Sequence[Question]) -> list[int]:
        """Return the order in which questions go into shards."""
        return list(range(len(questions)))

    def question_seed(self, question: Question) -> int:
        """Return 31 bits that depend on the seed and the prompt only, not on its neighbours."""
        prompt = array("q", question.ids).tobytes()
        digest = hashlib.blake2b(prompt, digest_size=8, salt=str(self.seed).encode()[:16]).digest()
        return int.from_bytes(digest, "little") % 2**31

    def check_sampling(self) -> None:
        """Refuse values out of range, by name."""
        key = "data.answers"
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"{key}.temperature: needs 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{key}.top_p: needs more than 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"{key}.top_k: needs at least 1, got {self.top_k}")


@dataclass
class LocalAnswers(Answers):
    """The target answers on this machine, batched by length.

    A sampled answer depends on the seed and its prompt, not on the other prompts, up to rounding.

    Args:
        batch_size: Prompts generated together, and kept together on disk.
        temperature: 0 is greedy, as the drafter is evaluated by default.
        top_p: Keep the most probable tokens that together have at least this probability.
        top_k: Keep the k most probable tokens; null keeps all.
        seed: What sampled answers follow from; a prompt that comes twice gets one answer.
    """

    batch_size: int = 192
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        self.check_sampling()
        if self.batch_size < 1:
            raise UserError(f"data.answers.batch_size: needs at least 1, got {self.batch_size}")
        self.shard_size, self.window = self.batch_size, 16 * self.batch_size

    def identity(self) -> list[Any]:
        """Return the batch size (it bends rounding), and how tokens are drawn."""
        drawn = [self.temperature, self.top_p, self.top_k, self.seed] if self.temperature else []
        return ["local", self.batch_size, *drawn]

    def order(self, questions: Sequence[Question]) -> list[int]:
        """Sort by length, so that a batch has little padding."""
        return sorted(range(len(questions)), key=lambda i: (len(questions[i].ids), i))

    def answer(
        self, spec: TargetSpec, load_target: Callable[[], Target], questions: Sequence[Question]
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the answers batch by batch."""
        target = load_target()
        for start in range(0, len(questions), self.batch_size):
            batch = questions[start : start + self.batch_size]
            yield from enumerate(self._generate(target, batch), start)

    def _generate(self, target: Target, batch: Sequence[Question]) -> list[Answer]:
        length = max(len(q.ids) for q in batch)
        limit = max(q.limit for q in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, question in enumerate(batch):
            ids[row, length - len(question.ids) :] = torch.tensor(list(question.ids))
            mask[row, length - len(question.ids) :] = 1
        config = GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=sorted(target.stop_ids) or None,
            pad_token_id=0,
            cache_implementation="static"
            if getattr(target.model, "_can_compile_fullgraph", False)
            else None,
            disable_compile=True,
        )
        own_config = target.model.generation_config
        target.model.generation_config = GenerationConfig()  # its beams or banned tokens: not asked
        try:
            output = target.model.generate(
                ids.to(target.device),
                attention_mask=mask.to(target.device),
                generation_config=config,
                logits_processor=self._processors(batch, limit, length),
            )
        finally:
            target.model.generation_config = own_config
        rows = zip(batch, output[:, length:].tolist(), strict=True)
        return [finished(row[: q.limit], target.stop_ids) for q, row in rows]

    def _processors(
        self, batch: Sequence[Question], limit: int, length: int
    ) -> LogitsProcessorList | None:
        if self.temperature == 0:
            return None
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        rows = [np.random.default_rng(self.question_seed(q)).random(limit) for q in batch]
        return LogitsProcessorList([*warpers, _Drawn(torch.tensor(np.stack(rows)), length)])


class _Drawn(LogitsProcessor):
    """Leaves one token a row: the one its own uniform number `[B, steps]` picks."""

    def __init__(self, uniform: Tensor, length: int) -> None:
        self.uniform, self.length = uniform, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[B, V]` that are -inf but for the drawn token."""
        total = scores.double().softmax(dim=-1).cumsum(dim=-1)
        uniform = self.uniform[:, input_ids.shape[1] - self.length, None].to(total.device)
        token = torch.searchsorted(total, uniform * total[:, -1:], right=True)
        last = scores.shape[-1] - 1 - scores.isfinite().flip(-1).long().argmax(-1, keepdim=True)
        token = torch.minimum(token, last)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


def finished(ids: list[int], stop_ids: frozenset[int]) -> Answer:
    """Return the answer up to and including the first stop token."""
    for n, token in enumerate(ids):
        if token in stop_ids:
            return Answer(ids[: n + 1], "stop")
    return Answer(ids, "length")
