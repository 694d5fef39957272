"""What a study knows beyond its runs: what was asked, what failed, importances, trade-offs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_lightning.errors import UserError
from dflash_lightning.reporting.cells import label_of, short_names

log = logging.getLogger(__name__)
Direction = Literal["maximize", "minimize"]
ENOUGH_TRIALS = 16
"""Complete trials from which importances are shown."""


@dataclass(frozen=True)
class Study:
    """A sweep's study, as far as the report needs it."""

    name: str
    sweep: dict[str, Any]
    """Of `sweep.yaml`."""
    trials: list[Any] = field(default_factory=list, repr=False)
    """Optuna's frozen trials."""
    directions: list[Direction] = field(default_factory=list)
    """`maximize` or `minimize`, one an objective."""
    metrics: list[str] = field(default_factory=list)

    @property
    def unfinished(self) -> list[str]:
        """Trials without a value, in words, each with its parameters, seed and reason."""
        rows = []
        for trial in self.trials:
            state = trial.state.name
            if state in ("FAIL", "PRUNED", "RUNNING"):
                known = {**trial.params, "seed": trial.user_attrs.get("seed")}
                setting = label_of(known, short_names(list(known)))
                reason = trial.user_attrs.get("reason") or _REASONS[state]
                one_line = " ".join(str(reason).split())
                rows.append(f"trial {trial.number} ({setting}): {state.lower()}: {one_line}")
        return rows


_REASONS = {
    "FAIL": "no reason was recorded",
    "PRUNED": "the pruner stopped it",
    "RUNNING": "it runs, or its worker was killed",
}


def load_study(folder: Path) -> Study | None:
    """Return the study of a sweep's folder; None where the folder holds plain runs.

    A storage that can't be read is said and left out: the runs are enough for most of a report.
    """
    file = folder / "sweep.yaml"
    if not file.is_file() and not (folder / "journal.log").is_file():
        return None
    sweep: Any = {}
    if file.is_file():
        try:
            sweep = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{file}: can't be read ({str(error).splitlines()[0]})") from error
    if not isinstance(sweep, dict):
        raise UserError(f"{file}: holds no mapping")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        name = str(sweep.get("name") or folder.resolve().name)
        study = optuna.load_study(study_name=name, storage=_storage(folder, sweep))
        directions: list[Direction] = [
            "maximize" if direction.name == "MAXIMIZE" else "minimize"
            for direction in study.directions
        ]
        metrics = study.user_attrs.get("metric_names") or study.metric_names
        metrics = metrics or [f"objective {i + 1}" for i in range(len(directions))]
        return Study(name, sweep, study.get_trials(deepcopy=False), directions, metrics)
    except Exception as error:  # storages raise many unrelated types
        line = (str(error).splitlines() or [type(error).__name__])[0]
        log.info("report: the study of %s can't be read (%s); its runs are used", folder, line)
        asked = [o for o in sweep.get("objectives") or () if isinstance(o, dict) and "metric" in o]
        return Study(
            str(sweep.get("name") or folder.name),
            sweep,
            directions=[o.get("direction", "maximize") for o in asked],
            metrics=[o["metric"] for o in asked],
        )


def importances(study: Study) -> dict[str, dict[str, float]]:
    """Return by objective how much each parameter matters, in shares of 1 (PED-ANOVA).

    Empty for fewer than two parameters or too few complete trials.
    """
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    complete = [t for t in study.trials if t.state.name == "COMPLETE"]
    varied = {key for t in complete for key in t.params}
    varied = {key for key in varied if len({str(t.params.get(key)) for t in complete}) > 1}
    if len(varied) < 2 or len(complete) < ENOUGH_TRIALS:
        return {}
    found = {}
    for i, metric in enumerate(study.metrics):
        copy = optuna.create_study(direction=study.directions[i])
        copy.add_trials(
            [
                optuna.trial.create_trial(
                    params={k: v for k, v in t.params.items() if k in varied},
                    distributions={k: v for k, v in t.distributions.items() if k in varied},
                    value=t.values[i],
                )
                for t in complete
            ]
        )
        try:
            raw = get_param_importances(copy, evaluator=PedAnovaImportanceEvaluator())
        except (ValueError, RuntimeError) as error:
            log.info("report: no importances for %s (%s)", metric, error)
            continue
        found[metric] = {key: float(share) for key, share in raw.items()}
    return found


def pareto(values: Sequence[Sequence[float]], directions: Sequence[str]) -> list[bool]:
    """Return which points no other beats in one objective without losing in another.

    >>> pareto([(2.0, 5.0), (1.0, 4.0), (1.0, 6.0)], ["maximize", "minimize"])
    [True, True, False]
    """
    signs = [1 if direction == "maximize" else -1 for direction in directions]
    points = [[s * v for s, v in zip(signs, point, strict=True)] for point in values]

    def beats(a: list[float], b: list[float]) -> bool:
        return a != b and all(x >= y for x, y in zip(a, b, strict=True))

    return [not any(beats(other, point) for other in points) for point in points]


def _storage(folder: Path, sweep: dict[str, Any]) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    url = sweep.get("storage")
    if isinstance(url, str) and "://" in url:
        return url
    file = folder / "journal.log"
    if not file.is_file():
        raise UserError("no journal.log")
    return JournalStorage(JournalFileBackend(str(file)))
