"""The target answers chats turn by turn: what is supervised, in which context, and when it ends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS, tiny_target, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data.answers import Answer, LocalAnswers
from dflash_lightning.data.chats import target_samples, user_turns
from dflash_lightning.data.prepare import AnswerBook
from dflash_lightning.data.prompts import Prompt
from dflash_lightning.data.rows import BadRows
from dflash_lightning.data.samples import Sample, prompt_ids
from dflash_lightning.data.summary import Summary
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetSpec

FORGETFUL = (  # as Qwen3's: what an earlier turn began with is not told again
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{{message['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\nthink:\n'}}{% endif %}"
)


def spec_of(template: str | None = None) -> TargetSpec:
    target = tiny_target()
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return TargetSpec(
        Path(), "float32", "t", tokenizer, target.config, [1, 3, 5], 95, target.stop_ids
    )


class Book(AnswerBook):
    """Answers from a list, and remembers what was asked."""

    def __init__(self, spec: TargetSpec, said: Sequence[tuple[str, bool]]) -> None:
        super().__init__(LocalAnswers(2), spec, tiny_target, 16, Path("nowhere"))
        self.said, self.heard = list(said), list[str]()

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        self.heard += [str(self.spec.tokenizer.decode(list(p))) for p in prompts]
        found = []
        for text, ends in (self.said.pop(0) for _ in prompts):
            ids = list(self.spec.tokenizer(text).input_ids)
            found.append(Answer([*ids, EOS] if ends else ids, "stop" if ends else "length"))
        return found


def chat(*turns: str, source: str = "a:1") -> Prompt:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": roles[t[0]], "content": t[2:]} for t in turns]
    return Prompt(source, tuple(messages))


def run(
    prompts: Sequence[Prompt], book: Book, max_length: int = 999
) -> tuple[list[Sample], Summary]:
    summary = Summary()
    bad = BadRows(0.5, lambda _: None)
    samples = target_samples(prompts, book, book.spec, max_length, bad, summary)
    return list(samples), summary


def parts(spec: TargetSpec, sample: Sample) -> list[tuple[str, bool]]:
    """Return the stretches of a sample as text, with whether they are supervised."""
    found: list[tuple[list[int], bool]] = []
    for token, on in zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if not found or found[-1][1] != on:
            found.append(([], on))
        found[-1][0].append(token)
    return [(str(spec.tokenizer.decode(ids)), on) for ids, on in found]


def test_every_turn_is_answered_in_turn_and_supervised() -> None:
    spec = spec_of()
    book = Book(spec, [("one", True), ("two", True)])
    samples, summary = run([chat("s:be", "u:hi", "a:given", "u:more", "a:given")], book)
    first = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    first += "<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert [parts(spec, s) for s in samples] == [
        [(first, False), ("one<|im_end|>", True), (between, False), ("two<|im_end|>", True)]
    ]
    assert book.heard == [first, first + "one<|im_end|>" + between]
    assert "given" not in "".join(book.heard)
    assert (summary.samples, summary.answers, summary.cut) == (1, 2, 0)


def test_a_cut_answer_ends_the_chat() -> None:
    book = Book(spec_of(), [("one", False)])
    samples, summary = run([chat("u:hi", "a:x", "u:more")], book)
    assert parts(book.spec, samples[0])[-1] == ("one", True)
    assert summary.cut == 1


def test_template_that_rewrites_parts_the_turns_into_samples_of_their_own() -> None:
    """The second turn's context is the template's, not what the target read before."""
    spec = spec_of(FORGETFUL)
    book = Book(spec, [("one", True), ("two", True)])
    samples, _ = run([chat("u:hi", "a:x", "u:more")], book)
    assert len(samples) == 2
    for sample, heard, said in zip(samples, book.heard, ("one", "two"), strict=True):
        assert parts(spec, sample) == [(heard, False), (f"{said}<|im_end|>", True)]
    assert book.heard[0].endswith("assistant\nthink:\n")
    assert "assistant\none<|im_end|>" in book.heard[1]


def test_single_turns_are_asked_together_and_come_in_order() -> None:
    spec = spec_of()
    book = Book(spec, [(str(n), True) for n in range(40)])
    prompts = [chat(f"u:{n}") for n in range(40)]
    samples, summary = run(prompts, book)
    for n, sample in enumerate(samples):
        prompt = prompt_ids(spec.tokenizer, prompts[n].messages)
        assert sample.ids[: len(prompt)].tolist() == prompt
        assert parts(spec, sample)[-1] == (f"{n}<|im_end|>", True)
    assert summary.samples == 40


def test_long_prompts_are_not_answered() -> None:
    book = Book(spec_of(), [("one", True), ("two", True)])
    samples, summary = run([chat("u:" + "x" * 90), chat("u:hi"), chat("u:" + "y" * 300)], book, 80)
    assert len(samples) == 1
    assert summary.too_long == 2
    samples, _ = run([chat("u:hi", "a:x", "u:" + "y" * 90, "a:x", "u:z")], book, 80)
    assert [p[1] for p in parts(book.spec, samples[0])] == [False, True, False]


def test_bad_chats_are_counted_not_fatal() -> None:
    book = Book(spec_of(), [("one", True), ("two", True)])
    prompts = [chat("u:hi"), chat("a:lonely", source="b:7"), chat("u:ho")]
    samples, summary = run(prompts, book)
    assert len(samples) == 2
    assert summary.bad_rows == 1
    with pytest.raises(UserError, match=r"b:7: the chat has no user turn to answer \(2 of 2"):
        run([prompts[1]] * 2, book)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["u:1"], [["1"]]),
        (["s:0", "u:1", "a:x", "u:2", "a:y"], [["0", "1"], ["2"]]),
        (["a:0", "u:1", "a:x"], [["0", "1"]]),
        (["s:s", "a:0", "u:1"], [["s", "0", "1"]]),
        (["u:1", "a:x", "a:y", "u:2"], [["1"], ["2"]]),
        (["u:1", "u:2", "a:x"], [["1", "2"]]),
        (["u:1", "a:x", "s:late"], [["1"]]),
    ],
)
def test_turns(turns: list[str], expected: list[list[str]]) -> None:
    found = [[m["content"] for m in turn] for turn in user_turns(chat(*turns))]
    assert found == expected


def test_real_answers_of_a_chat_are_the_targets_greedy_output(tmp_path: Path) -> None:
    """Each supervised stretch is what plain greedy decoding gives behind all tokens before it."""
    target, spec = tiny_target("llama_untied"), spec_of()
    book = AnswerBook(LocalAnswers(3), spec, lambda: target, 40, tmp_path)
    prompts = [chat(f"u:{n * 7}", "a:", f"u:{n}?", "a:", "u:x") for n in range(30)]
    summary = Summary()
    samples = list(target_samples(prompts, book, spec, 250, BadRows(0.0, lambda _: None), summary))
    assert len(samples) == 30
    assert summary.answers > 30, "some chats must reach a second turn"
    several = 0
    for sample in samples:
        mask = sample.loss_mask.tolist()
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        several += len(starts) > 1
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            logits: Any = target.forward(sample.ids[None, :end], logits_to_keep=0, tap=False).logits
            assert torch.equal(logits[0, start - 1 : end - 1].argmax(-1), sample.ids[start:end])
    assert several
