"""What a sweep asks for: one YAML file, every key of which is a flag too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]
from jsonargparse.typing import PositiveInt
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from dflash_lightning.commands import PROG, Parser

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
    workers: int
    report: bool
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
    add("--report", type=bool, default=True, help="Write a report when all trials have ended.")
    add(
        "--workers",
        type=PositiveInt,
        default=1,
        help="Processes of this command, among which the machine's threads are divided. Small "
        "drafters train faster on one thread each; measured speeds are then void as speeds.",
    )
    return made


def name_of(choice: Any) -> str:
    """Return what a choice is called in `aliases`.

    >>> [name_of(choice) for choice in ("uniform", 3, 3.0, 1.5)]
    ['uniform', '3', '3', '1.5']
    """
    whole = isinstance(choice, float) and choice.is_integer()
    return str(int(choice)) if whole else str(choice)
