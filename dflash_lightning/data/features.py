"""The store of tapped target states.

Computed once, memory-mapped, shared by every epoch and run on one target.
"""

import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dflash_lightning.data.prepare import cache_key
from dflash_lightning.data.samples import Sample
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

log = logging.getLogger(__name__)

TOKENS_PER_BATCH = 2048


class FeatureStore:
    """Tapped states of a list of samples, one file a layer.

    `layer_08.bin` holds `[tokens, H]` in the target's dtype.

    Args:
        folder: Where the files lie; its name is a key over target, dtype and samples.
        lengths: Tokens of each sample.
        layer_ids: Layers to read, in the drafter's order.
        hidden_size: H.
        dtype: Dtype of the stored states.
    """

    def __init__(
        self,
        folder: Path,
        lengths: Sequence[int],
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.starts = _starts(lengths)
        self.layers = [
            torch.from_file(
                str(_layer_file(folder, i)),
                shared=False,
                size=self.starts[-1] * hidden_size,
                dtype=dtype,
            ).view(-1, hidden_size)
            for i in layer_ids
        ]

    def __getitem__(self, index: int) -> Tensor:
        """Return the tapped states `[S, T*H]` of one sample."""
        span = slice(self.starts[index], self.starts[index + 1])
        return torch.cat([layer[span] for layer in self.layers], dim=-1)


def build_store(
    load_target: Callable[[], Target],
    fingerprint: str,
    samples: Sequence[Sample],
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    cache_dir: Path,
) -> FeatureStore:
    """Return the store of these samples; layers it lacks are computed in one target pass and added.

    Raises:
        UserError: The disk has no room for it.
    """
    key = cache_key(fingerprint, [s.ids.tolist() for s in samples])
    folder = cache_dir / "features" / key
    missing = [i for i in layer_ids if not _layer_file(folder, i).is_file()]
    lengths = [len(s.ids) for s in samples]
    if missing and samples:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(lengths) * len(missing) * hidden_size * dtype.itemsize
        free = shutil.disk_usage(folder).free
        log.info(
            "the target reads %d tokens; %d layers take %.2f GB in %s",
            sum(lengths),
            len(missing),
            size / 1e9,
            folder,
        )
        if size > 0.95 * free:
            raise UserError(
                f"data.features: the store needs {size / 1e9:.1f} GB and {cache_dir} has "
                f"{free / 1e9:.1f} GB free; take data.features=online, fewer taps or another "
                "data.cache_dir"
            )
        _fill(load_target(), samples, missing, hidden_size, dtype, folder)
    return FeatureStore(folder, lengths, layer_ids if samples else [], hidden_size, dtype)


def _layer_file(folder: Path, layer_id: int) -> Path:
    return folder / f"layer_{layer_id:02d}.bin"


def _fill(
    target: Target,
    samples: Sequence[Sample],
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write the given layers' states of all samples; each file appears whole, by renaming."""
    lengths = [len(s.ids) for s in samples]
    starts = _starts(lengths)
    total = sum(lengths)
    partial = [_layer_file(folder, i).with_suffix(".partial") for i in layer_ids]
    files = []
    for path in partial:
        path.unlink(missing_ok=True)
        files.append(
            torch.from_file(str(path), shared=True, size=total * hidden_size, dtype=dtype).view(
                -1, hidden_size
            )
        )
    with tqdm(total=total, desc="target reads answers", unit="token") as bar:
        for batch in _batches_by_length(lengths):
            ids = pad_sequence([samples[i].ids for i in batch], batch_first=True).to(target.device)
            mask = pad_sequence(
                [torch.ones(lengths[i], dtype=torch.int64) for i in batch], batch_first=True
            )
            states = target.features(ids, mask.to(target.device), layer_ids)
            for file, state in zip(files, states, strict=True):
                for row, i in enumerate(batch):
                    file[starts[i] : starts[i] + lengths[i]] = state[row, : lengths[i]].cpu()
            bar.update(sum(lengths[i] for i in batch))
    del files
    for path, i in zip(partial, layer_ids, strict=True):
        path.rename(_layer_file(folder, i))


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each sample, and the number of rows last."""
    return [0, *itertools.accumulate(lengths)]


def _batches_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return sample indices in batches of similar length.

    A batch has at most about TOKENS_PER_BATCH padded tokens.
    """
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(i)
    return batches
