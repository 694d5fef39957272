"""Norms, rotations and gates of a layer in few passes over memory, and with little of it kept.

Only in training on CPU, where each operation reads and writes all it works on; elsewhere the plain
formulas run, which a compiler fuses. Both compute in float32 at least.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from dflash_lightning.drafter.rope import Rotation, rotate


class RMSNorm(Qwen3RMSNorm):
    """`x / rms(x) * weight`; under autocast its output is already what a projection takes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., H]` normed."""
        if _fused_elsewhere(x):
            plain: Tensor = super().forward(x)
            return plain
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        normed: Tensor = _Norm.apply(x, self.weight, self.variance_epsilon, dtype)
        return normed


class MLP(Qwen3MLP):
    """SwiGLU; backward computes the gated states again, which is half of what it would keep."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., H]`."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if _fused_elsewhere(x):
            plain: Tensor = self.down_proj(silu(gate) * up)
            return plain
        down: Tensor = _GateDown.apply(gate, up, self.down_proj.weight)
        return down


def norm_and_rotate(x: Tensor, norm: RMSNorm, by: Rotation, dtype: torch.dtype) -> Tensor:
    """Return heads `[B, heads, S, head_dim]` normed and rotated, of `x` `[B, S, heads, head_dim]`.

    Args:
        x: Projected heads.
        norm: Over the head dim.
        by: Cos and sin `[B, 1, S, rotary_dim]`.
        dtype: Of the output.
    """
    if _fused_elsewhere(x):
        return rotate(norm(x).transpose(1, 2), by, dtype)
    cos, sin = (y.transpose(1, 2) for y in by)
    turned: Tensor = _NormRotate.apply(x, norm.weight, norm.variance_epsilon, cos, sin, dtype)
    return turned.transpose(1, 2)


def _fused_elsewhere(x: Tensor) -> bool:
    """Also without gradients: decoding stays as transformers has it, to the last bit."""
    compiled = x.device.type != "cpu" or torch.compiler.is_compiling()
    return compiled or not torch.is_grad_enabled() or x.numel() == 0


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = _wide(x)
        scale = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        to_x, to_weight = _norm_backward(x, weight, scale, _wide(slope))
        return to_x, to_weight, None, None


class _GateDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        with torch.autocast("cpu", enabled=False):
            return silu(gate).mul_(up) @ weight.to(gate.dtype).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        gate, up, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            gated = silu(gate)
            to_weight = slope.flatten(0, -2).mT @ (gated * up).flatten(0, -2)
            to_product = slope @ weight.to(gate.dtype)
            to_gate = torch.ops.aten.silu_backward(to_product * up, gate)
            return to_gate, gated.mul_(to_product), to_weight.to(weight.dtype)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = _wide(x)
        scale = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, scale, cos, sin)
        return _turned((wide * scale).mul_(weight), cos, sin).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, cos, sin = ctx.saved_tensors
        back = _turned(_wide(slope), cos, -sin)
        to_x, to_weight = _norm_backward(x, weight, scale, back)
        return to_x, to_weight, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(x: Tensor, weight: Tensor, scale: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients to `x` and `weight` of `x * scale * weight`, whose slope is given."""
    normed = _wide(x) * scale
    product = slope * normed
    to_weight = product.flatten(0, -2).sum(dim=0)
    along = (product @ weight.to(product.dtype)).div_(x.shape[-1])
    to_x = torch.mul(slope, weight, out=product).addcmul_(normed, along[..., None], value=-1)
    return to_x.mul_(scale).to(x.dtype), to_weight.to(weight.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first of `x` `[B, S, heads, head_dim]` by cos and sin `[B, S, 1, rotary_dim]`."""
    size = cos.shape[-1]
    half = size // 2
    low, high = x[..., :half], x[..., half:size]
    found = x.clone() if size < x.shape[-1] else torch.empty_like(x)
    torch.mul(low, cos[..., :half], out=found[..., :half]).addcmul_(high, sin[..., :half], value=-1)
    torch.mul(high, cos[..., half:], out=found[..., half:size]).addcmul_(low, sin[..., half:])
    return found
