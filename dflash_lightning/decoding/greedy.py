"""Greedy decoding of one prompt.

Draft a block, verify it in one target forward, keep what the target agrees with:

    prefill -> first token;  then cycle:  propose K-1 tokens -> verify K
            -> accept the matching prefix + one bonus token -> roll the target's cache back
            -> hand the accepted positions' states to the proposer

The output is the target's own greedy output, token for token (float32; in bfloat16 a verify of K
tokens and a one-token step differ in rounding, see `divergence`).
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target


@dataclass
class Cycle:
    """One draft-and-verify cycle."""

    drafted: int
    """Tokens the target verified."""
    accepted: int
    """Of these, how many led the block and matched."""
    committed: int
    """Tokens added to the output: accepted + bonus, cut at a stop token."""


@dataclass
class Decoded:
    """What decoding one prompt gave; times in seconds."""

    tokens: list[int]
    """New tokens, the stop token included."""
    cycles: list[Cycle] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def accept_len(self) -> float:
        """Tokens committed per cycle, bonus included, prefill token not; NaN without cycles."""
        return (
            sum(c.committed for c in self.cycles) / len(self.cycles)
            if self.cycles
            else float("nan")
        )


@torch.no_grad()
def speculate(
    target: Target,
    proposer: Proposer,
    prompt: Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] | None = None,
) -> Decoded:
    """Decode one prompt speculatively.

    Args:
        target: Verifies, greedily.
        proposer: Drafts; reset here.
        prompt: Token ids `[P]`.
        max_new_tokens: Longest output, the prefill's token included.
        stop_ids: Tokens that end the output; None takes the target's.
    """
    stops = target.stop_ids if stop_ids is None else frozenset(stop_ids)
    cache = new_cache(target, prompt, max_new_tokens)
    proposer.reset()
    clock = _Clock(target.device)
    start = clock.now()
    output = target.forward(prompt[None].to(target.device), cache=cache)
    check_rollback(cache, target)
    tokens = [int(output.logits[0, -1].argmax())]
    decoded = Decoded(tokens, prefill_s=clock.now() - start)
    hidden = cast(Tensor, output.hidden)
    while tokens[-1] not in stops and len(tokens) < max_new_tokens:
        began = clock.now()
        drafts = torch.empty(0, dtype=torch.int64, device=target.device)
        room = max_new_tokens - len(tokens)
        if room > 1:
            proposer.observe(hidden)
            drafts = proposer.propose(tokens[-1])[: room - 1]
        drafted = clock.now()
        block = torch.cat([drafts.new_tensor(tokens[-1:]), drafts])
        output = target.forward(block[None], cache=cache, logits_to_keep=0)
        choices = output.logits[0].argmax(dim=-1)
        accepted = matching_prefix(drafts, choices)
        cache.crop(-(len(drafts) - accepted))
        hidden = cast(Tensor, output.hidden)[:, : accepted + 1]
        new = until_stop(choices[: accepted + 1].tolist(), stops)
        tokens += new
        decoded.cycles.append(Cycle(len(drafts), accepted, len(new)))
        decoded.draft_s += drafted - began
        decoded.verify_s += clock.now() - drafted
    decoded.total_s = clock.now() - start
    return decoded


@torch.no_grad()
def decode_plain(
    target: Target, prompt: Tensor, max_new_tokens: int, stop_ids: Collection[int] | None = None
) -> Decoded:
    """Decode a prompt with the target alone, one token a step: the denominator of every speedup."""
    stops = target.stop_ids if stop_ids is None else frozenset(stop_ids)
    cache = new_cache(target, prompt, max_new_tokens)
    clock = _Clock(target.device)
    start = clock.now()
    output = target.forward(prompt[None].to(target.device), cache=cache, tap=False)
    tokens = [int(output.logits[0, -1].argmax())]
    decoded = Decoded(tokens, prefill_s=clock.now() - start)
    while tokens[-1] not in stops and len(tokens) < max_new_tokens:
        last = torch.tensor([tokens[-1:]], device=target.device)
        output = target.forward(last, cache=cache, tap=False)
        tokens.append(int(output.logits[0, -1].argmax()))
        decoded.cycles.append(Cycle(0, 0, 1))
    decoded.total_s = clock.now() - start
    decoded.verify_s = decoded.total_s - decoded.prefill_s
    return decoded


@torch.no_grad()
def divergence(
    target: Target, prompt: Tensor, ours: list[int], plain: list[int]
) -> tuple[int, float] | None:
    """Return where outputs first differ and the target's logit gap there; None if they are equal.

    The gap is between the two tokens' logits, in logits: near 0 it is a rounding tie, wide it is a
    bug.
    """
    if ours == plain:
        return None
    common = min(len(ours), len(plain))
    at = next((i for i in range(common) if ours[i] != plain[i]), common)
    if at == common:
        return at, float("inf")
    ids = torch.cat([prompt, prompt.new_tensor(ours[:at])])[None].to(target.device)
    logits = target.forward(ids, tap=False).logits[0, -1].float()
    return at, abs(float(logits[ours[at]] - logits[plain[at]]))


def matching_prefix(drafts: Tensor, choices: Tensor) -> int:
    """Return how many leading drafts `[k]` equal the target's choices `[k+1]`.

    >>> matching_prefix(torch.tensor([5, 6, 7]), torch.tensor([5, 6, 0, 7]))
    2
    """
    return int((drafts == choices[: len(drafts)]).long().cumprod(dim=0).sum())


def until_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in stop_ids), tokens)


def new_cache(target: Target, prompt: Tensor, max_new_tokens: int) -> DynamicCache:
    """Return an empty cache that can be rolled back; checks that the sequence fits the target.

    Raises:
        UserError: Empty prompt, nothing to generate, or a sequence longer than the target's context
            window.
    """
    window = int(target.config.max_position_embeddings)
    if prompt.numel() == 0:
        raise UserError("the prompt is empty: it needs at least one token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: needs at least 1, got {max_new_tokens}")
    if prompt.numel() + max_new_tokens > window:
        raise UserError(
            f"the prompt's {prompt.numel()} tokens and max_new_tokens={max_new_tokens} exceed the "
            f"target's context window of {window}"
        )
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    return cache


def check_rollback(cache: DynamicCache, target: Target) -> None:
    """Refuse a target whose cache can't forget rejected tokens.

    Raises:
        UserError: For example a recurrent or linear-attention target.
    """
    if not cache.is_croppable:
        raise UserError(
            f"{type(target.model).__name__} keeps a state that can't be rolled back: "
            "it can't verify drafts"
        )


class _Clock:
    """Seconds, after the device has finished what it was given."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
