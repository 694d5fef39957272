"""A sweep as it runs: a table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dflash_lightning.sweeps.cells import label
from dflash_lightning.sweeps.spec import Spec
from dflash_lightning.sweeps.study import AGAIN, Trials, seed_of

STATES = {
    TrialState.WAITING: "waits",
    TrialState.RUNNING: "runs",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class View:
    """Shows the trials of a study.

    Args:
        trials: The study's.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.console = trials, Console(file=sys.stdout)
        self.progress: dict[int, float] = {}
        """Trial number -> share that is done, of trials that run in this process."""
        self._live: Live | None = None
        self._lock = Lock()

    def __enter__(self) -> "View":
        """Begin to show."""
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the last state and stop."""
        if self._live is not None:
            self.refresh(whole=True)
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def refresh(self, whole: bool = False) -> None:
        """Show how things stand, on a terminal; as much of it as fits, or the whole table."""
        if self._live is not None:
            with self._lock:
                found = shown(self.trials) if whole else self._fitting(shown(self.trials))
                self._live.update(table(found, self.trials, self.progress))
                self._live.refresh()

    def _fitting(self, found: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return the trials that fit on the screen: what runs, what ended last, what is next."""
        rows = max(4, (self.console.height - 6) // 2)  # a row may take two lines
        running = [t for t in found if t.state == TrialState.RUNNING]
        waiting = [t for t in found if t.state == TrialState.WAITING][: rows // 3]
        ended = sorted((t for t in found if t.state.is_finished()), key=_end)
        ended = ended[-max(1, rows - len(running) - len(waiting)) :]
        return sorted([*running, *ended, *waiting], key=lambda t: t.number)

    def event(self, trial: FrozenTrial, words: str) -> None:
        """Tell of a trial; on a terminal the table does."""
        if self._live is None:
            rest = remaining_s(self.trials, self.progress)
            eta = f" (the rest: about {duration(rest)})" if rest else ""
            cell = label(self.trials.cell(trial))
            self.say(f"trial {trial.number}: {cell} seed={seed_of(trial)}: {words}{eta}")
        self.refresh()


def notes(spec: Spec) -> list[str]:
    """Return what should be known before a sweep: one line each."""
    only_length = all(m.endswith(("accept_len", "accept_len_per_prompt")) for m in spec.metrics)
    if only_length and "model.num_layers" in spec.space:
        return [
            "note: accept length alone always picks the deepest drafter; what depth costs shows in "
            "decode/speedup or decode/draft_ms"
        ]
    return []


def conclude(trials: Trials) -> list[str]:
    """Return what is to be said when nothing is left to do for a worker."""
    found = shown(trials)
    counts = {
        name: sum(trial.state == state for trial in found)
        for name, state in (
            ("done", TrialState.COMPLETE),
            ("pruned", TrialState.PRUNED),
            ("failed", TrialState.FAIL),
            ("running in other workers", TrialState.RUNNING),
        )
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [f"{trials.spec.name}: {said or 'no trials'}, in {trials.spec.folder}"]
    if counts["failed"]:
        lines.append("failed ones are trained again with --retry_failed")
    return lines


def shown(trials: Trials) -> list[FrozenTrial]:
    """Return the trials of a study but for those that were started again."""
    return [
        trial
        for trial in trials.all()
        if not (trial.state == TrialState.FAIL and trial.user_attrs.get("reason") in AGAIN)
    ]


def table(found: Sequence[FrozenTrial], trials: Trials, progress: dict[int, float]) -> Table:
    """Return the trials as a table."""
    every = shown(trials)
    done = sum(trial.state.is_finished() for trial in every)
    rest = remaining_s(trials, progress)
    eta = f", about {duration(rest)} to go" if rest else ""
    made = Table(title=f"{trials.spec.name}: {done} of {len(every)} trials{eta}")
    for name in ("trial", "cell", "seed", "state", *trials.spec.metrics, "time"):
        made.add_column(name, justify="left" if name in ("cell", "state") else "right")
    for trial in found:
        values: list[Any] = list(trial.values or [None] * len(trials.spec.metrics))
        state = STATES[trial.state]
        if trial.state == TrialState.RUNNING:
            share = progress.get(trial.number, trial.user_attrs.get("progress", 0.0))
            state = f"runs, {share:.0%}"
        if trial.state == TrialState.FAIL:
            state = f"failed: {trial.user_attrs.get('reason', '?')}"
        made.add_row(
            str(trial.number),
            label(trials.cell(trial)),
            str(seed_of(trial)),
            state,
            *("" if v is None else f"{v:.3f}" for v in values),
            "" if (spent := seconds(trial)) is None else duration(spent),
        )
    return made


def seconds(trial: FrozenTrial) -> float | None:
    """Return how long a trial took, or has taken so far."""
    if trial.datetime_start is None:
        return None
    end = trial.datetime_complete.timestamp() if trial.datetime_complete else time.time()
    return end - trial.datetime_start.timestamp()


def _end(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0


def remaining_s(trials: Trials, progress: dict[int, float]) -> float | None:
    """Return how long the trials that aren't done take, by those that are; None if none is."""
    took = [
        seconds(t) for t in trials.all(TrialState.COMPLETE) if "copied_from" not in t.user_attrs
    ]
    known = [s for s in took if s is not None]
    running = trials.all(TrialState.RUNNING)
    if not known:
        return None
    mean = sum(known) / len(known)
    left = [
        max(0.0, 1 - progress.get(t.number, t.user_attrs.get("progress", 0.0))) for t in running
    ]
    waiting = len(trials.wanted(TrialState.WAITING))
    return mean * (waiting + sum(left)) / max(1, len(running))


def duration(spent: float) -> str:
    """Return a time in words.

    >>> duration(5.2), duration(75), duration(7300)
    ('5 s', '1 min 15 s', '2 h 1 min')
    """
    whole = int(spent)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
