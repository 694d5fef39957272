"""Every drafter that the axes can make: it drafts as it was trained, and decodes losslessly."""

from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from reference import EveryAnchor, every_block, greedy, observe, token_ids, training_module, varied
from tiny import tiny_drafter, tiny_target
from torch import Tensor

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.blocks import Batch, BlockCollator, shown_slots
from dflash_lightning.data.samples import Sample
from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.proposer import DrafterProposer, TokenWalk
from dflash_lightning.decoding.sampling import Sampling
from dflash_lightning.drafter.attention import (
    Attend,
    Visibility,
    chunked_attention,
    dense_attention,
    dense_mask,
    flex_mask,
)
from dflash_lightning.drafter.axes import Axes, noise_of
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

K = 4
PROMPTS = [token_ids(length, 40 + i) for i, length in enumerate([4, 19, 1, 13])]
GRID = [
    Axes(),
    Axes(fusion="per_layer"),
    Axes(injection="input"),
    Axes(injection="none"),
    Axes(drafting="autoregressive"),
    Axes(drafting="autoregressive", injection="input"),
    Axes(drafting="autoregressive", fusion="per_layer", sliding_window=6),
    Axes(drafting="autoregressive", injection="input", sliding_window=4),
    Axes(drafting="autoregressive", injection="input", sliding_window=7, sliding_layers=[1]),
    Axes(denoising_steps=3),
    Axes(denoising_steps=2, fusion="per_layer", sliding_window=5),
    Axes(denoising_steps=2, injection="input", sliding_window=6, sliding_layers=[0]),
    Axes(denoising_steps=3, injection="none"),
    Axes(in_block="causal"),
    Axes(in_block="causal", injection="input", sliding_window=5),
    Axes(in_block="causal", injection="none", markov_rank=3),
    Axes(in_block="causal", fusion="per_layer", markov_rank=3, sliding_window=8),
    Axes(sliding_window=5),
    Axes(sliding_window=4, sliding_layers=[1]),
    Axes(injection="none", sliding_window=5, sliding_layers=[0]),
    Axes(markov_rank=4),
    Axes(markov_rank=4, injection="input", sliding_window=5),
    Axes("per_layer", in_block="causal", markov_rank=2, sliding_window=6, sliding_layers=[0]),
    Axes(injection="none", sliding_window=6),
]
LAYERS = 2


def name(axes: Axes) -> str:
    return axes.short_name or "dflash"


@cache
def continuations() -> list[list[int]]:
    """Return the target's greedy output of every prompt."""
    target = tiny_target()
    found = [greedy(target, prompt, 14) for prompt in PROMPTS]
    varied(max(found, key=lambda tokens: len(set(tokens))))
    return found


every_system = pytest.mark.parametrize("axes", GRID, ids=name)


def drafter_of(target: Target, axes: Axes, **changes: object) -> Drafter:
    axes.check(LAYERS, K)
    return tiny_drafter(target, **{"num_layers": LAYERS, "block_size": K, "axes": axes, **changes})


def batch_of(rows: list[Tensor], axes: Axes, mask_token_id: int) -> Batch:
    """A block at every position; the slots hold what they do in validation."""
    batch = every_block(rows, K, mask_token_id)
    if axes.drafting == "block":
        return batch
    samples = [Sample(row, torch.ones(len(row), dtype=torch.bool)) for row in rows]
    collate = BlockCollator(EveryAnchor(max(map(len, rows)) - 1), K, mask_token_id, 0, "tokens")
    return collate([[(i, 0, sample, None)] for i, sample in enumerate(samples)])


