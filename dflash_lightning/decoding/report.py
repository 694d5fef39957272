"""What decoding some prompts showed: accept length, acceptance by position, speed, losslessness."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from statistics import fmean, median
from typing import Any

from dflash_lightning.decoding.outcome import Decoded


@dataclass(frozen=True)
class Divergence:
    """Where speculative output first differs from plain output.

    The gap is the target's, between the logits of the two tokens there.
    """

    prompt: int
    position: int
    logit_gap: float


@dataclass(frozen=True)
class PromptFigures:
    """What decoding one prompt gave, in sums, so that prompts can be pooled, paired and resampled.

    Seconds are shares of the batch's, for prompts decoded together.
    """

    prompt: str
    """Short hash of the prompt's token ids: the same prompt in every run on one tokenizer."""
    tokens: int
    """New tokens."""
    cycles: int
    committed: int
    """Tokens that the cycles committed: all new ones but the prefill's."""
    accepted_histogram: list[int]
    """Cycles by number of accepted drafts, 0..K-1."""
    drafted_histogram: list[int]
    """Cycles by number of verified drafts, 0..K-1."""
    seconds: float
    draft_seconds: float
    verify_seconds: float
    plain_tokens: int
    plain_seconds: float
    speedup: float
    """Tokens per second over those of plain decoding."""


@dataclass(frozen=True)
class DecodingReport:
    """Figures over all prompts; see the attribute docs for units."""

    prompts: int
    block_size: int
    cycles: int
    accept_len: float
    """Pooled: committed tokens / cycles; bonus token included, prefill token not."""
    accept_len_per_prompt: float
    """Mean over prompts of each prompt's accept length."""
    survival: list[float]
    """Share of cycles whose first k drafts were all accepted, k = 1..K-1.

    Over the cycles that verified at least k drafts.
    """
    conditional: list[float]
    """Survival at k over survival at k - 1: acceptance of draft k once those before it held."""
    marginal: list[float]
    """How often draft k alone is the token that the output has at its place, k = 1..K-1."""
    accepted_histogram: list[int]
    """Cycles by number of accepted drafts, 0..K-1."""
    tokens_per_s: float
    """New tokens per second of wall time, prefill included."""
    plain_tokens_per_s: float
    """The same of plain decoding of the same prompts on the same machine."""
    speedup: float
    """Ratio of the two."""
    speedup_per_prompt: list[float]
    prefill_ms: float
    draft_ms: float
    """Median over prompts of the drafting time per cycle."""
    verify_ms: float
    """Median over prompts of the target's forward per cycle."""
    overhead_ms: float
    """Median over prompts of what else a cycle takes."""
    plain_step_ms: float
    """Median over prompts of a plain step."""
    identical: int
    """Prompts whose output equals plain decoding token for token."""
    divergences: list[Divergence]
    batch_size: int = 1
    """Prompts decoded together; seconds are shares of the batch's."""
    others: dict[str, float] = field(default_factory=dict)
    """Tokens per second of what a user could take instead, on the same prompts."""
    per_prompt: list[PromptFigures] = field(default_factory=list)
    """In the order of the prompts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Return the figures that are logged, under `decode/`."""
        values = {
            "accept_len": self.accept_len,
            "accept_len_per_prompt": self.accept_len_per_prompt,
            "speedup": self.speedup,
            "tokens_per_s": self.tokens_per_s,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "overhead_ms": self.overhead_ms,
            "identical_share": self.identical / self.prompts,
            **{f"accept_rate/pos_{k}": rate for k, rate in enumerate(self.survival, start=1)},
            **{f"{name}_tokens_per_s": speed for name, speed in self.others.items()},
        }
        return {f"decode/{name}": value for name, value in values.items() if math.isfinite(value)}

    @property
    def lossless(self) -> str:
        """Say in words whether the output is the target's own."""
        if not self.divergences:
            return f"yes ({self.identical} of {self.prompts} outputs identical)"
        widest = max(d.logit_gap for d in self.divergences)
        verdict = "yes, up to rounding" if widest <= ROUNDING_GAP else "NO"
        return (
            f"{verdict} ({self.identical} of {self.prompts} outputs identical; the others part "
            f"where the logits of two tokens are within {widest:.3g})"
        )


ROUNDING_GAP = 0.5
"""Logits. Neighbouring bfloat16 numbers in 16..32 are 0.125 apart: a tie shows some such steps."""


