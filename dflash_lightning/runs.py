"""From what a run left behind back to its drafter and target.

A run is given as its folder, its drafter folder, or a `.ckpt` file.
"""

import json
from pathlib import Path
from typing import Any, Literal, cast

import torch

from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_spec import TargetConfig, TargetSpec, inspect_target


def load_run(
    path: str | Path, cache_dir: Path, device: torch.device | str = "cpu"
) -> tuple[Target, Drafter]:
    """Return a run's target and its drafter; see `load_drafter` and `target_of`."""
    drafter = load_drafter(path)
    return load_target(target_of(drafter, cache_dir), device), drafter.to(device)  # type: ignore[arg-type]


def load_drafter(path: str | Path) -> Drafter:
    """Return the drafter of a run's folder, a drafter folder or a `.ckpt` file, in eval mode.

    A run that never reached its end has no drafter folder; its newest checkpoint is taken.

    Raises:
        UserError: Nothing there, or nothing of ours.
    """
    path = Path(path).expanduser()
    for folder in (path / "drafter", path):
        if (folder / "config.json").is_file():
            return _from_folder(folder)
    if checkpoints := list((path / "checkpoints").glob("*.ckpt")):
        path = max(checkpoints, key=lambda file: file.stat().st_mtime)
    if not path.is_file():
        raise UserError(f"--ckpt: no run, drafter folder or .ckpt file at {path}")
    return _from_checkpoint(path)


def target_of(drafter: Drafter, cache_dir: Path, name: str | None = None) -> TargetSpec:
    """Return what is known of a drafter's target before its weights are loaded.

    Args:
        drafter: Says where its target came from, its precision and its tapped layers.
        cache_dir: Where converted targets lie.
        name: Where the target lies now; None takes what the drafter says.

    Raises:
        UserError: The target is not there, or can't be the one.
    """
    config = drafter.config
    asked = TargetConfig(
        name=name or config.target_name,
        revision=config.target_revision if name is None else None,
        dtype=cast(Literal["bfloat16", "float16", "float32"], config.target_dtype),
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
    )
    try:
        return inspect_target(asked, cache_dir)
    except UserError as error:
        raise UserError(f"the drafter's target: {error}; --target says where it lies") from error


def usable_device(name: str | None) -> torch.device:
    """Return the device of that name; None takes a CUDA device if there is one.

    Raises:
        UserError: No such device here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except Exception as error:  # torch raises unrelated types, with and without CUDA
        raise UserError(f"--device: {name} can't be used here ({_line(error)})") from error
    return device


def _from_folder(folder: Path) -> Drafter:
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"--ckpt: {folder / 'config.json'} is not a JSON object") from error
    if kind != DrafterConfig.model_type:
        raise UserError(f"--ckpt: {folder} holds no drafter of dflash_lightning but a {kind}")
    try:
        found: Any = Drafter.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # transformers raises many unrelated types on damaged files
        raise UserError(
            f"--ckpt: the drafter in {folder} can't be read ({_line(error)})"
        ) from error
    drafter, problems = found
    if lacking := sorted(problems["missing_keys"]):
        raise UserError(f"--ckpt: the drafter in {folder} lacks the weights {', '.join(lacking)}")
    result: Drafter = drafter.eval()
    return result


def _from_checkpoint(path: Path) -> Drafter:
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        drafter = Drafter(DrafterConfig.from_dict(checkpoint["drafter_config"]))
        weights = checkpoint["state_dict"].items()
        prefix = "drafter."
        drafter.load_state_dict(
            {key.removeprefix(prefix): w for key, w in weights if key.startswith(prefix)}
        )
    except Exception as error:  # torch.load raises many unrelated types on a foreign file
        raise UserError(f"--ckpt: {path} is no checkpoint of dflash_lightning") from error
    return drafter.eval()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
