"""Decoding that shows what is committed as it is committed, and keeps it when interrupted."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor
from tqdm import tqdm

from dflash_lightning.decoding.evaluate import divergence
from dflash_lightning.decoding.loop import OnCommit, decode
from dflash_lightning.decoding.outcome import Cycle, Decoded
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.sampling import Sampling
from dflash_lightning.requests import Request
from dflash_lightning.target import Target

GREEN, PLAIN = "\033[32m", "\033[0m"


@dataclass(frozen=True)
class Decoder:
    """A target, who drafts for it, and how tokens are chosen and ended."""

    target: Target
    proposer: Proposer
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    seed: int

    def decode(
        self, prompts: Sequence[Tensor], first: int = 0, on_commit: OnCommit | None = None
    ) -> list[Decoded]:
        """Decode prompts `[P]`, of which the first is number `first` of all."""
        return self._decode(self.proposer, prompts, first, on_commit)

    def plain(self, prompts: Sequence[Tensor], first: int = 0) -> list[Decoded]:
        """Decode the same way without drafts, one token a step."""
        return self._decode(None, prompts, first, None)

    def warm_up(self, prompt: Tensor) -> None:
        """Decode a little in both ways, so that a comparison counts no first calls."""
        for proposer in (self.proposer, None):
            decode(self.target, [prompt], proposer, min(8, self.max_new_tokens), ())

    def text(self, tokens: list[int]) -> str:
        """Return generated tokens as text, special tokens left out and nothing tidied up."""
        assert self.target.tokenizer is not None
        return str(
            self.target.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def finish_reason(self, tokens: list[int]) -> str:
        """Return why an output ended: `stop`, `length` or `interrupted`."""
        if tokens and tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(tokens) >= self.max_new_tokens else "interrupted"

    def _decode(
        self,
        proposer: Proposer | None,
        prompts: Sequence[Tensor],
        first: int,
        on_commit: OnCommit | None,
    ) -> list[Decoded]:
        return decode(
            self.target,
            prompts,
            proposer,
            self.max_new_tokens,
            self.stop_ids,
            self.sampling,
            self.seed + first,
            on_commit,
        )


class Stream:
    """Writes tokens as text as they come, accepted drafts in colour.

    Characters that are not complete yet are held back.

    Args:
        text: From all tokens so far to text.
        out: Where the text goes.
        colored: Whether accepted drafts are green.
    """

    def __init__(self, text: Callable[[list[int]], str], out: TextIO, colored: bool) -> None:
        self.text, self.out, self.colored = text, out, colored
        self.tokens: list[int] = []
        self.written = 0

    def commit(self, tokens: list[int], accepted: int) -> None:
        """Take new tokens, of which the first `accepted` were drafts."""
        for piece, color in ((tokens[:accepted], GREEN), (tokens[accepted:], "")):
            if piece:
                self.tokens += piece
                self._write(self.text(self.tokens).rstrip("\ufffd"), color)

    def close(self) -> None:
        """Write what was held back, and end the line."""
        self._write(self.text(self.tokens), "")
        self.out.write("\n")
        self.out.flush()

    def _write(self, text: str, color: str) -> None:
        new, self.written = text[self.written :], max(self.written, len(text))
        if new:
            self.out.write(f"{color}{new}{PLAIN}" if color and self.colored else new)
            self.out.flush()


class Progress:
    """What a running batch has committed, so that an interrupt loses nothing."""

    def __init__(self, count: int) -> None:
        self.decoded = [Decoded() for _ in range(count)]

    def commit(self, index: int, tokens: list[int], accepted: int) -> None:
        """Note new tokens of prompt `index`; its first ones come from the prefill."""
        decoded = self.decoded[index]
        if decoded.tokens:
            decoded.cycles.append(Cycle(len(tokens), accepted, len(tokens)))
        decoded.tokens += tokens


def stream_one(decoder: Decoder, prompt: Tensor, compare: bool, colored: bool) -> None:
    """Decode one prompt `[P]` to standard output, with a summary on standard error.

    Raises:
        KeyboardInterrupt: After what was made has been shown and summed up.
    """
    if compare:
        decoder.warm_up(prompt)
    began, progress = time.perf_counter(), Progress(1)
    stream = Stream(decoder.text, sys.stdout, colored)

    def commit(index: int, tokens: list[int], accepted: int) -> None:
        progress.commit(index, tokens, accepted)
        stream.commit(tokens, accepted)

    try:
        found = decoder.decode([prompt], on_commit=commit)
    except KeyboardInterrupt:
        stream.close()
        _say(f"interrupted: {summary(progress.decoded, time.perf_counter() - began)}")
        raise
    stream.close()
    legend = " (green: accepted drafts)" if colored else ""
    _say(summary(found, _seconds(found)) + legend)
    if compare:
        plain = decoder.plain([prompt])
        _say(_comparison(found, plain) + _difference(decoder, prompt, found[0], plain[0]))


def decode_file(
    decoder: Decoder, requests: Sequence[Request], batch_size: int, compare: bool, out: TextIO
) -> None:
    """Decode requests batch by batch, one JSON object a line, with a summary on standard error.

    Raises:
        KeyboardInterrupt: After everything decoded so far has been written.
    """
    began, progress = time.perf_counter(), Progress(0)
    found: list[Decoded] = []
    plain: list[Decoded] = []
    if compare:
        decoder.warm_up(requests[0].ids)
    try:
        with tqdm(total=len(requests), unit="prompt", disable=None, leave=False) as bar:
            for start in range(0, len(requests), batch_size):
                batch = [request.ids for request in requests[start : start + batch_size]]
                progress = Progress(len(batch))
                decoded = decoder.decode(batch, start, progress.commit)
                _write_rows(decoder, requests[start:], decoded, out)
                found += decoded
                progress = Progress(0)
                if compare:
                    plain += decoder.plain(batch, start)
                bar.update(len(batch))
    except KeyboardInterrupt:
        _write_rows(decoder, requests[len(found) :], progress.decoded, out)
        found += [decoded for decoded in progress.decoded if decoded.tokens]
        elapsed = time.perf_counter() - began
        _say(f"interrupted, {len(requests)} prompts asked: {summary(found, elapsed)}")
        raise
    _say(summary(found, _seconds(found)))
    if compare:
        same = sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))
        equal = f"; the same tokens for {same} of {len(plain)}" if decoder.sampling.greedy else ""
        _say(_comparison(found, plain) + equal)


def summary(decoded: Sequence[Decoded], seconds: float) -> str:
    """Return the line under generated texts; the accept length is pooled over all cycles."""
    count = sum(len(d.tokens) for d in decoded)
    cycles = [cycle.committed for d in decoded for cycle in d.cycles]
    line = f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s"
    if cycles:
        line += f", accept length {sum(cycles) / len(cycles):.2f} over {len(cycles)} cycles"
    return line if len(decoded) == 1 else f"{len(decoded)} prompts, {line}"


def _write_rows(
    decoder: Decoder, requests: Sequence[Request], decoded: Sequence[Decoded], out: TextIO
) -> None:
    """Write a line for each output that has begun, all at once; requests may be more."""
    rows = [
        row(decoder, request, found)
        for request, found in zip(requests, decoded, strict=False)
        if found.tokens
    ]
    out.write("".join(json.dumps(row) + "\n" for row in rows))
    out.flush()


def row(decoder: Decoder, request: Request, decoded: Decoded) -> dict[str, Any]:
    """Return one result as plain types."""
    return {
        "source": request.source,
        "prompt": decoder.target.text(request.ids),
        "text": decoder.text(decoded.tokens),
        "token_ids": decoded.tokens,
        "finish_reason": decoder.finish_reason(decoded.tokens),
        "accept_len": decoded.accept_len if decoded.cycles else None,
        "cycles": len(decoded.cycles),
    }


def _comparison(decoded: Sequence[Decoded], plain: Sequence[Decoded]) -> str:
    count, seconds = sum(len(d.tokens) for d in plain), _seconds(plain)
    ours = sum(len(d.tokens) for d in decoded) / _seconds(decoded)
    speed = count / seconds
    return (
        f"plain decoding: {count} tokens in {seconds:.1f} s: {speed:.1f} tokens/s; "
        f"speedup {ours / speed:.2f} x"
    )


def _difference(decoder: Decoder, prompt: Tensor, ours: Decoded, plain: Decoded) -> str:
    if not decoder.sampling.greedy:
        return ""
    found = divergence(decoder.target, prompt, ours.tokens, plain.tokens)
    if found is None:
        return "; the same tokens"
    return f"; differs from token {found[0]} on (the target's two logits lie {found[1]:.2g} apart)"


def _seconds(decoded: Sequence[Decoded]) -> float:
    return sum(d.total_s for d in decoded)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