def report(
    decoded: Sequence[Decoded],
    plain: Sequence[Decoded],
    divergences: Sequence[Divergence],
    block_size: int,
    batch_size: int = 1,
    others: dict[str, float] | None = None,
    prompts: Sequence[Sequence[int]] = (),
) -> DecodingReport:
    """Return the figures of prompts decoded speculatively and plainly, in the same order.

    Args:
        decoded: Speculative output per prompt.
        plain: Plain output per prompt.
        divergences: One per prompt whose outputs differ.
        block_size: K.
        batch_size: Prompts that were decoded together.
        others: Tokens per second of other decoders on the same prompts.
        prompts: Token ids of each prompt; without them there are no figures per prompt.
    """
    cycles = [cycle for d in decoded for cycle in d.cycles]
    tokens, seconds = sum(len(d.tokens) for d in decoded), sum(d.total_s for d in decoded)
    plain_tokens, plain_seconds = sum(len(d.tokens) for d in plain), sum(d.total_s for d in plain)
    survival = [
        _ratio(sum(c.accepted >= k for c in cycles), sum(c.drafted >= k for c in cycles))
        for k in range(1, block_size)
    ]
    return DecodingReport(
        prompts=len(decoded),
        block_size=block_size,
        cycles=len(cycles),
        accept_len=_ratio(sum(c.committed for c in cycles), len(cycles)),
        accept_len_per_prompt=_mean([d.accept_len for d in decoded if d.cycles]),
        survival=survival,
        conditional=[
            _ratio(s, before) for s, before in zip(survival, [1.0, *survival[:-1]], strict=True)
        ],
        marginal=marginal_acceptance(decoded, block_size),
        accepted_histogram=[sum(c.accepted == n for c in cycles) for n in range(block_size)],
        tokens_per_s=_ratio(tokens, seconds),
        plain_tokens_per_s=_ratio(plain_tokens, plain_seconds),
        speedup=_ratio(tokens * plain_seconds, seconds * plain_tokens),
        speedup_per_prompt=[
            _ratio(len(d.tokens) * p.total_s, d.total_s * len(p.tokens))
            for d, p in zip(decoded, plain, strict=True)
        ],
        prefill_ms=_median([1e3 * d.prefill_s for d in decoded]),
        draft_ms=_median([1e3 * d.draft_s / len(d.cycles) for d in decoded if d.cycles]),
        verify_ms=_median([1e3 * d.verify_s / len(d.cycles) for d in decoded if d.cycles]),
        overhead_ms=_median([1e3 * _overhead(d) / len(d.cycles) for d in decoded if d.cycles]),
        plain_step_ms=_median([1e3 * p.verify_s / len(p.cycles) for p in plain if p.cycles]),
        identical=len(decoded) - len(divergences),
        divergences=list(divergences),
        batch_size=batch_size,
        others=others or {},
        per_prompt=[
            _prompt_figures(*one, block_size)
            for one in zip(prompts, decoded, plain, strict=bool(prompts))
        ],
    )


def prompt_hash(ids: Sequence[int]) -> str:
    """Return a short name of a prompt's token ids.

    >>> prompt_hash([1, 2]) == prompt_hash([1, 2]) != prompt_hash([12])
    True
    """
    return sha256(" ".join(map(str, ids)).encode()).hexdigest()[:12]


def _prompt_figures(
    ids: Sequence[int], d: Decoded, plain: Decoded, block_size: int
) -> PromptFigures:
    accepted, drafted = [c.accepted for c in d.cycles], [c.drafted for c in d.cycles]
    return PromptFigures(
        prompt=prompt_hash(ids),
        tokens=len(d.tokens),
        cycles=len(d.cycles),
        committed=sum(c.committed for c in d.cycles),
        accepted_histogram=[accepted.count(n) for n in range(block_size)],
        drafted_histogram=[drafted.count(n) for n in range(block_size)],
        seconds=d.total_s,
        draft_seconds=d.draft_s,
        verify_seconds=d.verify_s,
        plain_tokens=len(plain.tokens),
        plain_seconds=plain.total_s,
        speedup=_ratio(len(d.tokens) * plain.total_s, d.total_s * len(plain.tokens)),
    )


def marginal_acceptance(decoded: Sequence[Decoded], block_size: int) -> list[float]:
    """Return how often draft k alone was right, `[K-1]`, judged by what the output became.

    Unlike survival it does not ask whether the drafts before were right; places beyond the output's
    end are not counted. NaN where nothing was.
    """
    right, scored = [0] * (block_size - 1), [0] * (block_size - 1)
    for d in decoded:
        at = 1
        for cycle in d.cycles:
            for k, (draft, token) in enumerate(zip(cycle.drafts, d.tokens[at:], strict=False)):
                right[k] += draft == token
                scored[k] += 1
            at += cycle.committed
    return [_ratio(r, n) for r, n in zip(right, scored, strict=True)]


def _overhead(d: Decoded) -> float:
    return d.total_s - d.prefill_s - d.draft_s - d.verify_s


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _mean(values: list[float]) -> float:
    return fmean(values) if values else math.nan


def _median(values: list[float]) -> float:
    return median(values) if values else math.nan
