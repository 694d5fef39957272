"""Drafter layers that start from target layers: what is copied, and what it computes."""

import logging

import pytest
import torch
from tiny import tiny_config, tiny_drafter, tiny_target
from torch.nn.functional import scaled_dot_product_attention

from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.rope import rotation
from dflash_lightning.errors import UserError
from dflash_lightning.initialisation import copy_target_layers
from dflash_lightning.target import Target

PROJECTIONS = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
MLP = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
LAYER_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
COPIED = {
    "llama_tied": PROJECTIONS | MLP | LAYER_NORMS,
    "llama_untied": PROJECTIONS | MLP | LAYER_NORMS,
    "qwen2": PROJECTIONS | MLP | LAYER_NORMS,
    "qwen3": PROJECTIONS | MLP | LAYER_NORMS | HEAD_NORMS,
    "mistral_sliding": PROJECTIONS | MLP | LAYER_NORMS,
    # gelu, and a post_attention_layernorm that stands before the residual sum
    "gemma3_softcap": PROJECTIONS | HEAD_NORMS | {"input_layernorm.weight"},
}


def spread(target: Target) -> None:
    """Give the target's norms weights that differ, so that a copy shows."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in target.model.named_parameters():
        if "norm" in name:
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data.add_(0.5 * noise)


def changed(drafter: Drafter, before: dict[str, torch.Tensor], layer: int) -> set[str]:
    return {
        name
        for name, weight in drafter.layers[layer].named_parameters()
        if not torch.equal(weight, before[f"layers.{layer}.{name}"])
    }


@pytest.mark.parametrize("architecture", COPIED)
def test_what_fits_is_copied_and_the_log_says_it(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target(architecture)
    spread(target)
    drafter = tiny_drafter(target)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    with caplog.at_level(logging.INFO, logger="dflash_lightning"):
        copy_target_layers(drafter, target, [6, 1])
    for number, layer_id in enumerate([6, 1]):
        assert changed(drafter, before, number) == COPIED[architecture]
        source = target.decoder_layer(layer_id)
        for name in COPIED[architecture] & (PROJECTIONS | MLP):
            copy = drafter.layers[number].get_parameter(name)
            assert torch.equal(copy, source.get_parameter(name)), name
    other = {n for n in before if not n.startswith("layers.")}
    assert all(torch.equal(before[n], drafter.get_parameter(n)) for n in other)
    said = [r.getMessage() for r in caplog.records if "init_from_layers" in r.getMessage()]
    assert len(said) == 2
    copied, _, kept = said[0].partition("; not copied: ")
    assert "drafter layer 0 from target layer 6" in copied
    for name in PROJECTIONS | MLP | LAYER_NORMS | HEAD_NORMS:
        short = name.removesuffix(".weight").removeprefix("self_attn.")
        assert (short in copied) == (name in COPIED[architecture]), short
        assert (short in kept) != (name in COPIED[architecture]) or architecture == "qwen2"
    if architecture == "qwen2":
        assert "q_proj.bias (the drafter has none)" in kept


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_softcap"])
def test_copied_norms_do_what_the_targets_do(architecture: str) -> None:
    """Gemma scales by 1 + weight: the effect is copied, not the number."""
    target = tiny_target(architecture)
    spread(target)
    drafter = tiny_drafter(target)
    copy_target_layers(drafter, target, [3, 0])
    source, copy = target.decoder_layer(3), drafter.layers[0]
    for name in COPIED[architecture] & (LAYER_NORMS | HEAD_NORMS):
        path = name.removesuffix(".weight")
        x = torch.randn(5, copy.get_parameter(name).shape[0])
        expected, found = source.get_submodule(path)(x), copy.get_submodule(path)(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_fully_copied_layer_computes_what_the_targets_layer_does() -> None:
    """Qwen3 has all that the drafter has: without context and causally, they are the same layer."""
    target = tiny_target("qwen3")
    spread(target)
    drafter = tiny_drafter(target)
    copy_target_layers(drafter, target, [4, 2])
    ids = torch.randint(3, 90, (1, 11), generator=torch.Generator().manual_seed(0))
    before, after = target.features(ids, None, [3, 4])
    none = torch.zeros(1, 2, 0, 8)

    def causal(q, _k, _v, k, v):  # type: ignore[no-untyped-def]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    by = rotation(torch.arange(11)[None], drafter.config)
    with torch.no_grad():
        found = drafter.layers[0](before, by, (none, none), causal)
    torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)


def test_another_width_of_mlp_leaves_the_mlp_alone(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, intermediate_size=20)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    with caplog.at_level(logging.INFO, logger="dflash_lightning"):
        copy_target_layers(drafter, target, [0, 0])
    assert not changed(drafter, before, 0) & MLP
    assert changed(drafter, before, 0) >= PROJECTIONS
    assert "mlp.gate_proj ([48, 32] is not [20, 32])" in caplog.text


def test_a_target_of_which_nothing_fits_is_refused() -> None:
    target = tiny_target("gpt_neox")
    with pytest.raises(
        UserError, match="init_from_layers: nothing of a GPTNeoXLayer fits"
    ) as error:
        copy_target_layers(Drafter(tiny_config(target)), target, [0, 1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layer_ids", [[0, 8], [-1, 3]])
def test_layers_that_are_not_there_are_refused(layer_ids: list[int]) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    with pytest.raises(UserError, match=r"init_from_layers: (8|-1) is not within 0\.\.7"):
        copy_target_layers(drafter, target, layer_ids)
    assert not changed(drafter, before, 0)


def test_last_is_as_many_of_the_last_layers() -> None:
    target = tiny_target()
    by_name, by_ids = tiny_drafter(target), tiny_drafter(target)
    copy_target_layers(by_name, target, "last")
    copy_target_layers(by_ids, target, [6, 7])
    for ours, theirs in zip(by_name.parameters(), by_ids.parameters(), strict=True):
        assert torch.equal(ours, theirs)
