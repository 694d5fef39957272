"""The target's answers: its own greedy output, made once, kept whole, continued after a kill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, MASK, tiny_model, tiny_target

from dflash_lightning.data.answers import Answers, LocalAnswers
from dflash_lightning.data.prepare import AnswerBook, cache_key, windows
from dflash_lightning.target import Target
from dflash_lightning.target_spec import TargetSpec

MAX_NEW = 10


def ragged_prompts(lengths: tuple[int, ...] = (3, 9, 5, 14, 4, 9, 1)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]


def one_by_one(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return what `generate` gives for each prompt alone, without padding."""
    return [
        target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=sorted(target.stop_ids),
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


class Loading:
    """A `load_target` that counts; `fail_at` kills that call of `generate`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: Target, fail_at: int | None = None
    ) -> None:
        self.loaded, self.generated, self.target, self.fail_at = 0, 0, target, fail_at
        self.generate: Callable[..., Any] = type(target.model).generate
        monkeypatch.setattr(target.model, "generate", self._generate, raising=False)

    def __call__(self) -> Target:
        self.loaded += 1
        return self.target

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.generated += 1
        if self.generated == self.fail_at:
            raise KeyboardInterrupt
        return self.generate(self.target.model, *args, **kwargs)


def spec_of(fingerprint: str = "t", **changes: Any) -> TargetSpec:
    target = tiny_target()
    return TargetSpec(
        folder=Path(),
        dtype="float32",
        fingerprint=fingerprint,
        tokenizer=changes.get("tokenizer"),  # type: ignore[arg-type]
        config=target.config,
        target_layer_ids=target.target_layer_ids,
        mask_token_id=MASK,
        stop_ids=target.stop_ids,
    )


def answers(
    loading: Loading | Callable[[], Target],
    cache: Path,
    prompts: list[list[int]],
    fingerprint: str = "t",
    max_new_tokens: int = MAX_NEW,
    backend: Answers | None = None,
    **options: Any,
) -> list[list[int]]:
    backend = backend or LocalAnswers(**{"batch_size": 3, **options})
    book = AnswerBook(backend, spec_of(fingerprint), loading, max_new_tokens, cache)
    found = [a.ids for window in windows(prompts, book.window) for a in book.ask(window)]
    book.close()
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_the_targets_own_greedy_output(tmp_path: Path, architecture: str) -> None:
    target, prompts = tiny_target(architecture), ragged_prompts()
    expected = one_by_one(target, prompts, MAX_NEW)
    assert len({tuple(answer) for answer in expected}) > 1
    assert answers(lambda: target, tmp_path, prompts) == expected
    assert answers(lambda: target, tmp_path, prompts, batch_size=64) == expected


def test_stop_token_is_kept_and_nothing_after_it(tmp_path: Path) -> None:
    model, prompts = tiny_model("llama_tied"), ragged_prompts()
    plain = one_by_one(Target(model, None, [1, 3, 5], MASK), prompts, MAX_NEW)
    second_stop = plain[0][4]
    model.generation_config.eos_token_id = [1, second_stop]
    target = Target(model, None, [1, 3, 5], MASK)
    found = answers(lambda: target, tmp_path, prompts)
    assert any(answer[-1] == second_stop for answer in found)
    assert any(len(answer) == MAX_NEW for answer in found)
    for answer, full in zip(found, plain, strict=True):
        cut = next((n + 1 for n, token in enumerate(full) if token in (1, second_stop)), MAX_NEW)
        assert answer == full[:cut]


@pytest.mark.parametrize(
    "change",
    [
        {"num_beams": 3},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": MAX_NEW},
        {"suppress_tokens": [5]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_generation_config_of_the_target_does_not_bend_greedy(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """The decoder takes the plain argmax, so the training answers must as well."""
    target, prompts = tiny_target("llama_untied"), ragged_prompts()
    expected = one_by_one(target, prompts, MAX_NEW)
    if "suppress_tokens" in change:
        change = {"suppress_tokens": [expected[0][0]]}
    for name, value in change.items():
        setattr(target.model.generation_config, name, value)
    own_config = target.model.generation_config
    assert one_by_one(target, prompts, MAX_NEW) != expected, "the change must matter"
    assert answers(lambda: target, tmp_path, prompts) == expected
    assert target.model.generation_config is own_config


def test_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, prompts = Loading(monkeypatch, tiny_target()), ragged_prompts()
    first = answers(loading, tmp_path, prompts)
    assert (loading.loaded, loading.generated) == (1, 3)
    assert answers(loading, tmp_path, prompts) == first
    assert (loading.loaded, loading.generated) == (1, 3)


def test_killed_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ragged_prompts()
    expected = answers(tiny_target, tmp_path / "straight", prompts)
    with pytest.raises(KeyboardInterrupt):
        answers(Loading(monkeypatch, tiny_target(), fail_at=3), tmp_path / "killed", prompts)
    rest = Loading(monkeypatch, tiny_target())
    assert answers(rest, tmp_path / "killed", prompts) == expected
    assert rest.generated == 1


def test_lost_shard_alone_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, prompts = Loading(monkeypatch, tiny_target()), ragged_prompts()
    expected = answers(loading, tmp_path, prompts)
    shards = list(tmp_path.rglob("*.jsonl"))
    assert len(shards) == 3
    kept = {shard: shard.stat().st_mtime_ns for shard in (shards[0], shards[2])}
    shards[1].unlink()
    assert answers(loading, tmp_path, prompts) == expected
    assert loading.generated == 4
    assert kept == {shard: shard.stat().st_mtime_ns for shard in kept}


def test_leftover_partial_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, prompts = Loading(monkeypatch, tiny_target()), ragged_prompts()
    expected = answers(loading, tmp_path, prompts)
    shard = sorted(tmp_path.rglob("*.jsonl"))[1]
    shard.with_name(f"{shard.name}.1.partial").write_text(shard.read_text()[:7])
    shard.unlink()
    assert answers(loading, tmp_path, prompts) == expected


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "u"}, {"max_new_tokens": MAX_NEW + 1}, {"prompts": ragged_prompts((3, 4))}],
    ids=lambda change: next(iter(change)),
)
def test_other_target_length_or_prompts_are_answered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    loading = Loading(monkeypatch, tiny_target())
    options: dict[str, Any] = {"prompts": ragged_prompts()}
    first = answers(loading, tmp_path, **options)
    answers(loading, tmp_path, **(options | change))
    assert loading.loaded == 2
    assert answers(loading, tmp_path, **options) == first
    assert loading.loaded == 2


def test_order_of_the_prompts_is_the_order_of_the_answers(tmp_path: Path) -> None:
    target, prompts = tiny_target(), ragged_prompts()
    forward = answers(lambda: target, tmp_path, prompts)
    assert answers(lambda: target, tmp_path, prompts[::-1]) == forward[::-1]


def test_no_prompts_need_no_target(tmp_path: Path) -> None:
    def never() -> Target:
        raise AssertionError("loaded")

    assert answers(never, tmp_path, []) == []


def test_cache_key_tells_its_parts_apart() -> None:
    keys = [cache_key("a", 1), cache_key("a", 2), cache_key("b", 1), cache_key("a1"), cache_key()]
    keys += [cache_key([[1, 2], [3]]), cache_key([[1], [2, 3]]), cache_key([[1, 2, 3]])]
    assert len(set(keys)) == len(keys)
    assert cache_key("a", [[1]]) == cache_key("a", [[1]])
