"""Against an independent implementation: transformers' own DFlash drafter and its own DFlash
decoding loop.
"""

import itertools
from typing import Any

import pytest
import torch
from reference import PROMPT, every_block, greedy, speculate, token_ids, training_module, varied
from tiny import tiny_drafter, tiny_target
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.drafter.attention import full_attention
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.target import Target

COUNT = 40


def oracle_of(drafter: Drafter) -> MuseGlimmerAssistantModel:
    """Return transformers' drafter with our weights, by two renamings and nothing else."""
    config = drafter.config
    same = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
    )
    oracle = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in same},
            rope_parameters=dict(config.rope_parameters or {}),
            layer_types=["full_attention"] * config.num_hidden_layers,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    ).eval()
    renamed = {
        name.replace("fc.", "encoder.fc.", 1).replace("hidden_norm.", "encoder.output_norm_enc.", 1)
        if name.startswith(("fc.", "hidden_norm."))
        else name: value
        for name, value in drafter.state_dict().items()
    }
    oracle.load_state_dict(renamed, strict=True)
    return oracle


@pytest.mark.parametrize("architecture", ["llama_tied", "llama_untied", "qwen2", "qwen3"])
@pytest.mark.parametrize("length", [1, 9, 40])
@torch.no_grad()
def test_hidden_states_are_transformers_own(architecture: str, length: int) -> None:
    """Our weights give the same block in transformers' drafter, under the target's own
    RoPE base.
    """
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, num_layers=3, block_size=6)
    oracle = oracle_of(drafter)
    hidden = target.forward(token_ids(length)[None]).hidden
    assert hidden is not None
    noise = target.embed(torch.tensor([[7] + [target.mask_token_id] * 5]))
    context = drafter.context_key_values(hidden, torch.arange(length)[None])
    ours = drafter(noise, torch.arange(length, length + 6)[None], context, full_attention)
    theirs = oracle(noise_embeds=noise, context_hidden_states=hidden).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_oracle_tells_rope_bases_apart() -> None:
    """A wrong base would show: 10000 against 500000 is another block."""
    target = tiny_target("llama_untied")
    drafter = tiny_drafter(target)
    hidden = target.forward(token_ids(30)[None]).hidden
    assert hidden is not None
    noise = target.embed(torch.tensor([[7, 95, 95, 95]]))
    with torch.no_grad():
        right = oracle_of(drafter)(noise_embeds=noise, context_hidden_states=hidden)
        assert drafter.config.rope_parameters is not None
        drafter.config.rope_parameters["rope_theta"] = 1e4
        wrong = oracle_of(drafter)(noise_embeds=noise, context_hidden_states=hidden)
    assert (right.last_hidden_state - wrong.last_hidden_state).abs().max() > 1e-3


def half_trained(target: Target, block_size: int, rows: list[Tensor], steps: int) -> Drafter:
    """Return a drafter overfitted for some steps on what the target says: it hits often, and misses
    often.
    """
    torch.manual_seed(0)
    drafter = tiny_drafter(target, block_size=block_size)
    module = training_module(target, drafter.train())
    batch = every_block(rows, block_size, target.mask_token_id)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        output, denominator, _ = module.block_loss(batch)
        optimizer.zero_grad()
        (output.numerator / denominator).backward()
        optimizer.step()
    return drafter.eval()


def transformers_cycles(
    target: Target, oracle: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """Return the tokens of transformers' DFlash generation and the tokens committed in each of its
    cycles.
    """
    lengths: list[int] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def record(
        self: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        lengths.append(input_ids.shape[1])
        return original(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record)
    output = target.model.generate(
        PROMPT[None],
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        assistant_model=oracle,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=2,
    )
    edges = [*lengths[1:], output.shape[1]]
    committed = [after - before for before, after in itertools.pairwise(edges)]
    return output[0, len(PROMPT) :].tolist(), committed


@pytest.mark.parametrize("architecture", ["llama_untied", "qwen3", "mistral_sliding"])
@pytest.mark.parametrize("block_size", [4, 8])
def test_decoding_accepts_what_transformers_accepts(
    architecture: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tokens and the same number of tokens in every cycle, with a drafter that hits
    sometimes.
    """
    target = tiny_target(architecture)
    expected = varied(greedy(target, PROMPT, COUNT))
    row = torch.cat([PROMPT, torch.tensor(expected)])
    drafter = half_trained(target, block_size, [row], steps=15)
    proposer = DrafterProposer(drafter, target)
    decoded = speculate(target, proposer, PROMPT, COUNT, stop_ids=())
    committed = [cycle.committed for cycle in decoded.cycles]
    assert decoded.tokens == expected
    assert len(set(committed)) >= 3, committed
    tokens, theirs = transformers_cycles(target, oracle_of(drafter), COUNT, monkeypatch)
    assert tokens == expected
    assert committed == theirs
