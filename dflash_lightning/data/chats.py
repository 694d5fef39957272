"""The target answers chats: each user turn in turn, its earlier answers standing in the context."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from dflash_lightning.data.answers import Answer
from dflash_lightning.data.prepare import AnswerBook, windows
from dflash_lightning.data.prompts import Prompt
from dflash_lightning.data.rows import BadRows, good_rows
from dflash_lightning.data.samples import Message, Sample, render
from dflash_lightning.data.summary import Summary
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetSpec


def target_samples(
    prompts: Iterable[Prompt],
    book: AnswerBook,
    spec: TargetSpec,
    max_length: int,
    bad: BadRows,
    summary: Summary,
) -> Iterator[Sample]:
    """Yield each chat as a sample in which every assistant turn is the target's own answer.

    Where the chat template rewrites an earlier turn (Qwen3 removes its thinking tags), the turns
    behind it are a sample of their own, with the history as the target will see it. A chat ends
    with an answer that the limit cut, or where its next turn has no room within `max_length`.
    Answers that it came with are dropped. No more than a window of chats is held in memory.

    Args:
        prompts: Chats.
        book: Where answers come from.
        spec: The target: its tokenizer and stop tokens.
        max_length: Longest useful sample; a longer prompt is not answered.
        bad: Counts the chats that can't be asked.
        summary: Counts what was answered.

    Raises:
        UserError: Too many chats are bad.
    """
    room = min(max_length, int(spec.config.max_position_embeddings))
    chats = good_rows(prompts, lambda prompt: Chat(prompt, spec, room), bad)
    for window in windows(chats, book.window):
        asking = [chat for chat in window if not chat.done]
        summary.too_long += len(window) - len(asking)
        while asking:
            for chat, answer in zip(asking, book.ask([c.ids for c in asking]), strict=True):
                summary.answer(answer, spec.stop_ids)
                chat.take(answer)
            asking = [chat for chat in asking if not chat.done]
            book.expect(len(asking))
        for sample in (sample for chat in window for sample in chat.samples()):
            summary.sample(sample)
            yield sample
    summary.bad_rows += bad.bad


class Chat:
    """A chat under way: `ids` up to where the next answer begins.

    Raises:
        UserError: Nothing to answer, or a chat template that refuses it.
    """

    def __init__(self, prompt: Prompt, spec: TargetSpec, room: int) -> None:
        self.tokenizer, self.room = spec.tokenizer, room
        self.turns = user_turns(prompt)
        self.messages: list[Message] = []
        self._samples: list[Sample] = []
        try:
            self._begin([])
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error

    def _begin(self, said: list[Message]) -> None:
        """Render the chat anew, up to its next user turn; nothing of it is supervised yet."""
        self.messages += [*said, *self.turns.pop(0)]
        self.text = render(self.tokenizer, self.messages, add_generation_prompt=True)
        self.ids = list(self.tokenizer(self.text, add_special_tokens=False).input_ids)
        self.supervised = [False] * len(self.ids)
        self.done = len(self.ids) >= self.room

    def samples(self) -> list[Sample]:
        """Return what the target answered so far."""
        return [*self._samples, *([self._sample()] if any(self.supervised) else [])]

    def _sample(self) -> Sample:
        return Sample(torch.tensor(self.ids), torch.tensor(self.supervised))

    def take(self, answer: Answer) -> None:
        """Append the target's answer, and the next user turn if there is one."""
        self.ids += answer.ids
        self.supervised += [True] * len(answer.ids)
        if not self.turns or answer.finish != "stop":
            self.done = True
            return
        before, sample = self.text, self._sample()
        said, stop = (str(self.tokenizer.decode(ids)) for ids in (answer.ids[:-1], answer.ids[-1:]))
        try:
            self._begin([{"role": "assistant", "content": said}])
        except UserError:  # the target said what the template can't hold
            self.done = True
            return
        between = self._between(before + said + stop)
        if between is None:
            self._samples.append(sample)
            return
        self.ids = [*sample.ids.tolist(), *between]
        self.supervised = [*sample.loss_mask.tolist(), *[False] * len(between)]
        self.done = len(self.ids) >= self.room

    def _between(self, before: str) -> list[int] | None:
        """Return what the template puts between a stop token and the next answer.

        None if it tells the chat before in another way than the target read and wrote it.
        """
        if not self.text.startswith(before):
            return None
        added = self.text[len(before) :]
        ids = list(self.tokenizer(added, add_special_tokens=False).input_ids)
        return ids if str(self.tokenizer.decode(ids)) == added else None


def user_turns(prompt: Prompt) -> list[Sequence[Message]]:
    """Return the messages before each answer: what an assistant turn stands behind or would.

    Raises:
        UserError: A plain text, or a chat in which nobody asks anything.
    """
    if prompt.text is not None:
        raise UserError(
            f"{prompt.source}: plain text has no prompt to answer; set data.responses=given"
        )
    turns: list[list[Message]] = [[]]
    for message in prompt.messages:
        asked = any(m["role"] != "assistant" for m in turns[-1])
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif asked and any(m["role"] == "user" for m in turns[-1]):
            turns.append([])
        elif len(turns) == 1:  # an opening line of the assistant, which nothing asked for
            turns[-1].append(message)
    if not turns[-1] or not any(m["role"] == "user" for m in turns[-1]):
        turns.pop()
    if not turns:
        raise UserError(f"{prompt.source}: the chat has no user turn to answer")
    return list(turns)
