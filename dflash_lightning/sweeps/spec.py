"""What a sweep asks for: one YAML file, every key of which is a flag too."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from dflash_lightning.commands import PROG, Parser
from dflash_lightning.errors import UserError

EXHAUSTIVE = ("BruteForceSampler", "GridSampler")
"""Samplers whose every cell is wanted."""

EXPERIMENT = "experiment"
"""The dimension that several experiments make."""

DECODED = (
    "accept_len|accept_len_per_prompt|speedup|tokens_per_s|plain_tokens_per_s|draft_ms|verify_ms"
    r"|overhead_ms|identical_share|accept_rate/pos_\d+"
)
VALIDATED = r"loss|accept_len|accept_len_full_blocks|accept_rate/pos_\d+|slot_accuracy/pos_\d+"
COST = "parameters|draft_ms|verify_ms|plain_ms|expected_speedup"
LOGGED = rf"decode/({DECODED})|val/({VALIDATED})|cost/({COST})"
"""What a run's end can say."""
WATCHED = rf"decode/({DECODED})|val/({VALIDATED})"
"""What a run says while it trains."""


@dataclass(frozen=True)
class Objective:
    """A figure of a run's end, and which way is better."""

    metric: str
    direction: Literal["maximize", "minimize"] = "maximize"


@dataclass(frozen=True)
class Spec:
    """A sweep as asked; see the help of the flags of `parser`."""

    name: str
    experiments: dict[str, str]
    space: dict[str, BaseDistribution]
    aliases: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    seeds: list[int]
    objectives: list[Objective]
    pruner: BasePruner | None
    monitor: str
    trials: int | None
    budget: dict[str, float]
    storage: str | None
    folder: Path
    retry_failed: bool
    plain: dict[str, Any]
    """All of it as plain types."""

    @property
    def exhaustive(self) -> bool:
        """Whether every cell is wanted."""
        return self.plain["sampler"]["class_path"].rpartition(".")[2] in EXHAUSTIVE

    @property
    def metrics(self) -> list[str]:
        """The names of the objectives."""
        return [objective.metric for objective in self.objectives]

    def sampler(self, trials: int) -> BaseSampler:
        """Return the sampler for a study of so many trials.

        A seed counts on with the trials: the same one would give the first points again.
        """
        asked = yaml.safe_load(yaml.safe_dump(self.plain["sampler"]))
        init = asked.get("init_args", {})
        if init.get("seed") is not None:
            init["seed"] += trials
        parser = Parser()
        parser.add_argument("--sampler", type=BaseSampler)
        made = parser.instantiate_classes(parser.parse_object({"sampler": asked}))
        return cast(BaseSampler, made.sampler)


def parser() -> Parser:
    """Return the parser of a sweep's flags."""
    made = Parser(
        prog=f"{PROG} sweep",
        description="Train every cell of a space, or search it: trials of an Optuna study. Start "
        "it again to go on, in several terminals to share the work.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("-c", "--config", action=ActionConfigFile, help="The sweep's YAML file.")
    add(
        "--experiments",
        type=list[str] | str,
        help="Experiment files; several are a dimension named experiment. Looked for beside the "
        "sweep's file, then in the working directory.",
    )
    add(
        "--space",
        type=dict[str, BaseDistribution],
        default={},
        help="The command line's dotted keys -> Optuna distributions by class_path.",
    )
    add(
        "--aliases",
        type=dict[str, dict[str, Any]],
        default={},
        help="What a choice stands for: name -> the keys that it sets, instead of its own; of a "
        "number: beside its own.",
    )
    add("--settings", type=dict[str, Any], default={}, help="Keys that every trial gets.")
    add("--seeds", type=list[int], default=[0, 1, 2], help="Every cell is trained with each.")
    add(
        "--objectives",
        type=list[Objective],
        default=[{"metric": "decode/accept_len"}, {"metric": "decode/speedup"}],
        help="What is compared: figures of a run's end, each with a direction.",
    )
    add(
        "--sampler",
        type=BaseSampler,
        default={"class_path": "optuna.samplers.BruteForceSampler"},
        help="BruteForceSampler: every cell. Others search, and need --trials.",
    )
    add(
        "--pruner",
        type=BasePruner | None,
        default=None,
        help="Ends hopeless trials early; needs one objective.",
    )
    add(
        "--monitor",
        type=str,
        default="val/accept_len",
        help="What the pruner sees, better in the objective's direction.",
    )
    add("--trials", type=int | None, default=None, help="Cells that a searching sampler tries.")
    add(
        "--budget",
        type=dict[str, float] | None,
        default=None,
        help="What each trial gets: tokens, minutes or flops (see fit's budget); null: its steps.",
    )
    add(
        "--storage",
        type=str | None,
        default=None,
        help="Database URL for many machines; null: a journal file in the study's folder.",
    )
    add("--results", type=str, default="sweeps/results", help="Holds a folder a study.")
    add("--name", type=str | None, default=None, help="The study's; null: the file's.")
    add("--retry_failed", action="store_true", help="Train failed trials again.")
    return made


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
    plain.pop("retry_failed", None)
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


def name_of(choice: Any) -> str:
    """Return what a choice is called in `aliases`.

    >>> [name_of(choice) for choice in ("uniform", 3, 3.0, 1.5)]
    ['uniform', '3', '3', '1.5']
    """
    whole = isinstance(choice, float) and choice.is_integer()
    return str(int(choice)) if whole else str(choice)


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
