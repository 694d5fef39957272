"""Samples on disk: what was written is read, whole or not at all, and as if nothing were cut."""

import json
import multiprocessing as mp
import os
import pickle
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_datamodule import make_data, ready_data, write_chats
from tiny import CHATML, tiny_tokenizer

from dflash_lightning.data import samples as tokenizing
from dflash_lightning.data.prompts import Prompt, PromptSource, Split
from dflash_lightning.data.rows import row_prompt
from dflash_lightning.data.sample_store import SampleStore, TokenLists, write_samples
from dflash_lightning.data.samples import Sample, chat_samples, text_samples
from dflash_lightning.data.sources import JsonlPrompts
from dflash_lightning.errors import UserError

fork = mp.get_context("fork")


def some_samples(count: int = 9, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 30) for _ in range(count)]
    return [
        Sample(torch.tensor([rng.randrange(2**31) for _ in range(n)]), torch.rand(n) < 0.5)
        for n in lengths
    ]


def same(found: Sample, expected: Sample) -> bool:
    return torch.equal(found.ids, expected.ids) and torch.equal(found.loss_mask, expected.loss_mask)


def test_samples_and_prompts_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples, prompts = some_samples(), [[1, 2, 3], [4], [5, 6]]
    store = write_samples(tmp_path / "s", [samples[0], None, *samples[1:], None], prompts)
    for found in (store, SampleStore(tmp_path / "s"), pickle.loads(pickle.dumps(store))):
        assert len(found) == 9
        assert found.left_out == 2
        assert all(same(a, b) for a, b in zip(found, samples, strict=True))
        assert found[0].ids.dtype == torch.int64
        assert same(found[-1], samples[-1])
        assert same(found[2:4][1], samples[3])
        assert found.lengths.tolist() == [len(s.ids) for s in samples]
        with pytest.raises(IndexError):
            found[9]
    lists = pickle.loads(pickle.dumps(TokenLists(tmp_path / "s", "prompts")))
    assert list(lists) == prompts
    assert lists[1:] == prompts[1:]
    assert len(pickle.dumps(store)) < 500, "workers get the place, not the content"


def test_what_is_read_can_be_changed_and_the_store_stays(tmp_path: Path) -> None:
    store = write_samples(tmp_path / "s", some_samples())
    before = store[0].ids.clone()
    store[0].ids.zero_()
    store[0].loss_mask.fill_(True)
    assert torch.equal(store[0].ids, before)


def test_no_samples(tmp_path: Path) -> None:
    store = write_samples(tmp_path / "s", [])
    assert len(store) == store.num_tokens == 0
    assert list(store.supervised_ids()) == []


def test_digests_change_with_what_they_stand_for(tmp_path: Path) -> None:
    samples = some_samples()

    def made(rows: list[Sample], prompts: list[list[int]] | None = None) -> tuple[str, str]:
        store = write_samples(tmp_path / "s", rows, prompts or [])
        return store.digest, store.content

    digest, content = made(samples)
    assert made(samples) == (digest, content)
    other_mask = [Sample(samples[0].ids, ~samples[0].loss_mask), *samples[1:]]
    assert made(other_mask)[0] == digest, "states don't depend on the loss mask"
    assert made(other_mask)[1] != content
    assert made(samples, [[1]]) == (digest, made(samples, [[1]])[1])
    assert made(samples, [[1]])[1] != content
    joined = Sample(*(torch.cat([getattr(s, k) for s in samples[:2]]) for k in vars(samples[0])))
    assert made([joined, *samples[2:]])[0] != digest, "the same ids, in other samples"
    assert made(samples[::-1])[0] != digest


# ---- tokenizing long rows in part ----------------------------------------------------------------


@pytest.mark.parametrize("max_length", [1, 20, 60, 200])
def test_tokenizing_a_beginning_is_tokenizing_all_and_cutting(
    monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    monkeypatch.setattr(tokenizing, "CHARACTERS_PER_TOKEN", 1)
    monkeypatch.setattr(tokenizing, "SURE_AFTER", 16)
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    texts = [
        "".join(rng.choice(["a", "b", " ", "<|im_end|>"]) for _ in range(rng.randrange(400)))
        for _ in range(30)
    ]
    chats = [
        [{"role": role, "content": rng.choice(texts)} for role in ("user", "assistant") * 2]
        for _ in range(30)
    ]
    for found, whole in (
        (chat_samples(tokenizer, chats, None, max_length), chat_samples(tokenizer, chats)),
        (text_samples(tokenizer, texts, max_length), text_samples(tokenizer, texts)),
    ):
        for a, b in zip(found, whole, strict=True):
            assert isinstance(a, Sample)
            assert isinstance(b, Sample)
            assert same(a, b.cut(max_length))


def test_only_a_beginning_of_a_long_row_is_tokenized() -> None:
    tokenizer = tiny_tokenizer()
    seen: list[int] = []

    class Spy:
        eos_token_id = tokenizer.eos_token_id
        chat_template = CHATML

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer.apply_chat_template(*args, **kwargs)

        def __call__(self, texts: list[str], **kwargs: Any) -> Any:
            seen.extend(map(len, texts))
            return tokenizer(texts, **kwargs)

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100_000}]
    (found,) = chat_samples(Spy(), [chat], None, 32)  # type: ignore[arg-type]
    assert isinstance(found, Sample)
    assert len(found.ids) == 32
    assert sum(seen) < 1000
    (text,) = text_samples(Spy(), ["<|im_start|>" * 1000], 200)  # type: ignore[arg-type]
    assert len(text.ids) == 200, "tokens longer than expected: the whole text is taken"


