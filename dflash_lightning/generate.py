"""`generate`: decode prompts with a trained drafter, streaming what the target commits.

python -m dflash_lightning generate --ckpt runs/quickstart/d3-k8-g4-t5-s0/version_0 --prompt "..."
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.datamodule import default_cache_dir
from dflash_lightning.data.prompts import jsonl_prompts
from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.decoding.loop import Decoded, decode
from dflash_lightning.decoding.proposer import DrafterProposer, decoding_copy
from dflash_lightning.decoding.sampling import Sampling
from dflash_lightning.errors import UserError
from dflash_lightning.runs import load_run
from dflash_lightning.target import Target

GREEN, PLAIN = "\033[32m", "\033[0m"


def generate(
    ckpt: str,
    prompt: str | None = None,
    file: str | None = None,
    out: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    rule: Literal["match", "rejection"] = "match",
    seed: int = 0,
    block_size: int | None = None,
    longer: bool = False,
    stop: list[str] | None = None,
    batch_size: int = 8,
    compare: bool = False,
    raw: bool = False,
    color: Literal["auto", "always", "never"] = "auto",
    cache_dir: str | None = None,
) -> None:
    """Decode with a trained drafter; the target verifies every token.

    One prompt streams to the terminal, accepted drafts in green; a JSONL file of prompts is decoded in
    batches, one result a line.

    Args:
        ckpt: A run's folder, its drafter folder, or a .ckpt file.
        prompt: What the user says; without it, standard input is read.
        file: JSONL of prompts ({"prompt": "..."} or {"messages": [...]}) instead of one prompt.
        out: Write the results of `file` here instead of to standard output.
        max_new_tokens: Longest output, in tokens.
        temperature: 0 is greedy.
        top_k: Keep the k most probable tokens.
        top_p: Keep the most probable tokens that together have at least this probability.
        repetition_penalty: Push down tokens that occurred; 1 is off.
        rule: How drafts are accepted when sampling: `match` (drafter's argmax against the target's sample)
            or `rejection` (drafter's sample, with probability min(1, p/q)); both are lossless.
        seed: Prompt i draws from seed + i.
        block_size: Block size to decode with; null takes the trained one.
        longer: Permit a block size beyond the trained one.
        stop: Tokens that end the output besides the target's own; each must be one token.
        batch_size: Prompts of `file` decoded together.
        compare: Decode plainly too, and say how much faster the drafter is.
        raw: Take prompts as they are, without the chat template.
        color: Whether accepted drafts are coloured; `auto` does so on a terminal.
        cache_dir: Where converted targets lie; null takes $DFLASH_CACHE or ~/.cache/dflash_lightning.
    """
    if batch_size < 1:
        raise UserError(f"batch_size: needs at least 1, got {batch_size}")
    if file is not None and prompt is not None:
        raise UserError("--prompt and --file exclude each other: give one of them")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, rule)
    target, drafter = load_run(ckpt, Path(cache_dir) if cache_dir else default_cache_dir())
    proposer = DrafterProposer(decoding_copy(drafter, target.dtype), target, block_size, longer)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_ids": target.stop_ids | stop_tokens(_tokenizer(target), stop or []),
        "sampling": sampling,
    }
    if file is not None:
        prompts = [_ids(target, messages, raw) for messages in _messages(file)]
        with open(out, "w") if out else _standard_output() as stream:
            _decode_file(target, proposer, prompts, batch_size, seed, compare, options, stream)
        return
    text = sys.stdin.read() if prompt is None else prompt
    messages = [{"role": "user", "content": text}]
    _decode_one(target, proposer, _ids(target, messages, raw), seed, compare, color, options)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> frozenset[int]:
    """Return the ids of stop strings.

    Raises:
        UserError: A string is not one token of the target.
    """
    found = set()
    for text in stops:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UserError(f"--stop: {text!r} is {len(ids)} tokens of this target, it must be one")
        found.add(int(ids[0]))
    return frozenset(found)


class Stream:
    """Writes committed tokens as text, accepted drafts in colour; holds back unfinished characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, colored: bool) -> None:
        self.tokenizer, self.out, self.colored = tokenizer, out, colored
        self.ids: list[int] = []
        self.written = 0

    def commit(self, _index: int, tokens: list[int], accepted: int) -> None:
        """Write newly committed tokens, of which the first `accepted` were drafts."""
        self._write(tokens[:accepted], GREEN)
        self._write(tokens[accepted:], "")

    def _write(self, tokens: list[int], color: str) -> None:
        self.ids += tokens
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return
        new, self.written = text[self.written :], max(self.written, len(text))
        self.out.write(f"{color}{new}{PLAIN}" if color and self.colored and new else new)
        self.out.flush()


