"""More workers of the same sweep, each a process of its own."""

import ctypes
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


@contextmanager
def other_workers(number: int, args: Sequence[str], folder: Path) -> Iterator[None]:
    """Start so many workers; wait for them at the end. An interruption interrupts them too.

    Args:
        number: How many.
        args: The flags of the sweep.
        folder: The study's; what worker n says goes to `worker-n.log` in it.
    """
    command = [sys.executable, "-m", "dflash_lightning", "sweep", *args]
    command += ["--workers", "1", "--report", "false"]
    started = []
    for n in range(2, number + 2):
        with (folder / f"worker-{n}.log").open("a") as said:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=_interrupted_with_parent,
            )
        started.append((n, process))
    try:
        yield
    except BaseException:
        for _, process in started:
            process.send_signal(signal.SIGINT)
        raise
    finally:
        for n, process in started:
            if process.wait() not in (0, 130):
                log.warning(
                    "worker %d ended with status %d: see %s",
                    n,
                    process.returncode,
                    folder / f"worker-{n}.log",
                )


def _interrupted_with_parent() -> None:
    """Let this process be interrupted, and have Linux do so when its parent dies, however."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
