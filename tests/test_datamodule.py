"""The data module end to end on a tiny target: answers, samples, blocks, stored states."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CHATML, save_tiny_target, tiny_tokenizer

from dflash_lightning.data import datamodule
from dflash_lightning.data.anchors import RandomAnchors, anchor_candidates
from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.datamodule import DFlashDataModule, default_cache_dir
from dflash_lightning.data.prompts import SPLITS, PromptSource
from dflash_lightning.data.sources import JsonlPrompts, TextPrompts
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_spec import TargetConfig

K, N, HIDDEN, TAPS = 4, 5, 32, 3
MAX_NEW = 12


def write_chats(path: Path, answers: list[str]) -> str:
    rows = [{"prompt": f"Q{i}" + "?" * (i % 4), "response": a} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def word_prompts(folder: Path, count: int = 14, held_out: int = 3) -> JsonlPrompts:
    file = write_chats(folder / "chats.jsonl", ["It is " + "so " * i for i in range(count)])
    return JsonlPrompts(file, held_out=held_out)


def make_data(
    target_folder: Path, cache: Path, prompts: PromptSource, **changes: Any
) -> DFlashDataModule:
    options: dict[str, Any] = {
        "target": TargetConfig(name=str(target_folder), dtype="float32", num_taps=TAPS),
        "block_size": K,
        "anchors": RandomAnchors(N),
        "batch_size": 3,
        "max_new_tokens": MAX_NEW,
        "cache_dir": str(cache),
    }
    return DFlashDataModule(prompts, **(options | changes))


def ready_data(*args: Any, **changes: Any) -> DFlashDataModule:
    data = make_data(*args, **changes)
    data.prepare_data()
    data.setup("fit")
    return data


def batches(loader: Any, epoch: int = 0) -> list[Batch]:
    iterator = iter(loader)
    loader.sampler.set_epoch(epoch)
    return list(iterator)


def user_error(data: DFlashDataModule) -> str:
    with pytest.raises(UserError) as caught:
        data.prepare_data()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("features", ["online", "store"])
def test_shapes_and_dtypes_of_a_batch(target_folder: Path, tmp_path: Path, features: str) -> None:
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path), features=features)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in batches(loader):
            rows, width = batch.input_ids.shape
            assert rows <= 3
            for name in ("attention_mask", "loss_mask"):
                assert getattr(batch, name).shape == (rows, width)
                assert getattr(batch, name).dtype == torch.bool
            assert batch.anchor_positions.shape == batch.block_keep_mask.shape == (rows, N)
            for name in ("noise_ids", "labels", "label_mask", "position_ids"):
                assert getattr(batch, name).shape == (rows, N, K)
            for name in ("input_ids", "anchor_positions", "noise_ids", "labels", "position_ids"):
                assert getattr(batch, name).dtype == torch.int64
            assert batch.block_keep_mask.dtype == torch.bool
            assert batch.label_mask.dtype == torch.bool
            assert (batch.noise_ids[..., 1:] == data.spec.mask_token_id).all()
            assert batch.block_keep_mask.any(1).all(), "each sample has a block"
            if features == "online":
                assert batch.target_hidden is None
            else:
                assert batch.target_hidden is not None
                assert batch.target_hidden.shape == (rows, width, TAPS * HIDDEN)
                assert batch.target_hidden.dtype == torch.float32


@pytest.mark.parametrize("responses", ["target", "given"])
def test_stored_states_equal_online_states(
    target_folder: Path, tmp_path: Path, responses: str
) -> None:
    prompts = word_prompts(tmp_path)
    online, stored = (
        ready_data(target_folder, tmp_path, prompts, responses=responses, features=features)
        for features in ("online", "store")
    )
    target = load_target(online.spec)
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        for a, b in zip(
            batches(getattr(online, name)()), batches(getattr(stored, name)()), strict=True
        ):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.anchor_positions, b.anchor_positions)
            expected = target.forward(a.input_ids, a.attention_mask.long()).hidden
            assert expected is not None
            assert b.target_hidden is not None
            real = a.attention_mask
            error = (b.target_hidden[real] - expected[real]).abs().max()
            assert error / expected[real].abs().max() < 5e-6
            assert not b.target_hidden[~real].any()


def test_given_answers_are_supervised_as_they_are(target_folder: Path, tmp_path: Path) -> None:
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path), responses="given")
    texts = [data.spec.tokenizer.decode(s.ids[s.loss_mask]) for s in data.samples["train"]]
    assert texts == ["It is " + "so " * i + "<|im_end|>" for i in (0, 2, 4, 6, 7, 9, 11, 13)]


def test_answers_of_the_target_are_its_greedy_output(target_folder: Path, tmp_path: Path) -> None:
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path))
    target = load_target(data.spec)
    assert data.samples["train"]
    for sample in data.samples["train"]:
        prompt = sample.ids[~sample.loss_mask]
        text = data.spec.tokenizer.decode(prompt)
        assert text.startswith("<|im_start|>user\nQ")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        expected = target.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=MAX_NEW,
            do_sample=False,
        )
        assert torch.equal(sample.ids, expected[0])


def test_target_is_loaded_once_and_not_again(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def counting(*args: Any) -> Target:
        loaded.append(args)
        return load_target(*args)

    monkeypatch.setattr(datamodule, "load_target", counting)
    first = ready_data(target_folder, tmp_path, word_prompts(tmp_path), features="store")
    assert len(loaded) == 1, "all splits share one target"
    second = make_data(target_folder, tmp_path, word_prompts(tmp_path), features="store")
    second.setup("fit")
    assert len(loaded) == 1, "the cache has it all"
    for split in SPLITS:
        pairs = zip(first.samples[split], second.samples[split], strict=True)
        assert all(torch.equal(a.ids, b.ids) for a, b in pairs)


def test_given_answers_need_no_target(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(datamodule, "load_target")
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path), responses="given")
    assert batches(data.train_dataloader())


def test_text_has_no_prompt_to_answer(target_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\nonce\n\nupon\n\na time\n", encoding="utf-8")
    data = make_data(target_folder, tmp_path, TextPrompts(str(file), held_out=1))
    message = user_error(data)
    assert message.startswith(f"{file}:4: plain text has no prompt")
    assert "data.responses=given" in message


def test_given_text_is_supervised_and_halved_for_decoding(
    target_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("once upon\n\na time\n\nthere was\n", encoding="utf-8")
    prompts = TextPrompts(str(file), held_out=1)
    data = ready_data(target_folder, tmp_path, prompts, responses="given")
    decode = data.spec.tokenizer.decode
    assert [decode(s.ids) for s in data.samples["train"]] == ["a time\n"]
    assert data.samples["train"][0].loss_mask.tolist() == [False] + [True] * 6
    assert [decode(ids) for ids in data.held_out_prompts["test"]] == ["there"]


@pytest.mark.parametrize("responses", ["given", "target"])
def test_bad_chats_are_named_by_file_and_line(
    target_folder: Path, tmp_path: Path, responses: str
) -> None:
    file = tmp_path / "a.jsonl"
    bad = {"messages": [{"role": "assistant", "content": "Hello"}]}
    file.write_text('{"prompt": "a", "response": "b"}\n' + json.dumps(bad) + "\n")
    prompts = JsonlPrompts(str(file), held_out=0)
    message = user_error(make_data(target_folder, tmp_path, prompts, responses=responses))
    assert message.startswith(f"{file}:2: ")


@pytest.mark.parametrize("responses", ["given", "target"])
def test_chats_that_the_template_refuses_are_named(tmp_path: Path, responses: str) -> None:
    folder = save_tiny_target(tmp_path / "picky")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{raise_exception('no system')}}{% endif %}"
        + CHATML
    )
    tokenizer.save_pretrained(folder)
    turns = [{"role": r, "content": r} for r in ("system", "user", "assistant")]
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' + json.dumps({"messages": turns}) + "\n")
    prompts = JsonlPrompts(str(file), held_out=0)
    message = user_error(make_data(folder, tmp_path, prompts, responses=responses))
    assert message.startswith(
        f"{file}:2: the target's chat template refuses this chat: no system ("
    )


def test_given_chats_keep_every_turn_under_a_template_that_rewrites(tmp_path: Path) -> None:
    """As Qwen3's does: an answer that is not the last is shown otherwise than it was given."""
    folder = save_tiny_target(tmp_path / "forgetful")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace(
        "message['content']",
        "(message['content'] if loop.last or message['role'] == 'user' else '(cut)')",
    )
    tokenizer.save_pretrained(folder)
    turns = [("user", "1"), ("assistant", "one!"), ("user", "2"), ("assistant", "two!")]
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in turns]},
        {"prompt": "3", "response": "three"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ready_data(folder, tmp_path, JsonlPrompts(str(file), held_out=0), responses="given")
    said = [tokenizer.decode(s.ids[s.loss_mask]) for s in data.samples["train"]]
    assert said == ["one!<|im_end|>", "two!<|im_end|>", "three<|im_end|>"]


def test_samples_without_possible_anchor_are_dropped(target_folder: Path, tmp_path: Path) -> None:
    """An empty answer is a lone stop token: nothing can be drafted after it."""
    file = write_chats(tmp_path / "a.jsonl", ["yes", "", "no", "", "1"])
    prompts = JsonlPrompts(file, held_out=0)
    data = ready_data(target_folder, tmp_path, prompts, responses="given")
    texts = [data.spec.tokenizer.decode(s.ids[s.loss_mask]) for s in data.samples["train"]]
    assert texts == ["yes<|im_end|>", "no<|im_end|>", "1<|im_end|>"]


def test_long_samples_are_cut_and_dropped_where_the_answer_is_gone(
    target_folder: Path, tmp_path: Path
) -> None:
    prompts = JsonlPrompts(write_chats(tmp_path / "a.jsonl", ["x" * 40] * 4), held_out=0)
    whole = ready_data(target_folder, tmp_path, prompts, responses="given")
    starts = [int(s.loss_mask.int().argmax()) for s in whole.samples["train"]]
    assert starts == sorted(set(starts))
    limit = starts[1] + 2  # the second prompt is one token longer than the first
    cut = ready_data(target_folder, tmp_path, prompts, responses="given", max_length=limit)
    assert [len(s.ids) for s in cut.samples["train"]] == [limit, limit]
    assert all(len(anchor_candidates(s.loss_mask)) for s in cut.samples["train"])


@pytest.mark.parametrize(
    ("rows", "max_length"), [([""] * 4, 99), (["yes"] * 4, 10)], ids=["no answers", "too short"]
)
def test_no_possible_anchor_at_all_is_refused(
    target_folder: Path, tmp_path: Path, rows: list[str], max_length: int
) -> None:
    prompts = JsonlPrompts(write_chats(tmp_path / "a.jsonl", rows), held_out=0)
    options: dict[str, Any] = {"responses": "given", "max_length": max_length}
    message = user_error(make_data(target_folder, tmp_path, prompts, **options))
    assert message.startswith("data: no train sample has two supervised tokens in a row")
    assert f"data.max_length={max_length}" in message


def test_empty_training_split_is_refused(target_folder: Path, tmp_path: Path) -> None:
    prompts = JsonlPrompts(write_chats(tmp_path / "a.jsonl", ["yes"] * 3), held_out=1, limit=0)
    data = ready_data(target_folder, tmp_path, prompts, responses="given")
    with pytest.raises(UserError, match="the train split is empty"):
        data.train_dataloader()


@pytest.mark.parametrize("name", ["val_dataloader", "test_dataloader"])
def test_validation_anchors_are_the_same_in_every_epoch(
    target_folder: Path, tmp_path: Path, name: str
) -> None:
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path), responses="given")
    loader = getattr(data, name)()
    first = batches(loader)
    for again in (batches(loader, epoch=3), batches(getattr(data, name)(), epoch=1)):
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.anchor_positions, b.anchor_positions)
    train = data.train_dataloader()
    anchors = [
        {tuple(r.tolist()) for b in batches(train, epoch) for r in b.anchor_positions}
        for epoch in (0, 1)
    ]
    assert anchors[0] != anchors[1]


