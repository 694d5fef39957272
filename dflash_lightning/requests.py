"""From what a user asks (text, chats, stop strings) to token ids that the target takes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.prompts import Prompt
from dflash_lightning.data.rows import jsonl_prompts
from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetSpec


@dataclass(frozen=True)
class Request:
    """Token ids `[P]` to go on from, and the place they came from."""

    source: str
    ids: Tensor


def file_requests(file: str, spec: TargetSpec, max_new_tokens: int, raw: bool) -> list[Request]:
    """Return the requests of a JSONL file of prompts; answers at the end of a chat are dropped.

    Raises:
        UserError: No prompt in it, or a bad row; the message names file and line.
    """
    found = [request(prompt, spec, max_new_tokens, raw) for prompt in jsonl_prompts(file)]
    if not found:
        raise UserError(f"--file: there is no prompt in {file}")
    return found


def request(prompt: Prompt, spec: TargetSpec, max_new_tokens: int, raw: bool) -> Request:
    """Return a prompt's token ids.

    Args:
        prompt: A chat.
        spec: Whose tokenizer, chat template and window.
        max_new_tokens: Must fit behind the prompt.
        raw: Take the text as it is. A target without chat template always does.

    Raises:
        UserError: Nothing to answer, more than the window, or a chat that can't be raw.
    """
    messages = list(prompt.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise UserError(f"{prompt.source}: the prompt is empty")
    _check_unicode(prompt.source, messages)
    tokenizer = spec.tokenizer
    if raw or tokenizer.chat_template is None:
        if len(messages) > 1:
            raise UserError(
                f"{prompt.source}: a chat of {len(messages)} messages can't be raw text"
            )
        ids = list(tokenizer(messages[0]["content"]).input_ids)
    else:
        try:
            ids = prompt_ids(tokenizer, messages)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error
    window = int(spec.config.max_position_embeddings)
    if len(ids) + max_new_tokens > window:
        raise UserError(
            f"{prompt.source}: {len(ids)} prompt tokens and max_new_tokens={max_new_tokens} exceed "
            f"the target's context window of {window}"
        )
    return Request(prompt.source, torch.tensor(ids, dtype=torch.int64))


def _check_unicode(source: str, messages: list[dict[str, str]]) -> None:
    try:
        "".join(m["content"] for m in messages).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: the prompt is not UTF-8 text") from error


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> frozenset[int]:
    """Return the ids of stop strings.

    Raises:
        UserError: A string is not one token of the target.
    """
    unknown = tokenizer.unk_token_id
    found = set()
    for text in stops:
        ids: Any = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1 or (ids[0] == unknown and text != tokenizer.unk_token):
            count = "an unknown token" if len(ids) == 1 else f"{len(ids)} tokens"
            raise UserError(f"--stop: {text!r} is {count} of this target, it must be one token")
        found.add(int(ids[0]))
    return frozenset(found)
