from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from dflash_lightning.cli import DFlashCLI, main
from dflash_lightning.drafter.config import drafter_config
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.position_weights import ExpWeights, default_gamma
from dflash_lightning.slot_losses import DataToken
from dflash_lightning.target_rules import default_layer_ids

ROOT = Path(__file__).parent.parent
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
QWEN3 = {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "qwen3-4b": Qwen3Config(
        **QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36
    ),
    "qwen3-8b": Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36
    ),
}


def built(file: Path, runs: Path) -> DFlashCLI:
    """Return the command line of an experiment, with model, data and trainer built on the CPU."""
    flags = ["--trainer.default_root_dir", str(runs), "--trainer.accelerator", "cpu"]
    return main(["-c", str(file), *flags], run=False)


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_parses_and_instantiates(file: Path, tmp_path: Path) -> None:
    cli = built(file, tmp_path)
    assert cli.datamodule.block_size == cli.model.block_size
    assert cli.datamodule.target == cli.model.target_config
    assert cli.trainer.gradient_clip_val == 1.0
    assert cli.trainer.logger.name.startswith(f"d{cli.model.num_layers}-k{cli.model.block_size}-g")


@pytest.mark.parametrize("name", SHAPES)
def test_paper_recipe(name: str, tmp_path: Path) -> None:
    cli = built(ROOT / "experiments" / f"{name}.yaml", tmp_path)
    model, data = cli.model, cli.datamodule
    assert (model.num_layers, model.block_size, model.lr, model.warmup_ratio) == (5, 16, 6e-4, 0.04)
    assert (model.weight_decay, model.draft_vocab) == (0.0, None)
    assert (type(model.loss), model.position_weights) == (DataToken, ExpWeights("auto"))
    assert default_gamma(model.block_size) == 7.0
    assert (data.anchors.num_anchors, data.max_length, cli.trainer.max_epochs) == (512, 3072, 6)
    taps = default_layer_ids(36, model.target_config.num_taps)
    assert taps == [1, 9, 17, 25, 33]
    config = drafter_config(
        _with_rope(SHAPES[name]),
        num_layers=model.num_layers,
        block_size=model.block_size,
        mask_token_id=model.target_config.mask_token_id,
        target_layer_ids=taps,
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    assert drafter.fc.weight.shape == (config.hidden_size, 5 * config.hidden_size)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def _with_rope(config: Qwen3Config) -> Qwen3Config:
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    return config
