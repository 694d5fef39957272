"""Locks between the workers of a machine; the kernel lets go of those of a killed process."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock; waits until it is free."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Presence:
    """A worker's sign of life: a file that is locked as long as its process lives.

    Args:
        folder: Holds the files of all workers that share results.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.file = self.folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
        self._stream: IO[str] | None = None

    def __enter__(self) -> "Presence":
        """Begin to live."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            self._stream = self.file.open("w")
            fcntl.flock(self._stream, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        """End, and leave no file."""
        with suppress(OSError):
            self.file.unlink()
        if self._stream is not None:
            self._stream.close()

    @property
    def identity(self) -> dict[str, str | int]:
        """Who this is, for others to ask after."""
        return {"host": socket.gethostname(), "pid": os.getpid(), "file": str(self.file)}

    def alive(self) -> int:
        """Return how many workers of this machine live; sweep away the files of the dead."""
        count = 0
        with locked(self.folder / "lock"):
            for file in self.folder.glob(f"{socket.gethostname()}-*"):
                if is_held(file):
                    count += 1
                else:
                    file.unlink(missing_ok=True)
        return count


def is_held(file: Path) -> bool:
    """Return whether another process, or this one, holds a file's lock."""
    try:
        with file.open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
