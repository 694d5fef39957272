"""The command line: `prepare`, `fit`, `validate`, `test` and `predict` by LightningCLI.

An experiment is one YAML file, and every key of it is a flag:

python -m dflash_lightning prepare -c experiments/quickstart.yaml
python -m dflash_lightning fit -c experiments/quickstart.yaml --model.num_layers 5
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from omegaconf.errors import OmegaConfBaseException
from transformers.utils import logging as huggingface

from dflash_lightning.budget import Budget
from dflash_lightning.configs import with_bases
from dflash_lightning.console import preparation_table
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.drafter.axes import noise_of
from dflash_lightning.errors import UserError
from dflash_lightning.evaluation import DecodingEvaluation, run_folder
from dflash_lightning.module import DFlashModule
from dflash_lightning.precision import multiplies_bfloat16, trainer_precision
from dflash_lightning.run_names import run_name
from dflash_lightning.run_record import RunRecord
from dflash_lightning.target_spec import TargetConfig
from dflash_lightning.throughput import Throughput

log = logging.getLogger(__name__)

LINKS = (
    *(f"target.{field.name}" for field in dataclasses.fields(TargetConfig)),
    "block_size",
)
"""What model and data share is said once, under `model`."""

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 6,
    "gradient_clip_val": 1.0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # EpochSampler shares out samples itself
    "default_root_dir": "runs",
}


class Parser(LightningArgumentParser):
    """The CLI's parser; bad input becomes one line instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message` on one line, with where to read on."""
        line, prog = " ".join(str(message).split()), self.prog.replace(" [options]", "")
        raise UserError(f"{line} (see {prog} --help)") from ex


class Trainer(pl.Trainer):
    """Lightning's trainer, and `prepare`, which has the keys of `fit`."""

    def prepare(
        self,
        model: pl.LightningModule,
        datamodule: DFlashDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Make the data that fit needs: the target's answers, and its states where stored.

        Args:
            model: Not used.
            datamodule: Prepares its data.
            ckpt_path: Not used; it is here so that a run's config.yaml can be prepared.
            weights_only: Not used; likewise.
        """
        datamodule.prepare_data()
        preparation_table(datamodule.summaries, datamodule.cache_dir)


class DFlashCLI(LightningCLI):
    """LightningCLI with shared keys linked, runs named by what varies, and decoding evaluation."""

    more_callbacks: Sequence[pl.Callback] = ()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Add `prepare` to Lightning's own."""
        return {"prepare": {"model", "datamodule"}, **LightningCLI.subcommands()}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what model and data share; add the `decode` section and `base`."""
        about = "Another experiment, beside this file, whose keys hold where this one says nothing."
        parser.add_argument("--base", type=str | None, default=None, help=about)
        for key in LINKS:
            parser.link_arguments(f"model.{key}", f"data.{key}")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.link_arguments(
            "model.needs_final_states", "data.final_states", apply_on="instantiate"
        )
        ways = "model.axes.drafting", "model.axes.denoising_steps"
        parser.link_arguments(ways, "data.noise", compute_fn=noise_of)
        parser.add_lightning_class_args(Budget, "budget")  # first: its clock stops at a batch's end
        parser.add_lightning_class_args(DecodingEvaluation, "decode")

    def before_instantiate_classes(self) -> None:
        """Log to TensorBoard under the run's name unless another logger was asked for.

        A budget alone ends training.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        if self.subcommand not in (None, "fit", "prepare") and config.get("ckpt_path") is None:
            raise UserError(
                f"--ckpt_path: {self.subcommand} needs the checkpoint of a trained drafter"
            )
        _check_checkpoint(config.get("ckpt_path"))
        if any(value is not None for value in config.budget.values()):
            config.trainer.max_steps = config.trainer.max_epochs = -1
        _check_strategy(config.trainer.strategy)
        if config.trainer.logger in (None, True):
            config.trainer.logger = Namespace(
                class_path="lightning.pytorch.loggers.TensorBoardLogger",
                init_args=Namespace(
                    save_dir=config.trainer.default_root_dir or "runs",
                    name=run_name(config),
                    default_hp_metric=False,
                ),
            )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Keep `last.ckpt` unless checkpoints are off or configured otherwise.

        `prepare` gets one that was never set up: it trains nothing, and the machine may lack the
        devices that the experiment names.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        _check_precision(config.trainer.precision, config.model.target.dtype)
        if self.subcommand == "prepare":
            return Trainer.__new__(Trainer)
        own = self._get(self.config_init, "trainer.callbacks") or []
        saved = self._get(self.config_init, "trainer.enable_checkpointing") is not False
        callbacks: list[pl.Callback] = [*self.more_callbacks, PredictionWriter(), Throughput()]
        if saved and not any(isinstance(c, ModelCheckpoint) for c in own):
            callbacks.append(ModelCheckpoint(save_last=True))
        self.trainer_defaults["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)


class PredictionWriter(pl.Callback):
    """Writes what `predict` decoded to `predictions.jsonl` in the run's folder."""

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write one line a prompt; of several processes, the first writes its own."""
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer) or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "predictions.jsonl"
        rows = trainer.predict_loop.predictions
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        log.info("wrote %d predictions to %s", len(rows), file)


def _check_checkpoint(path: Any) -> None:
    if path is not None and path not in ("last", "best") and not Path(str(path)).is_file():
        raise UserError(f"--ckpt_path: no such file: {path}")


def _check_strategy(strategy: Any) -> None:
    name = str(getattr(strategy, "class_path", strategy)).rpartition(".")[2].lower()
    if name.startswith(("fsdp", "modelparallel", "deepspeed")):
        raise UserError(
            f"trainer.strategy: {name} is not supported: a drafter fits a device whole, and the "
            "target is neither sharded nor synchronised; take ddp"
        )


def _check_precision(precision: Any, target_dtype: str) -> None:
    wide = precision in (None, 32, "32", "32-true", 64, "64", "64-true")
    if not multiplies_bfloat16() and not (wide and target_dtype == "float32"):
        log.warning(
            "this machine is not known to multiply bfloat16; --trainer.precision 32-true and "
            "--model.target.dtype float32 may be several times as fast"
        )


def main(
    args: list[str] | None = None,
    run: bool = True,
    callbacks: Sequence[pl.Callback] = (),
    workers: int = 1,
    kind: type[DFlashCLI] = DFlashCLI,
) -> DFlashCLI:
    """Run a command line.

    Args:
        args: The words; None takes the process's own.
        run: False: there is no subcommand; model, data and trainer are built and returned.
        callbacks: The trainer gets these too.
        workers: Processes that train on this machine side by side, for the record.
        kind: Which command line.
    """
    words = sys.argv[1:] if args is None else args
    made = type(kind.__name__, (kind,), {"more_callbacks": tuple(callbacks)})
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in str(record.msg))
    huggingface.disable_progress_bar()
    try:
        return made(
            DFlashModule,
            DFlashDataModule,
            args=with_bases(words),
            run=run,
            trainer_class=Trainer,
            seed_everything_default=0,
            save_config_callback=RunRecord,
            save_config_kwargs={"command": words, "workers": workers},
            trainer_defaults={**TRAINER_DEFAULTS, "precision": trainer_precision()},
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={
                "parser_mode": "omegaconf+",
                "allow_abbrev": False,
                "prog": "python -m dflash_lightning",
                "description": "Train, decode and compare DFlash block-diffusion drafters.",
            },
        )
    except OmegaConfBaseException as error:
        key = f" in {error.full_key}" if error.full_key else ""
        raise UserError(f"{str(error).splitlines()[0]}{key}") from error
