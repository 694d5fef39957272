"""Memory of the process on CPU: what a step frees, the next one takes again."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's `mallopt`."""


def keep_freed_memory() -> bool:
    """Let the C library keep large freed blocks instead of giving them back to the system.

    Otherwise each step asks for all its activations anew, and the system clears every page of
    them: an eighth of a step's time. Returns whether the library can (glibc's can).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(TRIM_THRESHOLD, (1 << 31) - 1))