def test_held_out_prompts_end_where_the_answer_begins(target_folder: Path, tmp_path: Path) -> None:
    data = ready_data(target_folder, tmp_path, word_prompts(tmp_path), responses="given")
    assert not data.held_out_prompts["train"]
    texts = [data.spec.tokenizer.decode(ids) for ids in data.held_out_prompts["test"]]
    assert texts == [
        f"<|im_start|>user\nQ{i}{'?' * (i % 4)}<|im_end|>\n<|im_start|>assistant\n"
        for i in (3, 8, 12)
    ]
    assert list(data.predict_dataloader()) == list(data.held_out_prompts["test"])


def test_worker_processes_read_the_store(target_folder: Path, tmp_path: Path) -> None:
    prompts = word_prompts(tmp_path)
    plain, workers = (
        ready_data(
            target_folder,
            tmp_path,
            prompts,
            responses="given",
            features="store",
            num_workers=workers,
        )
        for workers in (0, 2)
    )
    for a, b in zip(
        batches(plain.train_dataloader(), 1), batches(workers.train_dataloader(), 1), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, target_folder: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "env"))
    assert default_cache_dir() == tmp_path / "env"
    prompts = word_prompts(tmp_path)
    assert make_data(target_folder, tmp_path, prompts, cache_dir=None).cache_dir == tmp_path / "env"
    monkeypatch.delenv("DFLASH_CACHE")
    assert default_cache_dir() == Path.home() / ".cache/dflash_lightning"


def test_too_little_disk_for_the_store(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    data = make_data(
        target_folder, tmp_path, word_prompts(tmp_path), responses="given", features="store"
    )
    assert "data.features=online" in user_error(data)
