"""Sampled answers: the target's distribution, one per prompt whatever the batch, by seed."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare import Loading, answers, ragged_prompts, spec_of
from tiny import tiny_target

from dflash_lightning.data.answers import LocalAnswers, Question
from dflash_lightning.data.prepare import AnswerBook, read_shard
from dflash_lightning.errors import UserError


def test_sampled_answer_depends_on_seed_and_prompt_only(tmp_path: Path) -> None:
    target, prompts = tiny_target("llama_untied"), ragged_prompts()

    def sampled(name: str, asked: list[list[int]], **options: Any) -> list[list[int]]:
        return answers(lambda: target, tmp_path / name, asked, temperature=1.0, **options)

    first = sampled("a", prompts)
    assert sampled("b", prompts, batch_size=64) == first
    assert sampled("c", prompts[::-1], batch_size=1) == first[::-1]
    assert sampled("d", [prompts[2]]) == [first[2]]
    assert sampled("e", prompts, seed=1) != first
    assert sampled("f", prompts, max_new_tokens=4) == [answer[:4] for answer in first]
    assert sampled("a", prompts, seed=1) == sampled("e", prompts, seed=1), "the seed is in the key"
    assert answers(lambda: target, tmp_path / "a", prompts) != first


@pytest.mark.parametrize(
    ("options", "nucleus"),
    [({"temperature": 1.0}, 1.0), ({"temperature": 0.5}, 1.0), ({"top_p": 0.6}, 0.6)],
)
def test_first_tokens_have_the_targets_distribution(
    tmp_path: Path, options: dict[str, float], nucleus: float
) -> None:
    """Chi-square over 2,000 seeds, cells of at least 5 expected."""
    target, prompt = tiny_target(), [5, 9, 40]
    temperature = options.get("temperature", 1.0)
    logits = target.forward(torch.tensor([prompt]), tap=False).logits[0, -1] / temperature
    p = logits.double().softmax(-1)
    if nucleus < 1:
        ordered, order = p.sort(descending=True)
        p[order[(ordered.cumsum(0) - ordered) >= nucleus]] = 0
        p /= p.sum()
    count, backend = 2000, LocalAnswers(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    found: Counter[int] = Counter()
    processors: Any = None
    for seed in range(count):
        backend.seed = seed
        processors = backend._processors([Question(prompt, 1)], 1, len(prompt))
        raw = logits[None] * temperature
        found[int(processors(torch.tensor([prompt]), raw.float()).argmax())] += 1
    assert all(p[token] > 0 for token in found)
    cells = [i for i in range(len(p)) if p[i] * count >= 5]
    rest = 1 - float(p[cells].sum())
    chi = sum((found[i] - count * float(p[i])) ** 2 / (count * float(p[i])) for i in cells)
    if rest * count >= 5:
        other = count - sum(found[i] for i in cells)
        chi += (other - count * rest) ** 2 / (count * rest)
    freedom = len(cells)
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_prompts_draw_independently() -> None:
    """Equal logits, other prompts: they must not all take the same path through the sums."""
    batch = [Question([n, 5], 1) for n in range(50)]
    processors: Any = LocalAnswers(temperature=1.0)._processors(batch, 1, 2)
    ids = torch.tensor([q.ids for q in batch])
    assert len(set(processors(ids, torch.zeros(50, 30)).argmax(-1).tolist())) > 15


def test_limits_within_the_context_window(tmp_path: Path) -> None:
    """The window of 256 leaves a long prompt less room than its batch."""
    target = tiny_target("llama_untied")
    prompts = [[7] * 200, [8] * 253]
    book = AnswerBook(LocalAnswers(2), spec_of(), lambda: target, 20, tmp_path)
    found = book.ask(prompts)
    assert len(found[0].ids) == 20
    assert len(found[1].ids) == 3
    assert [a.finish for a in found] == ["length", "length"]


def test_longer_list_of_prompts_takes_over_whole_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, prompts = Loading(monkeypatch, tiny_target()), ragged_prompts(tuple(range(1, 40)))
    first = answers(loading, tmp_path, prompts[:32], batch_size=1)
    made = loading.generated
    assert answers(loading, tmp_path, prompts, batch_size=1)[:32] == first
    assert loading.generated == made + 7


@pytest.mark.parametrize("damage", ["cut", "row", "text", "empty", "keys"])
def test_damaged_shard_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    loading, prompts = Loading(monkeypatch, tiny_target()), ragged_prompts()
    expected = answers(loading, tmp_path, prompts)
    shard = sorted(tmp_path.rglob("*.jsonl"))[0]
    whole = shard.read_text()
    lines = whole.splitlines(keepends=True)
    shard.write_text(
        {
            "cut": whole[:-9],
            "row": "".join(lines[:-1]),
            "text": "x" + whole,
            "empty": "",
            "keys": "{}\n" * len(lines),
        }[damage]
    )
    assert read_shard(shard, len(lines)) is None
    assert answers(loading, tmp_path, prompts) == expected
    assert loading.generated == 4
    assert shard.read_text() == whole


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": -1}, "data.answers.temperature"),
        ({"top_p": 0}, "data.answers.top_p"),
        ({"top_k": 0}, "data.answers.top_k"),
        ({"batch_size": 0}, "data.answers.batch_size"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        LocalAnswers(**options)
