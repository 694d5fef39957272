"""The target answers the prompts, greedily, once.

Answers are kept in shards that are written whole or not at all.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from dflash_lightning.target import Target

log = logging.getLogger(__name__)


def cache_key(*parts: object) -> str:
    """Return 16 hex digits that change with any of the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def answer_prompts(
    load_target: Callable[[], Target],
    fingerprint: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    cache_dir: Path,
    batch_size: int = 192,
) -> list[list[int]]:
    """Return the target's greedy answer to each prompt; made now if the cache lacks it.

    Args:
        load_target: Called only if an answer is missing.
        fingerprint: Identity of the target, for the cache's key.
        prompts: Token ids of each prompt.
        max_new_tokens: Longest answer, in tokens.
        cache_dir: Answers lie in `cache_dir/answers/KEY/`; a killed run goes on where it stopped.
        batch_size: Prompts generated together, sorted by length.

    Returns:
        Answer ids without padding; the stop token is included where the target gave one.
    """
    folder = (
        cache_dir
        / "answers"
        / cache_key(fingerprint, max_new_tokens, batch_size, [list(p) for p in prompts])
    )
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    shards = {
        folder / f"shard_{n:05d}.json": order[start : start + batch_size]
        for n, start in enumerate(range(0, len(order), batch_size))
    }
    missing = [path for path in shards if not path.is_file()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        target = load_target()
        total = sum(len(shards[path]) for path in missing)
        log.info(
            "the target answers %d prompts (up to %d tokens each), kept in %s",
            total,
            max_new_tokens,
            folder,
        )
        with tqdm(total=total, desc="target answers prompts", unit="prompt") as bar:
            for path in missing:
                answers = _generate(target, [prompts[i] for i in shards[path]], max_new_tokens)
                _write_whole(path, json.dumps(answers))
                bar.update(len(answers))
    found: dict[int, list[int]] = {}
    for path, indices in shards.items():
        found.update(zip(indices, json.loads(path.read_text()), strict=True))
    return [found[i] for i in range(len(prompts))]


def _generate(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    length = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, length - len(prompt) :] = 1
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=sorted(target.stop_ids) or None,
        pad_token_id=0,
        cache_implementation="static"
        if getattr(target.model, "_can_compile_fullgraph", False)
        else None,
        disable_compile=True,
    )
    own_config = target.model.generation_config
    target.model.generation_config = GenerationConfig()  # its beams or banned tokens are not greedy
    try:
        output = target.model.generate(
            ids.to(target.device), attention_mask=mask.to(target.device), generation_config=config
        )
    finally:
        target.model.generation_config = own_config
    return [_until_stop(row, target.stop_ids) for row in output[:, length:].tolist()]


def _until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    for n, token in enumerate(ids):
        if token in stop_ids:
            return ids[: n + 1]
    return ids


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)
