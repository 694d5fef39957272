"""Shards of the feature store: whole or not at all, checked, by one writer that may be killed."""

import multiprocessing as mp
import os
import pickle
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_features import assert_same_states, build, expected_states, never, samples_of
from tiny import tiny_target
from torch import Tensor

from dflash_lightning.data import features, files, shards
from dflash_lightning.data.files import only_writer
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

ROW = 32 * 4
fork = mp.get_context("fork")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 16 * ROW)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module in (features, files):
        for level in ("info", "warning"):
            monkeypatch.setattr(module.log, level, lambda text, *a: found.append(text % a))
    return found


def shard_files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("shard_*.bin"))


@pytest.mark.parametrize("lengths", [[3, 5, 8, 1, 40, 2, 2], [16] * 4, [100], [], [1] * 50])
def test_every_sample_is_in_one_shard(lengths: list[int]) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    plan = shards.plan_shards(Path(), starts, 32, torch.float32)
    inside = [list(plan.samples(shard)) for shard in range(len(plan))]
    assert list(chain.from_iterable(inside)) == list(range(len(lengths)))
    assert all(inside)
    assert [plan.tokens(s) for s in range(len(plan))] == [
        sum(lengths[i] for i in rows) for rows in inside
    ]
    for shard, rows in enumerate(inside):
        assert plan.tokens(shard) <= 16 + max(lengths[i] for i in rows), "a shard is bounded"
        at = 0
        for i in rows:
            assert plan.locate(i) == (shard, slice(at, at + lengths[i]))
            at += lengths[i]


