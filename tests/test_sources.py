"""Hugging Face data sets and reasoning-gym: columns, splits, seeds, and what is missing said."""

import itertools
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_prompts import contents, load, one_line_error

from dflash_lightning.data.prompts import SPLITS
from dflash_lightning.data.sources import HuggingFacePrompts, ReasoningGymPrompts, WordProblems

ROWS = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(20)]
COLUMNS = {"prompt": "q", "response": "a"}


@pytest.fixture(scope="module")
def datasets() -> Any:
    return import_module("datasets")  # slow to import


@pytest.fixture
def saved(datasets: Any, tmp_path: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    return str(tmp_path / "one")


def test_saved_data_set_with_a_column_map(saved: str) -> None:
    found = load(HuggingFacePrompts(path=saved, columns=COLUMNS, held_out=0.1))
    assert [len(found[split]) for split in SPLITS] == [16, 2, 2]
    together = [p for split in SPLITS for p in found[split]]
    assert sorted(contents(together)) == sorted(row["q"] for row in ROWS)
    first = found["train"][0]
    assert first.source == f"{saved}[train]:0"
    assert first.messages[1] == {"role": "assistant", "content": "answer 0"}


def test_several_splits_of_a_saved_data_set(datasets: Any, tmp_path: Path) -> None:
    make = datasets.Dataset.from_list
    parts = {"train_sft": make(ROWS[:12]), "test_sft": make(ROWS[10:])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "two"))
    options: dict[str, Any] = {"path": str(tmp_path / "two"), "columns": COLUMNS, "held_out": 2}
    found = load(HuggingFacePrompts(train="train_sft", test="test_sft", **options))
    assert [len(found[split]) for split in SPLITS] == [8, 2, 10]
    message = one_line_error(HuggingFacePrompts(**options))
    assert "has no split train (it has train_sft, test_sft)" in message


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_folder_of_files(datasets: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [{"messages": [{"role": "user", "content": row["q"]}], "n": 1} for row in ROWS]
    table = datasets.Dataset.from_list(rows)
    getattr(table, f"to_{kind}")(str(folder / f"train.{kind}"))
    found = load(HuggingFacePrompts(path=str(folder), held_out=0))["train"]
    assert contents(found) == [row["q"] for row in ROWS]


def test_bad_row_of_a_data_set_is_named_by_number(datasets: Any, tmp_path: Path) -> None:
    rows = [*ROWS, {"q": None, "a": None}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "bad"))
    source = HuggingFacePrompts(path=str(tmp_path / "bad"), columns=COLUMNS, held_out=0)
    assert len(list(source.stream("train"))) == 20
    source = HuggingFacePrompts(
        path=str(tmp_path / "bad"), columns=COLUMNS, held_out=0, max_bad_share=0
    )
    assert one_line_error(source).startswith(f"{tmp_path}/bad[train]:20: ")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (None, "say which column holds the prompts (there are q, a)"),
        ({"prompt": "question"}, "there is no column question (there are q, a)"),
        ({"question": "q"}, "question is none of messages"),
        ({"response": "a"}, "say which column holds the prompts"),
    ],
)
def test_wrong_columns_are_named(saved: str, columns: Any, reason: str) -> None:
    message = one_line_error(HuggingFacePrompts(path=saved, columns=columns))
    assert message.startswith("data.prompts.init_args.columns: ")
    assert reason in message


def test_what_a_data_set_lacks_is_said(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "leave out validation" in one_line_error(
        HuggingFacePrompts(path=saved, columns=COLUMNS, val="validation")
    )
    (tmp_path / "empty").mkdir()
    assert "can't open" in one_line_error(HuggingFacePrompts(path=str(tmp_path / "empty")))
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    message = one_line_error(HuggingFacePrompts(path="some/where"))
    assert message.startswith("data.prompts.init_args.path: can't open some/where (split train)")
    assert "no route" in message


def unreachable(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route\nto the hub")


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("datasets", HuggingFacePrompts(path="x/y")),
        ("reasoning_gym", ReasoningGymPrompts()),
    ],
)
def test_missing_package_is_named_with_its_extra(
    package: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = one_line_error(source)
    assert f'pip install "dflash-lightning[{package.replace("_", "-")}]"' in message


def test_identity_of_a_data_set(saved: str) -> None:
    def identity(**changes: Any) -> str | None:
        return HuggingFacePrompts(path=saved, columns=COLUMNS, **changes).fingerprint()

    assert identity() is not None
    assert identity() == identity()
    assert identity() != identity(held_out=3)


# ---- reasoning-gym -----------------------------------------------------------


def make_gym(**changes: Any) -> ReasoningGymPrompts:
    options: dict[str, Any] = {"num_train": 60, "num_val": 15, "num_test": 15}
    return ReasoningGymPrompts(**(options | changes))


@pytest.mark.parametrize("tasks", [["gsm_symbolic"], {"chain_sum": {"max_digits": 2}, "gcd": {}}])
def test_splits_of_reasoning_gym_share_no_question(tasks: Any) -> None:
    source = make_gym(tasks=tasks)
    found = load(source)
    assert [len(found[split]) for split in SPLITS] == [60, 15, 15]
    assert [source.count(split) for split in SPLITS] == [60, 15, 15]
    texts = [t for split in SPLITS for t in contents(found[split])]
    assert len(set(texts)) == len(texts)
    assert all([m["role"] for m in p.messages] == ["user", "assistant"] for p in found["train"])
    assert load(source) == found


def test_seeds_of_the_splits_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem's seed is its data set's plus its index: ranges must not meet."""
    import reasoning_gym

    spans = []
    make = reasoning_gym.create_dataset

    def recorded(name: str, seed: int, size: int, **options: Any) -> Any:
        spans.append((seed, seed + size))
        return make(name, seed=seed, size=size, **options)

    monkeypatch.setattr(reasoning_gym, "create_dataset", recorded)
    for seed in (0, 1, 340):
        load(make_gym(seed=seed, num_train=3, num_val=3, num_test=3))
    spans = sorted(set(spans))
    assert len(spans) == 9
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] < 2**32


def test_seeds_give_other_questions_and_sizes_keep_the_first() -> None:
    def texts(**changes: Any) -> list[str]:
        return contents(list(make_gym(**changes).stream("train")))

    assert texts() != texts(seed=1)
    assert texts(num_train=20) == texts()[:20]
    assert texts(num_val=14)[:5] == texts()[:5]


def test_bad_tasks_are_named() -> None:
    assert "data.prompts.tasks: nonsense" in one_line_error(make_gym(tasks=["nonsense"]))
    assert "tasks: gcd: " in one_line_error(make_gym(tasks={"gcd": {"nonsense": 1}}))
    assert "seed 0 to 340" in one_line_error(make_gym(seed=341))
    assert "tasks needs at least one" in one_line_error(make_gym(tasks=[]))
    few = {"coin_flip": {"min_trials": 1, "max_trials": 1}}
    assert "has no new test question" in one_line_error(make_gym(tasks=few, num_test=1000))


def test_word_problems_know_their_identity_and_count() -> None:
    assert WordProblems(5, 2, 2).fingerprint() != WordProblems(5, 2, 2, seed=1).fingerprint()
    assert WordProblems(5, 2, 2).count("train") == 5