def decoding_states(target: Target, drafter: Drafter, ids: Tensor, anchor: int) -> Tensor:
    """Return the states `[K, H]` at one anchor, the context fed in uneven pieces; slot k says
    token k.
    """
    proposer = DrafterProposer(drafter, target)
    hidden = target.forward(ids[None]).hidden
    assert hidden is not None
    cuts = [anchor // 3, anchor - anchor // 2]
    for piece, tokens in zip(
        hidden[:, :anchor].tensor_split(cuts, dim=1), ids[:anchor].tensor_split(cuts), strict=True
    ):
        observe(proposer, piece, tokens)
    if not drafter.config.autoregressive:
        return proposer.block_hidden(proposer.block_ids(ids[anchor : anchor + 1]))[0]
    walk = TokenWalk(proposer)
    steps = [walk.step(token[None])[0] for token in ids[anchor : anchor + K - 1]]
    return torch.stack([torch.zeros_like(steps[0]), *steps])


def values(axes: Axes) -> list[tuple[str, object]]:
    """Return every axis with its value; numbers as whether they are set."""
    windowed = None if axes.sliding_window is None else axes.sliding_layers is None
    return [
        *((key, getattr(axes, key)) for key in ("fusion", "injection", "drafting", "in_block")),
        ("iterative", axes.denoising_steps > 1),
        ("markov", axes.markov_rank is not None),
        ("window on all layers", windowed),
    ]


def test_the_grid_holds_every_two_values_that_go_together() -> None:
    possible = set()
    windows: list[tuple[int | None, list[int] | None]] = [(None, None), (6, None), (6, [1])]
    for fusion, injection, drafting, steps, in_block, window, rank in product(
        ("shared", "per_layer"),
        ("kv", "input", "none"),
        ("block", "autoregressive"),
        (1, 2),
        ("bidirectional", "causal"),
        windows,
        (None, 3),
    ):
        axes = Axes(fusion, injection, drafting, steps, in_block, *window, rank)  # type: ignore[arg-type]
        with suppress(UserError):
            possible |= set(combinations(values(axes.check(LAYERS, K)), 2))
    held = {pair for axes in GRID for pair in combinations(values(axes), 2)}
    assert possible == held


# ---- training is decoding ------------------------------------------------------------------------


@every_system
@pytest.mark.parametrize("attention", ["chunked", "dense"])
def test_training_states_are_decoding_states(axes: Axes, attention: str, tmp_path: Path) -> None:
    """Every anchor of a row in one batch beside another, the drafter saved and loaded between."""
    target = tiny_target()
    drafter = drafter_of(target, axes)
    ids, other = token_ids(17, seed=1), token_ids(21, seed=2)
    batch = batch_of([ids, other], axes, target.mask_token_id)
    with torch.no_grad():
        blocks = training_module(target, drafter, attention).block_hidden(batch)[0]
        drafter.save_pretrained(tmp_path)
        loaded = Drafter.from_pretrained(tmp_path).eval()
        assert {key: getattr(loaded.config, key) for key in asdict(axes)} == asdict(axes)
        for anchor in range(1, len(ids) - K):
            found = decoding_states(target, loaded, ids, anchor)
            torch.testing.assert_close(blocks[anchor], found, rtol=1e-5, atol=1e-5)
    assert (blocks[1:12, 1:] - blocks[:11, 1:]).abs().amax((1, 2)).min() > 1e-2


SHAPES = list(product((2, 3, 5), ((4,), (1, 3), (0, 1, 3, 5)), (None, 40)))
"""Depth, taps and draft vocabulary; each system meets one of them, each of them a system."""


@pytest.mark.parametrize("row", range(len(GRID)), ids=[name(axes) for axes in GRID])
def test_any_depth_and_taps_go_with_any_system(row: int) -> None:
    """Depth is independent of the taps: training is decoding, and that is lossless."""
    axes, (depth, taps, draft_vocab) = GRID[row], SHAPES[row % len(SHAPES)]
    target = tiny_target(taps=taps)
    drafter = drafter_of(target, axes, num_layers=depth, draft_vocab_size=draft_vocab)
    ids = token_ids(15, seed=4)
    batch = batch_of([ids], axes, target.mask_token_id)
    with torch.no_grad():
        blocks = training_module(target, drafter).block_hidden(batch)[0]
        for anchor in (1, 6, 10):
            found = decoding_states(target, drafter, ids, anchor)
            torch.testing.assert_close(blocks[anchor], found, rtol=1e-5, atol=1e-5)
    decoded = decode(target, PROMPTS, DrafterProposer(drafter, target), 12, ())
    assert [d.tokens for d in decoded] == [tokens[:12] for tokens in continuations()]


@every_system
@pytest.mark.parametrize("attention", ["chunked", "dense"])
def test_layers_that_are_run_again_give_the_same_gradients(axes: Axes, attention: str) -> None:
    """Each layer's pass over the blocks happens once more, in the backward pass."""
    target = tiny_target()
    drafter = drafter_of(target, axes).train()
    if (axes.injection, axes.drafting) == ("input", "autoregressive"):
        with pytest.raises(UserError, match=r"^model.gradient_checkpointing: .* leave it false$"):
            axes.check(LAYERS, K, gradient_checkpointing=True)
        return
    axes.check(LAYERS, K, gradient_checkpointing=True)
    batch = batch_of([token_ids(11, seed=1), token_ids(16, seed=2)], axes, target.mask_token_id)
    module = training_module(target, drafter, attention)
    found, passes = [], []
    for again in (False, True):
        drafter.gradient_checkpointing = again
        count = [0] * LAYERS
        hooks = [
            layer.register_forward_pre_hook(lambda *_, i=i, n=count: n.__setitem__(i, n[i] + 1))
            for i, layer in enumerate(drafter.layers)
        ]
        drafter.zero_grad()
        hidden = module.block_hidden(batch)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        found.append(
            {name: p.grad for name, p in drafter.named_parameters() if "markov" not in name}
        )
        passes.append(count)
        for hook in hooks:
            hook.remove()
    assert passes[1] == [n + 1 for n in passes[0]]
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, found[1][name]), name


