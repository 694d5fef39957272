"""From what a run left behind (its folder, its drafter folder, a checkpoint) back to target and drafter."""

from pathlib import Path
from typing import Any

import torch

from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, TargetConfig, inspect_target, load_target


def load_run(path: str, cache_dir: Path, device: str = "cpu") -> tuple[Target, Drafter]:
    """Return the target and the drafter of a run, ready to decode.

    Args:
        path: A run's folder, a drafter folder, or a `.ckpt` file.
        cache_dir: Where converted targets lie.
        device: Where both go.

    Raises:
        UserError: Nothing there, or a file that is no checkpoint of ours.
    """
    drafter = load_drafter(Path(path).expanduser())
    config = drafter.config
    target = load_target(
        inspect_target(
            TargetConfig(
                name=config.target_name,
                dtype=config.target_dtype,
                target_layer_ids=config.target_layer_ids,
                mask_token_id=config.mask_token_id,
            ),
            cache_dir,
        ),
        device,
    )
    return target, drafter.to(device)  # type: ignore[arg-type]


def load_drafter(path: Path) -> Drafter:
    """Return the drafter of a run's folder, a drafter folder or a `.ckpt` file.

    Raises:
        UserError: Nothing there, or a file that is no checkpoint of ours.
    """
    for folder in (path / "drafter", path):
        if (folder / "config.json").is_file():
            return Drafter.from_pretrained(folder)
    if path.is_dir() and (checkpoints := sorted((path / "checkpoints").glob("*.ckpt"))):
        path = max(checkpoints, key=lambda file: file.stat().st_mtime)
    if not path.is_file():
        raise UserError(f"--ckpt: no run, drafter folder or .ckpt file at {path}")
    return _from_checkpoint(path)


def _from_checkpoint(path: Path) -> Drafter:
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        config = DrafterConfig.from_dict(checkpoint["drafter_config"])
    except Exception as error:  # torch.load raises many unrelated types on a foreign file
        raise UserError(f"--ckpt: {path} is no checkpoint of dflash_lightning") from error
    drafter = Drafter(config)
    prefix = "drafter."
    weights = checkpoint["state_dict"].items()
    drafter.load_state_dict({k.removeprefix(prefix): v for k, v in weights if k.startswith(prefix)})
    return drafter.eval()
