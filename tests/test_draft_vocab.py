"""The draft vocabulary: supervised counts, the most frequent tokens, the map to its rows."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from dflash_lightning.data import sample_store
from dflash_lightning.data.draft_vocab import most_frequent, to_draft_rows, token_counts
from dflash_lightning.data.sample_store import write_samples
from dflash_lightning.data.samples import Sample, response_sample
from dflash_lightning.errors import UserError


def random_samples(seed: int, vocab_size: int) -> list[Sample]:
    rng = random.Random(seed)
    return [
        response_sample(
            [rng.randrange(vocab_size) for _ in range(rng.randrange(6))],
            [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 12))],
        )
        for _ in range(20)
    ]


def test_only_supervised_tokens_are_counted(tmp_path: Path) -> None:
    samples = [response_sample([1, 1, 1], [2, 3, 3]), response_sample([3, 0], [2])]
    assert token_counts(write_samples(tmp_path / "s", samples), 6).tolist() == [0, 0, 2, 2, 0, 0]


def test_counts_against_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = random_samples(0, 15)
    expected = Counter(
        int(token)
        for sample in samples
        for token, used in zip(sample.ids, sample.loss_mask, strict=True)
        if used
    )
    monkeypatch.setattr(sample_store, "TOKENS_PER_CHUNK", 7)
    counts = token_counts(write_samples(tmp_path / "s", samples), 20)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [expected[token] for token in range(20)]


def test_no_samples_count_nothing(tmp_path: Path) -> None:
    assert token_counts(write_samples(tmp_path / "s", []), 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_most_frequent_is_ascending_and_ties_go_to_the_lower_id(
    size: int, expected: list[int]
) -> None:
    assert most_frequent(torch.tensor([0, 3, 3, 0, 7]), size).tolist() == expected


def test_most_frequent_against_loop_with_many_ties() -> None:
    counts = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(0))
    for size in (1, 7, 100, 299, 300):
        ranked = sorted(range(300), key=lambda token: (-int(counts[token]), token))
        assert most_frequent(counts, size).tolist() == sorted(ranked[:size])


@pytest.mark.parametrize("size", [0, -1, 6])
def test_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=rf"model\.draft_vocab: needs 1\.\.5 tokens .* got {size}$"):
        most_frequent(torch.zeros(5, dtype=torch.int64), size)


def test_rows_invert_the_draft_ids() -> None:
    draft_ids = torch.tensor([2, 3, 7])
    rows = to_draft_rows(draft_ids, 9)
    assert rows.tolist() == [-1, -1, 0, 1, -1, -1, -1, 2, -1]
    assert torch.equal(draft_ids[rows[draft_ids]], draft_ids)
