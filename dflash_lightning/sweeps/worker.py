"""A worker: takes trials of a study one after the other until none is left."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import torch
import yaml
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from dflash_lightning.data.files import write_whole
from dflash_lightning.errors import UserError
from dflash_lightning.run_record import config_hash
from dflash_lightning.sweeps.cells import (
    Cell,
    command,
    full_name,
    pasteable,
    run_names,
)
from dflash_lightning.sweeps.live import View, duration, notes
from dflash_lightning.sweeps.locks import Presence, locked
from dflash_lightning.sweeps.parsing import Meaning, check_cells, meaning
from dflash_lightning.sweeps.spec import EXPERIMENT, Spec
from dflash_lightning.sweeps.study import (
    HEARTBEAT_S,
    INTERRUPTED,
    KILLED,
    Trials,
    seed_of,
)
from dflash_lightning.sweeps.trial import (
    Outcome,
    Watch,
    copy_run,
    find_finished,
    record,
    train,
)

REFRESH_S = 1.0


class Worker:
    """Trains trials of a sweep's study in this process.

    Args:
        spec: The sweep.
        presence: This process's sign of life.
    """

    def __init__(self, spec: Spec, presence: Presence) -> None:
        self.spec, self.presence = spec, presence
        self.threads = torch.get_num_threads()
        checked = check_cells(spec)
        self.names = _names(spec, checked)
        identities = _identities(spec)
        with self._lock():
            self.trials = Trials(spec, identities)
            text = yaml.safe_dump(spec.plain, sort_keys=False)
            write_whole(spec.folder / "sweep.yaml", text.encode())
            self._reclaim()
            if spec.exhaustive:
                self.trials.add_missing(cell for cell, _ in checked)
        self.view = View(self.trials)
        self._warned = False

    def work(self) -> None:
        """Take trials until none waits."""
        try:
            with self.view:
                for line in notes(self.spec):
                    self.view.say(line)
                while (trial := self._next()) is not None:
                    self._run(trial)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rest takes no second
            self._give_back()
            self.view.say("interrupted; the same command goes on, with the trial that ran first")
            raise
        finally:
            torch.set_num_threads(self.threads)

    @property
    def all_ended(self) -> bool:
        """Whether no trial of the study waits or runs, here or elsewhere."""
        open_ = (TrialState.WAITING, TrialState.RUNNING)
        return not any(self.trials.wanted(state) for state in open_)

    @property
    def has_values(self) -> bool:
        """Whether a trial of the study is complete."""
        return bool(self.trials.all(TrialState.COMPLETE))

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self.spec.folder / "lock")

    def _next(self) -> FrozenTrial | None:
        with self._lock():
            self._reclaim()
            worker = dict(self.presence.identity)
            trial = self.trials.claim(worker)
            if trial is None and not self.spec.exhaustive:
                trial = self.trials.ask(worker)
            return trial

    def _reclaim(self) -> None:
        """Add the trials of killed workers again, and remove what is left of their runs."""
        for trial in self.trials.dead():
            self._add_again(trial, KILLED)

    def _give_back(self) -> None:
        """Add the trial that this worker runs again."""
        for trial in self.trials.all(TrialState.RUNNING):
            if trial.user_attrs.get("worker") == self.presence.identity:
                self._add_again(trial, INTERRUPTED)

    def _add_again(self, trial: FrozenTrial, reason: str) -> None:
        run = trial.user_attrs.get("run")
        if self.trials.give_back(trial, reason) and run is not None:
            _remove_unfinished(self.spec.folder / run)

    def _run(self, trial: FrozenTrial) -> None:
        """Train a trial and tell the study."""
        began = time.monotonic()
        try:
            with self._beating(trial) as watch:
                outcome = self._outcome(trial, watch)
            self._tell(trial, outcome, time.monotonic() - began)
        except UpdateFinishedTrialError:
            self.view.event(trial, "was taken for dead and given to another worker")

    def _outcome(self, trial: FrozenTrial, watch: Watch) -> Outcome:
        cell, seed = self.trials.cell(trial), seed_of(trial)
        try:
            read = meaning(command(self.spec, cell, seed, "run"))
        except UserError as error:
            return Outcome({}, str(error))
        run = f"{self._name(cell, read)}-s{seed}"
        words, folder = command(self.spec, cell, seed, run), self.spec.folder / run
        self.trials.sign(trial, run=run, command=pasteable(words))
        outcome = self._copied(folder, read)
        if outcome is None:
            workers = self._share_threads()
            shutil.rmtree(folder, ignore_errors=True)
            self.view.event(trial, "starts")
            outcome = train(words, folder, watch, workers)
        return self._recorded(trial, folder, outcome)

    def _name(self, cell: Cell, read: Meaning) -> str:
        known = self.names.get(repr(cell)) if self.spec.exhaustive else None
        return known or full_name(read.name, cell)

    def _copied(self, folder: Path, read: Meaning) -> Outcome | None:
        """Return what a finished run of the same configuration showed, with its files here."""
        found = find_finished(self.spec.folder.parent, read.identity)
        if found is None or not set(self.spec.metrics) <= set(found[1]):
            return None
        if found[0].resolve() == folder.resolve():
            return Outcome(found[1])
        copy_run(found[0], folder)
        return Outcome(found[1], copied_from=str(found[0]))

    def _recorded(self, trial: FrozenTrial, folder: Path, outcome: Outcome) -> Outcome:
        """Write trial.json of a trial that has its values; say why another has none."""
        if outcome.reason is not None:
            return outcome
        lacking = [metric for metric in self.spec.metrics if metric not in outcome.metrics]
        if lacking:
            return Outcome({}, f"the run gave no finite {', '.join(lacking)}")
        record(
            folder,
            study=self.spec.name,
            trial=trial.number,
            cell=self.trials.cell(trial),
            seed=seed_of(trial),
            values={metric: outcome.metrics[metric] for metric in self.spec.metrics},
            metrics=outcome.metrics,
            copied_from=outcome.copied_from,
        )
        return outcome

    def _tell(self, trial: FrozenTrial, outcome: Outcome, spent: float) -> None:
        if outcome.pruned:
            self.trials.end(trial, None)
            words = f"pruned: {outcome.reason}"
        elif outcome.reason is not None:
            self.trials.fail(trial, outcome.reason)
            words = f"failed: {outcome.reason}"
        else:
            if outcome.copied_from is not None:
                self.trials.sign(trial, copied_from=outcome.copied_from)
            values = {metric: outcome.metrics[metric] for metric in self.spec.metrics}
            self.trials.end(trial, list(values.values()))
            how = f"copied from {outcome.copied_from}" if outcome.copied_from else duration(spent)
            words = " ".join(f"{metric}={value:.3f}" for metric, value in values.items())
            words += f" ({how})"
        self.view.event(trial, words)

    def _share_threads(self) -> int:
        """Take this worker's share of the machine's threads; return how many workers live."""
        workers = max(self.presence.alive(), self.spec.workers)
        torch.set_num_threads(max(1, self.threads // workers))
        if workers > 1 and not self._warned:
            self._warned = True
            self.view.say(
                f"{workers} workers train on this machine: speeds measured now are void as speeds"
            )
        return workers

    @contextmanager
    def _beating(self, trial: FrozenTrial) -> Iterator[Watch]:
        """Show progress and sign the trial now and then, from another thread."""
        prune = self._hopeless(trial) if self.spec.pruner is not None else None
        watch = Watch(None if prune is None else self.spec.monitor, prune)
        over = Event()

        def beat() -> None:
            last = time.monotonic()
            while not over.wait(REFRESH_S):
                self.view.progress[trial.number] = watch.progress
                if time.monotonic() - last > HEARTBEAT_S:
                    last = time.monotonic()
                    progress = round(watch.progress, 3)
                    with suppress(UpdateFinishedTrialError, StorageInternalError):
                        self.trials.sign(trial, heartbeat=time.time(), progress=progress)
                with suppress(StorageInternalError):
                    self.view.refresh()

        thread = Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            over.set()
            thread.join()
            self.view.progress.pop(trial.number, None)

    def _hopeless(self, trial: FrozenTrial) -> Callable[[int, float], bool]:
        storage, number = self.trials.storage, trial._trial_id
        pruner = self.spec.pruner
        assert pruner is not None

        def hopeless(step: int, value: float) -> bool:
            storage.set_trial_intermediate_value(number, step, value)
            return pruner.prune(self.trials.study, storage.get_trial(number))

        return hopeless


def _names(spec: Spec, checked: Sequence[tuple[Cell, Meaning]]) -> dict[str, str]:
    cells = [cell for cell, _ in checked]
    names = run_names([read.name for _, read in checked], cells)
    return {repr(cell): name for cell, name in zip(cells, names, strict=True)}


def _identities(spec: Spec) -> dict[str, str]:
    """Return what each experiment trains but for the space."""
    found = {}
    for label in spec.experiments:
        try:
            read = meaning(command(spec, {EXPERIMENT: label}, 0, "run"))
        except UserError as error:
            raise UserError(f"experiments: {label}: {error}") from error
        found[label] = config_hash(read.config, package="")
    return found


def _remove_unfinished(folder: Path) -> None:
    if not (folder / "trial.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
