"""The formula of useful operations, beside torch's own counter."""

from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_drafter, tiny_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dflash_lightning.data.anchors import AllAnchors, Anchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.samples import Sample
from dflash_lightning.drafter.axes import Axes
from dflash_lightning.drafter.training import training_hidden
from dflash_lightning.flops import batch_flops, step_flops
from dflash_lightning.objective import Objective
from dflash_lightning.position_weights import UniformWeights
from dflash_lightning.slot_losses import DataToken


class FirstAnchor(Anchors):
    num_anchors = 1

    def choose(self, candidates: Any, generator: Any, block_size: int) -> Any:
        return candidates[:1]


def batch_of(lengths: list[int], supervised: int, anchors: Anchors, noise: Any = "masked") -> Batch:
    """Return rows of one document each whose last `supervised` tokens are supervised."""
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.arange(length) % 90
        rows.append([(index, 0, Sample(ids, torch.arange(length) >= length - supervised), None)])
    return BlockCollator(anchors, 4, 95, 0, noise)(rows)


@pytest.mark.parametrize(
    ("axes", "noise"),
    [
        (Axes(), "masked"),
        (Axes(fusion="per_layer"), "masked"),
        (Axes(markov_rank=8), "masked"),
        (Axes(injection="input"), "masked"),
        (Axes(injection="none"), "masked"),
        (Axes(drafting="autoregressive"), "tokens"),
    ],
    ids=["dflash", "per_layer", "markov", "input", "none", "kv_autoregressive"],
)
def test_formula_is_what_torch_counts_where_nothing_is_masked(axes: Axes, noise: str) -> None:
    """One block at the end of a row. What torch counts too is added: the masked half of the
    context's attention over itself, and with injection kv the 5 positions that the block can't see.
    """
    target = tiny_target(taps=(1, 3, 5))
    drafter = tiny_drafter(target, num_layers=3, draft_vocab_size=40, axes=axes).train()
    batch = batch_of([41], 5, FirstAnchor(), noise)
    assert batch.label_mask.sum() == 3
    states = torch.randn(1, 41, 3 * 32)
    objective = Objective(drafter, target, DataToken(), UniformWeights(), 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = training_hidden(drafter, target, batch, states, "dense")
        objective(hidden, batch, states)[0].numerator.backward()
    layers, width, keys, slots = 3, 32, 16, 4
    if axes.injection == "kv":
        fusion = 2 * 2 * 3 * width * width * (layers if axes.fusion == "per_layer" else 1)
        useless = 5 * (fusion + 3 * layers * (4 * width * keys + 4 * slots * width))
    else:
        useless = (layers - 1) * 3 * 4 * width * (41 * 40 // 2)
        useless += 5 * 3 * layers * 4 * slots * width
    found = batch_flops(drafter.config, batch) + useless
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_step_and_batch_agree() -> None:
    """On a batch whose anchors are spread evenly and whose slots all have labels."""
    config = tiny_config(tiny_target(), axes=Axes(sliding_window=9, sliding_layers=[0]))
    batch = batch_of([40, 40], 40, AllAnchors())
    anchors = torch.arange(5, 40, 10).expand(2, -1)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    batch = batch._replace(anchor_positions=anchors, block_keep_mask=mask[..., 0], label_mask=mask)
    found = step_flops(config, context_len=40, num_anchors=4, vocab=96, rows=2)
    assert batch_flops(config, batch) == pytest.approx(found, rel=0.01)


def test_padding_dead_blocks_and_other_documents_cost_nothing() -> None:
    config = tiny_config(tiny_target(), axes=Axes(injection="none"))
    apart = [batch_of([length], 12, AllAnchors()) for length in (30, 14)]
    together = batch_of([30, 14], 12, AllAnchors())
    assert together.input_ids.shape == (2, 30)
    total = sum(batch_flops(config, batch) for batch in apart)
    assert batch_flops(config, together) == pytest.approx(total)
