"""Tests of the word-problem generator: its templates, its grammar and its splits."""

import itertools
import random
import re

import pytest

from dflash_lightning.data.word_problems import (
    WORDS,
    fill,
    load_templates,
    split_templates,
    word_problems,
)

TEMPLATES = load_templates()
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\w+):(\d+)-(\d+)(?:/(\d+))?")
FILLINGS = 200


def prompt_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches exactly the texts a template may fill to.

    Drawn numbers are groups named like their variable; everything that repeats is a backreference.
    """
    pattern, position, groups = "", 0, set[str]()
    for match in PLACEHOLDER.finditer(template):
        pattern += re.escape(template[position : match.start()])
        position = match.end()
        body = match[1]
        name = re.split("[:=]", body)[0]
        words = WORDS.get(name.rstrip("0123456789"))
        if body != name and name.startswith("_"):
            continue
        if name in groups:
            pattern += f"(?P={name})"
            continue
        groups.add(name)
        pattern += f"(?P<{name}>{'|'.join(words) if words else '[1-9][0-9]*'})"
    return re.compile(pattern + re.escape(template[position:]))


PATTERNS = [prompt_pattern(template) for template in TEMPLATES]


def sources(prompts: list[str]) -> list[int]:
    """Find the one template that each prompt was filled from."""
    found = [
        [i for i, pattern in enumerate(PATTERNS) if pattern.fullmatch(text)] for text in prompts
    ]
    assert all(len(indices) == 1 for indices in found)
    return [indices[0] for indices in found]


def fillings(template: str, count: int = FILLINGS) -> list[str]:
    """Fill a template ``count`` times from one generator."""
    rng = random.Random(f"test/{template}")
    return [fill(template, rng) for _ in range(count)]


def test_templates_are_many_and_differ() -> None:
    """A reworded number or name does not make a new template."""
    skeletons = {PLACEHOLDER.sub("#", template) for template in TEMPLATES}
    assert len(TEMPLATES) >= 250
    assert len(skeletons) == len(TEMPLATES)


def test_no_two_templates_share_most_of_their_words() -> None:
    """Templates are different problems and not paraphrases: half of the word pairs differ."""
    bags = []
    for template in TEMPLATES:
        words = re.findall(r"[a-z]+|#", PLACEHOLDER.sub("#", template).lower())
        bags.append(set(itertools.pairwise(words)))
    for (i, one), (j, other) in itertools.combinations(enumerate(bags), 2):
        overlap = len(one & other) / min(len(one), len(other))
        assert overlap < 0.5, (TEMPLATES[i], TEMPLATES[j])


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_fills_to_sensible_prompts(template: str) -> None:
    """Every filling is a question of 25 to 70 words made of positive whole numbers."""
    assert template.endswith("}"), "the answer check {_ans=...} is missing"
    assert "{_ans=" in template
    texts = fillings(template)
    pattern = prompt_pattern(template)
    for text in texts:
        assert pattern.fullmatch(text), text
        assert not re.search(r"[{}]|  |(?<!\w)-\d|\d\.\d|\b0\b|\d/\d", text), text
        assert not re.search(r"\b1 [a-z]+s\b|\ba (8\d*|11|18)\b", text), text
        assert 25 <= len(text.split()) <= 70, text
        assert "?" in text or "Explain" in text, text
        assert text[0].isupper(), text
        assert text[-1] in ".?", text
    assert len(set(texts)) > FILLINGS // 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_honours_its_ranges(template: str) -> None:
    """Printed draws stay on the grid from low to high that the template asks for."""
    pattern = prompt_pattern(template)
    grids = {
        name: range(int(low), int(high) + 1, int(step or 1))
        for name, low, high, step in RANGE.findall(template)
        if not name.startswith("_")
    }
    for text in fillings(template):
        match = pattern.fullmatch(text)
        assert match is not None
        for name, grid in grids.items():
            assert int(match[name]) in grid, (name, text)


def test_ranges_reach_both_ends() -> None:
    """A range includes its ends, and a step skips what lies between."""
    assert {int(text) for text in fillings("{x:2-4}")} == {2, 3, 4}
    assert {int(text) for text in fillings("{x:10-25/5}")} == {10, 15, 20, 25}


def test_expressions_use_precedence_and_earlier_variables() -> None:
    """Computed values follow the usual rules and only need to be whole in the end."""
    assert fill("{a:6-6} {b:4-4} {c=a+b*2} {d=(a+b)*2} {e=a/b*2}", random.Random("x")) == (
        "6 4 14 20 3"
    )


def test_hidden_variables_print_only_on_reference() -> None:
    """A leading underscore silences the definition and nothing else."""
    assert fill("{_x:7-7}{_y=_x+1}<{_x}|{_y}>", random.Random("x")) == "<7|8>"


def test_words_repeat_by_placeholder_and_differ_between_placeholders() -> None:
    """The same placeholder is one person, different ones are different people."""
    for text in fillings("{name} {name2} {girl} {boy} {name}"):
        first, *others, last = text.split()
        assert first == last
        assert len({first, *others}) == 4


@pytest.mark.parametrize(
    ("template", "placeholder"),
    [
        ("A {nobody} here", "{nobody}"),
        ("A {} here", "{}"),
        ("A {x:2} here", "{x:2}"),
        ("A {x:9-2} here", "{x:9-2}"),
        ("A {x:2-9/0} here", "{x:2-9/0}"),
        ("A {x:-3-9} here", "{x:-3-9}"),
        ("A {x:2-9}{x:2-9} here", "{x:2-9}"),
        ("A {name:2-9} here", "{name:2-9}"),
        ("A {x=y+1} here", "{x=y+1}"),
        ("A {x=2+} here", "{x=2+}"),
        ("A {x=2**3} here", "{x=2**3}"),
        ("A {x=3-3} here", "{x=3-3}"),
        ("A {x=3-5} here", "{x=3-5}"),
        ("A {x=3/2} here", "{x=3/2}"),
        ("A {x=3/(2-2)} here", "{x=3/(2-2)}"),
        ("A {x=True} here", "{x=True}"),
        ("A {name here", "{name"),
        ("A name} here", "}"),
        ("A {{name}} here", "{"),
        ("".join(f"{{day{i}}}" for i in range(8)), "{day7}"),
    ],
)
def test_bad_grammar_names_template_and_placeholder(template: str, placeholder: str) -> None:
    """The error message is enough to find the mistake in the text file."""
    with pytest.raises(ValueError, match="bad placeholder") as caught:
        fill(template, random.Random("x"))
    assert repr(template) in str(caught.value)
    assert f"bad placeholder {placeholder} in" in str(caught.value)


@pytest.mark.parametrize(("count", "val", "test"), [(30, 5, 7), (2, 1, 0), (3, 0, 2), (1, 0, 0)])
def test_split_is_disjoint_and_complete(count: int, val: int, test: int) -> None:
    """Every template index lands in exactly one split of the requested size."""
    split = split_templates(count, 3, val, test)
    assert list(split) == ["train", "val", "test"]
    assert [len(part) for part in split.values()] == [count - val - test, val, test]
    assert sorted(itertools.chain(*split.values())) == list(range(count))


def test_split_depends_on_the_seed_alone() -> None:
    """The same seed deals the same split, another seed another one."""
    assert split_templates(100, 1, 10, 10) == split_templates(100, 1, 10, 10)
    assert split_templates(100, 1, 10, 10) != split_templates(100, 2, 10, 10)


@pytest.mark.parametrize(("count", "val", "test"), [(10, 5, 5), (10, 11, 0), (0, 0, 0), (9, -1, 2)])
def test_split_rejects_sizes_that_leave_no_training(count: int, val: int, test: int) -> None:
    """Bad sizes are one clear line."""
    with pytest.raises(ValueError, match="leave none for training") as caught:
        split_templates(count, 0, val, test)
    assert "\n" not in str(caught.value)


def test_prompts_are_deterministic_and_leave_the_global_generator_alone() -> None:
    """Equal arguments give equal prompts, whatever the global random state is."""
    random.seed(1)
    state = random.getstate()
    first = word_problems(150, 15, 15, seed=4)
    assert random.getstate() == state
    random.seed(2)
    assert word_problems(150, 15, 15, seed=4) == first
    assert word_problems(150, 15, 15, seed=5) != first


def test_draws_are_pinned() -> None:
    """String seeds give the same draws on every machine and in every process."""
    text = fill("{name} of {town} has {a:2-99} {item} and {b=a*3}.", random.Random("0/pin"))
    assert text == "Luis of Fairfield has 29 rulers and 87."
    assert split_templates(8, 0, 2, 2) == {
        "train": [1, 7, 4, 5],
        "val": [2, 6],
        "test": [0, 3],
    }


def test_splits_share_no_template_and_no_prompt() -> None:
    """No validation or test prompt comes from a template that training has seen."""
    prompts = word_problems(400, 45, 35, seed=9, val_templates=8, test_templates=12)
    assert {split: len(texts) for split, texts in prompts.items()} == {
        "train": 400,
        "val": 45,
        "test": 35,
    }
    texts = list(itertools.chain(*prompts.values()))
    assert len(set(texts)) == len(texts)
    used = {split: set(sources(part)) for split, part in prompts.items()}
    assert used["train"].isdisjoint(used["val"] | used["test"])
    assert used["val"].isdisjoint(used["test"])
    assert len(used["train"]) == len(TEMPLATES) - 20
    assert len(used["val"]) == 8
    assert len(used["test"]) == 12


def test_templates_take_turns() -> None:
    """Usage counts differ by one at most, and a longer list starts with the shorter one."""
    prompts = word_problems(300, 25, 0)
    for part in (prompts["train"], prompts["val"]):
        counts = list(map(sources(part).count, set(sources(part))))
        assert max(counts) - min(counts) <= 1
    assert word_problems(200, 5, 0)["train"] == prompts["train"][:200]
    assert word_problems(200, 5, 0)["val"] == prompts["val"][:5]


def test_duplicates_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fillings of small templates come up before the generator gives in, once each."""
    tiny = ["Train {x:1-6}", "Val {x:1-6}", "Test {x:1-6}"]
    monkeypatch.setattr("dflash_lightning.data.word_problems.load_templates", lambda: tiny)
    prompts = word_problems(6, 6, 6, val_templates=1, test_templates=1)
    assert all(len(set(part)) == 6 for part in prompts.values())
    with pytest.raises(ValueError, match=r"no new val prompt after 6 from '\w+ \{x:1-6\}'"):
        word_problems(6, 7, 6, val_templates=1, test_templates=1)


def test_duplicates_across_splits_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two templates that can fill to the same text never do so in different splits."""
    tiny = ["Number {x:1-6}", "Number {y:1-6}"]
    monkeypatch.setattr("dflash_lightning.data.word_problems.load_templates", lambda: tiny)
    prompts = word_problems(3, 3, 0, val_templates=1, test_templates=0)
    assert len(set(prompts["train"] + prompts["val"])) == 6


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_impossible_numbers_are_rejected(numbers: tuple[int, int, int]) -> None:
    """A negative number, or prompts from a split without templates, is an error."""
    with pytest.raises(ValueError, match="cannot make"):
        word_problems(*numbers, val_templates=0, test_templates=0)
