"""Rotary positions in float32, whatever the model is cast to.

A rounded frequency drifts with the position.
"""

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_lightning.drafter.config import DrafterConfig

Rotation = tuple[Tensor, Tensor]


def inverse_frequencies(config: DrafterConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return the float32 frequencies `[rotary_dim / 2]` and the factor on cos and sin.

    The factor is 1 but for YaRN and kin. Honours `partial_rotary_factor`: the rotary dim is that
    share of `head_dim`.
    """
    rope = config.rope_parameters
    if rope is None:
        raise ValueError("the drafter's config has no rope_parameters")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device)
        return frequencies.float(), float(factor)
    dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (rope["rope_theta"] ** exponents), 1.0


def rotation(positions: Tensor, config: DrafterConfig) -> Rotation:
    """Return cos and sin `[B, 1, S, rotary_dim]` in float32 for absolute positions `[B, S]`."""
    frequencies, factor = inverse_frequencies(config, positions.device)
    with torch.autocast(positions.device.type, enabled=False):
        angles = positions[:, None, :, None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, by: Rotation, dtype: torch.dtype) -> Tensor:
    """Rotate heads `[B, heads, S, head_dim]` in float32 and return them as `dtype`.

    A partial rotation leaves the rest.
    """
    cos, sin = by
    size = cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned.to(dtype), rest.to(dtype)], dim=-1)