@every_system
def test_context_behind_the_last_anchor_is_not_even_read(axes: Axes) -> None:
    """No number there can be seen, not even one that would spoil any sum it entered."""
    target = tiny_target()
    module = training_module(target, drafter_of(target, axes))
    ids = token_ids(13)
    batch = batch_of([ids], axes, target.mask_token_id)
    first = {
        key: getattr(batch, key)[:, :5]
        for key in ("anchor_positions", "block_keep_mask", "noise_ids", "position_ids")
    }
    hidden = target.forward(ids[None]).hidden
    assert hidden is not None
    spoilt = hidden.clone()
    spoilt[:, int(first["anchor_positions"].max()) :] = torch.nan
    with torch.no_grad():
        expected = module.block_hidden(batch._replace(target_hidden=hidden))[:, :5, 1:]
        found = module.block_hidden(batch._replace(target_hidden=spoilt, **first))[:, :, 1:]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_system
def test_a_block_sees_no_state_at_or_after_its_anchor(axes: Axes) -> None:
    """And, without injection, none at all; those before it reach it as far as its layers see."""
    target = tiny_target()
    module = training_module(target, drafter_of(target, axes))
    ids = token_ids(13)
    batch = batch_of([ids], axes, target.mask_token_id)
    hidden = target.forward(ids[None]).hidden
    assert hidden is not None
    windows = module.drafter.config.windows()
    reach = (
        sum(w or 99 for w in windows)
        if axes.injection == "input"
        else max(w or 99 for w in windows)
    )
    with torch.no_grad():
        before = module.block_hidden(batch._replace(target_hidden=hidden))[0, :, 1:]
        for position in range(len(ids)):
            changed = hidden.clone()
            changed[:, position] += torch.linspace(-3, 3, hidden.shape[-1])
            after = module.block_hidden(batch._replace(target_hidden=changed))[0, :, 1:]
            moved = (after - before).abs().amax(dim=-1)
            for anchor in range(len(ids) - 1):
                if position >= anchor or axes.injection == "none":
                    assert (moved[anchor] == 0).all(), (anchor, position)
                elif anchor - position < min(reach, 3):
                    assert moved[anchor].amax() > 1e-5, (anchor, position)
                elif anchor - position > reach:
                    assert (moved[anchor] == 0).all(), (anchor, position)


