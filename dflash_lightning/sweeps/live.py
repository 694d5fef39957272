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
            self.refresh()
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Show how things stand, on a terminal."""
        if self._live is not None:
            with self._lock:
                self._live.update(table(shown(self.trials), self.trials, self.progress))
                self._live.refresh()

    def event(self, trial: FrozenTrial, words: str) -> None:
        """Tell of a trial; on a terminal the table does."""
        if self._live is None:
            rest = remaining_s(self.trials, self.progress)
            eta = "" if rest is None else f" (the rest: about {duration(rest)})"
            cell = label(self.trials.cell(trial))
            self.say(f"trial {trial.number}: {cell} seed={seed_of(trial)}: {words}{eta}")
        self.refresh()


def shown(trials: Trials) -> list[FrozenTrial]:
    """Return the trials of a study but for those that were started again."""
    return [
        trial
        for trial in trials.all()
        if not (trial.state == TrialState.FAIL and trial.user_attrs.get("reason") in AGAIN)
    ]


def table(found: Sequence[FrozenTrial], trials: Trials, progress: dict[int, float]) -> Table:
    """Return the trials as a table."""
    done = sum(trial.state.is_finished() for trial in found)
    rest = remaining_s(trials, progress)
    eta = "" if rest is None else f", about {duration(rest)} to go"
    made = Table(title=f"{trials.spec.name}: {done} of {len(found)} trials{eta}")
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
