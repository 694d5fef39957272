"""What is supervised: every token that the target itself would have generated, and no other."""

import pytest
import torch
from tiny import CHATML, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data.samples import (
    Message,
    Sample,
    chat_samples,
    prompt_ids,
    response_sample,
    text_samples,
    turns_apart,
)
from dflash_lightning.errors import UserError

TAGGED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}"
    "{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
FORGETFUL = CHATML.replace(
    "message['content']",
    "(message['content'] if loop.last or message['role'] == 'user' else '(cut)')",
)
NO_THINKING = CHATML.replace(
    "'<|im_start|>assistant\n'",
    "'<|im_start|>assistant\n' + ('' if enable_thinking is true else '<think>\n\n</think>\n\n')",
).replace(
    "message['content']",
    "('<think>\n\n</think>\n\n' if message['role'] == 'assistant' else '') + message['content']",
)
PICKY = (
    "{% if messages[0]['role'] != 'user' %}{{raise_exception('no\nsystem')}}{% endif %}" + CHATML
)
ONE_TURN = [("user", "What is 2+2?"), ("assistant", "It is 4.")]
TWO_TURNS = [("system", "Be brief."), *ONE_TURN, ("user", "And 3+3?"), ("assistant", "6")]


def chat(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chat_sample(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], stop_ids: set[int] | None = None
) -> Sample:
    found = chat_samples(tokenizer, [messages], stop_ids)[0]
    if isinstance(found, UserError):
        raise found
    return found


def supervised(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """Return the text of each supervised stretch."""
    stretches: list[list[int]] = []
    before = False
    for token, used in zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if used and not before:
            stretches.append([])
        if used:
            stretches[-1].append(token)
        before = used
    return [tokenizer.decode(ids) for ids in stretches]


@pytest.mark.parametrize("template", [CHATML, TAGGED, PICKY], ids=["stock", "tagged", "picky"])
def test_answer_and_its_stop_token_are_supervised(template: str) -> None:
    tokenizer = tokenizer_with(template)
    sample = chat_sample(tokenizer, chat(*ONE_TURN))
    assert sample.ids.dtype == torch.int64
    assert sample.loss_mask.dtype == torch.bool
    assert supervised(tokenizer, sample) == ["It is 4.<|im_end|>"]
    assert not sample.loss_mask[-1], "the newline after the stop token is not the target's"


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["stock", "tagged"])
def test_every_assistant_turn_is_supervised(template: str) -> None:
    tokenizer = tokenizer_with(template)
    sample = chat_sample(tokenizer, chat(*TWO_TURNS))
    assert supervised(tokenizer, sample) == ["It is 4.<|im_end|>", "6<|im_end|>"]


def test_mask_by_hand() -> None:
    tokenizer = tiny_tokenizer()
    sample = chat_sample(tokenizer, chat(("user", "a"), ("assistant", "bc")))
    tokens = tokenizer.convert_ids_to_tokens(sample.ids.tolist())
    user = ["<|im_start|>", *"user\n", "a", "<|im_end|>", "\n"]
    head = ["<|im_start|>", *"assistant\n"]
    assert tokens == [*user, *head, "b", "c", "<|im_end|>", "\n"]
    unsupervised = len(user) + len(head)
    assert sample.loss_mask.tolist() == [False] * unsupervised + [True, True, True, False]


def test_tags_supervise_what_transformers_itself_supervises() -> None:
    tokenizer = tokenizer_with(TAGGED)
    expected = tokenizer.apply_chat_template(
        chat(*TWO_TURNS),
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_offsets_mapping=False,
    )
    sample = chat_sample(tokenizer, chat(*TWO_TURNS))
    assert sample.ids.tolist() == list(expected["input_ids"])
    assert sample.loss_mask.int().tolist() == list(expected["assistant_masks"])


@pytest.mark.parametrize(
    "template", [CHATML, TAGGED, NO_THINKING], ids=["stock", "tagged", "no thinking"]
)
def test_prompt_ids_are_a_prefix_of_the_whole_chat(template: str) -> None:
    tokenizer = tokenizer_with(template)
    sample = chat_sample(tokenizer, chat(*TWO_TURNS))
    starts = [i for i, m in enumerate(TWO_TURNS) if m[0] == "assistant"]
    for turn in starts:
        prompt = prompt_ids(tokenizer, chat(*TWO_TURNS[:turn]))
        assert prompt == sample.ids[: len(prompt)].tolist()
        assert sample.loss_mask[len(prompt)]
        assert not sample.loss_mask[len(prompt) - 1]


def test_empty_thinking_of_the_prompt_is_not_supervised() -> None:
    """The target never generates it: the template puts it there (A31)."""
    tokenizer = tokenizer_with(NO_THINKING)
    assert tokenizer.decode(prompt_ids(tokenizer, chat(ONE_TURN[0]))).endswith("</think>\n\n")
    sample = chat_sample(tokenizer, chat(*ONE_TURN))
    assert supervised(tokenizer, sample) == ["It is 4.<|im_end|>"]


def test_no_special_token_is_added_to_a_chat() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.bos_token_id not in chat_sample(tokenizer, chat(*TWO_TURNS)).ids
    assert tokenizer.bos_token_id not in prompt_ids(tokenizer, chat(*TWO_TURNS))


