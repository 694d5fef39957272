"""Packing: samples that share a row, and never see each other."""

import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_datamodule import HIDDEN, TAPS, batches, make_data, ready_data, write_chats
from test_module import Watch, assert_same, trainer, weights_of
from tiny import ARCHITECTURES, MASK, tiny_drafter, tiny_target
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.packing import pack
from dflash_lightning.data.samples import Sample
from dflash_lightning.data.sources import JsonlPrompts
from dflash_lightning.drafter import attention
from dflash_lightning.errors import UserError
from dflash_lightning.module import DFlashModule

LENGTHS = (9, 17, 5, 12, 3, 8)


# ---- which samples share a row -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 300])
def test_every_sample_is_in_one_row_that_holds_it(count: int, seed: int) -> None:
    rng = random.Random(count)
    lengths = np.array([rng.randrange(2, 101) for _ in range(count)], np.int64)
    rows = pack(lengths, 100, seed)
    found = [rows[i] for i in range(len(rows))]
    assert sorted(chain.from_iterable(found)) == list(range(count))
    assert all(found)
    assert rows.lengths(lengths).tolist() == [int(lengths[row].sum()) for row in found]
    assert all(lengths[row].sum() <= 100 for row in found)


def test_rows_are_full() -> None:
    rng = random.Random(0)
    lengths = np.array([rng.randrange(20, 400) for _ in range(3000)], np.int64)
    rows = pack(lengths, 1024, 0)
    assert lengths.sum() / (1024 * len(rows)) > 0.99


def test_equally_long_samples_meet_by_the_seed() -> None:
    lengths = np.full(40, 10)

    def rows(seed: int) -> list[list[int]]:
        found = pack(lengths, 20, seed)
        return [found[i] for i in range(len(found))]

    assert rows(0) == rows(0)
    assert sorted(map(sorted, rows(0))) != sorted(map(sorted, rows(1)))


# ---- the target sees one document at a time ------------------------------------------------------


