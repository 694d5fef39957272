"""Prompt sources: what they read, how they split, and that bad input is named by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data.prompts import SPLITS, Prompt, PromptSource, Split
from dflash_lightning.data.sources import JsonlPrompts, TextPrompts, WordProblems
from dflash_lightning.errors import UserError


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "response": f"answer {i}"} for i in range(count)]


def contents(prompts: list[Prompt]) -> list[str]:
    return [p.messages[0]["content"] if p.text is None else p.text.strip() for p in prompts]


def load(source: PromptSource) -> dict[Split, list[Prompt]]:
    return {split: list(source.stream(split)) for split in SPLITS}


def one_line_error(source: PromptSource) -> str:
    with pytest.raises(UserError) as caught:
        load(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- word problems -----------------------------------------------------------


def test_word_problems_fill_the_splits() -> None:
    found = load(WordProblems(num_train=60, num_val=12, num_test=11))
    assert [len(found[split]) for split in SPLITS] == [60, 12, 11]
    everything = [p for split in SPLITS for p in found[split]]
    assert all(p.text is None and [m["role"] for m in p.messages] == ["user"] for p in everything)
    assert len({p.source for p in everything}) == len(everything)
    assert len(set(contents(everything))) == len(everything)


def test_word_problems_split_by_template(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = [f"Template{i} has {{x:10-99}} parts.{{_ans=x}}" for i in range(40)]
    monkeypatch.setattr("dflash_lightning.data.word_problems.load_templates", lambda: templates)
    found = load(WordProblems(num_train=40, num_val=20, num_test=20))
    used = {split: {text.split()[0] for text in contents(found[split])} for split in SPLITS}
    assert [len(used[split]) for split in SPLITS] == [20, 10, 10]
    assert not used["train"] & used["val"]
    assert not used["train"] & used["test"]
    assert not used["val"] & used["test"]


def test_word_problems_follow_the_seed() -> None:
    def texts(seed: int) -> list[str]:
        return contents(load(WordProblems(30, 5, 5, seed=seed))["train"])

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def test_impossible_number_of_word_problems_is_a_user_error() -> None:
    assert one_line_error(WordProblems(num_train=-1)).startswith("data.prompts: ")


# ---- rows --------------------------------------------------------------------


def test_both_row_forms_are_read(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "s", "extra": 1},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "ä"},
    ]
    rows = [{"messages": turns}, {"prompt": "p", "response": "r"}, {"prompt": "q"}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    found = load(JsonlPrompts(file, held_out=0))
    assert found["train"] == [
        Prompt(f"{file}:1", tuple({"role": t["role"], "content": t["content"]} for t in turns)),
        Prompt(
            f"{file}:2",
            ({"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}),
        ),
        Prompt(f"{file}:3", ({"role": "user", "content": "q"},)),
    ]
    assert found["val"] == found["test"] == []


def test_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"prompt": "a"}\r\n   \n{"prompt": "b"}', encoding="utf-8")
    found = load(JsonlPrompts(str(file), held_out=0))["train"]
    assert [p.source for p in found] == [f"{file}:2", f"{file}:4"]
    assert contents(found) == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("hello", "not JSON"),
        ("[1, 2]", 'needs "messages"'),
        ("7", 'needs "messages"'),
        ("{}", 'needs "messages"'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": "a"}', '"messages" must be a list'),
        ('{"prompt": 5}', 'needs "messages"'),
        ('{"messages": ["a"]}', '"role" and a "content"'),
        ('{"messages": [{"role": "user"}]}', '"role" and a "content"'),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', '"role" and a "content"'),
        ('{"messages": [{"role": 1, "content": "a"}]}', '"role" and a "content"'),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_bad_row_is_named_by_file_and_line(
    tmp_path: Path, row: str, reason: str, split: str
) -> None:
    good = write_rows(tmp_path / "good.jsonl", chats(4))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n' + row + "\n", encoding="utf-8")
    files = {"train": good, "val": good, split: str(bad)}
    message = one_line_error(JsonlPrompts(files["train"], files["val"], good))
    assert message.startswith(f"{bad}:2: ")
    assert reason in message


def test_wrong_encoding_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    assert one_line_error(JsonlPrompts(str(file))).startswith(f"{file}:2: not UTF-8 text (1 of 2 ")


@pytest.mark.parametrize("kind", [JsonlPrompts, TextPrompts])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_file_is_named(
    tmp_path: Path, kind: type[JsonlPrompts | TextPrompts], split: str
) -> None:
    good = write_rows(tmp_path / "good.jsonl", chats(4))
    files = {"train": good, "val": good, "test": good, split: str(tmp_path / "absent")}
    assert one_line_error(kind(**files)) == f"data.prompts: no such file: {tmp_path / 'absent'}"


# ---- splits ------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "held_out"), [(3, 1), (10, 3), (101, 20), (12, 0)])
def test_held_out_rows_are_disjoint_and_complete(tmp_path: Path, rows: int, held_out: int) -> None:
    file = write_rows(tmp_path / "a.jsonl", chats(rows))
    found = load(JsonlPrompts(file, held_out=held_out))
    assert [len(found[split]) for split in ("val", "test")] == [held_out, held_out]
    together = [text for split in SPLITS for text in contents(found[split])]
    assert sorted(together) == sorted(f"question {i}" for i in range(rows))


@pytest.mark.parametrize("rows", [0, 1, 5, 10])
def test_too_few_rows_to_hold_out(tmp_path: Path, rows: int) -> None:
    file = write_rows(tmp_path / "a.jsonl", chats(rows))
    message = one_line_error(JsonlPrompts(file, held_out=5))
    assert message.startswith(f"{file}: {rows} rows are too few to hold out 5 for ")


def test_own_files_are_taken_whole(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / f"{n}.jsonl", [{"prompt": f"{n} {i}"} for i in range(n)])
        for n in (6, 2, 3)
    ]
    found = load(JsonlPrompts(*files, held_out=5))
    assert [len(found[split]) for split in SPLITS] == [6, 2, 3]
    one_own = load(JsonlPrompts(files[0], val=files[1], held_out=4))
    assert [len(one_own[split]) for split in SPLITS] == [2, 2, 4]


def test_limit_shortens_training_and_never_the_held_out_rows(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", chats(20))
    whole = load(JsonlPrompts(file, held_out=3))
    short = load(JsonlPrompts(file, held_out=3, limit=4))
    assert short["train"] == whole["train"][:4]
    assert short["val"] == whole["val"]
    assert short["test"] == whole["test"]


# ---- text --------------------------------------------------------------------


def test_documents_are_parted_by_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\none\ntwo\n\n \nthree\n\nfour\nfive", encoding="utf-8")
    found = load(TextPrompts(str(file), held_out=1))
    assert [found[split] for split in SPLITS] == [
        [Prompt(f"{file}:6", text="three\n")],
        [Prompt(f"{file}:2", text="one\ntwo\n")],
        [Prompt(f"{file}:8", text="four\nfive")],
    ]


def test_carriage_returns_are_no_part_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    found = load(TextPrompts(str(file), held_out=0))["train"]
    assert [p.text for p in found] == ["one\ntwo\n", "three\n"]


def test_too_few_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    assert "too few to hold out 1" in one_line_error(TextPrompts(str(file), held_out=1))
