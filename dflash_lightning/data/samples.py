"""A sample: token ids and which of them the target would have generated itself (`loss_mask`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import UserError

Message = dict[str, str]

CHARACTERS_PER_TOKEN = 8
SURE_AFTER = 64
"""Tokens that what follows a piece of text can't reach back over."""


@dataclass(frozen=True)
class Sample:
    """A training sequence: `ids` `[S]` int64 and `loss_mask` `[S]` bool, true where supervised."""

    ids: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        """Check that both are `[S]`."""
        if self.ids.shape != self.loss_mask.shape or self.ids.dim() != 1:
            raise ValueError(f"ids {self.ids.shape} and loss_mask {self.loss_mask.shape} differ")

    def cut(self, max_length: int | None) -> "Sample":
        """Return the sample's first `max_length` tokens; None keeps all."""
        return Sample(self.ids[:max_length], self.loss_mask[:max_length])


def response_sample(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sample:
    """Return prompt plus response as one sample, the response supervised.

    Token ids go in as the target produced them: tokenizing its text again may split it differently.
    """
    ids = torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64)
    return Sample(ids, torch.arange(len(ids)) >= len(prompt_ids))


def text_samples(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None = None
) -> list[Sample]:
    """Return texts as samples of at most `max_length` tokens, all but the first supervised."""
    rows = _tokenized(tokenizer, texts, max_length, add_special_tokens=True)
    return [
        Sample(torch.from_numpy(row.ids), torch.arange(len(row.ids)) >= 1).cut(max_length)
        for row in rows
    ]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return a chat's ids up to where the assistant's answer begins (chat template applied)."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def chat_samples(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Sequence[Message]],
    stop_ids: Collection[int] | None = None,
    max_length: int | None = None,
    since: Sequence[int] | None = None,
) -> list[Sample | UserError]:
    """Return finished chats as samples, tokenized together.

    Every assistant turn is supervised, its stop token included. Works with templates that carry
    generation tags and with stock templates that have none: an assistant turn is what the chat's
    rendering adds to the rendering of the chat before it with the generation prompt.

    Args:
        tokenizer: The target's, with a chat template.
        chats: The chats.
        stop_ids: Tokens that end a turn; None takes the tokenizer's eos.
        max_length: Tokens behind it are cut off, before they are tokenized if the chat is long.
        since: The message of each chat from which on turns are supervised; None means all.

    Returns:
        A sample a chat; the error where it has no assistant turn, or the template none that can be
        located.
    """
    ends = [tokenizer.eos_token_id] if stop_ids is None else sorted(stop_ids)
    found: list[Sample | UserError] = []
    rendered: list[tuple[str, list[tuple[int, int]]]] = []
    for chat, first in zip(chats, since or [0] * len(chats), strict=True):
        try:
            rendered.append(_rendered(tokenizer, chat, first))
        except UserError as error:
            rendered.append(("", []))
            found.append(error)
        else:
            found.append(_NOTHING_SUPERVISED)
    rows = _tokenized(tokenizer, [text for text, _ in rendered], max_length)
    for i, ((text, spans), row) in enumerate(zip(rendered, rows, strict=True)):
        loss_mask = _supervised(row, spans, ends)
        if spans and (loss_mask.any() or row.characters < len(text)):
            sample = Sample(torch.from_numpy(row.ids), torch.from_numpy(loss_mask))
            found[i] = sample.cut(max_length)
    return found


_NOTHING_SUPERVISED = UserError(
    "the assistant mask is all zero: the chat has no assistant turn that answers something"
)


class _Tokenized(NamedTuple):
    """Ids `[S]`, where each lies in the text `[S, 2]`, and how much of the text was tokenized."""

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    characters: int


def _supervised(
    row: _Tokenized, spans: Sequence[tuple[int, int]], ends: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return the tokens `[S]` inside `spans` of characters, each up to its last stop token."""
    loss_mask = np.zeros(len(row.ids), np.bool_)
    first, last = row.offsets[:, 0], row.offsets[:, 1]
    for start, end in spans:
        inside = np.flatnonzero((first >= start) & (first < last) & (last <= end))
        stops = np.flatnonzero(np.isin(row.ids[inside], ends))
        if len(stops) and end <= row.characters:
            inside = inside[: stops[-1] + 1]
        loss_mask[inside] = True
    return loss_mask


def _tokenized(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    add_special_tokens: bool = False,
) -> list[_Tokenized]:
    """Tokenize texts together; of a long one only a piece that surely holds `max_length` tokens.

    What follows a piece can change the last of its tokens, but not those long before.
    """

    def run(parts: Sequence[str]) -> list[_Tokenized]:
        encoded = tokenizer(
            list(parts), add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        return [
            _Tokenized(
                np.array(ids, np.int64), np.array(offsets, np.int64).reshape(-1, 2), len(part)
            )
            for ids, offsets, part in zip(
                encoded.input_ids, encoded.offset_mapping, parts, strict=True
            )
        ]

    if not texts or max_length is None:
        return run(texts) if texts else []
    enough = max_length + SURE_AFTER
    found = run([text[: enough * CHARACTERS_PER_TOKEN] for text in texts])
    for i, text in enumerate(texts):
        if len(found[i].ids) < enough and found[i].characters < len(text):
            found[i] = run([text])[0]
    return found


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], since: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat's text and where its assistant turns lie.

    Raises:
        UserError: No assistant turn, or none that can be located.
    """
    text = render(tokenizer, messages, add_generation_prompt=False)
    spans = _assistant_spans(tokenizer, messages, text, since)
    if not spans:
        raise _NOTHING_SUPERVISED
    return text, spans


def turns_apart(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> list[tuple[Sequence[Message], int]]:
    """Return a chat as chats whose turns can be located, each with the message it counts from.

    A template that rewrites earlier turns (Qwen3 removes its thinking tags) shows each of them as
    the target wrote it only while it is the last: it then ends a chat of its own.

    Raises:
        UserError: The template refuses the chat.
    """
    found: list[tuple[Sequence[Message], int]] = []
    for turn in _answers(messages):
        so_far = messages[: turn + 1]
        if found:
            since = found[-1][1]
            try:
                _rendered(tokenizer, so_far, since)
            except UserError:
                pass
            else:
                found[-1] = so_far, since
                continue
        found.append((so_far, turn))
    return found


def _answers(messages: Sequence[Message]) -> list[int]:
    """Return the assistant's turns, but an opening one, which nothing asked for."""
    return [n for n, m in enumerate(messages) if m["role"] == "assistant" and n > 0]


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, since: int
) -> list[tuple[int, int]]:
    spans = []
    for turn in _answers(messages):
        if turn < since:
            continue
        before = render(tokenizer, messages[:turn], add_generation_prompt=True)
        last = turn + 1 == len(messages)
        after = text if last else render(tokenizer, messages[: turn + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the assistant mask of turn {turn + 1} can't be located: this chat template "
                "rewrites what stood there"
            )
        spans.append((len(before), len(after)))
    return spans


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool
) -> str:
    """Return a chat as text, by the target's chat template, thinking off.

    Raises:
        UserError: There is no chat template, or it refuses this chat.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "the target's tokenizer has no chat template: give plain text (TextPrompts) instead"
        )
    options: dict[str, Any] = {"tokenize": False, "enable_thinking": False}
    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, **options
        )
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the target's chat template refuses this chat: {reason}") from error
    return str(text)
