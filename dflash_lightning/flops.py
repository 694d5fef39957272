"""Useful floating-point operations of a drafter's training step.

Counted are the matrix products that an exact step can't do without, 2 operations a multiply-add:

- fusion `S (T H) H`; each layer's keys and values of the context `2 S H KV` (injection `kv`; S ends
  at the last anchor of a document there, behind which no block looks);
- with injection `input` and `none`, the layers over the context itself, the last one only as far as
  its keys and values; causal attention there;
- each layer over the blocks' slots: `q`, `o` `2 H Q`, `k`, `v` `2 H KV`, MLP `3 H I` a slot;
- attention `2 Q` a pair of query and visible key, in each layer;
- the head `H Vd` a labelled slot, and a markov head's `R Vd`.

The backward pass takes twice the forward one; once where an operand needs no gradient: the tapped
states under the fusion, the frozen head. Norms, rotations, softmaxes, the optimizer and the target
are left out, and so is what an implementation adds: padding, masked pairs, recomputation.
"""

import torch
from torch import Tensor

from dflash_lightning.data.blocks import Batch
from dflash_lightning.drafter.config import DrafterConfig


def step_flops(
    config: DrafterConfig, *, context_len: int, num_anchors: int, vocab: int, rows: int = 1
) -> float:
    """Return the operations of a step, forward and backward, with anchors spread evenly.

    Args:
        config: The drafter's.
        context_len: S, tokens of a row, each row one document.
        num_anchors: N, blocks of a row, all slots of which have a label.
        vocab: Vd, tokens that the drafter can say.
        rows: B.
    """
    places = (torch.arange(num_anchors) + 0.5) * context_len / num_anchors
    labelled = rows * num_anchors * (config.block_size - 1)
    lengths = torch.full((rows,), float(context_len))
    seen = float(places[-1]) * rows if num_anchors else 0.0
    return _flops(config, lengths, seen, places.repeat(rows), labelled, vocab)


def batch_flops(config: DrafterConfig, batch: Batch) -> float:
    """Return the operations of a step on this batch, forward and backward."""
    real, starts = batch.attention_mask.cpu(), batch.document_starts.cpu()
    begins = (starts == torch.arange(starts.shape[1])) & real
    document = begins.flatten().cumsum(0)[real.flatten()]
    kept = batch.block_keep_mask.cpu()
    anchors = batch.anchor_positions.cpu()
    begin = starts.gather(1, anchors)
    places = (anchors - begin)[kept]
    its_document = (begin + torch.arange(len(starts))[:, None] * starts.shape[1])[kept]
    seen = torch.zeros(starts.numel(), dtype=torch.long)
    seen = seen.scatter_reduce(0, its_document, places, "amax").sum()
    vocab = config.draft_vocab_size or config.vocab_size
    labelled = int(batch.label_mask[..., 1:].sum())
    lengths = document.bincount()[1:].float()
    return _flops(config, lengths, float(seen), places.float(), labelled, vocab)


def _flops(
    config: DrafterConfig,
    lengths: Tensor,
    seen: float,
    places: Tensor,
    labelled: float,
    vocab: int,
) -> float:
    """Return the operations of documents of `lengths` `[D]` with anchors at `places` `[M]`.

    Of all their positions, `seen` lie before the last anchor of their document.
    """
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers
    tokens = seen if config.injection == "kv" else float(lengths.sum())
    unrolled = config.autoregressive and config.injection == "input"
    slots = len(places) * (config.block_size - 1 if unrolled else config.block_size)
    layer = 2 * width * heads + 2 * width * keys + 3 * width * config.intermediate_size
    once: float = labelled * width * vocab  # the frozen head
    twice: float = slots * layers * layer
    if config.injection != "none":
        fusions = layers if config.fusion == "per_layer" else 1
        once += fusions * tokens * config.num_taps * width * width
    if config.injection == "kv":
        twice += layers * tokens * 2 * width * keys
    else:
        twice += tokens * ((layers - 1) * layer + 2 * width * keys)
    if config.injection == "input":
        twice += (tokens + slots) * 2 * width * width
    if config.markov_rank is not None:
        twice += labelled * config.markov_rank * vocab
    for index, window in enumerate(config.windows()):
        twice += 2 * heads * _block_pairs(config, places, slots, window)
        if config.injection != "kv" and index < layers - 1:
            twice += 2 * heads * _causal_pairs(lengths, window)
    return 2 * (2 * once + 3 * twice)


def _block_pairs(config: DrafterConfig, places: Tensor, slots: int, window: int | None) -> float:
    """Return the pairs of a slot and a key that it sees, over all blocks."""
    size = slots // max(1, len(places))
    slot = torch.arange(size)
    own = slot + 1 if config.causal else torch.full((size,), size)
    context = places[:, None].expand(-1, size)
    if window is not None:
        context = context.minimum((window - 1 - slot).clamp(min=0))
        own = own - (slot + 1 - window).clamp(min=0)
    return float(context.sum() + own.sum() * len(places))


def _causal_pairs(lengths: Tensor, window: int | None) -> float:
    """Return the pairs of two tokens of a document of which the later sees the earlier."""
    if window is None:
        return float((lengths * (lengths + 1) / 2).sum())
    inside = lengths.clamp(max=window)
    return float((inside * (inside + 1) / 2 + (lengths - inside) * window).sum())
