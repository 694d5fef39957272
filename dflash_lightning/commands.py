"""Plain commands beside LightningCLI's: a function each, whose parameters are the flags.

Only the command that runs is imported, so `--help` answers at once.
"""

import json
from collections.abc import Callable
from importlib import import_module
from inspect import getdoc, signature
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from dflash_lightning.errors import UserError

COMMANDS = {
    "generate": "Decode prompts with a trained drafter, streaming what the target commits.",
    "report": "Compare the runs of a sweep, or any runs: tables, intervals, figures, TensorBoard.",
    "sweep": "Train every cell of a space, or search it: trials of an Optuna study.",
}
"""Name -> what it does. The command is the function of that name in the module of that name, or
that module's `run_args`, which reads its flags itself.
"""

OF_EXPERIMENTS = {
    "prepare": "Make the data that fit needs: the target's answers, its states where stored.",
    "fit": "Train a drafter; decode held-out prompts with it.",
    "validate": "Score a checkpoint on the validation split and decode its prompts.",
    "test": "Score a checkpoint on the test split and decode its prompts.",
    "predict": "Decode the test prompts into a JSONL file.",
}
"""Name -> what it does; LightningCLI runs these."""

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
    """Return the flags as the parser wants them.

    That is `true` behind each bare switch, one list behind a flag that takes several words, and the
    first parameter's name before a word that comes first.

    >>> def command(folder: str = "", fast: bool = False, names: list[str] | None = None): ...
    >>> spell_out(command, ["--fast", "--names", "x", "y"])
    ['--fast', 'true', '--names', '["x", "y"]']
    >>> spell_out(command, ["here", "--fast", "false"])
    ['--folder', 'here', '--fast', 'false']
    """
    parameters = signature(function).parameters.values()
    switches = {f"--{p.name}" for p in parameters if p.default is False}
    lists = {f"--{p.name}" for p in parameters if "list[" in str(p.annotation)}
    if args and not args[0].startswith("-"):
        args = [f"--{next(iter(parameters)).name}", *args]
    args = _with_lists(args, lists)
    found = []
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        found.append(arg)
        if arg in switches and following.startswith("--"):
            found.append("true")
    return found


def _with_lists(args: list[str], flags: set[str]) -> list[str]:
    found: list[str] = []
    words: list[str] = []
    for arg in [*args, "--"]:
        if words and not arg.startswith("--"):
            words.append(arg)
            continue
        if words:
            flag, *values = words
            written = len(values) == 1 and values[0].startswith("[")
            found += [flag, values[0] if written else json.dumps(values)]
        words = [arg] if arg in flags else []
        found += [] if words else [arg]
    return found[:-1]


def overview() -> str:
    """Return the help page of the whole program, without importing what runs the commands."""

    def rows(commands: dict[str, str]) -> list[str]:
        return [f"    {name:<12}{words}" for name, words in commands.items()]

    lines = [
        f"usage: {PROG} COMMAND [-c EXPERIMENT.yaml] [--KEY VALUE ...]",
        "",
        "Train, decode and compare DFlash block-diffusion drafters.",
        "",
        "commands of an experiment (every key of its YAML is a flag):",
        *rows(OF_EXPERIMENTS),
        "",
        "plain commands:",
        *rows(COMMANDS),
        "",
        f"{PROG} COMMAND --help says more of each.",
    ]
    return "\n".join([*lines, ""])
