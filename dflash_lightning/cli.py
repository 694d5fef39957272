"""The command line: `prepare`, `fit`, `validate`, `test` and `predict` by LightningCLI.

An experiment is one YAML file, and every key of it is a flag:

python -m dflash_lightning prepare -c experiments/quickstart.yaml
python -m dflash_lightning fit -c experiments/quickstart.yaml --model.num_layers 5
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf.errors import OmegaConfBaseException
from transformers.utils import logging as huggingface

from dflash_lightning.configs import with_bases
from dflash_lightning.console import preparation_table
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.drafter.axes import noise_of
from dflash_lightning.errors import UserError
from dflash_lightning.evaluation import DecodingEvaluation, run_folder
from dflash_lightning.module import DFlashModule
from dflash_lightning.run_names import run_name
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
    "precision": "bf16-mixed",
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
        parser.add_lightning_class_args(DecodingEvaluation, "decode")

    def before_instantiate_classes(self) -> None:
        """Log to TensorBoard under the run's name unless another logger was asked for."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if self.subcommand not in (None, "fit", "prepare") and config.get("ckpt_path") is None:
            raise UserError(
                f"--ckpt_path: {self.subcommand} needs the checkpoint of a trained drafter"
            )
        _check_checkpoint(config.get("ckpt_path"))
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
        if self.subcommand == "prepare":
            return Trainer.__new__(Trainer)
        own = self._get(self.config_init, "trainer.callbacks") or []
        saved = self._get(self.config_init, "trainer.enable_checkpointing") is not False
        callbacks: list[pl.Callback] = [PredictionWriter(), Throughput()]
        if saved and not any(isinstance(c, ModelCheckpoint) for c in own):
            callbacks.append(ModelCheckpoint(save_last=True))
        self.trainer_defaults["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)


class RunRecord(SaveConfigCallback):
    """Keeps the configuration: config.yaml, HParams tab, and checkpoints to compare on resume."""

    def __init__(self, parser: Any, config: Any, **_: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False)

    @property
    def plain(self) -> dict[str, Any]:
        """The configuration as plain types."""
        text = self.parser.dump(self.config, skip_none=False, format="json")
        found: dict[str, Any] = json.loads(text)
        found.pop("base", None)  # its keys are all here
        return found

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write config.yaml into the run's folder and fill the HParams tab."""
        folder = run_folder(trainer)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = "config.yaml" if stage == "fit" else f"config_{stage}.yaml"
        (folder / name).write_text(yaml.safe_dump(self.plain, sort_keys=False))
        if stage != "fit":
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(
                    hyperparameters(self.plain), {"hp/accept_len": 1.0, "hp/speedup": 0.0}
                )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the configuration in the checkpoint."""
        checkpoint["experiment"] = self.plain

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say which keys differ from the checkpoint's experiment."""
        saved, asked = flat(checkpoint.get("experiment", {})), flat(self.plain)
        for key in sorted(saved.keys() & asked.keys() - {"ckpt_path"}):
            if saved[key] != asked[key]:
                kept = (
                    " (the checkpoint's optimizer state keeps the old value)"
                    if key in _IN_OPTIMIZER
                    else ""
                )
                log.info(
                    "differs from the checkpoint: %s: %s -> %s%s", key, saved[key], asked[key], kept
                )


_IN_OPTIMIZER = ("model.lr", "model.weight_decay")


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


def hyperparameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the model's, the data's and the seed's values for the HParams tab, flat."""
    return {
        k: v
        for k, v in flat(config).items()
        if k.split(".")[0] in ("model", "data", "seed_everything")
    }


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys joined by dots; lists become text.

    >>> flat({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': 1, 'c': '[1, 2]'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = str(value) if isinstance(value, list) else value
    return found


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


def main(args: list[str] | None = None, run: bool = True) -> DFlashCLI:
    """Run a command line; `args` defaults to the process's own.

    With `run=False` there is no subcommand: model, data and trainer are built and returned.
    """
    set_parsing_settings(
        omegaconf_absolute_to_relative_paths=True, docstring_parse_attribute_docstrings=True
    )
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in str(record.msg))
    huggingface.disable_progress_bar()
    try:
        return DFlashCLI(
            DFlashModule,
            DFlashDataModule,
            args=with_bases(sys.argv[1:] if args is None else args),
            run=run,
            trainer_class=Trainer,
            seed_everything_default=0,
            save_config_callback=RunRecord,
            trainer_defaults=dict(TRAINER_DEFAULTS),
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