@pytest.mark.parametrize(
    "turns",
    [[("user", "Hi")], [("system", "Hi"), ("user", "Hi")], [("assistant", "Hi")]],
    ids=["user only", "system and user", "nothing asked"],
)
def test_all_zero_mask_is_refused(turns: list[tuple[str, str]]) -> None:
    with pytest.raises(UserError, match="the assistant mask is all zero"):
        chat_sample(tiny_tokenizer(), chat(*turns))


def test_opening_turn_of_the_assistant_is_not_supervised() -> None:
    tokenizer = tiny_tokenizer()
    sample = chat_sample(tokenizer, chat(("assistant", "Hello!"), *ONE_TURN))
    assert supervised(tokenizer, sample) == ["It is 4.<|im_end|>"]


def test_missing_template_is_refused() -> None:
    tokenizer = tokenizer_with(None)
    for call in (chat_sample, prompt_ids):
        with pytest.raises(UserError, match="no chat template: give plain text"):
            call(tokenizer, chat(*ONE_TURN))


def test_a_turn_that_the_template_rewrites_is_not_supervised_as_it_stands() -> None:
    tokenizer = tokenizer_with(FORGETFUL)
    with pytest.raises(UserError, match="turn 3 can't be located: this chat template rewrites"):
        chat_sample(tokenizer, chat(*TWO_TURNS))
    assert supervised(tokenizer, chat_sample(tokenizer, chat(*ONE_TURN))) == ["It is 4.<|im_end|>"]


def test_rewritten_turns_each_end_a_chat_of_their_own() -> None:
    """Every turn is supervised once, as it was said, behind the history as the template has it."""
    tokenizer = tokenizer_with(FORGETFUL)
    three = chat(*TWO_TURNS, ("user", "And 4+4?"), ("assistant", "8"))
    parts = turns_apart(tokenizer, three)
    assert [(len(messages), since) for messages, since in parts] == [(3, 2), (5, 4), (7, 6)]
    since = [first for _, first in parts]
    samples = chat_samples(tokenizer, [messages for messages, _ in parts], None, None, since)
    said = ["It is 4.<|im_end|>", "6<|im_end|>", "8<|im_end|>"]
    for sample, turn in zip(samples, said, strict=True):
        assert isinstance(sample, Sample)
        assert supervised(tokenizer, sample) == [turn]
    assert "(cut)" in tokenizer.decode(samples[2].ids)  # type: ignore[union-attr]


def test_turns_that_stay_as_they_were_stay_together() -> None:
    """A template that rewrites nothing gives one chat; one that cuts what is old parts the rest."""
    assert turns_apart(tokenizer_with(CHATML), chat(*TWO_TURNS)) == [(chat(*TWO_TURNS), 2)]
    pairs = CHATML.replace(
        "message['content']",
        "(message['content'] if loop.revindex < 5 or message['role'] == 'user' else '(cut)')",
    )
    tokenizer = tokenizer_with(pairs)
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    parts = turns_apart(tokenizer, chat(*turns, *turns))
    assert [(len(messages), since) for messages, since in parts] == [(4, 1), (6, 5), (8, 7)]


def test_template_that_refuses_a_chat_gives_one_line() -> None:
    tokenizer = tokenizer_with(PICKY)
    for call in (chat_sample, prompt_ids):
        with pytest.raises(UserError, match=r"chat template refuses this chat: no system$"):
            call(tokenizer, chat(*TWO_TURNS))


def test_text_is_supervised_but_for_its_first_token() -> None:
    tokenizer = tiny_tokenizer()
    sample = text_samples(tokenizer, ["Once upon"])[0]
    assert tokenizer.decode(sample.ids) == "Once upon"
    assert sample.loss_mask.tolist() == [False] + [True] * 8


def test_empty_text_is_an_empty_sample() -> None:
    sample = text_samples(tiny_tokenizer(), [""])[0]
    assert sample.ids.shape == sample.loss_mask.shape == (0,)
    assert sample.ids.dtype == torch.int64


def test_response_keeps_the_ids_it_was_given() -> None:
    sample = response_sample([7, 5, 5], [9, 1])
    assert sample.ids.tolist() == [7, 5, 5, 9, 1]
    assert sample.ids.dtype == torch.int64
    assert sample.loss_mask.tolist() == [False, False, False, True, True]


def test_cut_keeps_ids_and_mask_together() -> None:
    cut = response_sample([7, 5], [9, 1, 4]).cut(3)
    assert cut.ids.tolist() == [7, 5, 9]
    assert cut.loss_mask.tolist() == [False, False, True]
    assert len(cut.cut(100).ids) == 3


def test_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        Sample(torch.arange(3), torch.ones(2, dtype=torch.bool))


def test_a_turn_ends_where_the_target_stops_not_only_at_eos() -> None:
    """Stop ids that only the generation config names (Gemma's end of turn) end a turn too."""
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b;c"}]
    stop = tokenizer(";", add_special_tokens=False).input_ids[0]
    sample = chat_sample(tokenizer, messages, {stop})
    assert tokenizer.convert_ids_to_tokens(sample.ids[sample.loss_mask].tolist()) == ["b", ";"]
