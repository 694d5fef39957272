"""The store of tapped target states.

Computed once, memory-mapped, shared by every epoch and run on one target and data set. It holds
every layer that any of them asked for, and the final states where a loss asked for them.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dflash_lightning.data import shards
from dflash_lightning.data.files import only_writer
from dflash_lightning.data.prepare import cache_key
from dflash_lightning.data.sample_store import SampleStore
from dflash_lightning.data.shards import ShardPlan, has_size, is_sound, plan_shards, write_shard
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

log = logging.getLogger(__name__)

TOKENS_PER_BATCH = 2048


class FeatureStore:
    """Tapped states of a list of samples, read through a memory map.

    Args:
        plan: Where each sample's states lie.
        layer_ids: Layers to read, in the drafter's order; `FINAL` may be the last.
    """

    def __init__(self, plan: ShardPlan, layer_ids: Sequence[int]) -> None:
        self.plan, self.layer_ids = plan, list(layer_ids)

    def __getitem__(self, index: int) -> Tensor:
        """Return the states `[S, T*H]` of one sample, the layers side by side."""
        shard, rows = self.plan.locate(index)
        return torch.cat([self.plan.states(i, shard)[rows] for i in self.layer_ids], dim=-1)

    def lacking(self, check: bool = False) -> dict[int, list[int]]:
        """Return the layers that each incomplete shard lacks: no file, or one of another size.

        With `check` all bytes are read, and a file that has not its checksum counts as lacking.
        """
        found: dict[int, list[int]] = {}
        for shard in range(len(self.plan)):
            size = self.plan.num_bytes(shard)
            for layer in self.layer_ids:
                path = self.plan.path(layer, shard)
                if not (has_size(path, size) and (not check or is_sound(path))):
                    found.setdefault(shard, []).append(layer)
        return found


def build_store(
    load_target: Callable[[], Target],
    fingerprint: str,
    samples: SampleStore,
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    cache_dir: Path,
    check: bool = True,
) -> FeatureStore:
    """Return the store of these samples; shards and layers it lacks are computed and added.

    Args:
        load_target: Called only if something is lacking.
        fingerprint: Identity of the target, its dtype and its chat template.
        samples: What the target reads.
        layer_ids: Layers to read, in the drafter's order; `FINAL` may be the last.
        hidden_size: H.
        dtype: Dtype of the states.
        cache_dir: The store lies in `cache_dir/features/KEY/`.
        check: Whether to read all bytes there are and compare checksums (once a process).

    Raises:
        UserError: The disk has no room for it.
    """
    key = cache_key(fingerprint, str(dtype), samples.digest, shards.SHARD_BYTES)
    folder = cache_dir / "features" / key
    store = FeatureStore(plan_shards(folder, samples.starts, hidden_size, dtype), layer_ids)
    began = time.perf_counter()
    lacking = store.lacking(check)
    checked, filled = time.perf_counter() - began, 0.0
    if lacking:
        with only_writer(folder, "the target's states"):
            lacking = store.lacking(check)
            if lacking:
                _refuse_too_large(store.plan, lacking, cache_dir)
                _fill(store.plan, load_target, samples, lacking)
        filled = time.perf_counter() - began - checked
    if not check:
        return store
    log.info(
        "data.features=store: %d tokens, %d layers, ready in %.1f s (checksums %.1f s, target %.1f "
        "s) in %s",
        samples.num_tokens,
        len(layer_ids),
        checked + filled,
        checked,
        filled,
        folder,
    )
    return store


def _refuse_too_large(plan: ShardPlan, lacking: dict[int, list[int]], cache_dir: Path) -> None:
    """Say what the states will take, and refuse what the disk can't."""
    tokens = sum(plan.tokens(shard) for shard in lacking)
    size = sum(plan.num_bytes(shard) * len(layers) for shard, layers in lacking.items())
    free = shutil.disk_usage(plan.folder).free
    log.info(
        "the target reads %d tokens; their states take %.2f GB (tokens x %g layers x %d x %d bytes)"
        " in %s",
        tokens,
        size / 1e9,
        round(size / (tokens * plan.hidden_size * plan.dtype.itemsize), 2),
        plan.hidden_size,
        plan.dtype.itemsize,
        plan.folder,
    )
    if size > 0.95 * free:
        raise UserError(
            f"data.features: the store needs {size / 1e9:.1f} GB and {cache_dir} has "
            f"{free / 1e9:.1f} GB free; take data.features=online, fewer taps or another "
            "data.cache_dir"
        )


def _fill(
    plan: ShardPlan,
    load_target: Callable[[], Target],
    samples: SampleStore,
    lacking: dict[int, list[int]],
) -> None:
    """Compute and write the lacking files, shard by shard; each appears whole."""
    for path in (plan.path(layer, shard) for shard in lacking for layer in lacking[shard]):
        if path.is_file():
            log.warning("%s is damaged and is computed again", path)
    target = load_target()
    total = sum(plan.tokens(shard) for shard in lacking)
    with tqdm(total=total, desc="target reads answers", unit="token") as bar:
        for shard, layers in lacking.items():
            states = _shard_states(plan, target, samples, shard, layers, bar)
            for layer, state in zip(layers, states, strict=True):
                write_shard(plan.path(layer, shard), state)
    shards.mapped.cache_clear()


def _shard_states(
    plan: ShardPlan,
    target: Target,
    samples: SampleStore,
    shard: int,
    layers: Sequence[int],
    bar: "tqdm[None]",
) -> list[Tensor]:
    """Return each layer's states `[tokens, H]` of a shard's samples."""
    size = (plan.tokens(shard), plan.hidden_size)
    found = [torch.empty(size, dtype=plan.dtype) for _ in layers]
    inside = plan.samples(shard)
    lengths = np.diff(plan.starts[inside.start : inside.stop + 1]).tolist()
    for batch in shards.batches_by_length(lengths, TOKENS_PER_BATCH):
        rows = [samples[inside[i]].ids for i in batch]
        ids = pad_sequence(rows, batch_first=True).to(target.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        states = target.features(ids, mask.to(target.device), layers)
        for whole, state in zip(found, states, strict=True):
            for row, i in enumerate(batch):
                whole[plan.locate(inside[i])[1]] = state[row, : lengths[i]].cpu()
        bar.update(sum(lengths[i] for i in batch))
    return found
