"""The prompt sources that an experiment can name in `data.prompts.class_path`."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dflash_lightning.data.prompts import SPLITS, Prompt, PromptSource, Split
from dflash_lightning.data.rows import Row, jsonl_rows, row_prompt, text_rows
from dflash_lightning.data.splits import Deal, content_hash
from dflash_lightning.data.word_problems import load_templates, word_problems
from dflash_lightning.errors import UserError


@dataclass
class WordProblems(PromptSource):
    """School-maths word problems that the package makes itself, split by template.

    No held-out prompt shares a template with a training prompt.

    Args:
        num_train: Training prompts.
        num_val: Validation prompts.
        num_test: Test prompts.
        seed: Names, objects and numbers follow from it, and which templates are held out.
    """

    num_train: int = 900
    num_val: int = 32
    num_test: int = 32
    seed: int = 0

    def stream(self, split: Split) -> Iterator[Prompt]:
        """See `PromptSource.stream`."""
        try:
            found = word_problems(self.num_train, self.num_val, self.num_test, seed=self.seed)
        except ValueError as error:
            raise UserError(f"data.prompts: {error}") from error
        for i, text in enumerate(found[split]):
            yield Prompt(f"WordProblems {split} {i}", ({"role": "user", "content": text},))

    def count(self, split: Split) -> int:
        """Return the number asked for."""
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}[split]

    def fingerprint(self) -> str:
        """Return the arguments and a hash of the templates."""
        return identity(self, hashlib.sha256("\n".join(load_templates()).encode()).hexdigest())


@dataclass
class ReasoningGymPrompts(PromptSource):
    """Endless problems of the reasoning-gym package, with seeds that no two splits share.

    Needs the extra: pip install "dflash-lightning[reasoning-gym]".

    Args:
        tasks: Its data sets, such as gsm_symbolic (school maths), chain_sum or simple_equations,
            which take turns; a mapping gives a task its options: {chain_sum: {max_terms: 3}}.
        num_train: Training prompts.
        num_val: Validation prompts.
        num_test: Test prompts.
        seed: 0 to 340; every split draws from a range of its own, and no question comes twice.
    """

    tasks: list[str] | dict[str, dict[str, Any]] = field(default_factory=lambda: ["gsm_symbolic"])
    num_train: int = 900
    num_val: int = 32
    num_test: int = 32
    seed: int = 0

    SPAN = 1 << 22

    def stream(self, split: Split) -> Iterator[Prompt]:
        """See `PromptSource.stream`."""
        taken: set[int] = set()
        for earlier in reversed(SPLITS):  # a question belongs to test before val before train
            for prompt in self._draw(earlier, taken):
                if earlier == split:
                    yield prompt
            if earlier == split:
                return

    def count(self, split: Split) -> int:
        """Return the number asked for."""
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}[split]

    def fingerprint(self) -> str:
        """Return the arguments and the version of reasoning-gym."""
        return identity(self, str(getattr(_reasoning_gym(), "__version__", "")))

    def _draw(self, split: Split, taken: set[int]) -> Iterator[Prompt]:
        """Yield the split's questions that are not in `taken`, and add them to it."""
        count = self.count(split)
        draws = min(self.SPAN, 20 * count + 1000)
        problems = [iter(self._problems(name, split, draws)) for name in self.tasks]
        if not problems or not 0 <= self.seed <= 340:
            raise UserError("data.prompts: tasks needs at least one name, and seed 0 to 340")
        for number in range(count):
            turn = number % len(problems)
            for problem in problems[turn]:
                asked = {"role": "user", "content": str(problem["question"])}
                answer = {"role": "assistant", "content": str(problem["answer"])}
                place = f"ReasoningGymPrompts {split} {number}"
                prompt = Prompt(place, (asked, answer))
                key = content_hash(prompt)
                if key not in taken:
                    taken.add(key)
                    yield prompt
                    break
            else:
                raise UserError(
                    f"data.prompts.tasks: {list(self.tasks)[turn]} has no new {split} question "
                    f"after {number}; ask for fewer, or add a task"
                )

    def _problems(self, name: str, split: Split, draws: int) -> Any:
        options = self.tasks[name] if isinstance(self.tasks, dict) else {}
        # a problem's seed is that of its data set plus its index, so the ranges must not overlap
        seed = (len(SPLITS) * self.seed + SPLITS.index(split)) * self.SPAN
        try:
            return _reasoning_gym().create_dataset(name, seed=seed, size=draws, **(options or {}))
        except (ValueError, TypeError, AssertionError, KeyError) as error:
            raise UserError(f"data.prompts.tasks: {name}: {error}") from error


