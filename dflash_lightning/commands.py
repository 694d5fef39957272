"""Plain commands beside LightningCLI's: a function each, whose parameters are the flags.

Only the command that runs is imported, so `--help` answers at once.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import getdoc, signature
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from dflash_lightning.errors import UserError

COMMANDS = {
    "generate": "Decode prompts with a trained drafter, streaming what the target commits.",
    "sweep": "Train every cell of a space, or search it: trials of an Optuna study.",
}
"""Name -> what it does. The command is the function of that name in the module of that name, or
that module's `run_args`, which reads its flags itself.
"""

PROG = "python -m dflash_lightning"


class Parser(ArgumentParser):
    """Bad input becomes one line instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message` on one line, with where to read on."""
        raise UserError(f"{' '.join(str(message).split())} (see {self.prog} --help)") from ex


def run_command(name: str, args: list[str]) -> Any:
    """Run the plain command `name` with its flags and return what it returns."""
    module = import_module(f"dflash_lightning.{name}")
    if hasattr(module, "run_args"):
        return module.run_args(args)
    function = getattr(module, name)
    return auto_cli(
        function,
        args=spell_out(function, args),
        as_positional=False,
        parser_class=Parser,
        prog=f"{PROG} {name}",
        description=(getdoc(function) or "").partition("\n\nArgs:")[0],
        allow_abbrev=False,
    )


def spell_out(function: Callable[..., Any], args: list[str]) -> list[str]:
    """Return the flags with `true` behind each bare switch, as the parser wants it.

    >>> def command(fast: bool = False, name: str = ""): ...
    >>> spell_out(command, ["--fast", "--name", "x"])
    ['--fast', 'true', '--name', 'x']
    """
    switches = {
        f"--{p.name}" for p in signature(function).parameters.values() if p.default is False
    }
    found = []
    for arg, following in zip(args, [*args[1:], "--"], strict=True):
        found.append(arg)
        if arg in switches and following.startswith("--"):
            found.append("true")
    return found


def listing() -> str:
    """Return the plain commands in the form of a help page's section."""
    rows = [f"    {name:<20}{words}" for name, words in COMMANDS.items()]
    return "\n".join(["plain commands (each has its own --help):", *rows, ""])
