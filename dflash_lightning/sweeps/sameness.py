"""Whether a study is of the sweep that is asked for."""

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.study import Study, StudyDirection

from dflash_lightning.errors import UserError
from dflash_lightning.sweeps.cells import dimensions, stored
from dflash_lightning.sweeps.spec import Spec, name_of

FIXED = ("objectives", "budget", "settings", "sampler", "pruner", "monitor")
"""Keys that all trials of a study must share; seeds, numbers and trials may grow."""


def check_same(study: Study, spec: Spec, identities: Mapping[str, str]) -> None:
    """Refuse a study of another sweep.

    Args:
        study: May be new.
        spec: The sweep.
        identities: What each experiment trains but for the space.

    Raises:
        UserError: What differs, and the cure.
    """
    asked = {**spec.plain, "identities": identities}
    before = study.user_attrs.get("sweep")
    if before is None:
        before = {} if study.get_trials(deepcopy=False) else asked
    for key in FIXED:
        if before.get(key) != asked[key]:
            raise UserError(_other(spec, key, before.get(key), asked[key]))
    old, new = before.get("aliases") or {}, asked["aliases"]
    if any(old.get(name) != new.get(name) for name in {*old, *_names(before)}):
        raise UserError(_other(spec, "aliases", old, new))
    directions = [StudyDirection[o.direction.upper()] for o in spec.objectives]
    if directions != study.directions:
        raise UserError(_other(spec, "objectives", study.directions, directions))
    for key, identity in identities.items():
        if before["identities"].get(key, identity) != identity:
            raise UserError(
                f"experiments: {key} has changed since study {spec.name} began; take another --name"
            )
    _check_space(study, spec, before)


def _names(before: dict[str, Any]) -> set[str]:
    spaces = (before.get("space") or {}).values()
    arguments = [space.get("init_args") or {} for space in spaces]
    return {name_of(choice) for given in arguments for choice in given.get("choices", ())}


def _check_space(study: Study, spec: Spec, before: dict[str, Any]) -> None:
    old, new = before["space"], spec.plain["space"]
    if old.keys() != new.keys() or (len(before["experiments"]) > 1) != (len(spec.experiments) > 1):
        raise UserError(_other(spec, "space", list(old), list(new)))
    for key, distribution in dimensions(spec).items():
        asked = stored(distribution) if spec.exhaustive else distribution
        for trial in study.get_trials(deepcopy=False):
            had = trial.distributions.get(key, asked)
            if not _fits(had, asked, spec.exhaustive):
                shown = [getattr(d, "choices", d) for d in (had, asked)]
                raise UserError(
                    f"space: {key}: study {spec.name} has {shown[0]}, asked {shown[1]}; Optuna "
                    "can't change it: take another --name (what is trained already is copied)"
                )


def _fits(had: BaseDistribution, asked: BaseDistribution, may_grow: bool) -> bool:
    if not may_grow:
        return had == asked
    try:
        check_distribution_compatibility(had, asked)
    except ValueError:
        return False
    return True


def _other(spec: Spec, key: str, had: Any, asked: Any) -> str:
    return (
        f"{key}: study {spec.name} has {had}, asked {asked}; take another --name or move "
        f"{spec.folder} away"
    )
