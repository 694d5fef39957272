"""Tests of the drafter: its configuration, its rotary positions, its weights on disk, and its
attention.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import ARCHITECTURES, tiny_config, tiny_drafter, tiny_target
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_lightning.drafter.attention import (
    Attend,
    Visibility,
    chunked_attention,
    cut_blocks,
    dense_attention,
    dense_mask,
    flex_mask,
    full_attention,
    training_attention,
)
from dflash_lightning.drafter.config import (
    DrafterConfig,
    architecture_differences,
    drafter_config,
    rope_of,
)
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.rope import inverse_frequencies, rotate, rotation
from dflash_lightning.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rotary_frequencies_are_the_targets(architecture: str) -> None:
    """Base, partial factor and head size come over; a Gemma drafter takes those of full
    attention.
    """
    target = tiny_target(architecture)
    embedding = target.model.base_model.rotary_emb
    expected = getattr(embedding, "inv_freq", None)
    if expected is None:
        expected = embedding.full_attention_inv_freq
    frequencies, factor = inverse_frequencies(tiny_config(target), CPU)
    assert torch.equal(frequencies, expected)
    assert factor == 1.0


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_config_carries_the_rope_base(base: float) -> None:
    """It has no default: a drafter trained with 10000 against 1e6 looks healthy and
    drafts badly.
    """
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": base})
    assert rope_of(config)["rope_theta"] == base
    _, second, *_ = inverse_frequencies(_with_rope(rope_of(config)), CPU)[0]
    assert float(second) == pytest.approx(base**-0.25)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        SimpleNamespace(model_type="x", rope_parameters=None),
        SimpleNamespace(model_type="x", rope_parameters={"rope_type": "default"}),
        SimpleNamespace(model_type="x"),
        SimpleNamespace(model_type="x", rope_parameters={"full_attention": {}}),
    ],
)
def test_a_target_without_rope_base_is_refused(config: Any) -> None:
    with pytest.raises(UserError, match="rope_theta") as caught:
        rope_of(config)
    assert "\n" not in str(caught.value)


def test_gemma_takes_the_base_of_full_attention() -> None:
    """Gemma 3 has a base for sliding and one for full layers; the drafter attends fully."""
    config = Gemma3TextConfig(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    assert rope_of(config) == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"block_size": 1}, "model.block_size"), ({"num_layers": 0}, "model.num_layers")],
)
def test_sizes_out_of_range_are_refused(options: dict[str, int], key: str) -> None:
    with pytest.raises(UserError, match=key):
        tiny_config(tiny_target(), **options)


def test_depth_and_taps_are_independent() -> None:
    """Tying them would confound every depth ablation."""
    target = tiny_target(taps=(1, 2, 3, 4, 5))
    drafter = tiny_drafter(target, num_layers=1)
    assert len(drafter.layers) == 1
    assert drafter.config.num_taps == 5
    assert drafter.fc.weight.shape == (32, 5 * 32)


def test_differences_name_key_and_values() -> None:
    """Equal configurations have none; what only people read doesn't count."""
    target = tiny_target()
    saved, asked = tiny_config(target), tiny_config(target, block_size=8)
    assert architecture_differences(saved, asked) == ["block_size: 4 -> 8"]
    asked.block_size, asked.target_name = 4, "elsewhere"
    assert architecture_differences(saved, asked) == []


