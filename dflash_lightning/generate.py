"""`generate`: decode prompts with a trained drafter, streaming what the target commits.

python -m dflash_lightning generate --ckpt runs/quickstart/d3-k8-g4-t5-s0/version_0 --prompt "..."
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from dflash_lightning.errors import UserError


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
    stop: list[str] | str | None = None,
    batch_size: int = 8,
    compare: bool = False,
    raw: bool = False,
    color: Literal["auto", "always", "never"] = "auto",
    target: str | None = None,
    device: str | None = None,
    cache_dir: str | None = None,
) -> None:
    """Decode with a trained drafter; the target verifies every token.

    One prompt streams to standard output, accepted drafts in green on a terminal. A JSONL file of
    prompts is decoded in batches, one result a line. A summary goes to standard error. Ctrl-C keeps
    what was made (a result cut short says "finish_reason": "interrupted") and ends with status 130.

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
        rule: How drafts are accepted when sampling: `match` (the drafter's argmax against the
            target's sample) or `rejection` (the drafter's sample, with probability min(1, p/q));
            both are lossless.
        seed: Prompt i draws from seed + i.
        block_size: Block size to decode with; null takes the trained one.
        longer: Permit a block size beyond the trained one.
        stop: A token, or [list, of, tokens], that ends the output besides the target's own.
        batch_size: Prompts of `file` decoded together.
        compare: Decode plainly too, and say how much faster the drafter is.
        raw: Take prompts as they are, without the chat template.
        color: Whether accepted drafts are coloured; `auto` does so on a terminal.
        target: Where the target lies now; null takes the name the drafter was trained with.
        device: As in torch, such as cuda:1; null takes a GPU if there is one.
        cache_dir: Where converted targets lie; null takes $DFLASH_CACHE or
            ~/.cache/dflash_lightning.
    """
    if batch_size < 1:
        raise UserError(f"batch_size: needs at least 1, got {batch_size}")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: needs at least 1, got {max_new_tokens}")
    _check_files(prompt, file, out)
    from dflash_lightning.data.datamodule import default_cache_dir
    from dflash_lightning.data.prompts import Prompt
    from dflash_lightning.decoding.proposer import (
        DrafterProposer,
        check_block_size,
        decoding_copy,
    )
    from dflash_lightning.decoding.sampling import Sampling
    from dflash_lightning.requests import file_requests, request, stop_tokens
    from dflash_lightning.runs import load_drafter, target_of, usable_device
    from dflash_lightning.streaming import Decoder, decode_file, stream_one
    from dflash_lightning.target import load_target

    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, rule)
    place = usable_device(device)
    drafter = load_drafter(ckpt)
    check_block_size(drafter, block_size, longer)
    spec = target_of(drafter, Path(cache_dir) if cache_dir else default_cache_dir(), target)
    stops = spec.stop_ids | stop_tokens(
        spec.tokenizer, [stop] if isinstance(stop, str) else stop or []
    )
    if file is not None:
        requests = file_requests(file, spec, max_new_tokens, raw)
    else:
        said = _standard_input() if prompt is None else prompt
        messages = ({"role": "user", "content": said},)
        requests = [request(Prompt("--prompt", messages), spec, max_new_tokens, raw)]
    loaded = load_target(spec, place)
    copied = decoding_copy(drafter.to(place), loaded.dtype)  # type: ignore[arg-type]
    proposer = DrafterProposer(copied, loaded, block_size, longer)
    decoder = Decoder(loaded, proposer, max_new_tokens, stops, sampling, seed)
    if file is None:
        stream_one(decoder, requests[0].ids, compare, _colored(color))
        return
    file_out = Path(out).expanduser().open("w", encoding="utf-8") if out else None
    with file_out or nullcontext(sys.stdout) as stream:
        decode_file(decoder, requests, batch_size, compare, stream)


def _check_files(prompt: str | None, file: str | None, out: str | None) -> None:
    if file is not None and prompt is not None:
        raise UserError("--prompt and --file exclude each other: give one of them")
    if file is not None and not Path(file).expanduser().is_file():
        raise UserError(f"--file: no such file: {file}")
    if out is None:
        return
    if file is None:
        raise UserError("--out goes with --file; a single prompt streams to standard output")
    path = Path(out).expanduser()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--out: can't write {out}: its folder must exist and be writable")
    if path.exists() and path.samefile(Path(file).expanduser()):
        raise UserError(f"--out: {out} is the file of the prompts")


def _standard_input() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("reading the prompt from standard input (Ctrl-D ends it)\n")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text") from error


def _colored(color: str) -> bool:
    if color == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return color == "always"
