"""Time spent in a part of a run."""

import time

import torch


class Stopwatch:
    """Sums the seconds inside `with`; on CUDA by events that are read later, so nothing waits."""

    def __init__(self) -> None:
        self.uses = 0
        self._seconds = 0.0
        self._began = 0.0
        self._events: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        """Start."""
        self._began = time.perf_counter()
        if torch.cuda.is_available():
            self._mark()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.uses += 1
        if torch.cuda.is_available():
            self._mark()
            self._read(keep=64)
        else:
            self._seconds += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        self._read(keep=0)
        return self._seconds

    def __str__(self) -> str:
        """Return `12.3 s in 40 batches`."""
        return f"{self.seconds:.1f} s in {self.uses} batches"

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def _read(self, keep: int) -> None:
        """Add up all but the last `keep` pairs of events."""
        while len(self._events) > 2 * keep:
            start, end = self._events.pop(0), self._events.pop(0)
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
