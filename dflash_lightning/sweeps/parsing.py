"""What a trial's command line means, read by the command line's own parser; nothing is loaded."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.cli import DFlashCLI, main
from dflash_lightning.configs import with_bases
from dflash_lightning.errors import UserError
from dflash_lightning.run_names import run_name
from dflash_lightning.run_record import config_hash, plain
from dflash_lightning.sweeps.cells import Cell, all_cells, command, edges, label
from dflash_lightning.sweeps.spec import Spec


class Reader(DFlashCLI):
    """Reads command lines and builds what checks itself: the model's and the data's choices."""

    def _set_seed(self) -> None:
        """Leave the random state alone."""

    def instantiate_classes(self) -> None:
        """Build everything but a trainer."""
        self.config_init = self.parser.instantiate_classes(self.config)


@functools.cache
def _reader() -> DFlashCLI:
    return main([], run=False, kind=Reader)


@dataclass(frozen=True)
class Meaning:
    """What a trial trains.

    Attributes:
        name: The run's, without its seed.
        identity: Hash of the configuration; the seed is in it.
        config: The configuration as plain types.
    """

    name: str
    identity: str
    config: dict[str, Any]


def meaning(words: Sequence[str]) -> Meaning:
    """Return what the words of a `fit` mean.

    Raises:
        UserError: An unknown key, or a value that a key can't take.
    """
    cli = _reader()
    try:
        cli.parse_arguments(cli.parser, with_bases(words[1:]))
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0]) from error
    cli.before_instantiate_classes()
    cli.instantiate_classes()
    config = plain(cli.parser, cli.config)
    seed = int(cli.config.seed_everything)
    return Meaning(run_name(cli.config).removesuffix(f"-s{seed}"), config_hash(config), config)


def check_cells(spec: Spec) -> list[tuple[Cell, Meaning]]:
    """Read every cell of a finite space, else the ends of each dimension; return them.

    Raises:
        UserError: One of them can't be.
    """
    found = []
    for cell in all_cells(spec) if spec.exhaustive else edges(spec):
        try:
            found.append((cell, meaning(command(spec, cell, spec.seeds[0], "run"))))
        except UserError as error:
            raise UserError(f"space: {label(cell)}: {_without_page(error)}") from error
        except Exception as error:  # a class of one's own may raise anything
            raise UserError(f"space: {label(cell)}: {type(error).__name__}: {error}") from error
    if spec.pruner is not None and spec.monitor.startswith("decode/"):
        for cell, read in found:
            if read.config["decode"]["every_n_steps"] is None:
                raise UserError(
                    f"monitor: {spec.monitor} is logged while training only with "
                    f"decode.every_n_steps ({label(cell)})"
                )
    return found


def _without_page(error: UserError) -> str:
    return str(error).partition(" (see ")[0]