@every_system
def test_documents_of_one_row_do_not_see_each_other(axes: Axes) -> None:
    """Two documents packed into one row give the states that each gives alone."""
    target = tiny_target()
    module = training_module(target, drafter_of(target, axes))
    documents = [token_ids(9, seed=1), token_ids(12, seed=2)]
    samples = [Sample(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in documents]
    noise = "masked" if axes.drafting == "block" else "tokens"
    collate = BlockCollator(RandomAnchors(5), K, target.mask_token_id, 0, noise)
    with torch.no_grad():
        alone = [collate([[(i, 0, s, None)]]) for i, s in enumerate(samples)]
        states = [module.block_hidden(b)[0] for b in alone]
        packed = collate([[(i, 0, s, None) for i, s in enumerate(samples)]])
        both = module.block_hidden(packed)[0]
    expected = torch.cat([s[b.block_keep_mask[0]] for s, b in zip(states, alone, strict=True)])
    torch.testing.assert_close(both[packed.block_keep_mask[0]], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shown", [(1,), (2,), (1, 3), (2, 3)])
def test_partly_shown_blocks_are_the_passes_of_denoising(shown: tuple[int, ...]) -> None:
    """What the drafter sees in a later pass is what it was trained on."""
    target = tiny_target()
    drafter = drafter_of(target, Axes(denoising_steps=3))
    ids = token_ids(14, seed=3)
    batch = every_block([ids], K, target.mask_token_id)
    noise = batch.noise_ids.clone()
    for slot in shown:
        noise[0, :10, slot] = ids[slot : slot + 10]
    with torch.no_grad():
        blocks = training_module(target, drafter).block_hidden(batch._replace(noise_ids=noise))[0]
        for anchor in range(1, 10):
            proposer = DrafterProposer(drafter, target)
            hidden = target.forward(ids[None, :anchor]).hidden
            assert hidden is not None
            observe(proposer, hidden)
            found = proposer.block_hidden(noise[0, anchor : anchor + 1])[0]
            torch.testing.assert_close(blocks[anchor], found, rtol=1e-4, atol=1e-4)


# ---- decoding ------------------------------------------------------------------------------------


@every_system
def test_greedy_output_is_the_targets(axes: Axes) -> None:
    """In a batch of uneven prompts, cycle by cycle as alone; a draft vocabulary included.

    Every other prompt is decoded alone too, the others with the draft vocabulary.
    """
    target = tiny_target()
    for first, changes in enumerate(({}, {"draft_vocab_size": 40})):
        proposer = DrafterProposer(drafter_of(target, axes, **changes), target)
        found = decode(target, PROMPTS, proposer, 14, ())
        assert [d.tokens for d in found] == continuations()
        for prompt, together in zip(PROMPTS[first::2], found[first::2], strict=True):
            [alone] = decode(target, [prompt], proposer, 14, ())
            assert [(c.drafts[: c.drafted], c.accepted) for c in alone.cycles] == [
                (c.drafts[: c.drafted], c.accepted) for c in together.cycles
            ]


@pytest.mark.slow
@every_system
def test_a_drafter_that_knows_the_text_is_accepted(axes: Axes) -> None:
    """Trained on one text until it knows it, decoding accepts whole blocks: whatever training and
    decoding did differently would show here.
    """
    target = tiny_target()
    prompt = PROMPTS[0]
    text = torch.cat([prompt, torch.tensor(greedy(target, prompt, 24))])
    drafter = drafter_of(target, axes).train()
    module = training_module(target, drafter)
    samples = [Sample(text, torch.arange(len(text)) >= len(prompt))]
    collate = BlockCollator(
        RandomAnchors(30),
        K,
        target.mask_token_id,
        0,
        noise_of(axes.drafting, axes.denoising_steps),
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for epoch in range(120):
        output, denominator, _ = module.block_loss(collate([[(0, epoch, samples[0], None)]]))
        optimizer.zero_grad()
        (output.numerator / denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    found = decode(target, [prompt], DrafterProposer(drafter.eval(), target), 24, ())[0]
    assert found.tokens == text[len(prompt) :].tolist()
    assert found.accept_len > 3


@every_system
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_sampled_rows_are_their_prompts_alone(axes: Axes, rule: str) -> None:
    """Every other prompt for each rule."""
    target = tiny_target()
    proposer = DrafterProposer(drafter_of(target, axes), target)
    sampling = Sampling(1.0, repetition_penalty=1.3, rule=rule)  # type: ignore[arg-type]
    if rule == "rejection" and axes.denoising_steps > 1:
        with pytest.raises(UserError, match="out of order; take match"):
            decode(target, PROMPTS, proposer, 8, (), sampling)
        return
    found = decode(target, PROMPTS, proposer, 12, (), sampling, seed=3)
    for n in range(rule == "match", len(PROMPTS), 2):
        [alone] = decode(target, [PROMPTS[n]], proposer, 12, (), sampling, seed=3 + n)
        assert alone.tokens == found[n].tokens


def test_denoising_fixes_every_slot_once_and_the_surest_first() -> None:
    """K-1 = 3 slots in 2 passes: 1 in the first and 2 in the second, or the other way round."""
    target = tiny_target()
    proposer = DrafterProposer(drafter_of(target, Axes(denoising_steps=2)), target)
    seen: list[Tensor] = []
    own = proposer.block_hidden

    def watch(ids: Tensor) -> Tensor:
        seen.append(ids.clone())
        return own(ids)

    proposer.block_hidden = watch  # type: ignore[method-assign]
    hidden = target.forward(PROMPTS[1][None]).hidden
    assert hidden is not None
    observe(proposer, hidden)
    anchor = torch.tensor([7])
    drafts = proposer.propose(anchor, Sampling(), torch.zeros(1, K), None).tokens
    mask = target.mask_token_id
    assert [(ids[0] == mask).sum().item() for ids in seen] == [3, 2]
    probabilities = target.head(own(seen[0])[0, 1:]).softmax(-1)
    surest = int(probabilities.amax(-1).argmax())
    assert seen[1][0, 1 + surest] == probabilities[surest].argmax() == drafts[0, surest]
    assert (drafts != mask).all()


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 6])
def test_masks_follow_the_rule(causal: bool, window: int | None) -> None:
    """Against the rule written as a loop; chunked and flex against dense."""
    anchors, starts = (
        torch.tensor([[1, 3, 5, 9], [0, 2, 2, 8]]),
        torch.tensor([[0, 0, 4, 4], [0, 0, 1, 6]]),
    )
    length = 11
    sight = Visibility(anchors, K, length, starts, causal, window)
    mask = dense_mask(sight)
    for b in range(2):
        for q in range(4 * K):
            block, slot = divmod(q, K)
            anchor = int(anchors[b, block])
            for p in range(length):
                seen = int(starts[b, block]) <= p < anchor
                seen &= window is None or p > anchor + slot - window
                assert mask[b, q, p] == seen
            for other in range(4 * K):
                its_block, its_slot = divmod(other, K)
                seen = its_block == block and (not causal or its_slot <= slot)
                seen &= window is None or its_slot > slot - window
                assert mask[b, q, length + other] == seen
    inputs = [
        torch.randn(2, h, n, 8, requires_grad=True)
        for h, n in ((4, 4 * K), (2, length), (2, length), (2, 4 * K), (2, 4 * K))
    ]
    weights = torch.randn(2, 4, 4 * K, 8)

    def outcome(attend: Attend) -> list[Tensor]:
        output = attend(*inputs)
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    expected = outcome(dense_attention(sight))
    for size in (4, 8, 100):
        torch.testing.assert_close(
            outcome(chunked_attention(sight, size)), expected, rtol=1e-5, atol=1e-5
        )
    visible = flex_mask(sight)
    b, q, kv = torch.meshgrid(
        torch.arange(2), torch.arange(4 * K), torch.arange(length + 4 * K), indexing="ij"
    )
    assert torch.equal(visible(b, torch.tensor(0), q, kv), mask)


def test_shown_slots_leave_one_hidden_and_cover_every_share() -> None:
    shown = shown_slots(4000, K, torch.Generator().manual_seed(0))
    assert not shown[:, 0].any()
    counts = shown.sum(dim=1)
    assert counts.max() == K - 2
    shares = [float((counts == n).float().mean()) for n in range(3)]
    assert shares == pytest.approx([0.25, 0.25, 0.5], abs=0.03)
    assert shown[:, 1:].float().mean(dim=0).std() < 0.02


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            Axes(fusion="per_layer", injection="input"),
            r"model.axes.fusion: per_layer .* leave it shared",
        ),
        (Axes(fusion="per_layer", injection="none"), "model.axes.fusion"),
        (Axes(drafting="autoregressive", injection="none"), "model.axes.drafting: .*kv or input"),
        (
            Axes(drafting="autoregressive", denoising_steps=2),
            "model.axes.denoising_steps: autoregr",
        ),
        (Axes(drafting="autoregressive", in_block="causal"), "model.axes.in_block: .*anyway"),
        (Axes(drafting="autoregressive", markov_rank=4), "model.axes.markov_rank: autoregressive"),
        (Axes(denoising_steps=2, in_block="causal"), "model.axes.denoising_steps: in a causal"),
        (Axes(denoising_steps=2, markov_rank=2), "model.axes.markov_rank: the markov head"),
        (Axes(denoising_steps=0), "model.axes.denoising_steps: needs 1 to 3"),
        (Axes(denoising_steps=4), "model.axes.denoising_steps: needs 1 to 3"),
        (Axes(markov_rank=0), "model.axes.markov_rank: needs at least 1"),
        (Axes(sliding_window=3), "model.axes.sliding_window: needs at least the block size"),
        (Axes(sliding_layers=[0]), "model.axes.sliding_layers: needs a sliding_window"),
        (
            Axes(sliding_window=8, sliding_layers=[2]),
            r"sliding_layers: there are layers 0 to 1, got \[2\]",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(axes: Axes, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        axes.check(2, K)
    assert "\n" not in str(error.value)


def test_published_names_are_kept() -> None:
    """The default drafter's weights still load elsewhere; baselines carry what they add."""
    target = tiny_target()
    names = {n.split(".")[0] for n in drafter_of(target, Axes()).state_dict()}
    assert names == {"fc", "hidden_norm", "layers", "norm"}
    assert "fc" not in {
        n.split(".")[0] for n in drafter_of(target, Axes(injection="none")).state_dict()
    }