def test_many_shards_hold_what_the_target_computes(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    assert len(shard_files(tmp_path)) == 3 * len(store.plan) >= 9
    for i, sample in enumerate(samples):
        assert_same_states(store[i], expected_states(target, sample))
    copy = pickle.loads(pickle.dumps(store))
    assert all(torch.equal(copy[i], store[i]) for i in range(len(samples)))


@pytest.mark.parametrize("harm", ["first byte", "last byte", "checksum", "cut", "longer", "gone"])
def test_a_damaged_shard_is_named_and_rebuilt(tmp_path: Path, lines: list[str], harm: str) -> None:
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    states = [store[i] for i in range(len(samples))]
    victim = store.plan.path(3, 1)
    before = {f: f.stat().st_mtime_ns for f in shard_files(tmp_path) if f != victim}
    content = bytearray(victim.read_bytes())
    if harm == "gone":
        victim.unlink()
    else:
        at = {"first byte": 0, "last byte": -5, "checksum": -1}.get(harm)
        if at is not None:
            content[at] ^= 1
        victim.write_bytes(
            bytes(content)[:-9] if harm == "cut" else bytes(content) + b"x" * (harm == "longer")
        )
    asked: list[tuple[int, list[int]]] = []
    compute = target.features

    def spy(ids: Tensor, mask: Tensor, layers: list[int]) -> list[Tensor]:
        asked.append((int(mask.sum()), list(layers)))
        return compute(ids, mask, layers)

    target.features = spy  # type: ignore[method-assign, assignment]
    again = build(tmp_path, target, samples)
    assert {tuple(layers) for _, layers in asked} == {(3,)}, "the other layers are kept"
    assert sum(count for count, _ in asked) == store.plan.tokens(1), "the other shards are kept"
    assert any(str(victim) in line and "damaged" in line for line in lines) == (harm != "gone")
    assert {f: f.stat().st_mtime_ns for f in before} == before
    for i, expected in enumerate(states):
        assert_same_states(again[i], expected)


def test_without_check_only_sizes_are_compared(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    store = build(tmp_path, target, samples)
    victim = store.plan.path(3, 1)
    content = bytearray(victim.read_bytes())
    content[0] ^= 1
    victim.write_bytes(content)
    build(tmp_path, target, samples, load_target=never, check=False)
    victim.write_bytes(content[:-1])
    again = build(tmp_path, target, samples, check=False)
    assert_same_states(again[2], expected_states(target, samples[2]))
    assert shards.is_sound(victim)


def test_bytes_are_read_once_a_process(tmp_path: Path) -> None:
    target, samples = tiny_target(), samples_of()
    build(tmp_path, target, samples)
    build(tmp_path, target, samples, load_target=never)
    before = shards._is_sound.cache_info()
    build(tmp_path, target, samples, load_target=never)
    after = shards._is_sound.cache_info()
    assert after.misses == before.misses
    assert after.hits == before.hits + len(shard_files(tmp_path))


def slowly(target: Target, calls: Any, last: int = 10**9) -> Target:
    """Count the target's passes; the process kills itself in pass number `last`."""
    compute = target.features

    def run(*args: Any) -> list[Tensor]:
        calls.value += 1
        if calls.value == last:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return compute(*args)

    target.features = run  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize("last", [1, 3])
def test_killed_fill_goes_on_from_whole_shards(tmp_path: Path, last: int) -> None:
    samples = samples_of()
    calls = fork.Value("i", 0)
    child = fork.Process(target=build, args=(tmp_path, slowly(tiny_target(), calls, last), samples))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    kept = {f: f.stat().st_mtime_ns for f in shard_files(tmp_path)}
    assert bool(kept) == (last > 1)
    target, calls = tiny_target(), fork.Value("i", 0)
    store = build(tmp_path, slowly(target, calls), samples)
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    assert len(shard_files(tmp_path)) == 3 * len(store.plan)
    assert not list(tmp_path.rglob("*.partial"))
    for i, sample in enumerate(samples):
        assert_same_states(store[i], expected_states(tiny_target(), sample))


def test_one_of_several_processes_writes_and_the_others_wait(tmp_path: Path) -> None:
    samples, calls = samples_of(), fork.Value("i", 0)
    said = fork.Queue()

    def run(number: int) -> None:
        files.log.info = lambda text, *a: said.put(text % a)  # type: ignore[method-assign]
        build(tmp_path / str(number), slowly(tiny_target(), calls), samples)

    for number in range(2):  # one store, each with its own copy of the samples
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "features").symlink_to(tmp_path / "features")
    (tmp_path / "features").mkdir()
    children = [fork.Process(target=run, args=(number,)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    once = fork.Value("i", 0)
    build(tmp_path / "alone", slowly(tiny_target(), once), samples)
    assert calls.value == once.value, "the target passes are made once"
    assert "waiting for process" in said.get(timeout=5)


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    def hold() -> None:
        with only_writer(tmp_path, "states"):
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork.Process(target=hold)
    child.start()
    child.join(60)
    with only_writer(tmp_path, "states"):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_full_disk_is_one_line_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, samples = tiny_target(), samples_of()
    opened, really_open = [], Path.open

    def open_on_full_disk(path: Path, *args: Any, **kwargs: Any) -> Any:
        stream = really_open(path, *args, **kwargs)
        if path.name.endswith(".partial"):
            opened.append(path)
            if len(opened) == 5:
                stream.write(b"half")
                stream.close()
                raise OSError(28, "No space left on device")
        return stream

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(UserError, match=r"data\.cache_dir: the disk of .* is full") as caught:
        build(tmp_path, target, samples)
    assert "\n" not in str(caught.value)
    assert len(shard_files(tmp_path)) == 4
    assert not list(tmp_path.rglob("*.partial"))


def test_progress_is_logged_in_words(tmp_path: Path, lines: list[str]) -> None:
    target, samples = tiny_target(), samples_of()
    build(tmp_path, target, samples)
    tokens = sum(len(s.ids) for s in samples)
    assert lines[0].startswith(f"the target reads {tokens} tokens; their states take 0.00 GB")
    assert "tokens x 3 layers x 32 x 4 bytes" in lines[0]
    assert lines[1].startswith(f"data.features=store: {tokens} tokens, 3 layers, ready in")
