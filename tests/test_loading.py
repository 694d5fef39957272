"""The order of samples, and loaders that a checkpoint continues without losing a batch."""

import random
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import MASK
from torch import Tensor

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.loading import (
    EpochSampler,
    PromptDataset,
    ResumableLoader,
    RowDataset,
    only_item,
)
from dflash_lightning.data.samples import Sample

COUNT, BATCH = 22, 4
BATCHES = 6


def random_lengths(count: int = COUNT, longest: int = 40) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(4, longest) for _ in range(count)]


def make_samples(lengths: list[int]) -> list[Sample]:
    """Return samples whose first token is their index."""
    return [
        Sample(torch.tensor([i] + [50] * (n - 1)), torch.ones(n, dtype=torch.bool))
        for i, n in enumerate(lengths)
    ]


def make_loader(shuffle: bool = True, workers: int = 0, seed: int = 0) -> ResumableLoader:
    samples = make_samples(random_lengths())
    return ResumableLoader(
        RowDataset(samples, None),
        batch_size=BATCH,
        sampler=EpochSampler([len(s.ids) for s in samples], BATCH, seed, shuffle),
        collate_fn=BlockCollator(RandomAnchors(3), 4, MASK, seed=seed),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def epoch_of(loader: ResumableLoader, epoch: int) -> Iterator[Any]:
    """Begin an epoch as Lightning does: the iterator first, then the epoch's number."""
    iterator = iter(loader)
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return iterator


def frozen(batches: Iterator[Any] | list[Batch]) -> list[list[Any]]:
    """Return batches as nested lists, to compare them by `==`."""
    return [[f.tolist() if isinstance(f, Tensor) else f for f in batch] for batch in batches]


# ---- sampler -----------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 63, 64, 65, 130, 131])
def test_every_sample_once_an_epoch(count: int, shuffle: bool) -> None:
    sampler = EpochSampler(random_lengths(count), BATCH, 0, shuffle)
    assert len(sampler) == count
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen = list(sampler)
        assert sorted(index for index, _ in seen) == list(range(count))
        assert {e for _, e in seen} <= {epoch if shuffle else 0}


def test_order_follows_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(random_lengths(200), BATCH, seed, shuffle=True)
        sampler.set_epoch(epoch)
        return [index for index, _ in sampler]

    orders = {tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert order(1, 2) == order(1, 2)


def test_order_neither_uses_nor_moves_global_randomness() -> None:
    sampler = EpochSampler(random_lengths(100), BATCH, 0, shuffle=True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = list(sampler)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert list(sampler) == first


def test_unshuffled_order_is_the_same_in_every_epoch() -> None:
    sampler = EpochSampler(random_lengths(), BATCH, 0, shuffle=False)
    for epoch in (0, 5):
        sampler.set_epoch(epoch)
        assert list(sampler) == [(i, 0) for i in range(COUNT)]


def spread(lengths: list[int], order: list[int]) -> float:
    """Return the mean difference of longest and shortest sample of a batch."""
    batches = [
        [lengths[i] for i in order[n : n + BATCH]] for n in range(0, len(order) - BATCH + 1, BATCH)
    ]
    return statistics.mean(max(batch) - min(batch) for batch in batches)


def test_similar_lengths_share_a_batch_but_batches_are_mixed() -> None:
    lengths = random_lengths(640, longest=1000)
    order = [index for index, _ in EpochSampler(lengths, BATCH, 0, shuffle=True)]
    assert spread(lengths, order) < 0.15 * spread(lengths, list(range(640)))
    means = [statistics.mean(lengths[i] for i in order[n : n + 4]) for n in range(0, 640, 4)]
    neighbours = statistics.mean(abs(a - b) for a, b in pairwise(means))
    assert neighbours > 150, "short and long batches must alternate, not climb"


def test_only_the_last_batch_is_short_and_shifts_no_other() -> None:
    """22 samples are one stretch: its batches are cut from the samples sorted by length."""
    lengths = random.Random(1).sample(range(4, 100), COUNT)
    by_length = sorted(range(COUNT), key=lambda i: lengths[i])
    expected = {frozenset(by_length[n : n + BATCH]) for n in range(0, COUNT, BATCH)}
    sampler = EpochSampler(lengths, BATCH, 0, shuffle=True)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        order = [index for index, _ in sampler]
        assert {frozenset(order[n : n + BATCH]) for n in range(0, COUNT, BATCH)} == expected


# ---- resuming ----------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("taken", range(BATCHES))
def test_resumed_loader_gives_exactly_the_remaining_batches(taken: int, epoch: int) -> None:
    whole = frozen(epoch_of(make_loader(), epoch))
    assert len(whole) == BATCHES
    loader = make_loader()
    first = frozen(islice(epoch_of(loader, epoch), taken))
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict() if taken else {"epoch": epoch, "batches": 0})
    assert len(resumed) == BATCHES
    rest = frozen(epoch_of(resumed, epoch))
    assert first == whole[:taken]
    assert rest == whole[taken:]
    assert frozen(epoch_of(resumed, epoch + 1)) == frozen(epoch_of(make_loader(), epoch + 1))


def test_a_resumed_loader_can_be_resumed_again() -> None:
    whole = frozen(epoch_of(make_loader(), 1))
    loader = make_loader()
    list(islice(epoch_of(loader, 1), 2))
    for taken in (2, 3):
        state = loader.state_dict()
        assert state == {"epoch": 1, "batches": taken, "ahead": 0}
        loader = make_loader()
        loader.load_state_dict(state)
        assert loader.state_dict() == state, "a checkpoint before the next batch"
        assert frozen(islice(epoch_of(loader, 1), 1)) == whole[taken : taken + 1]


@pytest.mark.parametrize("taken", [3, BATCHES], ids=["shortened epoch", "whole epoch"])
def test_next_epoch_is_whole_after_an_epoch_ended(taken: int) -> None:
    """With `limit_train_batches` an epoch ends before the loader does."""
    loader = make_loader()
    list(islice(epoch_of(loader, 0), taken))
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert frozen(epoch_of(resumed, 1)) == frozen(epoch_of(make_loader(), 1))


def test_finished_epoch_is_not_resumed_empty() -> None:
    loader = make_loader()
    list(epoch_of(loader, 0))
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert len(frozen(epoch_of(resumed, 0))) == BATCHES


def test_abandoned_epoch_does_not_shorten_the_next() -> None:
    loader = make_loader()
    list(islice(epoch_of(loader, 0), 2))
    assert frozen(epoch_of(loader, 1)) == frozen(epoch_of(make_loader(), 1))
    assert loader.state_dict() == {"epoch": 1, "batches": BATCHES, "ahead": 0}


def test_resuming_happens_once() -> None:
    """A resumed epoch that is abandoned and begun again is whole."""
    loader = make_loader()
    loader.load_state_dict({"epoch": 1, "batches": 2})
    list(islice(epoch_of(loader, 1), 1))
    assert frozen(epoch_of(loader, 1)) == frozen(epoch_of(make_loader(), 1))


def test_anchors_are_fresh_in_every_epoch_of_training_only() -> None:
    def anchors(shuffle: bool, epoch: int) -> dict[int, list[int]]:
        return {
            int(ids[0]): row.tolist()
            for batch in epoch_of(make_loader(shuffle), epoch)
            for ids, row in zip(batch.input_ids, batch.anchor_positions, strict=True)
        }

    assert anchors(True, 0) != anchors(True, 1)
    assert anchors(False, 0) == anchors(False, 1)


def test_worker_processes_change_nothing() -> None:
    """Two epochs with the same persistent workers, and a resume in the middle of the second."""
    plain, loader = make_loader(), make_loader(workers=2)
    for epoch in range(2):
        assert frozen(epoch_of(loader, epoch)) == frozen(epoch_of(plain, epoch))
    whole = frozen(epoch_of(plain, 1))
    assert frozen(islice(epoch_of(loader, 1), 2)) == whole[:2]
    assert loader.state_dict() == {"epoch": 1, "batches": 2, "ahead": 0}, (
        "prefetched batches do not count"
    )
    resumed = make_loader(workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert frozen(epoch_of(resumed, 1)) == whole[2:]


class Recorder(pl.LightningModule):
    """Notes every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Batch, _index: int) -> Tensor:
        self.seen.append((self.current_epoch, *frozen([batch])))
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(folder: Path, limit: int, resume: Path | None = None, steps: int = -1) -> list[Any]:
    module = Recorder()
    trainer = pl.Trainer(
        max_epochs=3,
        max_steps=steps,
        limit_train_batches=limit,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)],
    )
    trainer.fit(module, make_loader(), ckpt_path=resume, weights_only=False)
    return module.seen


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("limit", [3, BATCHES], ids=["shortened epochs", "whole epochs"])
def test_lightning_resumes_at_any_step(tmp_path: Path, limit: int) -> None:
    straight = trained(tmp_path / "straight", limit)
    assert len(straight) == 3 * limit
    counted = Counter(step[0] for step in straight)
    assert counted == {0: limit, 1: limit, 2: limit}
    for steps in (1, limit - 1, limit, limit + 1, 2 * limit):
        first = trained(tmp_path / str(steps), limit, steps=steps)
        rest = trained(tmp_path / f"{steps} on", limit, resume=tmp_path / str(steps) / "last.ckpt")
        assert first + rest == straight, steps


def test_prompts_come_one_by_one() -> None:
    prompts = [[1, 2], [3]]
    dataset = PromptDataset(prompts)
    assert [only_item([dataset[i]]) for i in range(len(dataset))] == prompts


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_samples(world: int) -> None:
    """Shuffled epochs: equally many whole batches each, none twice; unshuffled: every one once."""
    lengths = [5 + (i * 7) % 11 for i in range(41)]
    for shuffle in (True, False):
        shares = [
            EpochSampler(lengths, 4, seed=3, shuffle=shuffle, rank=rank, world=world)
            for rank in range(world)
        ]
        taken = [[index for index, _ in share] for share in shares]
        assert [len(share) for share in shares] == [len(indices) for indices in taken]
        everything = [index for indices in taken for index in indices]
        assert len(set(everything)) == len(everything)
        if shuffle:
            assert {len(indices) for indices in taken} == {41 // 4 // world * 4}
        else:
            assert sorted(everything) == list(range(41))
