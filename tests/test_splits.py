"""Rows among splits: disjoint, complete, spread, nothing in two splits; bad rows counted."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_prompts import chats, contents, load, one_line_error, write_rows

from dflash_lightning.data.prompts import SPLITS, Prompt
from dflash_lightning.data.rows import BadRows, Row, good_rows
from dflash_lightning.data.sources import JsonlPrompts, TextPrompts
from dflash_lightning.data.splits import Deal, content_hash
from dflash_lightning.errors import UserError

OWN = logging.getLogger("dflash_lightning")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(OWN, "propagate", True)
    caplog.set_level(logging.INFO, logger="dflash_lightning")
    return lambda: [record.getMessage() for record in caplog.records]


def prompt(text: str) -> Prompt:
    return Prompt("here", ({"role": "user", "content": text},))


def deal(count: int, held_out: int | float, limit: int | None = None, **parts: Any) -> Deal:
    def read(part: str) -> Iterator[Row]:
        return (prompt(f"{i}") for i in range(count))

    return Deal({"train": "t", **parts}, read, held_out, limit, 0.05)


@pytest.mark.parametrize(
    ("count", "held_out", "each"),
    [
        *((12501, 0.2, 2500), (10, 0.05, 1), (10, 0.04, 0), (9, 0.33, 3)),
        *((7, 3, 3), (3, 1, 1), (5, 0, 0), (5, 0.0, 0), (1, 0, 0), (0, 0, 0), (0, 0.5, 0)),
    ],
)
def test_splits_are_disjoint_and_complete(count: int, held_out: int | float, each: int) -> None:
    dealt = deal(count, held_out)
    found = {split: contents(list(dealt.stream(split))) for split in SPLITS}
    assert [len(found["val"]), len(found["test"])] == [each, each]
    assert [dealt.count(split) for split in SPLITS] == [len(found[split]) for split in SPLITS]
    together = sorted(int(text) for split in SPLITS for text in found[split])
    assert together == list(range(count))
    for texts in found.values():
        assert texts == sorted(texts, key=int), "in the order of the file"


@pytest.mark.parametrize("held_out", [1.0, 0.5, 0.499, 50, 10**9, 3.5])
def test_nothing_left_to_train_on_is_refused(held_out: int | float) -> None:
    with pytest.raises(UserError, match=r"t: 100 rows are too few to hold out .* val and test"):
        deal(100, held_out)


@pytest.mark.parametrize("held_out", [-1, -0.1, float("nan"), float("inf")])
def test_impossible_share_is_refused(held_out: int | float) -> None:
    with pytest.raises(UserError, match=r"data\.prompts\.held_out: needs a count or a share"):
        deal(100, held_out)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.prompts\.limit: needs 0 or more, got -1"):
        deal(10, 1, limit=-1)


def test_held_out_rows_are_spread_over_the_file() -> None:
    """A file sorted by topic: each of its ten topics is held out from."""
    dealt = deal(1000, 10)
    for split in ("val", "test"):
        assert {int(t) // 100 for t in contents(list(dealt.stream(split)))} == set(range(10))


def test_a_stream_starts_again_and_reads_no_further_than_asked() -> None:
    taken = []

    def read(part: str) -> Iterator[Row]:
        for i in range(100):
            taken.append(i)
            yield prompt(f"{i}")

    dealt = Deal({"train": "t"}, read, 10, None, 0.05)
    taken.clear()
    stream = dealt.stream("train")
    first = [next(stream) for _ in range(5)]
    assert len(taken) < 12
    assert [p for p, _ in zip(dealt.stream("train"), range(5), strict=False)] == first


def test_file_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", chats(10))
    source = JsonlPrompts(file, held_out=0)
    assert len(list(source.stream("train"))) == 10
    write_rows(tmp_path / "a.jsonl", chats(5))
    with pytest.raises(UserError, match=r"a\.jsonl: the rows changed while they were read"):
        list(source.stream("train"))


# ---- duplicates --------------------------------------------------------------


def test_a_prompt_of_two_splits_is_left_out_of_train_and_counted(tmp_path: Path, said: Any) -> None:
    held = ["What is 2+2?", "  what IS\n2+2? ", "e\u0301"]
    train = ["What is 2+2?", "new", "\u00e9", "WHAT is 2+2?", "new"]
    rows = [[{"prompt": t, "response": f"{n}"} for n, t in enumerate(x)] for x in (train, held)]
    files = [write_rows(tmp_path / f"{n}.jsonl", r) for n, r in enumerate(rows)]
    found = load(JsonlPrompts(files[0], val=files[1], test=write_rows(tmp_path / "t", chats(1))))
    assert contents(found["train"]) == ["new", "new"], "repeats inside train stay"
    assert contents(found["val"]) == held
    assert f"{files[0]}: 3 prompts of train occur in a held-out split too" in said()[0]


def test_duplicates_of_held_out_rows_of_the_same_file(tmp_path: Path) -> None:
    texts = [f"{i % 10}" for i in range(100)]
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": t} for t in texts])
    found = load(JsonlPrompts(file, held_out=2))
    sets = [set(contents(found[split])) for split in SPLITS]
    assert sets[1]
    assert sets[2]
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]


def test_content_is_what_is_asked() -> None:
    asked = {"role": "user", "content": "A b"}
    said = {"role": "assistant", "content": "x"}
    same = [Prompt("1", (asked,)), Prompt("2", (asked, said)), prompt(" a  B\n")]
    assert len({content_hash(p) for p in same}) == 1
    other = [prompt("ab"), Prompt("", (asked, said, asked)), Prompt("", text="a c")]
    assert len({content_hash(p) for p in [*other, same[0]]}) == 4


# ---- bad rows ----------------------------------------------------------------


def test_bad_rows_are_named_counted_and_left_out(tmp_path: Path, said: Any) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in chats(100)]
    for n in (10, 20, 30, 40, 50):
        lines[n] = "{"
    file.write_text("\n".join(lines), encoding="utf-8")
    found = load(JsonlPrompts(str(file), held_out=5, max_bad_share=0.05))
    assert sum(len(found[split]) for split in SPLITS) == 95
    assert [line.split(": ")[0] for line in said()[:3]] == [f"{file}:{n}" for n in (11, 21, 31)]
    assert said()[-1] == "5 of 100 rows are bad and left out"
    message = one_line_error(JsonlPrompts(str(file), held_out=5, max_bad_share=0.04))
    assert message.startswith(f"{file}:11: not JSON")
    assert message.endswith("(5 of 100 rows are bad; max_bad_share permits 4%)")


def test_file_of_another_kind_is_refused_early_and_in_one_line(said: Any) -> None:
    rows = iter(range(10**9))
    bad = BadRows(0.05, OWN.warning)

    def refuse(_: Prompt) -> None:
        next(rows)
        raise UserError("here:1: no")

    with pytest.raises(UserError, match=r"here:1: no \(the first 100 rows are bad"):
        list(good_rows((prompt("x") for _ in range(10**6)), refuse, bad))
    assert next(rows) == 100
    assert said() == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
        ({"conversations": []}, '"conversations" must be a list'),
        ({"conversations": [{"from": "human"}]}, '"from" and a "value"'),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "a", "response": 5}, '"response" must be a string'),
        ({"prompt": "half \ud800 pair"}, "not Unicode text"),
    ],
)
def test_more_bad_rows(tmp_path: Path, row: Any, reason: str) -> None:
    message = one_line_error(JsonlPrompts(write_rows(tmp_path / "a.jsonl", [row]), held_out=0))
    assert message.startswith(f"{tmp_path}/a.jsonl:1: ")
    assert reason in message


def test_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("[" * 200_000 + "\n")
    assert f"{file}:1: not JSON" in one_line_error(JsonlPrompts(str(file), held_out=0))


def test_bad_text_document_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\n\ntw\xff\no\n\nthree\n")
    found = load(TextPrompts(str(file), held_out=0, max_bad_share=0.5))["train"]
    assert [p.text for p in found] == ["one\n", "three\n"]


def test_sharegpt_rows(tmp_path: Path) -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]
    row = {"conversations": [{"from": f, "value": v, "weight": 1} for f, v in turns]}
    own = {"conversations": [{"role": "user", "content": "x"}]}
    file = write_rows(tmp_path / "a.jsonl", [row, own])
    found = load(JsonlPrompts(file, held_out=0))["train"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in found[0].messages] == roles
    assert [m["content"] for m in found[0].messages] == [v for _, v in turns]
    assert found[1].messages == ({"role": "user", "content": "x"},)


# ---- identity ----------------------------------------------------------------


def test_fingerprint_changes_with_files_and_arguments(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{n}.jsonl", chats(n)) for n in (4, 5)]
    found = [
        JsonlPrompts(files[0], held_out=1).fingerprint(),
        JsonlPrompts(files[1], held_out=1).fingerprint(),
        JsonlPrompts(files[0], held_out=0).fingerprint(),
        JsonlPrompts(files[0], held_out=1, val=files[1]).fingerprint(),
        TextPrompts(files[0], held_out=1).fingerprint(),
    ]
    assert None not in found
    assert JsonlPrompts(files[0], held_out=1).fingerprint() == found[0]
    write_rows(tmp_path / "4.jsonl", chats(6))
    found.append(JsonlPrompts(files[0], held_out=1).fingerprint())
    assert len(set(found)) == len(found)
