"""Prompts that every machine has: the source text of the interpreter's standard library.

Which files are held out follows from a hash of their path, whatever the Python version, so that the
lab's target (`experiments/lab/train.py`) has read none of them.
"""

import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dflash_lightning.data.prompts import SPLITS, Prompt, PromptSource, Split
from dflash_lightning.data.sources import identity
from dflash_lightning.data.splits import content_hash
from dflash_lightning.errors import UserError

PIECE = 800
"""Least characters of a piece of a file that a language model reads."""
_DEFINITION = re.compile(r"\n\n(?=\n*[ \t]*(?:@|def |class |async def ))")
_LEFT_OUT = {  # tables, generated text, and what Debian packages apart
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("distutils", "__phello__"),
}
_LARGEST = 400_000


def stdlib_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(path: str) -> Split:
    """Return the split of a file by its path below the standard library: 1 in 16 is test, or val.

    >>> split_of("argparse.py"), split_of("tarfile.py"), split_of("logging/handlers.py")
    ('train', 'train', 'train')
    """
    bucket = hashlib.sha256(path.encode()).digest()[0] % 16
    return "test" if bucket == 0 else "val" if bucket == 1 else "train"


def stdlib_files(split: Split) -> list[Path]:
    """Return the files of a split, sorted by their path below the standard library."""
    root, found = stdlib_folder(), {}
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        wanted = _LEFT_OUT.isdisjoint(path.parts) and not path.parts[0].startswith("config-")
        if wanted and split_of(path.as_posix()) == split and file.stat().st_size <= _LARGEST:
            found[path.as_posix()] = file
    return [found[name] for name in sorted(found)]


def source_text(file: Path) -> str:
    """Return a file's text with Unix line ends; nothing if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return ""


def pieces(text: str, least: int = PIECE) -> Iterator[str]:
    """Yield a module's text in pieces of `least` characters or more; the last may be shorter.

    They are cut at empty lines before functions, methods, classes and decorators.
    """
    held = ""
    for part in _DEFINITION.split(text):
        held = f"{held}\n\n{part}" if held else part.lstrip("\n")
        if len(held) >= least:
            yield held
            held = ""
    if held:
        yield held


def opening(piece: str, characters: int) -> int:
    """Return where the first line ends that reaches so many characters; -1 if none does."""
    return piece.find("\n", characters)


@dataclass
class StdlibPrompts(PromptSource):
    """Beginnings of pieces of Python's standard library, to be gone on with; split by file.

    With `data.responses: given` the answer is the rest of the piece.

    Args:
        num_train: Training prompts.
        num_val: Validation prompts.
        num_test: Test prompts.
        characters: A prompt ends with the line that reaches so many characters.
        piece: Least characters of a piece.
        seed: Which pieces are taken, and their order.
    """

    num_train: int = 2048
    num_val: int = 64
    num_test: int = 64
    characters: int = 200
    piece: int = PIECE
    seed: int = 0

    def stream(self, split: Split) -> Iterator[Prompt]:
        """See `PromptSource.stream`."""
        yield from self._dealt[split]

    def count(self, split: Split) -> int:
        """Return the number asked for."""
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}[split]

    def fingerprint(self) -> str:
        """Return the arguments, the Python version and the sizes of the files."""
        files = [(str(f), f.stat().st_size) for split in SPLITS for f in stdlib_files(split)]
        known = hashlib.sha256(repr(files).encode()).hexdigest()
        return identity(self, sys.version, known)

    @cached_property
    def _dealt(self) -> dict[Split, list[Prompt]]:
        found: dict[Split, list[Prompt]] = {}
        taken: set[int] = set()
        for split in reversed(SPLITS):  # a licence that opens two files belongs to the held-out one
            prompts = sorted(self._prompts(split), key=self._rank)
            kept = {content_hash(p): p for p in reversed(prompts)}
            fresh = [p for p in prompts if kept.get(content_hash(p)) is p]
            fresh = [p for p in fresh if content_hash(p) not in taken]
            if len(fresh) < self.count(split):
                raise UserError(
                    f"data.prompts.num_{split}: {self.count(split)} prompts asked for, the "
                    f"standard library in {stdlib_folder()} gives {len(fresh)}; ask for fewer"
                )
            taken |= kept.keys()
            found[split] = fresh[: self.count(split)]
        return found

    def _rank(self, prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{self.seed}:{prompt.source}".encode()).digest()

    def _prompts(self, split: Split) -> Iterator[Prompt]:
        root = stdlib_folder()
        for file in stdlib_files(split):
            name = file.relative_to(root).as_posix()
            for number, piece in enumerate(pieces(source_text(file), self.piece)):
                end = opening(piece, self.characters)
                if end > 0 and piece[end:].strip():
                    asked = {"role": "user", "content": piece[:end]}
                    rest = {"role": "assistant", "content": piece[end:]}
                    yield Prompt(f"{name} piece {number}", (asked, rest))