def documents(seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 90, (n,), generator=generator) for n in LENGTHS]
    return [Sample(row, torch.arange(len(row)) >= len(row) // 4) for row in ids]


def collated(samples: list[Sample], rows: list[list[int]], states: Any = None) -> Batch:
    collate = BlockCollator(RandomAnchors(4), 4, MASK, seed=5)
    return collate([[(i, 0, samples[i], states and states[i]) for i in row] for row in rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_of_packed_documents_are_those_alone(architecture: str) -> None:
    target, samples = tiny_target(architecture), documents()
    rows = [[1, 0, 4], [2, 3]]
    batch = collated(samples, rows)
    found = target.document_states(batch.input_ids, batch.attention_mask, batch.document_starts)
    for row, inside in enumerate(rows):
        start = 0
        for i in inside:
            alone = target.forward(samples[i].ids[None]).hidden
            assert alone is not None
            part = found[row, start : start + len(samples[i].ids)]
            assert (part - alone[0]).abs().max() / alone.abs().max() < 5e-6
            start += len(samples[i].ids)


def test_a_target_that_looks_across_documents_is_refused() -> None:
    target, samples = tiny_target(), documents()
    compute = target.model.base_model.forward

    def blind(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **{**kwargs, "position_ids": None})

    target.model.base_model.forward = blind
    batch = collated(samples, [[0, 1]])
    with pytest.raises(UserError, match=r"data\.packing: .* does not keep the documents") as caught:
        target.document_states(batch.input_ids, batch.attention_mask, batch.document_starts)
    assert "data.features=store" in str(caught.value)
    alone = collated(samples, [[0], [1]])
    target.document_states(alone.input_ids, alone.attention_mask, alone.document_starts)


# ---- the loss of a sample ------------------------------------------------------------------------


def sample_losses(module: DFlashModule, batch: Batch, rows: list[list[int]]) -> dict[int, Tensor]:
    """Return sum(w * CE) of each sample of a batch."""
    with torch.no_grad():
        output, _, _ = module.block_loss(batch)
    loss = output.slot_loss * output.weights
    starts = batch.document_starts.gather(1, batch.anchor_positions)
    found = {}
    for row, inside in enumerate(rows):
        places = np.cumsum([0, *(LENGTHS[i] for i in inside)])
        for i, place in zip(inside, places[:-1], strict=True):
            own = (starts[row] == int(place)) & batch.block_keep_mask[row]
            found[i] = loss[row][own].sum()
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("features", ["online", "store"])
@pytest.mark.parametrize("name", ["dense", "chunked", "flex"])
def test_a_samples_loss_is_the_same_packed_or_not(
    monkeypatch: pytest.MonkeyPatch, name: Any, features: str
) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: torch_flex)
    monkeypatch.setattr(attention, "QUERIES_PER_CHUNK", 8)
    target, samples = tiny_target("qwen3"), documents()
    module = DFlashModule(block_size=4, attention=name)
    module.target, module.drafter = target, tiny_drafter(target)
    states = None
    if features == "store":
        states = [target.document_states(s.ids[None], *ones_and_zeros(s))[0] for s in samples]
    apart = [[i] for i in range(len(samples))]
    expected = sample_losses(module, collated(samples, apart, states), apart)
    for rows in ([[0, 1, 2], [3, 4, 5]], [[5, 1, 4, 0, 3, 2]], [[2], [0, 5], [1, 3, 4]]):
        found = sample_losses(module, collated(samples, rows, states), rows)
        assert found.keys() == expected.keys()
        for i, loss in expected.items():
            assert float(loss) > 1
            assert float(found[i]) == pytest.approx(float(loss), rel=1e-5), (rows, i)


def ones_and_zeros(sample: Sample) -> tuple[Tensor, Tensor]:
    return torch.ones_like(sample.loss_mask)[None], torch.zeros_like(sample.ids)[None]


def test_gradients_are_the_same_packed_or_not() -> None:
    target, samples = tiny_target(), documents()
    found = []
    for rows in ([[i] for i in range(6)], [[0, 1, 2], [3, 4, 5]]):
        module = DFlashModule(block_size=4)
        module.target, module.drafter = target, tiny_drafter(target)
        output, weight, _ = module.block_loss(collated(samples, rows))
        (output.numerator / weight).backward()
        grads = {n: p.grad for n, p in module.drafter.named_parameters() if p.grad is not None}
        assert max(float(g.abs().max()) for g in grads.values()) > 1e-2
        found.append(grads)
    scale = max(float(g.abs().max()) for g in found[0].values())
    assert_same(found[1], found[0], tolerance=1e-5 * scale)


# ---- the data module -----------------------------------------------------------------------------


def prompts(folder: Path) -> JsonlPrompts:
    rng = random.Random(0)
    answers = ["so " * rng.randrange(1, 12) + "it is." for _ in range(40)]
    return JsonlPrompts(write_chats(folder / "chats.jsonl", answers), held_out=4)


@pytest.mark.parametrize("features", ["online", "store"])
def test_packed_loaders_give_every_sample_with_little_padding(
    target_folder: Path, tmp_path: Path, features: str
) -> None:
    data = ready_data(
        target_folder,
        tmp_path,
        prompts(tmp_path),
        responses="given",
        packing=True,
        max_length=128,
        features=features,
    )
    loader = data.train_dataloader()
    assert len(loader) == len(batches(loader))
    for epoch in range(2):
        seen: list[tuple[int, ...]] = []
        real = total = 0
        for batch in batches(loader, epoch):
            real, total = real + int(batch.attention_mask.sum()), total + batch.input_ids.numel()
            for ids, starts, mask in zip(
                batch.input_ids, batch.document_starts, batch.attention_mask, strict=True
            ):
                assert len(ids) <= 128
                for start in starts[mask].unique():
                    seen.append(tuple(ids[(starts == start) & mask].tolist()))
            if features == "store":
                assert batch.target_hidden is not None
                assert batch.target_hidden.shape[1:] == (batch.input_ids.shape[1], TAPS * HIDDEN)
        assert sorted(seen) == sorted(tuple(s.ids.tolist()) for s in data.samples["train"])
        assert 1 - real / total < 0.1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_packed_epoch_resumes_in_its_middle(
    target_folder: Path, tmp_path: Path, workers: int
) -> None:
    def loader() -> Any:
        options: dict[str, Any] = {"responses": "given", "packing": True, "max_length": 96}
        data = ready_data(
            target_folder, tmp_path, prompts(tmp_path), num_workers=workers, **options
        )
        return data.train_dataloader()

    def begun(found: Any, epoch: int) -> Iterator[Batch]:
        iterator = iter(found)
        found.sampler.set_epoch(epoch)
        return iterator

    whole = list(begun(loader(), 1))
    first = loader()
    taken = list(islice(begun(first, 1), 2))
    again = loader()
    again.load_state_dict(first.state_dict())
    rest = list(begun(again, 1))
    assert len(whole) > 3
    for a, b in zip([*taken, *rest], whole, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[:-1], b[:-1], strict=True))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("features", ["online", "store"])
def test_a_packed_run_resumes_in_the_middle_of_an_epoch(
    target_folder: Path, tmp_path: Path, features: str
) -> None:
    options: dict[str, Any] = {"responses": "given", "packing": True, "features": features}

    def run(resume: Path | None = None) -> tuple[Watch, DFlashModule]:
        pl.seed_everything(7 if resume else 0, verbose=False)
        data = make_data(
            target_folder, tmp_path, prompts(tmp_path), max_length=96, num_workers=2, **options
        )
        module, watch = DFlashModule(target=data.target, block_size=4, num_layers=1), Watch()
        folder = tmp_path / ("rest" if resume else "whole")
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        fit = trainer(watch, keep, max_epochs=2)
        fit.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
        return watch, module

    whole, expected = run()
    step = len(whole.gradients) // 2 + 2
    rest, found = run(tmp_path / "whole" / f"step={step}.ckpt")
    assert len(rest.anchors) > 1
    assert rest.anchors == whole.anchors[step:]
    assert_same(weights_of(found), weights_of(expected))


def test_padding_share_is_logged(target_folder: Path, tmp_path: Path) -> None:
    shares = {}
    for packing in (False, True):
        data = make_data(
            target_folder,
            tmp_path,
            prompts(tmp_path),
            responses="given",
            packing=packing,
            max_length=256,
            batch_size=40,
        )
        fit = trainer(max_steps=1)
        fit.fit(DFlashModule(target=data.target, block_size=4, num_layers=1), datamodule=data)
        shares[packing] = float(fit.callback_metrics["train/padding_share"])
    assert 0 <= shares[True] < 0.1 < shares[False] < 1