@dataclass
class _SplitFiles(PromptSource):
    """What the sources of files and data sets share; their Args say what the fields are."""

    train: str
    val: str | None = None
    test: str | None = None
    held_out: int | float = 32
    limit: int | None = None
    max_bad_share: float = 0.05

    def stream(self, split: Split) -> Iterator[Prompt]:
        """See `PromptSource.stream`."""
        return self._deal.stream(split)

    def count(self, split: Split) -> int:
        """Return the number of good rows dealt to the split."""
        return self._deal.count(split)

    @cached_property
    def _deal(self) -> Deal:
        return Deal(self._parts(), self._rows, self.held_out, self.limit, self.max_bad_share)

    def _parts(self) -> dict[Split, str]:
        given: dict[Split, str | None] = {"train": self.train, "val": self.val, "test": self.test}
        return {split: part for split, part in given.items() if part is not None}

    def fingerprint(self) -> str | None:
        """Return the arguments, and size and time of change of the files."""
        files = [Path(part).expanduser() for part in self._parts().values()]
        if not all(file.is_file() for file in files):
            return None
        return identity(self, *(_state(file) for file in files))

    @abstractmethod
    def _rows(self, part: str) -> Iterator[Row]:
        """Yield the rows of a part, unparsed."""


@dataclass
class JsonlPrompts(_SplitFiles):
    """Chats in JSONL files, one object a line.

    A line is {"messages": [{"role": ..., "content": ...}]}, {"prompt": "...", "response": "..."},
    or {"conversations": [{"from": "human", "value": ...}]} as in ShareGPT.

    Args:
        train: File of training chats.
        val: File of validation chats; without one, rows are held out of the training file.
        test: File of test chats; likewise.
        held_out: Rows of `train` that go to each split without a file of its own: a count (64) or a
            share (0.01). They are spread evenly over the file. A prompt that occurs in two splits
            is left out of train.
        limit: Use at most so many training rows; null uses all.
        max_bad_share: Bad rows are named and left out, unless more than this share is bad.
    """

    def _rows(self, part: str) -> Iterator[Row]:
        return jsonl_rows(part)


@dataclass
class TextPrompts(_SplitFiles):
    """Plain text, documents separated by empty lines.

    Every token is supervised (`data.responses: given`).

    Args:
        train: Text file for training.
        val: Text file for validation; without one, documents are held out of the training file.
        test: Text file for testing; likewise.
        held_out: Documents of `train` that go to each split without a file of its own: a count (64)
            or a share (0.01). They are spread evenly over the file. A document that occurs in two
            splits is left out of train.
        limit: Use at most so many training documents; null uses all.
        max_bad_share: Bad documents are named and left out, unless more than this share is bad.
    """

    def _rows(self, part: str) -> Iterator[Row]:
        return text_rows(part)


@dataclass
class HuggingFacePrompts(_SplitFiles):
    """A data set of the Hugging Face hub, or a folder that holds one.

    Needs the extra: pip install "dflash-lightning[datasets]".

    Args:
        path: Hub id (HuggingFaceH4/ultrachat_200k), a folder written by `save_to_disk`, or a folder
            of parquet or JSONL files.
        name: Configuration of the data set, where it has several.
        revision: Hub revision (branch, tag or commit); null takes the default branch.
        columns: Our name of a column -> its name there. Ours are messages, conversations, prompt,
            response and text: {prompt: question, response: answer}. Null takes them as they are.
        train: Its split for training.
        val: Its split for validation; without one, rows are held out of the training split.
        test: Its split for testing; likewise.
        held_out: Rows of `train` that go to each of our splits without one: a count (64) or a share
            (0.01). They are spread evenly. A prompt that occurs in two splits is left out of train.
        limit: Use at most so many training rows; null uses all.
        max_bad_share: Bad rows are named and left out, unless more than this share is bad.
    """

    train: str = "train"
    path: str = field(kw_only=True)
    name: str | None = None
    revision: str | None = None
    columns: dict[str, str] | None = None

    def fingerprint(self) -> str | None:
        """Return the arguments, and size and time of change of the files behind the data set."""
        parts = self._parts().values()
        files = [Path(f["filename"]) for part in parts for f in self._open(part).cache_files]
        return identity(self, *(_state(file) for file in files)) if files else None

    def _rows(self, part: str) -> Iterator[Row]:
        from dflash_lightning.data.hub import our_columns

        found = self._open(part)
        names = our_columns(found.column_names, self.columns)
        found = found.select_columns(sorted(set(names.values())))

        def prompt(number: int) -> Prompt:
            row = found[number]
            ours = {name: row[theirs] for name, theirs in names.items()}
            return row_prompt(f"{self.path}[{part}]:{number}", ours)

        return (partial(prompt, number) for number in range(len(found)))

    def _open(self, part: str) -> Any:
        from dflash_lightning.data.hub import open_dataset

        return open_dataset(self.path, self.name, self.revision, part)


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "data.prompts: ReasoningGymPrompts needs the package reasoning-gym: "
            'pip install "dflash-lightning[reasoning-gym]"'
        ) from error
    return reasoning_gym


def identity(source: Any, *more: Any) -> str:
    """Return the class of a source, its arguments and what else it is known by."""
    return json.dumps([type(source).__qualname__, asdict(source), *more], sort_keys=True)


def _state(file: Path) -> list[Any]:
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]
