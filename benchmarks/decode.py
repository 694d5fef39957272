"""Decoding speed as ratios of one run: plain, our loop, transformers' native DFlash loop.

    python benchmarks/decode.py --ckpt runs/quickstart/d3-k8-g4-t5-s0/version_0

All with the same weights and the same held-out prompts, interleaved prompt by prompt, medians over
prompts; run it alone on the machine. Also: what a cycle costs against its two forwards measured
bare, and a batch of 8 against a batch of 1.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from dflash_lightning.data.datamodule import default_cache_dir
from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.data.sources import WordProblems
from dflash_lightning.decoding.cost import Cost, measure_cost
from dflash_lightning.decoding.evaluate import divergence
from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Cycle, Decoded
from dflash_lightning.decoding.proposer import DrafterProposer, decoding_copy
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.runs import load_run
from dflash_lightning.target import Target


def main(ckpt: str, prompts: int = 16, max_new_tokens: int = 96, out: str | None = None) -> None:
    """Measure decoding.

    Args:
        ckpt: A run's folder, its drafter folder, or a .ckpt file.
        prompts: Held-out word problems to decode.
        max_new_tokens: Longest output, in tokens.
        out: Write the figures here as JSON.
    """
    target, trained = load_run(ckpt, default_cache_dir())
    drafter = decoding_copy(trained, target.dtype)
    asked = word_problems(target, prompts)
    proposer = DrafterProposer(drafter, target)
    full_head = DrafterProposer(without_draft_vocab(drafter), target)
    native = native_drafter(drafter)
    runs: dict[str, list[Decoded]] = {"plain": [], "ours": [], "ours, full head": [], "native": []}
    for name in runs:
        run(name, target, asked[:1], proposer, full_head, native, 8)
    costs: list[Cost] = []
    for prompt in tqdm(asked, desc="decoding at batch 1"):
        for name, found in runs.items():
            found += run(name, target, [prompt], proposer, full_head, native, max_new_tokens)
        costs.append(measure_cost(target, proposer, prompt))
    batches = {8: [], 1: []}
    for start in tqdm(range(0, len(asked), 8), desc="decoding at batch 8"):
        batch = asked[start : start + 8]
        batches[8] += decode(target, batch, proposer, max_new_tokens)
        for prompt in batch:
            batches[1] += decode(target, [prompt], proposer, max_new_tokens)
    ours = runs["ours"]
    draft_ms, verify_ms = median(c.draft_ms for c in costs), median(c.verify_ms for c in costs)
    expected = median(c.speedup(accept_len(ours)) for c in costs)
    cycle_ms = median(1e3 * (d.total_s - d.prefill_s) / len(d.cycles) for d in ours if d.cycles)
    speeds = {name: speed(found) for name, found in runs.items()}
    pairs = list(zip(asked, runs["ours, full head"], runs["native"], strict=True))
    same = sum(
        [c.committed for c in a.cycles] == [c.committed for c in b.cycles] for _, a, b in pairs
    )
    parted = [divergence(target, prompt, a.tokens, b.tokens) for prompt, a, b in pairs]
    figures = {
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype),
        "prompts": len(asked),
        "tokens_per_s": speeds,
        "accept_len": {name: accept_len(found) for name, found in runs.items() if name != "plain"},
        "speedup over plain": speeds["ours"] / speeds["plain"],
        "speedup by the cost model": expected,
        "ours over native": speeds["ours"] / speeds["native"],
        "ours with full head over native": speeds["ours, full head"] / speeds["native"],
        "prompts with the same accepted counts as native (both full head)": same,
        "logit gaps where outputs part from native": [gap for _, gap in filter(None, parted)],
        "batch 8 over batch 1": speed(batches[8]) / speed(batches[1]),
        "cycle_ms": cycle_ms,
        "bare draft_ms": draft_ms,
        "bare verify_ms": verify_ms,
        "cycle over bare forwards": cycle_ms / (draft_ms + verify_ms),
    }
    text = json.dumps(figures, indent=1)
    if out is not None:
        Path(out).write_text(text + "\n")
    print(text)


def run(
    name: str,
    target: Target,
    asked: list[Tensor],
    proposer: DrafterProposer,
    full_head: DrafterProposer,
    native: Any,
    count: int,
) -> list[Decoded]:
    if name == "native":
        return [native_loop(target, native, prompt, count) for prompt in asked]
    proposers = {"plain": None, "ours": proposer, "ours, full head": full_head}
    return decode(target, asked, proposers[name], count)


def native_loop(target: Target, native: Any, prompt: Tensor, count: int) -> Decoded:
    """Decode with transformers' loop; committed tokens per cycle are read off its bookkeeping."""
    from transformers.generation.candidate_generator import (
        DFlashTokenCandidateGenerator as Generator,
    )

    matches: list[int] = []
    own = Generator.update_candidate_strategy

    def record(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        matches.append(int(num_matches))
        own(self, input_ids, scores, num_matches)

    config = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=0,
        speculation_type="dflash",
    )
    Generator.update_candidate_strategy = record
    try:
        start = time.perf_counter()
        with torch.no_grad():
            ids = target.model.generate(
                prompt[None], generation_config=config, assistant_model=native
            )
        seconds = time.perf_counter() - start
    finally:
        Generator.update_candidate_strategy = own
    cycles = [Cycle(0, n, n + 1) for n in matches[1:]]
    return Decoded(ids[0, prompt.numel() :].tolist(), cycles, total_s=seconds)


def native_drafter(drafter: Drafter) -> MuseGlimmerAssistantModel:
    """Return transformers' drafter with the same weights."""
    config = drafter.config
    same = [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
        *("block_size", "mask_token_id", "target_layer_ids"),
    ]
    model = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in same},
            rope_parameters=dict(config.rope_parameters or {}),
            layer_types=["full_attention"] * config.num_hidden_layers,
        )
    )
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    weights = {names.get(k, k): v for k, v in drafter.state_dict().items() if k != "draft_ids"}
    model.load_state_dict(weights, strict=True)
    return model.to(drafter.dtype).eval()


def without_draft_vocab(drafter: Drafter) -> Drafter:
    """Return the drafter with the target's whole head."""
    config = DrafterConfig.from_dict({**drafter.config.to_dict(), "draft_vocab_size": None})
    full = Drafter(config).to(drafter.dtype)
    full.load_state_dict({k: v for k, v in drafter.state_dict().items() if k != "draft_ids"})
    return full.eval().requires_grad_(False)


def word_problems(target: Target, count: int) -> list[Tensor]:
    source = WordProblems(num_train=1, num_val=1, num_test=count)
    assert target.tokenizer is not None
    found = list(source.stream("test"))
    return [torch.tensor(prompt_ids(target.tokenizer, p.messages)) for p in found]


def counts(decoded: Decoded) -> list[int]:
    return [cycle.committed for cycle in decoded.cycles]


def speed(found: list[Decoded]) -> float:
    return sum(len(d.tokens) for d in found) / sum(d.total_s for d in found)


def accept_len(found: list[Decoded]) -> float:
    cycles = [c for d in found for c in d.cycles]
    return sum(c.committed for c in cycles) / len(cycles)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
