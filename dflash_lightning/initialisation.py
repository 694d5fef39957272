"""A drafter whose layers start from layers of the target, where shape and meaning allow."""

import logging
from typing import Literal

import torch
from torch import Tensor, nn

from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

log = logging.getLogger(__name__)

KEY = "model.init_from_layers"


Layers = list[int] | Literal["last"]
"""Target layers by id; `last`: as many of the last as the drafter has layers."""


def check_count(layer_ids: Layers | None, num_layers: int) -> Layers | None:
    """Return the ids if there is one for each drafter layer.

    Raises:
        UserError: There are more or fewer.
    """
    if isinstance(layer_ids, list) and len(layer_ids) != num_layers:
        raise UserError(
            f"{KEY}: {len(layer_ids)} target layers for model.num_layers={num_layers}; name one "
            "for each"
        )
    return layer_ids


@torch.no_grad()
def copy_target_layers(drafter: Drafter, target: Target, layer_ids: Layers) -> None:
    """Copy the weights of target layers into the drafter's layers, and log which.

    A weight is copied if the target's layer has one of the same name, shape and meaning: norms must
    scale by RMS and stand where the drafter's stand, an MLP must have the drafter's activation.
    The rest stays random (norms: 1): `fc`, `hidden_norm` and the final norm always do.

    Args:
        drafter: Its layers are changed.
        target: Gives the weights.
        layer_ids: A target layer for each drafter layer, or `last`.

    Raises:
        UserError: No such layer, or nothing of it fits.
    """
    count = int(target.config.num_hidden_layers)
    if layer_ids == "last":
        layer_ids = list(range(count - len(drafter.layers), count))
    for layer_id in layer_ids:
        if not 0 <= layer_id < count:
            raise UserError(f"{KEY}: {layer_id} is not within 0..{count - 1}, the target's layers")
    for number, layer_id in enumerate(layer_ids):
        source = target.decoder_layer(layer_id)
        copied, kept = [], []
        for name, weight in drafter.layers[number].named_parameters():
            found = _matching(source, name, target)
            if isinstance(found, Tensor) and found.shape != weight.shape:
                found = f"{list(found.shape)} is not {list(weight.shape)}"
            if isinstance(found, str):
                kept.append(f"{_short(name)} ({found})")
                continue
            weight.copy_(found)
            copied.append(_short(name))
        if not copied:
            raise UserError(
                f"{KEY}: nothing of a {type(source).__name__} fits a drafter layer: "
                f"{', '.join(kept)}; leave the key out"
            )
        left = [_short(name) for name, _ in source.named_parameters() if name.endswith("bias")]
        log.info(
            "%s: drafter layer %d from target layer %d: %s; not copied: %s",
            KEY,
            number,
            layer_id,
            ", ".join(copied),
            ", ".join([*kept, *(f"{name}.bias (the drafter has none)" for name in left)]) or "none",
        )


def _matching(source: nn.Module, name: str, target: Target) -> Tensor | str:
    """Return the target layer's weight of that name and of that meaning, or why there is none."""
    path = name.rpartition(".")[0]
    try:
        module = source.get_submodule(path)
    except AttributeError:
        return "the target's layer has none"
    if path.startswith("mlp."):
        act = getattr(target.config, "hidden_act", getattr(target.config, "hidden_activation", ""))
        if act not in ("silu", "swish"):
            return f"the target's activation is {act}"
    if not path.endswith("norm"):
        return module.weight if isinstance(module, nn.Linear) else "not a plain linear map"
    others = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    if path == "post_attention_layernorm" and any(hasattr(source, other) for other in others):
        return "the target has it before the residual sum"
    return _rms_scale(module)


def _rms_scale(norm: nn.Module) -> Tensor | str:
    """Return what a norm multiplies by after dividing by the RMS, or that it does something else.

    Vectors of 1 and of 1, -1, ... both have an RMS of 1. Some norms scale by `1 + weight`.
    """
    weight = norm.weight
    assert isinstance(weight, Tensor)
    ones = torch.ones_like(weight)
    signs = ones.clone()
    signs[1::2] = -1
    scale: Tensor = norm(ones)
    if not torch.allclose(norm(signs), signs * scale, rtol=1e-2, atol=1e-3) or not scale.any():
        return "not an RMS norm"
    return scale


def _short(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").removeprefix("self_attn.")
