"""The target's answers, kept in shards that are written whole or not at all.

A shard is named by what was asked, so a killed run goes on where it stopped, and a longer list of
prompts takes over the answers of a shorter one.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from dflash_lightning.data.answers import Answer, Answers, Question
from dflash_lightning.data.files import write_whole
from dflash_lightning.target import Target
from dflash_lightning.target_spec import TargetSpec

log = logging.getLogger(__name__)
T = TypeVar("T")


def cache_key(*parts: object) -> str:
    """Return 16 hex digits that change with any of the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class AnswerBook:
    """The answers of one target under one setting: looked up, and made where they lack.

    Args:
        answers: Makes them.
        spec: The target.
        load_target: Called only if an answer is missing and must be made here.
        max_new_tokens: Longest answer, in tokens.
        cache_dir: Answers lie in `cache_dir/answers/KEY/`.
        total: How many answers will be asked for, to say when they are ready; None if unknown.
    """

    def __init__(
        self,
        answers: Answers,
        spec: TargetSpec,
        load_target: Callable[[], Target],
        max_new_tokens: int,
        cache_dir: Path,
        total: int | None = None,
    ) -> None:
        self.answers, self.spec, self.load_target = answers, spec, load_target
        self.max_new_tokens, self.window = max_new_tokens, answers.window
        key = cache_key(spec.fingerprint, max_new_tokens, answers.identity())
        self.folder = cache_dir / "answers" / key
        self.total, self.asked, self.made = total, 0, 0
        self._bar: tqdm[Any] | None = None
        self._names = hashlib.sha256()

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Return the answers to a window of prompts, in their order.

        Args:
            prompts: Token ids of each; shorter than the target's context window.
        """
        window = int(self.spec.config.max_position_embeddings)
        questions = [Question(p, min(self.max_new_tokens, window - len(p))) for p in prompts]
        order = self.answers.order(questions)
        size = self.answers.shard_size
        shards = {
            self._path([questions[i] for i in order[start : start + size]]): order[
                start : start + size
            ]
            for start in range(0, len(order), size)
        }
        self._names.update("".join(path.name for path in shards).encode())
        found: dict[int, Answer] = {}
        missing: dict[Path, list[int]] = {}
        for path, indices in shards.items():
            kept = read_shard(path, len(indices))
            if kept is None:
                missing[path] = indices
            else:
                found.update(zip(indices, kept, strict=True))
        self.asked += len(found)
        if missing:
            found.update(self._make(missing, questions))
        return [found[i] for i in range(len(prompts))]

    def expect(self, more: int) -> None:
        """Expect so many answers more than was thought."""
        if self.total is not None:
            self.total += more
            if self._bar is not None:
                self._bar.total = self.total

    def summary_file(self, split: str) -> Path:
        """Return where the summary of all that was asked so far lies: beside the shards."""
        return self.folder / f"summary_{split}_{self._names.hexdigest()[:16]}.json"

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _make(
        self, shards: dict[Path, list[int]], questions: Sequence[Question]
    ) -> dict[int, Answer]:
        self.folder.mkdir(parents=True, exist_ok=True)
        bar = self._progress()
        indices = [i for part in shards.values() for i in part]
        waiting = {path: len(part) for path, part in shards.items()}
        home = {i: path for path, part in shards.items() for i in part}
        found: dict[int, Answer] = {}
        made = self.answers.answer(self.spec, self.load_target, [questions[i] for i in indices])
        for place, answer in made:
            index = indices[place]
            found[index] = answer
            path = home[index]
            waiting[path] -= 1
            if waiting[path] == 0:
                write_shard(path, [found[i] for i in shards[path]])
                bar.update(len(shards[path]))  # one by one they jump
        self.asked, self.made = self.asked + len(indices), self.made + len(indices)
        return found

    def _path(self, questions: Sequence[Question]) -> Path:
        key = cache_key([[list(q.ids), q.limit] for q in questions])
        return self.folder / f"{key}.jsonl"

    def _progress(self) -> "tqdm[Any]":
        if self._bar is None:
            left = f" of {self.total}" if self.total else ""
            log.info(
                "the target answers prompts (%d%s are there; up to %d tokens each), kept in %s",
                self.asked,
                left,
                self.max_new_tokens,
                self.folder,
            )
            self._bar = tqdm(
                total=self.total, initial=self.asked, desc="target answers prompts", unit="prompt"
            )
        elif self.asked > self._bar.n:  # found on disk: they say nothing about the speed
            self._bar.initial += self.asked - self._bar.n
            self._bar.n = self.asked
        return self._bar


def read_shard(path: Path, count: int) -> list[Answer] | None:
    """Return the answers of a shard; None if there is none, or if it is damaged (said by name)."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [Answer(row["ids"], row["finish"], row.get("exact", True)) for row in rows]
        if len(found) == count:
            return found
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    log.warning("%s is damaged and made again", path)
    return None


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers, one a line; the file appears whole."""
    lines = []
    for answer in answers:
        row: dict[str, Any] = {"finish": answer.finish, "ids": answer.ids}
        lines.append(json.dumps(row if answer.exact else row | {"exact": False}) + "\n")
    write_whole(path, "".join(lines).encode())


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    while window := list(islice(iterator, size)):
        yield window
