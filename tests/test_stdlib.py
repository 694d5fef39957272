"""Tests of the prompts from Python's standard library: split by file, no prompt in two splits."""

import ast
from pathlib import Path

import pytest

from dflash_lightning.data import stdlib
from dflash_lightning.data.prompts import SPLITS
from dflash_lightning.data.splits import content_hash
from dflash_lightning.data.stdlib import (
    StdlibPrompts,
    opening,
    pieces,
    source_text,
    split_of,
    stdlib_files,
    stdlib_folder,
)
from dflash_lightning.errors import UserError

SMALL = {"num_train": 300, "num_val": 40, "num_test": 40}


@pytest.fixture(scope="module")
def source() -> StdlibPrompts:
    return StdlibPrompts(**SMALL)


def files(source: StdlibPrompts, split: str) -> set[str]:
    return {p.source.rpartition(" piece ")[0] for p in source.stream(split)}  # type: ignore[arg-type]


def test_no_file_in_two_splits_and_the_split_is_that_of_its_path(source: StdlibPrompts) -> None:
    found = {split: files(source, split) for split in SPLITS}
    assert all(split_of(name) == split for split in SPLITS for name in found[split])
    assert not found["train"] & (found["val"] | found["test"])
    assert not found["val"] & found["test"]
    assert min(map(len, found.values())) > 5


def test_held_out_files_are_those_the_labs_target_has_not_read() -> None:
    """Its weights are fixed: another rule would hold out what it was trained on."""
    held_out = {
        "val": ["queue.py", "timeit.py", "types.py"],
        "test": ["bz2.py", "enum.py", "uuid.py"],
    }
    assert {s: [n for n in names if split_of(n) == s] for s, names in held_out.items()} == held_out
    for name in ("argparse.py", "tarfile.py", "json/decoder.py", "email/message.py"):
        assert split_of(name) == "train"


def test_no_prompt_comes_twice(source: StdlibPrompts) -> None:
    hashes = [content_hash(p) for split in SPLITS for p in source.stream(split)]
    assert len(hashes) == len(set(hashes)) == sum(SMALL.values())


def test_prompt_and_answer_are_what_stands_in_the_file(source: StdlibPrompts) -> None:
    texts = {f.relative_to(stdlib_folder()).as_posix(): f for f in stdlib_files("val")}
    for prompt in source.stream("val"):
        asked, rest = (m["content"] for m in prompt.messages)
        assert len(asked) >= 200
        assert rest[0] == "\n"
        assert asked + rest in source_text(texts[prompt.source.rpartition(" piece ")[0]])


def test_pieces_start_at_definitions_and_lose_nothing_but_empty_lines() -> None:
    text = source_text(Path(ast.__file__))
    found = list(pieces(text, 800))
    assert len(found) > 20
    assert min(map(len, found[:-1])) >= 800
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(p.lstrip().startswith(("def ", "class ", "@", "async def ")) for p in found[1:])


def test_opening_ends_with_a_line() -> None:
    assert opening("abc\ndef\nghi", 3) == 3
    assert opening("abc\ndef\nghi", 4) == 7
    assert opening("abc\ndef\nghi", 8) == -1


def test_sizes_keep_the_first_and_the_seed_gives_others(source: StdlibPrompts) -> None:
    first = list(source.stream("train"))
    assert list(StdlibPrompts(**{**SMALL, "num_train": 100}).stream("train")) == first[:100]
    assert list(StdlibPrompts(**SMALL, seed=1).stream("train")) != first
    assert list(StdlibPrompts(**SMALL).stream("train")) == first
    assert source.count("val") == 40


def test_its_identity_changes_with_arguments_and_files(
    source: StdlibPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = source.fingerprint()
    assert StdlibPrompts(**SMALL).fingerprint() == known
    assert StdlibPrompts(**SMALL, characters=100).fingerprint() != known
    monkeypatch.setattr(stdlib, "stdlib_files", lambda split: stdlib_files(split)[1:])
    assert source.fingerprint() != known


def test_too_many_asked_for_is_one_line() -> None:
    with pytest.raises(UserError, match=r"num_val: 99999 prompts asked for, .* ask for fewer") as e:
        list(StdlibPrompts(num_val=99999).stream("val"))
    assert "\n" not in str(e.value)
