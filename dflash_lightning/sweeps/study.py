"""The study of a sweep: which trials there are, who runs them, and how they ended."""

import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from dflash_lightning.errors import UserError
from dflash_lightning.sweeps.cells import Cell, dimensions, stored, values_of
from dflash_lightning.sweeps.locks import is_held
from dflash_lightning.sweeps.sameness import check_same
from dflash_lightning.sweeps.spec import Spec

HEARTBEAT_S, DEAD_AFTER_S = 30.0, 300.0
KILLED, INTERRUPTED, DUPLICATE = "worker was killed", "interrupted", "duplicate"
AGAIN = (KILLED, INTERRUPTED, DUPLICATE)
"""Reasons of failed trials that say nothing about their cell."""

Pair = tuple[tuple[tuple[str, str], ...], int]
"""A cell and a seed, comparable."""


def pair_of(cell: Cell, seed: int) -> Pair:
    """Return what makes a trial the only one of its kind."""
    return tuple(sorted((key, repr(value)) for key, value in cell.items())), seed


def open_storage(spec: Spec) -> BaseStorage:
    """Return the sweep's storage: a journal file in its folder, or a database.

    Raises:
        UserError: It can't be reached.
    """
    if spec.storage is None:
        spec.folder.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(spec.folder / "journal.log")))
    try:
        return optuna.storages.get_storage(spec.storage)
    except Exception as error:  # drivers raise what they like
        raise UserError(f"storage: {spec.plain['storage']}: {_line(error)}") from error


