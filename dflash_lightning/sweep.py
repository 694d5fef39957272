"""The command `sweep`: a space in YAML, trained cell by cell and compared.

python -m dflash_lightning sweep -c sweeps/depth.yaml
"""

import sys
import warnings

from optuna.exceptions import ExperimentalWarning, StorageInternalError

from dflash_lightning.errors import UserError
from dflash_lightning.sweeps.locks import Presence, locked
from dflash_lightning.sweeps.processes import other_workers
from dflash_lightning.sweeps.reading import read_spec


def run_args(args: list[str]) -> None:
    """Train what the study of a sweep's flags lacks, then write its report.

    Raises:
        UserError: The sweep makes no sense, or the study is another's; nothing was trained.
        KeyboardInterrupt: Ctrl-C; the running trial was given back.
    """
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    spec = read_spec(args)
    from dflash_lightning.sweeps.live import conclude
    from dflash_lightning.sweeps.worker import Worker

    try:
        with Presence(spec.folder.parent / ".workers") as presence:
            worker = Worker(spec, presence)
            with other_workers(spec.workers - 1, args, spec.folder):
                worker.work()
    except StorageInternalError as error:
        raise UserError(f"storage: {str(error).splitlines()[0]}") from error
    for line in conclude(worker.trials):
        sys.stdout.write(line + "\n")
    if spec.report and worker.all_ended and worker.has_values:
        from dflash_lightning.report import report

        with locked(spec.folder / "lock"):
            report(str(spec.folder))
