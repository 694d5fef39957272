"""`python -m dflash_lightning`: see `--help`."""

import logging
import os
import signal
import sys
import threading
import warnings

from dflash_lightning.errors import UserError

INTERRUPTED, NO_READER = 130, 141
"""Exit statuses of shells: 128 + the signal's number (SIGINT, SIGPIPE)."""


def run() -> int:
    """Run the process's command line and return its exit status.

    Bad input ends with one line on standard error and status 2, Ctrl-C with status 130.
    """
    _quieten()
    _keep_interruptions()
    try:
        _dispatch(sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as in `generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    return 0


def _dispatch(args: list[str]) -> None:
    from dflash_lightning.commands import COMMANDS, overview, run_command

    if args and args[0] in ("-h", "--help"):
        sys.stdout.write(overview())
    elif args and args[0] in COMMANDS:
        run_command(args[0], args[1:])
    else:
        from dflash_lightning.cli import main

        main()


def _quieten() -> None:
    """Let our own lines through, and of the libraries' only warnings that a user can act on."""
    own = logging.getLogger("dflash_lightning")
    own.addHandler(logging.StreamHandler())
    own.setLevel(logging.INFO)
    own.propagate = False
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, each loader process complains
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for message in (
        "does not have many workers",
        "LeafSpec",
        "is not supported by the model",
        "LightningCLI's args parameter is intended",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


def _keep_interruptions() -> None:
    """Interrupt again where Python drops an interruption: in a `__del__`, of all places."""

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is KeyboardInterrupt:  # raised in here it would be dropped again
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = hook


if __name__ == "__main__":
    sys.exit(run())
