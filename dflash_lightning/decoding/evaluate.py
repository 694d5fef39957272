"""Decode prompts speculatively and plainly, side by side, and report on both."""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Decoded
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.report import DecodingReport, Divergence, report
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target


def evaluate(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    batch_size: int = 1,
    others: dict[str, float] | None = None,
) -> tuple[DecodingReport, list[Decoded]]:
    """Decode each batch of prompts speculatively and then plainly, greedily, and report on both.

    Args:
        target: The frozen target.
        proposer: The drafter behind the proposer protocol.
        prompts: Token ids `[P]` of each prompt.
        max_new_tokens: Longest output, in tokens.
        batch_size: Prompts decoded together, in both ways; 1 is what a single user sees.
        others: Tokens per second of other decoders on the same prompts, to report along.

    Raises:
        UserError: No prompt, or a batch of none.
    """
    if not prompts:
        raise UserError("data.prompts: there is no held-out prompt to decode")
    if batch_size < 1:
        raise UserError(f"decode.batch_size: needs at least 1, got {batch_size}")
    for warm in (proposer, None):
        decode(target, prompts[:batch_size], warm, 8, ())
    decoded: list[Decoded] = []
    plain: list[Decoded] = []
    with tqdm(total=len(prompts), desc="decoding held-out prompts", leave=False) as bar:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            decoded += decode(target, batch, proposer, max_new_tokens)
            plain += decode(target, batch, None, max_new_tokens)
            bar.update(len(batch))
    partings = [
        Divergence(n, *found)
        for n, (prompt, ours, theirs) in enumerate(zip(prompts, decoded, plain, strict=True))
        if (found := divergence(target, prompt, ours.tokens, theirs.tokens)) is not None
    ]
    ids = [prompt.tolist() for prompt in prompts]
    figures = report(decoded, plain, partings, proposer.block_size, batch_size, others, ids)
    return figures, decoded


@torch.no_grad()
def divergence(
    target: Target, prompt: Tensor, ours: list[int], plain: list[int]
) -> tuple[int, float] | None:
    """Return where two outputs first differ and the target's logit gap there, or None if equal.

    The gap is between the two tokens' logits: near 0 it is a rounding tie, wide it is a bug.
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


def marked_text(target: Target, prompt: Tensor, decoded: Decoded) -> str:
    """Return a decoded sample as Markdown in which accepted drafts are bold."""
    if target.tokenizer is None:
        return ""
    pieces, at = [target.text(decoded.tokens[:1])], 1
    for cycle in decoded.cycles:
        drafts = min(cycle.accepted, cycle.committed)
        pieces.append(_bold(target.text(decoded.tokens[at : at + drafts])))
        pieces.append(target.text(decoded.tokens[at + drafts : at + cycle.committed]))
        at += cycle.committed
    head = f"accept length {decoded.accept_len:.2f}; drafted and accepted tokens are bold\n\n"
    return head + "> " + target.text(prompt) + "\n\n" + "".join(pieces)


def _bold(text: str) -> str:
    inner = text.strip()
    return text.replace(inner, f"**{inner}**", 1) if inner else text