def _decode_one(
    target: Target,
    proposer: DrafterProposer,
    ids: Tensor,
    seed: int,
    compare: bool,
    color: str,
    options: dict[str, Any],
) -> None:
    colored = color == "always" or (color == "auto" and sys.stdout.isatty())
    stream = Stream(_tokenizer(target), sys.stdout, colored)
    try:
        [decoded] = decode(target, [ids], proposer, seed=seed, on_commit=stream.commit, **options)
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted after {len(stream.ids)} tokens\n")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(summary(decoded) + "\n")
    if compare:
        [plain] = decode(target, [ids], None, seed=seed, **options)
        same = "the same text" if plain.tokens == decoded.tokens else "another text"
        sys.stderr.write(
            f"plain decoding: {len(plain.tokens)} tokens, {_speed(plain):.1f} tokens/s, {same}; "
            f"speedup {_speed(decoded) / _speed(plain):.2f} x\n"
        )


def _decode_file(
    target: Target,
    proposer: DrafterProposer,
    prompts: list[Tensor],
    batch_size: int,
    seed: int,
    compare: bool,
    options: dict[str, Any],
    stream: TextIO,
) -> None:
    everything: list[Decoded] = []
    plain: list[Decoded] = []
    try:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            found = decode(target, batch, proposer, seed=seed + start, **options)
            for decoded in found:
                stream.write(json.dumps(_row(target, decoded)) + "\n")
            stream.flush()
            everything += found
            if compare:
                plain += decode(target, batch, None, seed=seed + start, **options)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted after {len(everything)} of {len(prompts)} prompts\n")
    tokens = sum(len(d.tokens) for d in everything)
    seconds = sum(d.total_s for d in everything)
    cycles = [c for d in everything for c in d.cycles]
    if not cycles:
        return
    length = sum(c.committed for c in cycles) / len(cycles)
    line = f"{len(everything)} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s, accept length {length:.2f}"
    if plain:
        slow = sum(len(d.tokens) for d in plain) / sum(d.total_s for d in plain)
        line += f"; plain decoding {slow:.1f} tokens/s, speedup {tokens / seconds / slow:.2f} x"
    sys.stderr.write(line + "\n")


def summary(decoded: Decoded) -> str:
    """Return the line under a generated text."""
    return (
        f"{len(decoded.tokens)} tokens in {decoded.total_s:.1f} s: {_speed(decoded):.1f} tokens/s, "
        f"accept length {decoded.accept_len:.2f} over {len(decoded.cycles)} cycles"
    )


def _row(target: Target, decoded: Decoded) -> dict[str, Any]:
    return {
        "text": _tokenizer(target).decode(decoded.tokens, skip_special_tokens=True),
        "token_ids": decoded.tokens,
        "accept_len": round(decoded.accept_len, 4) if decoded.cycles else None,
        "cycles": len(decoded.cycles),
    }


def _speed(decoded: Decoded) -> float:
    return len(decoded.tokens) / decoded.total_s


def _ids(target: Target, messages: list[dict[str, str]], raw: bool) -> Tensor:
    tokenizer = _tokenizer(target)
    text = messages[-1]["content"]
    if not text.strip():
        raise UserError("the prompt is empty: it needs at least one token")
    if raw or tokenizer.chat_template is None:
        return torch.tensor(tokenizer(text).input_ids, dtype=torch.int64)
    return torch.tensor(prompt_ids(tokenizer, messages), dtype=torch.int64)


def _messages(file: str) -> Iterator[list[dict[str, str]]]:
    for prompt in jsonl_prompts(file):
        messages = list(prompt.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UserError(f"{prompt.source}: the chat has no user turn to answer")
        yield messages


def _tokenizer(target: Target) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise UserError("the target has no tokenizer")
    return target.tokenizer


class _standard_output:
    def __enter__(self) -> TextIO:
        return sys.stdout

    def __exit__(self, *_: Any) -> None:
        sys.stdout.flush()
