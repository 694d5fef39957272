"""A sweep's YAML and flags -> what is asked for, checked by itself."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from dflash_lightning.errors import UserError
from dflash_lightning.sweeps.spec import EXPERIMENT, LOGGED, WATCHED, Spec, name_of, parser


def read_spec(args: Sequence[str]) -> Spec:
    """Return the sweep of a command line.

    Raises:
        UserError: A key or value makes no sense by itself.
    """
    reader = parser()
    asked = reader.parse_args(list(args))
    try:
        made = reader.instantiate_classes(asked)
    except (ValueError, TypeError) as error:
        raise UserError(f"space, sampler or pruner: {_line(error)}") from error
    files = [Path(str(file)) for file in asked.config or []]
    name = asked.name or (files[-1].stem if files else None)
    if not name:
        raise UserError("--config: needs the sweep's YAML file, as in -c sweeps/depth.yaml")
    if Path(name).name != name:
        raise UserError("--name: needs the study's name, without slashes")
    plain: dict[str, Any] = yaml.safe_load(reader.dump(asked, skip_none=False))
    plain.pop("config", None)
    for key in ("retry_failed", "workers", "report"):  # how this process works, not what is asked
        plain.pop(key, None)
    places = [file.parent for file in files] + [Path()]
    experiments = _experiments(asked.experiments, places)
    if made.storage is not None:  # no password in files
        plain["storage"] = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", made.storage)
    plain["objectives"] = [asdict(objective) for objective in made.objectives]
    plain.update(name=name, experiments=list(experiments.values()))
    spec = Spec(
        name=name,
        experiments=experiments,
        space=dict(made.space),
        aliases=made.aliases,
        settings=made.settings,
        seeds=made.seeds,
        objectives=list(made.objectives),
        pruner=made.pruner,
        monitor=made.monitor,
        trials=made.trials,
        budget=_budget(made),
        storage=made.storage,
        folder=Path(made.results) / name,
        retry_failed=made.retry_failed,
        workers=made.workers,
        report=made.report,
        plain=plain,
    )
    for problem in _problems(spec):
        raise UserError(problem)
    return spec


def _experiments(asked: list[str] | str | None, places: Sequence[Path]) -> dict[str, str]:
    """Return label -> file."""
    names = [asked] if isinstance(asked, str) else asked or []
    found: dict[str, str] = {}
    for name in names:
        file = next((place / name for place in places if (place / name).is_file()), None)
        if file is None:
            raise UserError(f"experiments: no such file: {name}")
        if file.stem in found:
            raise UserError(f"experiments: two are called {file.stem}; rename one")
        found[file.stem] = str(_short(file))
    if not found:
        raise UserError("experiments: needs the YAML file of one at least")
    return found


def _short(file: Path) -> Path:
    """Return a file relative to the working directory, if it lies below it."""
    whole = file.resolve()
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def _budget(made: Namespace) -> dict[str, float]:
    found = {key: value for key, value in (made.budget or {}).items() if value is not None}
    if set(found) - {"tokens", "minutes", "flops"} or len(found) > 1:
        raise UserError(f"budget: needs one of tokens, minutes and flops, got {made.budget}")
    return {key: int(value) if key == "tokens" else value for key, value in found.items()}


def _problems(spec: Spec) -> list[str]:
    searching = not spec.exhaustive
    pruned = spec.pruner is not None
    unknown = [m for m in spec.metrics if not re.fullmatch(LOGGED, m)]
    owned = [key for key in spec.space if key in spec.settings]
    choices = {name_of(c) for d in spec.space.values() for c in getattr(d, "choices", ())}
    unused = sorted(set(spec.aliases) - choices)
    rules = (
        (not spec.space and len(spec.experiments) < 2, "space: needs a key, or two experiments"),
        (
            "seed_everything" in spec.space,
            "space: seed_everything: seeds go into --seeds",
        ),
        (EXPERIMENT in spec.space, "space: experiment: list several --experiments instead"),
        (
            "trainer.devices" in {*spec.settings, *spec.space},
            "trainer.devices: a trial has one device; start a worker for each, as with "
            "CUDA_VISIBLE_DEVICES=1",
        ),
        (bool(owned), f"settings: {', '.join(owned)}: it is in the space already"),
        (bool(unused), f"aliases: no choice in the space is called {', '.join(unused)}"),
        (not spec.seeds, "seeds: needs one at least"),
        (len(set(spec.seeds)) < len(spec.seeds), f"seeds: one is there twice: {spec.seeds}"),
        (not spec.objectives, "objectives: needs one at least"),
        (
            bool(unknown),
            f"objectives: no run logs {', '.join(unknown)}; there are decode/accept_len, "
            "decode/speedup, decode/draft_ms, val/accept_len, val/loss, ...",
        ),
        (len(set(spec.metrics)) < len(spec.metrics), "objectives: one is there twice"),
        (
            pruned and len(spec.objectives) > 1,
            "pruner: Optuna prunes by one objective; leave the pruner out or name one",
        ),
        (
            pruned and not re.fullmatch(WATCHED, spec.monitor),
            f"monitor: no run logs {spec.monitor} while it trains; take val/accept_len, ...",
        ),
        (searching and (spec.trials or 0) < 1, "trials: a searching sampler needs how many cells"),
        (
            spec.exhaustive and spec.trials is not None,
            "trials: BruteForceSampler trains every cell; leave it out",
        ),
    )
    return [problem for wrong, problem in rules if wrong]


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