def test_head_size_need_not_divide_the_width() -> None:
    """Qwen3's heads are wider than hidden size / heads."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    built = drafter_config(
        config, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=[1]
    )
    attention = Drafter(built).layers[0].self_attn
    assert attention.q_proj.weight.shape == (64, 32)
    assert attention.k_proj.weight.shape == (16, 32)


# ---- rotary positions ----------------------------------------------------------------------------


def _with_rope(rope: dict[str, Any], head_dim: int = 8) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=rope,
        max_position_embeddings=256,
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotation_is_transformers_own_for_every_rope_type(rope: dict[str, Any]) -> None:
    """Cos and sin of a target with that type, to the last bit, the scale of YaRN included."""
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=dict(rope),
    )
    positions = torch.tensor([[0, 1, 7, 100, 255]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rotation(positions, _with_rope(rope_of(config)))
    assert torch.equal(ours[0][:, 0], cos)
    assert torch.equal(ours[1][:, 0], sin)


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    """GPT-NeoX rotates a quarter of each head; so must its drafter, here and when it is served."""
    config = tiny_config(tiny_target("gpt_neox"))
    assert config.rope_parameters is not None
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    by = rotation(torch.arange(5)[None], config)
    assert by[0].shape[-1] == 2
    heads = torch.randn(1, 4, 5, 8)
    turned = rotate(heads, by, torch.float32)
    assert torch.equal(turned[..., 2:], heads[..., 2:])
    assert (turned[:, :, 1:, :2] != heads[:, :, 1:, :2]).any(-1).all()


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    """The definition of RoPE: norms stay, and a product depends on the difference of positions."""
    config = _with_rope({"rope_type": "default", "rope_theta": 1e4})
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float32)

    def product(at: int, other: int) -> Tensor:
        turned = [
            rotate(x, rotation(torch.tensor([[p]]), config), torch.float32)
            for x, p in ((q, at), (k, other))
        ]
        torch.testing.assert_close(turned[0].norm(), q.norm())
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 1), product(103, 101), rtol=1e-4, atol=1e-4)
    assert abs(float(product(3, 1) - product(3, 2))) > 1e-3


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_rotation_stays_float32_under_a_cast(cast: torch.dtype) -> None:
    """A rounded frequency drifts with the position; Lightning's `bf16-true` casts every module."""
    drafter = tiny_drafter(tiny_target("qwen3"))
    positions = torch.arange(256)[None]
    before = rotation(positions, drafter.config)
    frequencies = inverse_frequencies(drafter.config, CPU)[0]
    drafter.to(cast)
    torch.set_default_dtype(cast)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            after = rotation(positions, drafter.config)
        cast_frequencies = inverse_frequencies(drafter.config, CPU)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(cast_frequencies, frequencies)
    assert after[0].dtype == after[1].dtype == cast_frequencies.dtype == torch.float32
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not [name for name, _ in drafter.named_buffers()]


def test_a_cast_drafter_stays_close_at_far_positions() -> None:
    """In bfloat16 the keys at position 250 are as close to float32 as those at position 0."""
    drafter = tiny_drafter(tiny_target("qwen3"))
    hidden = torch.randn(1, 1, 96).expand(1, 2, -1)
    positions = torch.tensor([[0, 250]])
    exact = drafter.context_key_values(hidden, positions)[0][0]
    rounded = drafter.bfloat16().context_key_values(hidden, positions)[0][0]
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - exact).detach().abs().amax(dim=(0, 1, 3))
    assert float(error[1]) < 3 * float(error[0])


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_state_dict_names_are_z_labs(draft_vocab: int | None) -> None:
    """No embedding, no head, no rotary buffer; the draft vocabulary only where there is one."""
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=draft_vocab)
    layer = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "self_attn.q_norm",
        "self_attn.k_norm",
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    ]
    names = {f"layers.{i}.{name}.weight" for i, name in itertools.product(range(2), layer)}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(drafter.state_dict()) == names | ({"draft_ids"} if draft_vocab else set())


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_saving_and_loading_keeps_every_bit(draft_vocab: int | None, tmp_path: Path) -> None:
    """Safetensors with the plain names, the whole configuration, and the draft vocabulary."""
    drafter = tiny_drafter(tiny_target("gpt_neox"), draft_vocab_size=draft_vocab)
    if draft_vocab:
        drafter.draft_ids.copy_(torch.randperm(96)[:draft_vocab].sort().values)
    drafter.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(drafter.state_dict())
    loaded = Drafter.from_pretrained(tmp_path)
    assert architecture_differences(drafter.config, loaded.config) == []
    assert loaded.config.rope_parameters == drafter.config.rope_parameters
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].dtype == value.dtype


