"""Help answers at once: nothing heavy is loaded for it."""

import subprocess
import sys

import pytest

from dflash_lightning.cli import DFlashCLI
from dflash_lightning.commands import COMMANDS, OF_EXPERIMENTS, overview

HELP = [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)]
CHILD = """
import sys
from dflash_lightning.__main__ import run
try:
    status = run()
except SystemExit as end:
    status = end.code or 0
print("HEAVY", sorted({"torch", "transformers", "lightning"} & set(sys.modules)))
sys.exit(status)
"""


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m dflash_lightning" in done.stdout
    assert done.stdout.rstrip().endswith("HEAVY []")


def test_the_overview_names_every_command() -> None:
    assert OF_EXPERIMENTS.keys() == DFlashCLI.subcommands().keys()
    for name, words in {**OF_EXPERIMENTS, **COMMANDS}.items():
        assert f"    {name} " in overview()
        assert words in overview()


DROPPED = """
import signal, sys, time
import dflash_lightning.__main__ as command_line

class Doomed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        len(())

def work(args):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Doomed()
    time.sleep(20)

command_line._dispatch = work
sys.exit(command_line.run())
"""


def test_an_interruption_in_a_destructor_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr == ""
