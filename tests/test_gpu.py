"""What only a GPU shows; `benchmarks/gpu.sh` runs this. And what of it a CPU can show."""

import shutil
from typing import Any

import pytest
import torch
from reference import every_block, token_ids, training_module
from test_drafter import ANCHORS, LENGTH, _inputs, _outcome
from tiny import tiny_drafter, tiny_target
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex_module

from dflash_lightning.data.blocks import Batch
from dflash_lightning.drafter import attention
from dflash_lightning.drafter.attention import (
    Visibility,
    dense_attention,
    flex_attention,
    training_attention,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def compiled() -> int:
    """Return how many graphs were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


def anchors(seed: int, count: int = 8, length: int = 120) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length, generator=generator)[:count].sort().values for _ in range(2)]
    return torch.stack(rows)


@needs_cuda
@pytest.mark.parametrize("name", ANCHORS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}], ids=str)
def test_flex_is_dense_with_gradients(name: str, options: dict[str, Any]) -> None:
    inputs = [x.detach().cuda().requires_grad_() for x in _inputs(5, 4)]
    sight = Visibility(torch.tensor(ANCHORS[name]).cuda(), 4, LENGTH, **options)
    expected = _outcome(dense_attention(sight), inputs)
    found = _outcome(training_attention("auto", sight), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_cuda
def test_nothing_is_compiled_again_after_the_second_step() -> None:
    target = tiny_target()
    target.model.cuda()
    drafter = tiny_drafter(target).cuda()
    module = training_module(target, drafter, "auto").cuda()
    drafter.compile()
    seen = []
    for step in range(6):
        batch = every_block([token_ids(100, step), token_ids(100, 50 + step)], 4, 95)
        moved = Batch(*(None if x is None else x.cuda() for x in batch))
        module.block_loss(moved)[0].numerator.backward()
        seen.append(compiled())
    assert seen[1] == seen[-1], seen


@pytest.mark.slow
@needs_compiler
def test_compiled_flex_is_dense_on_cpu_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward only: torch has no backward of it here. New anchors are new inputs, not new code."""
    compiled_mask = attention._compiled_mask()
    monkeypatch.setattr(flex_module, "create_block_mask", compiled_mask)  # as on CUDA
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 128, 16, generator=generator)
    context = [torch.randn(2, 2, 128, 16, generator=generator) for _ in range(2)]
    block = [torch.randn(2, 2, 128, 16, generator=generator) for _ in range(2)]
    seen = []
    for seed in range(4):
        sight = Visibility(anchors(seed, count=8), 16, 128)
        with torch.no_grad():
            found = flex_attention(sight)(q, *context, *block)
        expected = dense_attention(sight)(q, *context, *block)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        seen.append(compiled())
    assert seen[0] > 0
    assert seen[1] == seen[-1], seen
