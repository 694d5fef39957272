"""A TensorBoard logger whose x axis is supervised tokens, so that runs of any batch compare."""

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter


class TokenBoard(TensorBoardLogger):
    """TensorBoardLogger that puts everything at the supervised tokens seen, whatever the step.

    They are those of the module that is trained; until there is one, all is at 0. A module that
    doesn't count them keeps its steps. Wall time is kept. The HParams tab is left to `report`,
    which fills it with a row a cell: `log_hyperparams` writes `hparams.yaml` only.
    """

    _module: Any = None

    def tokens(self, step: int) -> int:
        """Return the supervised tokens seen by now, `step` where nothing counts them."""
        if self._module is None:
            return 0
        return int(getattr(self._module, "supervised_tokens", step))

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer; figures and texts written to it are placed by tokens too."""
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _PlacedWriter(self.tokens, log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Take note of the module; Lightning calls this for every logger before it trains."""
        self._module = model
        super().log_graph(model, input_array)

    @rank_zero_only
    def log_hyperparams(
        self, params: Any, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Keep the parameters for `hparams.yaml`."""
        self.hparams.update(params if isinstance(params, dict) else vars(params))


class _PlacedWriter(SummaryWriter):
    """A writer that asks where on the x axis each event belongs."""

    file_writer: Any
    all_writers: Any

    def __init__(self, place: Callable[[int], int], **kwargs: Any) -> None:
        self._place = place
        super().__init__(**kwargs)

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:  # closed, or never open
            files = _PlacedFile(self.log_dir, self.max_queue, self.flush_secs, self.filename_suffix)
            files.place = self._place
            self.file_writer, self.all_writers = files, {files.get_logdir(): files}
        return cast(FileWriter, self.file_writer)


class _PlacedFile(FileWriter):
    place: Callable[[int], int]

    def add_event(self, event: Any, step: Any = None, walltime: float | None = None) -> None:
        super().add_event(event, None if step is None else self.place(int(step)), walltime)
