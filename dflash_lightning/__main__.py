"""`python -m dflash_lightning`: see `--help`."""

import logging
import os
import sys
import warnings

from dflash_lightning.errors import UserError


def run() -> int:
    """Run the command line; bad input ends with one line on standard error and status 2."""
    _quieten()
    from dflash_lightning.cli import main

    try:
        main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _quieten() -> None:
    """Let our own lines through, and of the libraries' only warnings that a user can act on."""
    own = logging.getLogger("dflash_lightning")
    own.addHandler(logging.StreamHandler())
    own.setLevel(logging.INFO)
    own.propagate = False
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for message in ("does not have many workers", "LeafSpec", "is not supported by the model"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


if __name__ == "__main__":
    sys.exit(run())
