"""From the rows of a file to prompts; a bad row raises an error that says where it lies."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dflash_lightning.data.prompts import Prompt
from dflash_lightning.data.samples import Message
from dflash_lightning.errors import UserError

Row = Callable[[], Prompt]
"""A row as it was read: calling it parses it, and raises `UserError` if it is bad."""
T = TypeVar("T")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class BadRows:
    """Counts the rows of one part of the data and refuses it once too many are bad.

    Args:
        max_share: Highest share of bad rows.
        report: Told of the first few bad rows, and of the count at the end.
    """

    FEW, SURE = 3, 100

    def __init__(self, max_share: float, report: Callable[[str], None]) -> None:
        self.max_share, self.report = max_share, report
        self.seen, self.bad = 0, 0
        self.first: UserError | None = None
        self._unsaid: list[UserError] = []

    def good(self) -> None:
        """Count a good row."""
        self.seen += 1
        while self._unsaid:  # held back so far: a part that is all bad is refused in one line
            self.report(f"{self._unsaid.pop(0)}; the row is left out")

    def add(self, error: UserError) -> None:
        """Count a bad row; a part that begins with nothing but bad rows is refused at once."""
        self.seen, self.bad = self.seen + 1, self.bad + 1
        self.first = self.first or error
        if self.bad == self.seen == self.SURE and self.max_share < 1:
            raise self._refused(f"the first {self.bad} rows are bad")
        if self.bad <= self.FEW:
            self._unsaid.append(error)

    def end(self) -> None:
        """Say how many rows were bad.

        Raises:
            UserError: More than the permitted share was.
        """
        if self.bad > self.max_share * self.seen:
            raise self._refused(f"{self.bad} of {self.seen} rows are bad")
        for error in self._unsaid:
            self.report(f"{error}; the row is left out")
        if self.bad > self.FEW:
            self.report(f"{self.bad} of {self.seen} rows are bad and left out")

    def _refused(self, count: str) -> UserError:
        return UserError(f"{self.first} ({count}; max_bad_share permits {self.max_share:.0%})")


def good_rows(rows: Iterable[Prompt], use: Callable[[Prompt], T], bad: BadRows) -> Iterator[T]:
    """Yield what `use` makes of each prompt, without those it refuses by a `UserError`.

    Raises:
        UserError: It refuses too many.
    """
    for prompt in rows:
        try:
            made = use(prompt)
        except UserError as error:
            bad.add(error)
            continue
        bad.good()
        yield made
    bad.end()


def jsonl_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a JSONL file; see `row_prompt` for what they hold.

    Raises:
        UserError: The file is missing.
    """
    return (partial(_jsonl_row, source, line) for source, line in _lines(path) if line != "")


def jsonl_prompts(path: str) -> list[Prompt]:
    """Return the chats of one JSONL file, all of which must be good.

    Raises:
        UserError: The file is missing or a row is bad; the message names file and line.
    """
    return [row() for row in jsonl_rows(path)]


def text_rows(path: str) -> Iterator[Row]:
    """Yield the documents of a text file, which are separated by empty lines.

    Raises:
        UserError: The file is missing.
    """
    start, lines = "", list[str | None]()
    for source, line in _lines(path):
        if line != "":
            start = start if lines else source
            lines.append(line)
        elif lines:
            yield partial(_text_row, start, lines)
            lines = []
    if lines:
        yield partial(_text_row, start, lines)


def _jsonl_row(source: str, line: str | None) -> Prompt:
    if line is None:
        raise UserError(f"{source}: not UTF-8 text")
    return row_prompt(source, _parsed(source, line))


def _text_row(source: str, lines: list[str | None]) -> Prompt:
    if None in lines:
        raise UserError(f"{source}: not UTF-8 text")
    return Prompt(source, text="".join(line for line in lines if line is not None))


def row_prompt(source: str, row: Any) -> Prompt:
    """Return the prompt of a row.

    A row is {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]} as in
    ShareGPT, {"prompt", "response"} (the response may lack), or {"text"}.

    Raises:
        UserError: It is none of these; the message begins with `source`.
    """
    try:
        prompt = _prompt(source, row if isinstance(row, dict) else {})
        text = prompt.text or "".join(m["role"] + m["content"] for m in prompt.messages)
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: not Unicode text (half of a surrogate pair)") from error
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return prompt


def _prompt(source: str, row: dict[str, Any]) -> Prompt:
    if row.get("messages") is not None:
        return Prompt(source, _messages(row["messages"], "messages", ("role", "content")))
    if row.get("conversations") is not None:
        return Prompt(source, _messages(row["conversations"], "conversations", ("from", "value")))
    if isinstance(row.get("prompt"), str):
        asked = {"role": "user", "content": row["prompt"]}
        if not asked["content"].strip():
            raise UserError("the prompt is empty")
        if row.get("response") is None:
            return Prompt(source, (asked,))
        if not isinstance(row["response"], str):
            raise UserError('"response" must be a string')
        return Prompt(source, (asked, {"role": "assistant", "content": row["response"]}))
    if isinstance(row.get("text"), str) and row["text"].strip():
        return Prompt(source, text=row["text"])
    raise UserError(
        'needs "messages": [...], "conversations": [...], "prompt": "..." or "text": "..."'
    )


def _messages(found: Any, key: str, names: tuple[str, str]) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise UserError(f'"{key}" must be a list of messages')
    messages = []
    for message in found:
        given = message if isinstance(message, dict) else {}
        role, content = (
            given.get(name, given.get(ours)) for name, ours in zip(names, _OURS, strict=True)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f'each message needs a "{names[0]}" and a "{names[1]}", both strings')
        if key == "conversations":
            if role not in SHAREGPT_ROLES:
                raise UserError(f"unknown role {role!r} (known: {', '.join(SHAREGPT_ROLES)})")
            role = SHAREGPT_ROLES[role]
        messages.append({"role": role, "content": content})
    return tuple(messages)


_OURS = ("role", "content")


def _parsed(source: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{source}: not JSON (nested too deeply)") from error


def _lines(path: str) -> Iterator[tuple[str, str | None]]:
    """Yield (`path:line number`, line): "" for white space alone, None where it isn't UTF-8."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"data.prompts: no such file: {path}")
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                yield f"{path}:{number}", None
            else:
                yield f"{path}:{number}", "" if line.isspace() else line
