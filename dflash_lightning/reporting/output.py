"""Files of a report, each there whole or not at all."""

import os
from pathlib import Path

from dflash_lightning.errors import UserError


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
