"""A sample: token ids and which of them the target would have generated itself (`loss_mask`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """A training sequence: `ids` `[S]` int64 and `loss_mask` `[S]` bool, true where supervised."""

    ids: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        """Check that both are `[S]`."""
        if self.ids.shape != self.loss_mask.shape or self.ids.dim() != 1:
            raise ValueError(f"ids {self.ids.shape} and loss_mask {self.loss_mask.shape} differ")

    def cut(self, max_length: int) -> "Sample":
        """Return the sample's first `max_length` tokens."""
        return Sample(self.ids[:max_length], self.loss_mask[:max_length])


def response_sample(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sample:
    """Return prompt plus response as one sample, the response supervised.

    Token ids go in as the target produced them: tokenizing its text again may split it differently.
    """
    ids = torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64)
    return Sample(ids, torch.arange(len(ids)) >= len(prompt_ids))


def text_sample(tokenizer: PreTrainedTokenizerBase, text: str) -> Sample:
    """Return plain text as one sample; every token but the first is supervised."""
    ids = torch.tensor(tokenizer(text).input_ids, dtype=torch.int64)
    return Sample(ids, torch.arange(len(ids)) >= 1)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return a chat's ids up to where the assistant's answer begins (chat template applied)."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def chat_sample(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_ids: Collection[int] | None = None,
) -> Sample:
    """Return a finished chat as one sample.

    Every assistant turn is supervised, its stop token included. Works with templates that carry
    generation tags and with stock templates that have none: an assistant turn is what the chat's
    rendering adds to the rendering of the chat before it with the generation prompt.

    Args:
        tokenizer: The target's, with a chat template.
        messages: The chat.
        stop_ids: Tokens that end a turn; None takes the tokenizer's eos.

    Raises:
        UserError: No assistant turn, or a template under which none can be located.
    """
    ends = {tokenizer.eos_token_id} if stop_ids is None else stop_ids
    text = render(tokenizer, messages, add_generation_prompt=False)
    spans = _assistant_spans(tokenizer, messages, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor(encoded.input_ids, dtype=torch.int64)
    loss_mask = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        inside = [
            i for i, (s, e) in enumerate(encoded.offset_mapping) if s >= start and s < e <= end
        ]
        stops = [n for n, i in enumerate(inside) if int(ids[i]) in ends]
        loss_mask[inside[: stops[-1] + 1] if stops else inside] = True
    if not loss_mask.any():
        raise UserError(
            "the assistant mask is all zero: the chat has no assistant turn that answers something"
        )
    return Sample(ids, loss_mask)


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str
) -> list[tuple[int, int]]:
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:  # nothing asked for an opening turn
            continue
        before = render(tokenizer, messages[:turn], add_generation_prompt=True)
        after = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the assistant mask of turn {turn + 1} can't be located: this chat template "
                "rewrites earlier turns; give single-turn chats, or let the target answer the "
                "prompts (data.responses: target)"
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
