"""The embedded default target: that its conversion is right, and that decoding it is lossless."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from reference import decode_plain, speculate

from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.decoding.evaluate import divergence
from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.drafter.config import drafter_config
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_files import EMBEDDED_TARGET, _package_file
from dflash_lightning.target_spec import TargetConfig, inspect_target

pytestmark = pytest.mark.slow

QUESTION = "Tom has 12 apples and eats 5 of them. How many apples are left?"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def target(cache: Path) -> Target:
    """The target in float32."""
    return load_target(inspect_target(TargetConfig(dtype="float32"), cache))


def asked(target: Target, question: str) -> torch.Tensor:
    assert target.tokenizer is not None
    return torch.tensor(prompt_ids(target.tokenizer, [{"role": "user", "content": question}]))


def test_weights_are_the_files_own(target: Target) -> None:
    """Against the GGUF read by hand: q and k rows are in llama.cpp's rotary order there."""
    tensors = {t.name: t for t in GGUFReader(_package_file(EMBEDDED_TARGET)).tensors}

    def raw(name: str) -> torch.Tensor:
        values = dequantize(tensors[name].data, tensors[name].tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16().float()

    layer = target.model.model.layers[7]
    assert torch.equal(target.model.model.embed_tokens.weight, raw("token_embd.weight"))
    assert torch.equal(layer.self_attn.v_proj.weight, raw("blk.7.attn_v.weight"))
    assert torch.equal(layer.mlp.down_proj.weight, raw("blk.7.ffn_down.weight"))
    stored = raw("blk.7.attn_k.weight")
    ordered = stored.view(3, 32, 2, 576).transpose(1, 2).reshape(192, 576)
    assert torch.equal(layer.self_attn.k_proj.weight, ordered)
    assert not torch.equal(stored, ordered)


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(target: Target) -> None:
    assert target.tokenizer is not None
    assert target.tokenizer.tokenize("It is 1234.") == ["It", "Ġis", "Ġ", "1", "2", "3", "4", "."]
    ids = target.tokenizer("<|im_start|>user<empty_output>", add_special_tokens=False).input_ids
    assert ids[0] == 1
    assert ids[-1] == target.mask_token_id == 16
    assert target.stop_ids == {2}
    assert target.target_layer_ids == [1, 8, 14, 20, 27]


def test_it_knows_what_it_should(target: Target) -> None:
    """A wrong rotary order or a lost norm still gives fluent text, but no facts."""
    answer = decode_plain(target, asked(target, "What is the capital of France?"), 24)
    assert "Paris" in target.text(answer.tokens)


def random_drafter(target: Target) -> Drafter:
    torch.manual_seed(0)
    return Drafter(
        drafter_config(
            target.config,
            num_layers=2,
            block_size=8,
            mask_token_id=target.mask_token_id,
            target_layer_ids=target.target_layer_ids,
            target_fingerprint=target.fingerprint,
        )
    ).eval()


def test_lossless_in_float32(target: Target) -> None:
    prompt = asked(target, QUESTION)
    proposer = DrafterProposer(random_drafter(target), target)
    expected = target.model.generate(prompt[None], do_sample=False, max_new_tokens=40)
    assert speculate(target, proposer, prompt, 40).tokens == expected[0, len(prompt) :].tolist()


def test_bfloat16_parts_only_at_ties(cache: Path) -> None:
    """A verify of 8 tokens and a one-token step differ in rounding, by no more than that."""
    target = load_target(inspect_target(TargetConfig(), cache))
    proposer = DrafterProposer(random_drafter(target).bfloat16(), target)
    for question in (QUESTION, "Why is the sky blue?", "Write three lines about rain."):
        prompt = asked(target, question)
        ours = speculate(target, proposer, prompt, 48).tokens
        parted = divergence(target, prompt, ours, decode_plain(target, prompt, 48).tokens)
        assert parted is None or parted[1] <= 0.5
