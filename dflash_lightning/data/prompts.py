"""Where prompts come from.

A source is a class; an experiment names it by `class_path` and sets its arguments.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dflash_lightning.data.samples import Message
from dflash_lightning.data.word_problems import word_problems
from dflash_lightning.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Prompt:
    """A chat (`messages`) or a plain `text`, with the place it came from for error messages."""

    source: str
    messages: tuple[Message, ...] = ()
    text: str | None = None


class PromptSource(ABC):
    """Something that gives prompts by split; the splits share none."""

    @abstractmethod
    def load(self) -> dict[Split, list[Prompt]]:
        """Return the prompts of `train`, `val` and `test`.

        Raises:
            UserError: A file is missing or a row is bad; the message names file and line.
        """


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

    def load(self) -> dict[Split, list[Prompt]]:
        """See `PromptSource.load`."""
        try:
            found = word_problems(self.num_train, self.num_val, self.num_test, seed=self.seed)
        except ValueError as error:
            raise UserError(f"data.prompts: {error}") from error
        return {
            split: [
                _user_prompt(f"WordProblems {split} {i}", text)
                for i, text in enumerate(found[split])
            ]
            for split in SPLITS
        }


@dataclass
class JsonlPrompts(PromptSource):
    """Chats in JSONL files, one object a line.

    It is `{"messages": [...]}` or `{"prompt": "...", "response": "..."}`.

    Args:
        train: File of training chats.
        val: File of validation chats; without one, `held_out` rows are split off the training file.
        test: File of test chats; likewise.
        held_out: How many of the last rows of `train` go to each split that has no file of its own.
        limit: Read at most so many training rows; null reads all.
    """

    train: str
    val: str | None = None
    test: str | None = None
    held_out: int = 32
    limit: int | None = None

    def load(self) -> dict[Split, list[Prompt]]:
        """See `PromptSource.load`."""
        return _with_held_out(self, jsonl_prompts(self.train), jsonl_prompts)


@dataclass
class TextPrompts(PromptSource):
    """Plain text, documents separated by empty lines.

    Every token is supervised (`data.responses: given`).

    Args:
        train: Text file for training.
        val: Text file for validation; without one, `held_out` documents are split off.
        test: Text file for testing; likewise.
        held_out: How many of the last documents of `train` go to each split that has no file of its
            own.
        limit: Read at most so many training documents; null reads all.
    """

    train: str
    val: str | None = None
    test: str | None = None
    held_out: int = 32
    limit: int | None = None

    def load(self) -> dict[Split, list[Prompt]]:
        """See `PromptSource.load`."""
        return _with_held_out(self, _documents(self.train), _documents)


def jsonl_prompts(path: str) -> list[Prompt]:
    """Return the chats of one JSONL file; see `JsonlPrompts` for its rows.

    Raises:
        UserError: The file is missing or a row is bad; the message names file and line.
    """
    return [_jsonl_prompt(*row) for row in _lines(path)]


def _with_held_out(
    source: "JsonlPrompts | TextPrompts", train: list[Prompt], read: Callable[[str], list[Prompt]]
) -> dict[Split, list[Prompt]]:
    splits: dict[Split, list[Prompt]] = {"train": train}
    files: dict[Split, str | None] = {"test": source.test, "val": source.val}
    for split, path in files.items():
        if path is not None:
            splits[split] = read(path)
            continue
        if len(splits["train"]) <= source.held_out:
            raise UserError(
                f"{source.train}: {len(train)} rows are too few to hold out {source.held_out} for "
                f"{split}; give data.prompts.init_args.{split} or a smaller held_out"
            )
        cut = len(splits["train"]) - source.held_out
        splits["train"], splits[split] = splits["train"][:cut], splits["train"][cut:]
    splits["train"] = splits["train"][: source.limit]
    return splits


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """Yield (`path:line number`, line) of the non-empty lines."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"data.prompts: no such file: {path}")
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 text") from error
            if line.strip():
                yield f"{path}:{number}", line


def _jsonl_prompt(source: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not JSON ({error.msg} at column {error.colno})") from error
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        answer = (
            [{"role": "assistant", "content": row["response"]}]
            if isinstance(row.get("response"), str)
            else []
        )
        return Prompt(source, ({"role": "user", "content": row["prompt"]}, *answer))
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{source}: needs "messages": [...] or "prompt": "..."')
    for message in messages:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise UserError(
                f'{source}: each message needs a "role" and a "content" that are strings'
            )
    return Prompt(source, tuple({"role": m["role"], "content": m["content"]} for m in messages))


def _documents(path: str) -> list[Prompt]:
    documents: list[tuple[str, list[str]]] = []
    last = -1
    for source, line in _lines(path):
        number = int(source.rpartition(":")[2])
        if number != last + 1 or not documents:
            documents.append((source, []))
        documents[-1][1].append(line)
        last = number
    return [Prompt(source, text="".join(lines)) for source, lines in documents]


def _user_prompt(source: str, text: str) -> Prompt:
    return Prompt(source, ({"role": "user", "content": text},))
