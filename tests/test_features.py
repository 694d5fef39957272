"""The store of tapped states: what the target computes, written layer by layer or not at all."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import MASK, tiny_model, tiny_target
from torch import Tensor

from dflash_lightning.data import features, shards
from dflash_lightning.data.features import FeatureStore, build_store
from dflash_lightning.data.sample_store import write_samples
from dflash_lightning.data.samples import Sample, response_sample
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_rules import FINAL

HIDDEN = 32
LENGTHS = (7, 3, 12, 12, 5, 20, 2)


def samples_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
    return [response_sample(row[:1], row[1:]) for row in rows]


def build(cache: Path, target: Target, samples: list[Sample], **changes: Any) -> FeatureStore:
    options: dict[str, Any] = {
        "load_target": lambda: target,
        "fingerprint": target.fingerprint,
        "layer_ids": target.target_layer_ids,
        "hidden_size": HIDDEN,
        "dtype": target.dtype,
    }
    stored = write_samples(cache / "samples", samples)
    return build_store(samples=stored, cache_dir=cache, **(options | changes))


def expected_states(target: Target, sample: Sample) -> Tensor:
    hidden = target.forward(sample.ids[None]).hidden
    assert hidden is not None
    return hidden[0]


def assert_same_states(found: Tensor, expected: Tensor) -> None:
    """Check equality up to float32 rounding: a padded batch is summed in another order."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < 5e-6


def never() -> Target:
    raise AssertionError("the target was loaded")


def layer_files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("shard_*.bin"))


def set_free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=size))


@pytest.mark.parametrize("architecture", ["llama_tied", "mistral_sliding", "gemma3_softcap"])
@pytest.mark.parametrize("batch_tokens", [2048, 16])
def test_store_holds_what_the_target_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, batch_tokens: int
) -> None:
    monkeypatch.setattr(features, "TOKENS_PER_BATCH", batch_tokens)
    target, samples = tiny_target(architecture), samples_of()
    store = build(tmp_path, target, samples)
    for i, sample in enumerate(samples):
        expected = expected_states(target, sample)
        assert store[i].shape == (len(sample.ids), 3 * HIDDEN)
        assert_same_states(store[i], expected)


def test_store_is_exact_where_nothing_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "TOKENS_PER_BATCH", 1)
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    for i, sample in enumerate(samples):
        assert torch.equal(store[i], expected_states(target, sample))