def test_loading_keeps_the_saved_dtype(tmp_path: Path) -> None:
    """float32 master weights aren't rounded on the way back, bfloat16 ones aren't widened."""
    for dtype in (torch.float32, torch.bfloat16):
        tiny_drafter(tiny_target()).to(dtype).save_pretrained(tmp_path)
        assert Drafter.from_pretrained(tmp_path).dtype == dtype


# ---- forward -------------------------------------------------------------------------------------


def _block_output(drafter: Drafter, hidden: Tensor, noise: Tensor) -> Tensor:
    length, block = hidden.shape[1], noise.shape[1]
    context = drafter.context_key_values(hidden, torch.arange(length)[None])
    positions = torch.arange(length, length + block)[None]
    return drafter(noise, positions, context, full_attention)


def test_feature_norm_is_wired() -> None:
    """RMSNorm after a bias-free fc: the size of the features doesn't matter, their
    direction does.
    """
    drafter = tiny_drafter(tiny_target())
    hidden, noise = torch.randn(1, 6, 96), torch.randn(1, 4, 32)
    expected = _block_output(drafter, hidden, noise)
    torch.testing.assert_close(
        _block_output(drafter, hidden * 100, noise), expected, rtol=1e-4, atol=1e-4
    )
    assert (_block_output(drafter, -hidden, noise) - expected).abs().max() > 1e-2
    drafter.hidden_norm.weight.data *= 2
    assert (_block_output(drafter, hidden, noise) - expected).abs().max() > 1e-2


def test_context_passes_no_input_norm() -> None:
    """The context's keys and values skip `input_layernorm`, which is for the block."""
    drafter = tiny_drafter(tiny_target())
    hidden = torch.randn(1, 6, 96)
    positions = torch.arange(6)[None]
    before = drafter.context_key_values(hidden, positions)
    for layer in drafter.layers:
        layer.input_layernorm.weight.data *= 3
    after = drafter.context_key_values(hidden, positions)
    assert all(torch.equal(b, a) for b, a in zip(_flat(before), _flat(after), strict=True))


