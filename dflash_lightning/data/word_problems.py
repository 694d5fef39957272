"""Deterministic generator of school-maths word problems, used as training prompts.

The templates are the lines of ``word_problems.txt`` that are neither blank nor start with ``#``.
Inside one, the placeholders are (``x`` stands for any lower-case variable name):

* ``{name}``, ``{fruit}``, ...: a random word of that list in `WORDS`; a trailing number asks for
  another one (``{name2}``). Equal placeholders print the same word, different ones never do.
* ``{x:2-9}`` or ``{x:10-90/5}``: draw a whole number, both ends included, in steps of 1 or 5.
* ``{x=a*b+2}``: compute from variables defined further left with ``+ - * /`` and parentheses. The
  result must be a whole number of at least 1, so a template that does not add up fails.
* ``{x}``: print it again. A variable ``_x`` prints nothing where it is defined, only by ``{_x}``.

Every template ends in ``{_ans=...}``, its answer or the main number of it, as a check. To add a
template, add a line and run the tests.
"""

import ast
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from importlib import resources
from operator import add, mul, sub, truediv
from typing import Final

_LISTS: Final = {
    "girl": "Ada Alice Amina Bella Carla Clara Diana Elena Emma Fatima Grace Hana Isabel Julia "
    "Kira Leila Lucy Maria Mei Nina Nora Olga Priya Rosa Ruth Sofia Tina Vera Wendy Zoe",
    "boy": "Adam Ahmed Ben Carlos Daniel David Emil Felix George Hugo Ivan Jack James Kofi Leo "
    "Liam Luis Marco Noah Omar Oscar Paul Peter Ravi Sam Simon Tom Victor Will Yusuf",
    "item": "notebooks pencils erasers markers folders rulers crayons brushes pens",
    "fruit": "apples pears oranges peaches plums lemons mangoes bananas kiwis",
    "flower": "tulips roses daisies lilies sunflowers violets marigolds poppies",
    "toy": "marbles stickers stamps seashells buttons beads postcards coins",
    "team": "Tigers Eagles Lions Falcons Sharks Wolves Bears Hawks",
    "town": "Ashford Milton Riverside Oakdale Lakeview Fairfield Weston Norwood",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}
_NAMES: Final = {"name": f"{_LISTS['girl']} {_LISTS['boy']}"}
WORDS: Final = {key: words.split() for key, words in (_LISTS | _NAMES).items()}
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_DEFINITION: Final = re.compile(r"(_?[a-z]\w*)(?::(\d+)-(\d+)(?:/([1-9]\d*))?|=([a-z\d_()+*/ -]+))")
_OPERATORS: Final = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def load_templates() -> list[str]:
    """Read the templates that ship with the package, in file order."""
    path = resources.files("dflash_lightning.data").joinpath("word_problems.txt")
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name(id=name) if name in values:
            return Fraction(values[name])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            x, y = _evaluate(left, values), _evaluate(right, values)
            return Fraction(_OPERATORS[type(op)](x, y))
    raise ValueError(f"cannot evaluate {ast.unparse(node)!r}")


def _expand(body: str, values: dict[str, int], words: dict[str, str], rng: random.Random) -> str:
    """Return what ``{body}`` prints, adding what it defines to ``values`` or ``words``."""
    if body in values:
        return str(values[body])
    if (pool := WORDS.get(body.rstrip("0123456789"))) is not None:
        if body not in words:
            words[body] = rng.choice([word for word in pool if word not in words.values()])
        return words[body]
    if (parts := _DEFINITION.fullmatch(body)) is None:
        raise ValueError("not a word list, a known variable, x:low-high/step or x=expression")
    name, low, high, step, expression = parts.groups()
    if name in values or name.rstrip("0123456789") in WORDS:
        raise ValueError(f"{name!r} is already taken")
    if expression is None:
        values[name] = rng.choice(range(int(low), int(high) + 1, int(step or 1)))
    else:
        result = _evaluate(ast.parse(expression.strip(), mode="eval").body, values)
        if result < 1 or result.denominator != 1:
            raise ValueError(f"{result} is not a positive whole number")
        values[name] = int(result)
    return "" if name.startswith("_") else str(values[name])


def fill(template: str, rng: random.Random) -> str:
    """Replace the placeholders of a template (grammar: module docstring) by draws from ``rng``.

    Raises:
        ValueError: On bad grammar; the message names the template and the placeholder.
    """
    values: dict[str, int] = {}
    words: dict[str, str] = {}

    def expand(match: re.Match[str]) -> str:
        try:
            return _expand(match[1], values, words, rng)
        except (ValueError, SyntaxError, LookupError, ArithmeticError) as error:
            raise ValueError(f"bad placeholder {match[0]} in {template!r}: {error}") from error

    if stray := re.search(r"[{}]\w*", _PLACEHOLDER.sub("", template)):
        raise ValueError(f"bad placeholder {stray[0]} in {template!r}: unbalanced brace")
    return _PLACEHOLDER.sub(expand, template)


def split_templates(count: int, seed: int, val: int, test: int) -> dict[str, list[int]]:
    """Deal template indices ``0..count-1`` into disjoint, shuffled train, val and test lists."""
    if min(val, test) < 0 or val + test >= count:
        raise ValueError(f"{val} val + {test} test of {count} templates leave none for training")
    order = list(range(count))
    random.Random(f"{seed}/split").shuffle(order)
    return {"train": order[val + test :], "val": order[test : val + test], "test": order[:test]}


def word_problems(
    num_train: int,
    num_val: int,
    num_test: int,
    seed: int = 0,
    val_templates: int = 10,
    test_templates: int = 10,
) -> dict[str, list[str]]:
    """Make distinct prompts, 25 to 70 words each, for splits that have no template in common.

    The templates of a split take turns, so a longer list starts with the shorter one.

    Raises:
        ValueError: If a split has no templates, or one of them runs out of new prompts.
    """
    templates = load_templates()
    splits = split_templates(len(templates), seed, val_templates, test_templates)
    prompts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    seen: set[str] = set()
    for split, number in zip(prompts, (num_train, num_val, num_test), strict=True):
        indices = splits[split]
        if number < 0 or (number > 0 and not indices):
            raise ValueError(f"cannot make {number} {split} prompts from {len(indices)} templates")
        rngs = {index: random.Random(f"{seed}/{split}/{index}") for index in indices}
        for turn in range(number):
            index = indices[turn % len(indices)]
            fillings = (fill(templates[index], rngs[index]) for _ in range(1000))
            prompt = next((text for text in fillings if text not in seen), None)
            if prompt is None:
                raise ValueError(f"no new {split} prompt after {turn} from {templates[index]!r}")
            seen.add(prompt)
            prompts[split].append(prompt)
    return prompts