def test_one_refused_chat_spoils_no_other() -> None:
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = chat_samples(tiny_tokenizer(), [good, good[:1], good])
    assert isinstance(found[1], UserError)
    assert same(found[0], found[2])  # type: ignore[arg-type]
    assert "all zero" in str(found[1])


# ---- building ------------------------------------------------------------------------------------


@dataclass
class Listed(PromptSource):
    """Rows of every split; counts how often a split is read."""

    rows: list[dict[str, str]]
    name: str | None = None
    read: list[Split] = field(default_factory=list)
    die_at: int = -1

    def stream(self, split: Split) -> Iterator[Prompt]:
        self.read.append(split)
        for i, row in enumerate(self.rows):
            if i == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield row_prompt(f"{split} {i}", row)

    def fingerprint(self) -> str | None:
        return self.name


def listed(count: int, **changes: Any) -> Listed:
    rows = [{"prompt": f"Q{i}", "response": "so " * (1 + i % 5)} for i in range(count)]
    return Listed(rows, **changes)


def test_samples_are_made_once_for_a_source_with_a_fingerprint(
    target_folder: Path, tmp_path: Path
) -> None:
    first = ready_data(target_folder, tmp_path, listed(5, name="a"), responses="given")
    source = listed(5, name="a")
    again = ready_data(target_folder, tmp_path, source, responses="given")
    assert source.read == []
    assert all(same(a, b) for a, b in zip(first.samples["val"], again.samples["val"], strict=True))
    assert list(first.held_out_prompts["val"]) == list(again.held_out_prompts["val"])
    assert first.summaries["train"].plain() == again.summaries["train"].plain()
    assert again.summaries["train"].samples == 5
    other = listed(6, name="b")
    assert len(ready_data(target_folder, tmp_path, other, responses="given").samples["train"]) == 6


def test_a_source_without_a_fingerprint_is_read_every_time(
    target_folder: Path, tmp_path: Path
) -> None:
    first = ready_data(target_folder, tmp_path, listed(5), responses="given")
    same_again, other = listed(5), listed(6)
    second = ready_data(target_folder, tmp_path, same_again, responses="given")
    assert "train" in same_again.read
    assert second.samples["train"].folder == first.samples["train"].folder
    third = ready_data(target_folder, tmp_path, other, responses="given")
    assert [len(d.samples["train"]) for d in (first, second, third)] == [5, 5, 6]
    assert same(first.samples["train"][4], third.samples["train"][4])
    assert not list((tmp_path / "samples").rglob("*.partial"))


@pytest.mark.parametrize(
    "changes",
    [{"max_length": 30}, {"responses": "target"}, {"max_new_tokens": 5, "responses": "target"}],
)
def test_samples_depend_on_the_settings(
    target_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    base = {"responses": "given", "max_length": 60}
    ready_data(target_folder, tmp_path, listed(4, name="a"), **base)
    if "max_new_tokens" in changes:
        ready_data(target_folder, tmp_path, listed(4, name="a"), **{**base, "responses": "target"})
    source = listed(4, name="a")
    ready_data(target_folder, tmp_path, source, **{**base, **changes})
    assert "train" in source.read


def test_a_killed_build_leaves_nothing_half(target_folder: Path, tmp_path: Path) -> None:
    def build(source: Listed) -> None:
        make_data(target_folder, tmp_path, source, responses="given").prepare_data()

    child = fork.Process(target=build, args=(listed(200, name="a", die_at=150),))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert list((tmp_path / "samples").rglob("*.partial"))
    assert not list((tmp_path / "samples").rglob("whole"))
    data = ready_data(target_folder, tmp_path, listed(200, name="a"), responses="given")
    assert len(data.samples["train"]) == 200
    assert not list((tmp_path / "samples").rglob("*.partial"))


def test_a_changed_file_is_read_again(target_folder: Path, tmp_path: Path) -> None:
    for answers in (["yes it is"] * 6, ["no it is not"] * 7):
        prompts = JsonlPrompts(write_chats(tmp_path / "a.jsonl", answers), held_out=1)
        data = ready_data(target_folder, tmp_path, prompts, responses="given")
        sample = data.samples["train"][0]
        text = data.spec.tokenizer.decode(sample.ids[sample.loss_mask])
        assert text.startswith(answers[0])
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["response"] == answers[0]