def test_layers_come_in_the_drafters_order(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    for position, layer in enumerate(target.target_layer_ids):
        alone = build(tmp_path, target, samples, layer_ids=[layer], load_target=never)
        part = slice(position * HIDDEN, (position + 1) * HIDDEN)
        assert all(torch.equal(store[i][:, part], alone[i]) for i in range(len(samples)))
    assert not torch.equal(store[0][:, :HIDDEN], store[0][:, HIDDEN : 2 * HIDDEN])


def test_store_is_used_again(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    first = build(tmp_path, target, samples)
    again = build(tmp_path, target, samples, load_target=never)
    assert all(torch.equal(first[i], again[i]) for i in range(len(samples)))


def test_one_more_layer_adds_just_that_layer(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    build(tmp_path, target, samples)
    before = {f: (f.stat().st_mtime_ns, f.stat().st_ino) for f in layer_files(tmp_path)}
    wider = tiny_target(taps=(1, 3, 4, 5))
    asked: list[list[int]] = []
    compute = wider.features

    def spy(ids: Tensor, mask: Tensor, layer_ids: list[int]) -> list[Tensor]:
        asked.append(list(layer_ids))
        return compute(ids, mask, layer_ids)

    wider.features = spy  # type: ignore[method-assign]
    store = build(tmp_path, wider, samples)
    after = {f: (f.stat().st_mtime_ns, f.stat().st_ino) for f in layer_files(tmp_path)}
    assert {f.parent.name for f in set(after) - set(before)} == {"layer_04"}
    assert {name: after[name] for name in before} == before
    assert asked == [[4]]
    for i, sample in enumerate(samples):
        assert_same_states(store[i], expected_states(wider, sample))


def test_final_states_are_one_more_layer(tmp_path: Path) -> None:
    """A store that is there gets them without the others being computed again."""
    target, samples = tiny_target(), samples_of()
    build(tmp_path, target, samples)
    before = {f: f.stat().st_mtime_ns for f in layer_files(tmp_path)}
    store = build(tmp_path, target, samples, layer_ids=[*target.target_layer_ids, FINAL])
    added = set(layer_files(tmp_path)) - set(before)
    assert {file.parent.name for file in added} == {"final"}
    assert before == {f: f.stat().st_mtime_ns for f in before}
    for i, sample in enumerate(samples):
        tapped, final = store[i].split([3 * HIDDEN, HIDDEN], dim=-1)
        assert_same_states(tapped, expected_states(target, sample))
        logits = target.forward(sample.ids[None], logits_to_keep=0).logits[0]
        assert_same_states(target.head(final), logits)


@pytest.mark.parametrize("change", ["samples", "order", "target"])
def test_key_changes_with_samples_and_target(tmp_path: Path, change: str) -> None:
    target, samples = tiny_target(), samples_of()
    build(tmp_path, target, samples)
    if change == "target":
        target = tiny_target(seed=1)
    else:
        samples = samples[::-1] if change == "order" else samples_of(seed=1)
    store = build(tmp_path, target, samples)
    assert len(list((tmp_path / "features").iterdir())) == 2
    assert_same_states(store[1], expected_states(target, samples[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_is_the_real_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The disk may be filled to 95%: just enough room passes, one byte less is refused."""
    target = Target(tiny_model("llama_tied").to(dtype), None, [1, 3, 5], MASK, "tiny")
    samples = samples_of()
    store = build(tmp_path / "a", target, samples)
    assert store[0].dtype == dtype
    files = layer_files(tmp_path / "a")
    real = sum(file.stat().st_size - shards.CHECKSUM_BYTES for file in files)
    assert real == sum(LENGTHS) * 3 * HIDDEN * dtype.itemsize
    set_free(monkeypatch, (real - 1) / 0.95)
    with pytest.raises(UserError, match=r"data\.features: the store needs"):
        build(tmp_path / "b", target, samples, load_target=never)
    assert not layer_files(tmp_path / "b")
    set_free(monkeypatch, (real + 1) / 0.95)
    build(tmp_path / "b", target, samples)
    set_free(monkeypatch, 0)
    build(tmp_path / "b", target, samples, load_target=never)


def test_only_missing_layers_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of()
    build(tmp_path, tiny_target(), samples)
    one_layer = sum(LENGTHS) * HIDDEN * 4
    set_free(monkeypatch, (one_layer - 1) / 0.95)
    with pytest.raises(UserError, match=r"data\.features: the store needs"):
        build(tmp_path, tiny_target(taps=(1, 3, 4, 5)), samples)
    set_free(monkeypatch, (one_layer + 1) / 0.95)
    build(tmp_path, tiny_target(taps=(1, 3, 4, 5)), samples)


def test_too_little_disk_names_the_cure_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 10)
    with pytest.raises(UserError) as caught:
        build(tmp_path, tiny_target(), samples_of(), load_target=never)
    message = str(caught.value)
    assert "\n" not in message
    assert "data.features=online" in message
    assert str(tmp_path) in message


def test_interrupted_fill_leaves_no_layer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "TOKENS_PER_BATCH", 16)
    target, samples = tiny_target(), samples_of()
    compute, calls = target.features, 0

    def fail_at_the_third(*args: Any) -> list[Tensor]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return compute(*args)

    target.features = fail_at_the_third  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, target, samples)
    assert calls == 3
    assert not layer_files(tmp_path)
    store = build(tmp_path, target, samples)
    assert len(layer_files(tmp_path)) == 3
    assert not list(tmp_path.rglob("*.partial"))
    for i, sample in enumerate(samples):
        assert_same_states(store[i], expected_states(target, sample))


def test_batches_are_bounded_and_of_similar_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "TOKENS_PER_BATCH", 24)
    target, shapes = tiny_target(), []
    compute = target.features

    def spy(ids: Tensor, mask: Tensor, layer_ids: list[int]) -> list[Tensor]:
        shapes.append((*ids.shape, int(mask.sum())))
        return compute(ids, mask, layer_ids)

    target.features = spy  # type: ignore[method-assign]
    build(tmp_path, target, samples_of((30, 2, 11, 3, 12, 2, 30, 4)))
    assert all(rows * width <= 24 or rows == 1 for rows, width, _ in shapes)
    assert sum(rows for rows, _, _ in shapes) == 8
    assert sum(real for _, _, real in shapes) == 94
    assert len(shapes) == 4, "batches must be filled"


def test_reading_a_store_never_writes_to_it(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    content = [f.read_bytes() for f in layer_files(tmp_path)]
    for layer in target.target_layer_ids:
        store.plan.states(layer, 0).zero_()
    assert [f.read_bytes() for f in layer_files(tmp_path)] == content


def test_no_samples_make_an_empty_store(tmp_path: Path) -> None:
    store = build(tmp_path, tiny_target(), [], load_target=never)
    assert len(store.plan) == 0
    assert not layer_files(tmp_path)
