"""Files that several processes share: written by one at a time, whole or not at all."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)


@contextmanager
def only_writer(folder: Path, what: str) -> Iterator[None]:
    """Let one process at a time write into `folder` (made if need be); others wait and say so.

    The lock is the kernel's (`flock` on `folder/lock`), so it ends with its process, however that
    ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "?"
            log.info("waiting for process %s, which works on %s in %s", owner, what, folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        for left in folder.rglob("*.partial"):  # by a writer that was killed
            if left.is_file():
                left.unlink()
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that appears under its name only when all of it is there.

    Several processes may write the same one.

    Raises:
        UserError: The disk is full.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_as_user_error(path.parent):
        try:
            with partial.open("wb") as stream:
                for part in parts:
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
    partial.replace(path)


@contextmanager
def disk_full_as_user_error(folder: Path) -> Iterator[None]:
    """Turn a full disk into one line with its cure."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"data.cache_dir: the disk of {folder} is full; make room or set another "
            "data.cache_dir (what is whole is kept and used again)"
        ) from error