class Trials:
    """The trials of a sweep's study.

    Args:
        spec: What the sweep asks for.
        identities: What each experiment trains but for the space, to notice that one has changed.
    """

    def __init__(self, spec: Spec, identities: dict[str, str]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.spec, self.storage = spec, open_storage(spec)
        self.study = self._open()
        check_same(self.study, spec, identities)
        self.space = {
            key: stored(d) if spec.exhaustive else d for key, d in dimensions(spec).items()
        }
        kept = {**spec.plain, "identities": identities}
        if self.study.user_attrs.get("sweep") != kept:
            self.study.set_user_attr("sweep", kept)
            self.study.set_user_attr("metric_names", spec.metrics)
            self.study.set_metric_names(spec.metrics)

    def _open(self) -> Study:
        directions = [objective.direction for objective in self.spec.objectives]
        try:
            return optuna.create_study(
                storage=self.storage,
                study_name=self.spec.name,
                directions=directions,
                pruner=self.spec.pruner or optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
        except Exception as error:
            raise UserError(f"storage: {_line(error)}") from error

    # ---- what there is ---------------------------------------------------------------------------

    def all(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in these states, or all."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def cell(self, trial: FrozenTrial) -> Cell:
        """Return a trial's cell, its dimensions in the sweep's order."""
        return {key: trial.params[key] for key in self.space if key in trial.params}

    def pair(self, trial: FrozenTrial) -> Pair:
        """Return a trial's cell and seed."""
        return pair_of(self.cell(trial), seed_of(trial))

    def wanted(self, state: TrialState) -> list[FrozenTrial]:
        """Return the trials in a state that the sweep, as asked now, wants; by seed, then age."""
        order = {seed: n for n, seed in enumerate(self.spec.seeds)}
        found = [trial for trial in self.all(state) if seed_of(trial) in order]
        if self.spec.exhaustive:
            asked = dimensions(self.spec).items()
            values = {key: set(map(repr, values_of(key, d))) for key, d in asked}
            found = [
                t
                for t in found
                if all(repr(value) in values[key] for key, value in self.cell(t).items())
            ]
        return sorted(found, key=lambda trial: (order[seed_of(trial)], trial.number))

    # ---- changes ---------------------------------------------------------------------------------

    def add(self, cell: Cell, seed: int) -> None:
        """Add a trial that waits for a worker."""
        self.study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=cell,
                distributions=self.space,
                user_attrs={"seed": seed},
            )
        )

    def add_missing(self, cells: Iterable[Cell]) -> int:
        """Add every cell with every seed that isn't there, all cells of a seed first.

        A failed trial counts as there unless its failure says nothing about it, or failed ones
        shall be trained again.
        """
        there = {self.pair(trial) for trial in self.all() if not self._void(trial)}
        cells, added = list(cells), 0
        for seed in self.spec.seeds:
            for cell in cells:
                if pair_of(cell, seed) not in there:
                    self.add(cell, seed)
                    added += 1
        return added

    def _void(self, trial: FrozenTrial) -> bool:
        if trial.state != TrialState.FAIL:
            return False
        return self.spec.retry_failed or trial.user_attrs.get("reason") in AGAIN

    def claim(self, worker: dict[str, Any]) -> FrozenTrial | None:
        """Take a waiting trial; None where there is none."""
        for trial in self.wanted(TrialState.WAITING):
            if self.take(trial, worker):
                return self.storage.get_trial(trial._trial_id)
        return None

    def take(self, trial: FrozenTrial, worker: dict[str, Any]) -> bool:
        """Make a waiting trial this worker's; False where another was faster or has its like."""
        try:
            self.sign(trial, worker=worker, heartbeat=time.time())
            state = TrialState.RUNNING
            if not self.storage.set_trial_state_values(trial._trial_id, state=state):
                return False
            self.sign(trial, worker=worker)
        except UpdateFinishedTrialError:
            return False
        like = [t for t in self.all() if t.number < trial.number and t.state != TrialState.FAIL]
        if self.pair(trial) in {self.pair(t) for t in like if "seed" in t.user_attrs}:
            self.fail(trial, DUPLICATE)
            return False
        return True

    def ask(self, worker: dict[str, Any]) -> FrozenTrial | None:
        """Let the sampler choose the next cell; None once there are as many as asked for.

        Its other seeds wait for a worker then.
        """
        first, *others = self.spec.seeds
        there = [t for t in self.all() if not self._void(t) and seed_of(t) == first]
        assert self.spec.trials is not None
        if len(there) >= self.spec.trials:
            return None
        self.study.sampler = self.spec.sampler(len(self.all()))
        number = self.study.ask(fixed_distributions=self.space).number
        trial = next(t for t in self.all() if t.number == number)
        if "seed" not in trial.user_attrs:  # it is new, not one that waited
            self.sign(trial, seed=first)
            for seed in others:
                self.add(self.cell(trial), seed)
        self.sign(trial, worker=worker, heartbeat=time.time())
        return self.storage.get_trial(trial._trial_id)

    def sign(self, trial: FrozenTrial, **attributes: Any) -> None:
        """Write user attributes of a trial that isn't finished."""
        for key, value in attributes.items():
            self.storage.set_trial_user_attr(trial._trial_id, key, value)

    def fail(self, trial: FrozenTrial, reason: str) -> bool:
        """End a trial with the reason why it has no values; False if it had ended already."""
        try:
            self.sign(trial, reason=reason)
            self.storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False
        return True

    def end(self, trial: FrozenTrial, values: list[float] | None) -> None:
        """End a trial with its values, or as pruned with the last one that the pruner saw.

        Raises:
            UpdateFinishedTrialError: It was taken for dead meanwhile.
        """
        state = TrialState.COMPLETE if values is not None else TrialState.PRUNED
        seen = self.storage.get_trial(trial._trial_id).intermediate_values
        if values is None and seen:
            values = [seen[max(seen)]]
        self.storage.set_trial_state_values(trial._trial_id, state=state, values=values)

    def give_back(self, trial: FrozenTrial, reason: str) -> bool:
        """End a trial that says nothing about its cell and add it again; False if it had ended."""
        if not self.fail(trial, reason):
            return False
        if seed_of(trial) in self.spec.seeds:
            self.add(self.cell(trial), seed_of(trial))
        return True

    def dead(self) -> list[FrozenTrial]:
        """Return running trials whose worker is no more."""
        return [trial for trial in self.all(TrialState.RUNNING) if not _lives(trial)]


def seed_of(trial: FrozenTrial) -> int:
    """Return a trial's seed; -1 for a trial that isn't a sweep's."""
    return int(trial.user_attrs.get("seed", -1))


def _lives(trial: FrozenTrial) -> bool:
    worker = trial.user_attrs.get("worker")
    if worker is None:
        return False
    if worker["host"] == socket.gethostname():
        return is_held(Path(worker["file"]))
    return time.time() - trial.user_attrs.get("heartbeat", 0.0) < DEAD_AFTER_S


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
