"""Files of a report, each there whole or not at all."""

import os
from collections.abc import Sequence
from pathlib import Path

from dflash_lightning.errors import UserError

KEPT = ("config.yaml", "run.json", "trial.json", "decode_val.json")
"""What a report is made of, of each run: some 30 kB."""


def write(path: Path, content: str | bytes) -> None:
    """Write a file under its name only when all of it is there.

    Raises:
        UserError: It can't be written there.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"report: {path} can't be written ({error.strerror})") from error


def keep_runs(folders: Sequence[Path], place: Path) -> None:
    """Copy what a report is made of, a folder a run.

    Raises:
        UserError: It can't be written there.
    """
    for folder in folders:
        for file in (folder / name for name in KEPT):
            if file.is_file():
                write(place / folder.name / file.name, file.read_bytes())
