"""Experiments that build on others: `base: quickstart.yaml` at the top of a YAML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dflash_lightning.errors import UserError

FLAGS = ("-c", "--config")


def with_bases(args: Sequence[str]) -> list[str]:
    """Return the arguments with each `-c FILE` preceded by the files that FILE builds on.

    Later files win over earlier ones, as for several `-c`.

    Raises:
        UserError: A base is not there, or a file builds on itself.
    """
    found: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            found.append(word)
            continue
        file = value if equals else next(words, None)
        if file is None:
            found.append(word)
            continue
        for path in _chain(Path(file)):
            found += ["-c", str(path)]
    return found


def _chain(file: Path) -> list[Path]:
    """Return the files that `file` builds on, the first of them first, and itself last."""
    chain = [file]
    while (base := _base(chain[0])) is not None:
        if not base.is_file():
            raise UserError(f"{chain[0]}: base: no such file: {base}")
        if base.resolve() in {path.resolve() for path in chain}:
            raise UserError(f"{file}: base: it builds on itself by way of {chain[0]}")
        chain.insert(0, base)
    return chain


def _base(file: Path) -> Path | None:
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the parser says what is wrong with it
    base = content.get("base") if isinstance(content, dict) else None
    if base is not None and not isinstance(base, str):
        raise UserError(f"{file}: base: needs the name of a YAML file, got {base}")
    return None if base is None else file.parent / base
