"""The draft vocabulary: the target tokens a drafter can say, as EAGLE-3 and speculators have it.

It only narrows what is drafted. The target verifies over its full vocabulary, so decoding stays
lossless.
"""

import logging

import torch
from torch import Tensor

from dflash_lightning.data.sample_store import SampleStore
from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)


def choose_draft_vocab(samples: SampleStore, vocab_size: int, size: int) -> Tensor:
    """Return the `size` tokens `[Vd]` that the samples supervise most often, and say their share.

    Counts on the CPU, also where Lightning makes new tensors on the training device.
    """
    with torch.device("cpu"):
        counts = token_counts(samples, vocab_size)
        ids = most_frequent(counts, size)
    kept = float(counts[ids].sum() / counts.sum())
    log.info("draft vocabulary: %d tokens cover %.2f%% of the training answers", size, 100 * kept)
    return ids


def token_counts(samples: SampleStore, vocab_size: int) -> Tensor:
    """Return how often each token is supervised, `[V]` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in samples.supervised_ids():
        counts += torch.bincount(torch.from_numpy(ids), minlength=vocab_size)
    return counts


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent token ids, ascending `[Vd]`; ties go to the lower id.

    Raises:
        UserError: Size out of range.
    """
    if not 0 < size <= len(counts):
        raise UserError(
            f"model.draft_vocab: needs 1..{len(counts)} tokens (the target's vocabulary), "
            f"got {size}"
        )
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def to_draft_rows(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the map `[V]` from target ids to rows of the draft vocabulary.

    -1 where the drafter lacks the token.
    """
    rows = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_ids.device)
    rows[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return rows