def _flat(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def test_each_layer_projects_the_context_itself() -> None:
    """KV injection: changing one layer's `k_proj` changes that layer's context keys only."""
    drafter = tiny_drafter(tiny_target(), num_layers=3)
    hidden, positions = torch.randn(1, 6, 96), torch.arange(6)[None]
    before = drafter.context_key_values(hidden, positions)
    drafter.layers[1].self_attn.k_proj.weight.data.normal_()
    after = drafter.context_key_values(hidden, positions)
    changed = [not torch.equal(b, a) for b, a in zip(_flat(before), _flat(after), strict=True)]
    assert changed == [False, False, True, False, False, False]


def test_context_and_block_order_shows_in_the_rotation() -> None:
    """The same features at other positions are another context (RoPE reaches context and block)."""
    drafter = tiny_drafter(tiny_target())
    hidden, noise = torch.randn(1, 6, 96), torch.randn(1, 4, 32)
    context = drafter.context_key_values(hidden, torch.arange(6)[None])
    outputs = [
        drafter(noise, torch.arange(start, start + 4)[None], context, full_attention)
        for start in (6, 7)
    ]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


# ---- masks ---------------------------------------------------------------------------------------

ANCHORS = {
    "ascending": [[0, 2, 5, 9, 10], [1, 2, 3, 4, 11]],
    "overlapping": [[3, 4, 5, 5, 6], [0, 0, 1, 1, 2]],
    "unsorted": [[9, 0, 4, 11, 2], [7, 7, 1, 0, 10]],
    "dead tail": [[2, 6, 0, 0, 0], [11, 0, 0, 0, 0]],
    "all dead": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}
LENGTH = 12


def slow_mask(anchors: Tensor, block_size: int, length: int) -> Tensor:
    """Return the contract, pair by pair."""
    batch, blocks = anchors.shape
    mask = torch.zeros(batch, blocks * block_size, length + blocks * block_size, dtype=torch.bool)
    for b in range(batch):
        for q in range(blocks * block_size):
            for p in range(length):
                mask[b, q, p] = p < int(anchors[b, q // block_size])
            for other in range(blocks * block_size):
                mask[b, q, length + other] = q // block_size == other // block_size
    return mask


@pytest.mark.parametrize("name", ANCHORS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_dense_mask_is_the_contract(name: str, block_size: int) -> None:
    anchors = torch.tensor(ANCHORS[name])
    expected = slow_mask(anchors, block_size, LENGTH)
    assert torch.equal(dense_mask(Visibility(anchors, block_size, LENGTH)), expected)


@pytest.mark.parametrize("name", ANCHORS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_flex_mask_equals_the_dense_one_and_is_false_outside(name: str, block_size: int) -> None:
    """Flex rounds lengths up to its tiles: beyond the end nothing is seen and nothing read."""
    anchors = torch.tensor(ANCHORS[name])
    queries = anchors.shape[1] * block_size
    keys = LENGTH + queries
    q = torch.arange(queries + 128)[None, :, None]
    kv = torch.arange(keys + 128)[None, None, :]
    b = torch.arange(2)[:, None, None]
    visible = flex_mask(Visibility(anchors, block_size, LENGTH))(b, torch.tensor(0), q, kv)
    assert torch.equal(
        visible[:, :queries, :keys], dense_mask(Visibility(anchors, block_size, LENGTH))
    )
    assert not visible[:, queries:].any()
    assert not visible[:, :, keys:].any()


# ---- attention -----------------------------------------------------------------------------------


def _inputs(blocks: int, block_size: int, seed: int = 0) -> list[Tensor]:
    """Return q, k_context, v_context, k_block, v_block with 4 query and 2 key heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, blocks * block_size), (2, LENGTH), (2, LENGTH)] + [(2, blocks * block_size)] * 2
    return [
        torch.randn(2, heads, length, 8, generator=generator, requires_grad=True)
        for heads, length in shapes
    ]


def _outcome(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all five inputs."""
    output = attend(*inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def slow_attention(anchors: Tensor, block_size: int, inputs: list[Tensor]) -> Tensor:
    """Return attention written out with softmax over the visible keys of each query."""
    q, k_context, v_context, k_block, v_block = inputs
    keys = torch.cat([k_context, k_block], 2).repeat_interleave(2, dim=1)
    values = torch.cat([v_context, v_block], 2).repeat_interleave(2, dim=1)
    scores = q @ keys.transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = ~slow_mask(anchors, block_size, LENGTH)[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize("name", ANCHORS)
def test_dense_attention_is_softmax_over_the_visible(name: str) -> None:
    anchors = torch.tensor(ANCHORS[name])
    inputs = _inputs(5, 4)
    output = dense_attention(Visibility(anchors, 4, LENGTH))(*inputs)
    torch.testing.assert_close(output, slow_attention(anchors, 4, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ANCHORS)
@pytest.mark.parametrize("queries_per_chunk", [1, 4, 8, 12, 128])
def test_chunked_attention_is_dense_with_gradients(name: str, queries_per_chunk: int) -> None:
    """Whatever the anchors' order and the chunk: same output, same gradient of every input."""
    anchors = torch.tensor(ANCHORS[name])
    inputs = _inputs(5, 4)
    expected = _outcome(dense_attention(Visibility(anchors, 4, LENGTH)), inputs)
    found = _outcome(chunked_attention(Visibility(anchors, 4, LENGTH), queries_per_chunk), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_chunked_attention_skips_context_nobody_sees() -> None:
    """Ascending anchors are fast: NaN beyond a chunk's last anchor is never even read."""
    inputs = [x.detach().clone() for x in _inputs(5, 4)]
    for context in inputs[1:3]:
        context[:, :, 5:] = float("nan")
    anchors = torch.tensor([[0, 2, 5, 9, 10], [1, 2, 3, 4, 11]])
    output = chunked_attention(Visibility(anchors, 4, LENGTH), 4)(*inputs)
    assert output[:, :, :12].isfinite().all()
    assert output[:, :, 16:].isnan().any()


@pytest.mark.parametrize(
    ("documents", "wanted", "expected"),
    [
        ([10], 4, [4, 6]),
        ([5, 5], 4, [5, 5]),
        ([2, 2, 2, 2, 2], 4, [2, 2, 2, 2, 2]),
        ([1] * 9, 4, [2, 2, 2, 2, 1]),
        ([9, 3], 4, [4, 5, 3]),
    ],
    ids=str,
)
def test_chunks_end_with_documents(documents: list[int], wanted: int, expected: list[int]) -> None:
    """A chunk of two documents would score the pairs of both; a tiny one is all overhead."""
    starts = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None] * 7
    assert cut_blocks(starts, wanted) == expected


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ANCHORS)
def test_flex_attention_is_dense(name: str) -> None:
    """torch runs flex on CPU uncompiled, forward only: enough to check the mask in its hands."""
    anchors = torch.tensor(ANCHORS[name])
    q, k_context, v_context, k_block, v_block = [x.detach() for x in _inputs(5, 4)]
    mask = create_block_mask(
        flex_mask(Visibility(anchors, 4, LENGTH)),
        2,
        None,
        20,
        LENGTH + 20,
        device="cpu",
        BLOCK_SIZE=16,
    )
    keys, values = torch.cat([k_context, k_block], 2), torch.cat([v_context, v_block], 2)
    output = torch_flex(q, keys, values, block_mask=mask, enable_gqa=True)
    expected = dense_attention(Visibility(anchors, 4, LENGTH))(
        q, k_context, v_context, k_block, v_block
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_auto_attention_has_a_backward_on_cpu() -> None:
    """Flex has none there, so auto must not take it."""
    anchors = torch.tensor(ANCHORS["dead tail"])
    inputs = _inputs(5, 4)
    expected = _outcome(training_attention("dense", Visibility(anchors, 4, LENGTH)), inputs)
    for ours, theirs in zip(
        _outcome(training_attention("auto", Visibility(anchors, 4, LENGTH)), inputs),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["all dead", "dead tail"])
@pytest.mark.parametrize("attention", ["dense", "chunked"])
def test_dead_blocks_give_finite_outputs_and_gradients(name: str, attention: Any) -> None:
    """A dead block keeps its own slots, so no softmax is empty and no NaN poisons the batch."""
    anchors = torch.tensor(ANCHORS[name])
    drafter = tiny_drafter(tiny_target())
    hidden = torch.randn(2, LENGTH, 96)
    context = drafter.context_key_values(hidden, torch.arange(LENGTH).expand(2, -1))
    positions = (anchors[:, :, None] + torch.arange(4)).flatten(1)
    attend = training_attention(attention, Visibility(anchors, 4, LENGTH))
    output = drafter(torch.randn(2, 20, 32), positions, context, attend)
    assert output.isfinite().all()
    alive = (anchors > 0).repeat_interleave(4, dim=1)[..., None]
    (output * alive).sum().backward()
    for name_, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name_


def test_dead_blocks_send_no_gradient_to_the_context() -> None:
    """Weight 0 times a finite number: only live blocks train `fc`."""
    drafter = tiny_drafter(tiny_target())
    hidden = torch.randn(1, LENGTH, 96, requires_grad=True)
    anchors = torch.tensor([[3, 0, 0]])
    context = drafter.context_key_values(hidden, torch.arange(LENGTH)[None])
    attend = training_attention("chunked", Visibility(anchors, 4, LENGTH))
    positions = (anchors[:, :, None] + torch.arange(4)).flatten(1)
    output = drafter(torch.randn(1, 12, 32), positions, context, attend)
    output[:, :4].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[:, :3].abs().amax(-1).gt(0).all()
    assert (hidden.grad[:, 3:] == 0).all()
