"""Tests of greedy speculative decoding: the target's own output, whatever the proposer says."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import (
    PROMPT,
    block_hidden,
    decode_plain,
    greedy,
    hook_count,
    observe,
    propose,
    speculate,
    token_ids,
    training_module,
    varied,
)
from tiny import ARCHITECTURES, MASK, tiny_drafter, tiny_model, tiny_target
from torch import Tensor

from dflash_lightning.decoding import loop as loop_module
from dflash_lightning.decoding.cache import RowCache, check_rollback
from dflash_lightning.decoding.evaluate import divergence
from dflash_lightning.decoding.outcome import Cycle, Decoded, until_stop
from dflash_lightning.decoding.proposer import (
    DrafterProposer,
    Proposal,
    Proposer,
    decoding_copy,
)
from dflash_lightning.decoding.sampling import Sampling, accept_matching
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

K = 4
COUNT = 26


class Script:
    """A proposer that knows the continuation and hits as many slots as `hits(cycle)` says."""

    block_size = K

    def __init__(self, prompt: Tensor, continuation: list[int], hits: Callable[[int], int]) -> None:
        self.sequence = [*prompt.tolist(), *continuation]
        self.hits = hits
        self.begin(1)

    def begin(self, batch: int) -> None:
        assert batch == 1
        self.seen: list[Tensor] = []
        self.cycle = 0

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        self.seen.append(hidden[:, : int(counts[0])])

    def keep(self, index: Tensor) -> None:
        assert index.tolist() == []

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        anchor = int(anchors[0])
        at = sum(hidden.shape[1] for hidden in self.seen)
        assert self.sequence[at] == anchor
        true = (self.sequence[at + 1 : at + self.block_size] + [3] * self.block_size)[
            : self.block_size - 1
        ]
        hits = self.hits(self.cycle)
        self.cycle += 1
        drafts = [t if i < hits else (t + 1) % 96 for i, t in enumerate(true)]
        return Proposal(torch.tensor([drafts]))


def always(cycle: int) -> int:
    return K - 1


def never(cycle: int) -> int:
    return 0


def sometimes(cycle: int) -> int:
    return (0, 2, 3, 1, 0, 0, 3)[cycle % 7]


HITS = {"always": always, "never": never, "sometimes": sometimes}


# ---- the target's own output ---------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", HITS)
def test_output_is_the_targets_greedy_output(architecture: str, name: str) -> None:
    """Token for token, past the sliding window (12), the committed tokens' features handed on."""
    target = tiny_target(architecture)
    expected = varied(greedy(target, PROMPT, COUNT))
    proposer = Script(PROMPT, expected, HITS[name])
    decoded = speculate(target, proposer, PROMPT, COUNT, stop_ids=())
    assert decoded.tokens == expected
    assert sum(c.committed for c in decoded.cycles) == COUNT - 1
    full = [c for c in decoded.cycles if c.drafted == K - 1]
    assert [c.accepted for c in full] == [HITS[name](i) for i in range(len(full))]
    assert all(c.committed == c.accepted + 1 for c in decoded.cycles)
    seen = torch.cat(proposer.seen, dim=1)
    committed = torch.cat([PROMPT, torch.tensor(expected)])[None, : seen.shape[1]]
    whole = target.forward(committed).hidden
    torch.testing.assert_close(seen, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_with_a_real_drafter_is_the_targets(architecture: str) -> None:
    """A random drafter proposes nonsense; prompts longer than the sliding window included."""
    target = tiny_target(architecture)
    proposer = DrafterProposer(tiny_drafter(target), target)
    for prompt, count in ((torch.tensor([8]), 16), (token_ids(30), 8)):
        expected = greedy(target, prompt, count)
        assert speculate(target, proposer, prompt, count, stop_ids=()).tokens == expected
        assert decode_plain(target, prompt, count, stop_ids=()).tokens == expected


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma3_softcap"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9])
def test_output_has_exactly_the_length_asked_for(architecture: str, count: int) -> None:
    """Wherever `max_new_tokens` falls inside a block; no position beyond it is computed."""
    target = tiny_target(architecture)
    expected = greedy(target, PROMPT, 12)
    decoded = speculate(target, Script(PROMPT, expected, always), PROMPT, count, stop_ids=())
    assert decoded.tokens == expected[:count]
    cycles, rest = divmod(count - 1, K)
    assert [c.committed for c in decoded.cycles] == [K] * cycles + ([rest] if rest else [])
    assert [c.drafted for c in decoded.cycles] == [K - 1] * cycles + ([rest - 1] if rest else [])


def test_accept_len_of_perfect_and_useless_drafts() -> None:
    """K at best (the bonus token included), 1 at worst, the prefill's token not counted."""
    target = tiny_target()
    expected = greedy(target, PROMPT, 21)
    for hits, accept_len in ((always, K), (never, 1.0)):
        decoded = speculate(target, Script(PROMPT, expected, hits), PROMPT, 21, stop_ids=())
        assert decoded.accept_len == accept_len
    assert len(decoded.cycles) == 20
    assert speculate(target, Script(PROMPT, expected, always), PROMPT, 1 + K, ()).accept_len == K


def test_one_token_needs_no_cycle() -> None:
    """The prefill gives it; a rate over no cycles is unmeasured, not 0."""
    target = tiny_target()
    expected = greedy(target, PROMPT, 1)
    decoded = speculate(target, Script(PROMPT, expected, always), PROMPT, 1, stop_ids=())
    assert decoded.tokens == expected
    assert decoded.cycles == []
    assert decoded.accept_len != decoded.accept_len


def test_proposer_is_reset_between_prompts() -> None:
    """The second decoding of a prompt equals the first, cycle by cycle."""
    target = tiny_target()
    proposer = DrafterProposer(tiny_drafter(target), target)
    first = speculate(target, proposer, PROMPT, 20, stop_ids=())
    speculate(target, proposer, token_ids(9), 20, stop_ids=())
    again = speculate(target, proposer, PROMPT, 20, stop_ids=())
    assert again.tokens == first.tokens
    assert again.cycles == first.cycles


# ---- stopping ------------------------------------------------------------------------------------


def stop_positions(tokens: list[int]) -> list[int]:
    """Return where a token occurs for the first time: where it can end the output."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("architecture", ["qwen2", "mistral_sliding"])
@pytest.mark.parametrize("name", HITS)
def test_a_stop_token_ends_the_output_wherever_it_falls(architecture: str, name: str) -> None:
    """First token, inside a block, at its end: the output ends there and the rest doesn't count."""
    target = tiny_target(architecture)
    expected = varied(greedy(target, PROMPT, 20))
    for position in stop_positions(expected)[:8]:
        proposer = Script(PROMPT, expected, HITS[name])
        decoded = speculate(target, proposer, PROMPT, 20, stop_ids={expected[position], 12345})
        assert decoded.tokens == expected[: position + 1]
        assert sum(c.committed for c in decoded.cycles) == position
        assert all(1 <= c.committed <= c.accepted + 1 for c in decoded.cycles)
        plain = decode_plain(target, PROMPT, 20, stop_ids={expected[position]})
        assert plain.tokens == decoded.tokens


def test_tokens_cut_at_a_stop_do_not_count_as_accepted_length() -> None:
    """Stop at slot 2 of a fully accepted block: 2 tokens committed in that cycle, not 4."""
    target = tiny_target("qwen2")
    expected = greedy(target, PROMPT, 20)
    position = next(p for p in stop_positions(expected) if p > K and p % K == 2)
    proposer = Script(PROMPT, expected, always)
    decoded = speculate(target, proposer, PROMPT, 20, stop_ids={expected[position]})
    assert [c.committed for c in decoded.cycles] == [K] * (position // K) + [2]
    assert decoded.accept_len == position / len(decoded.cycles)


def test_stop_tokens_default_to_the_targets() -> None:
    """`generate` stops at the generation config's eos; so do both decoders, without being told."""
    target = tiny_target("qwen2")
    expected = greedy(target, PROMPT, 20)
    position = stop_positions(expected)[6]
    target.stop_ids = frozenset({expected[position]})
    proposer = Script(PROMPT, expected, always)
    assert speculate(target, proposer, PROMPT, 20).tokens == expected[: position + 1]
    assert decode_plain(target, PROMPT, 20).tokens == expected[: position + 1]
    target.stop_ids = frozenset({expected[0]})
    assert speculate(target, proposer, PROMPT, 20).tokens == expected[:1]


@pytest.mark.parametrize("name", HITS)
def test_a_generated_mask_token_stays_in_the_output(name: str) -> None:
    """Output is what was committed; filtering it by `== mask_token_id` would delete a token the
    target said.
    """
    model = tiny_model("qwen2")
    expected = greedy(tiny_target("qwen2"), PROMPT, 20)
    mask = expected[6]
    target = Target(model, None, [1, 3, 5], mask)
    assert target.mask_token_id in expected
    decoded = speculate(target, Script(PROMPT, expected, HITS[name]), PROMPT, 20, stop_ids=())
    assert decoded.tokens == expected


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [
        (0, 5, "prompt 0 is empty"),
        (4, 0, "max_new_tokens: needs at least 1"),
        (4, -3, "max_new_tokens: needs at least 1"),
        (300, 1, r"300 tokens .* context window of 256"),
        (250, 7, r"250 tokens and max_new_tokens=7 exceed"),
    ],
)
def test_impossible_requests_are_one_line(length: int, count: int, message: str) -> None:
    """Both decoders refuse before they compute."""
    target = tiny_target()
    prompt = token_ids(length)
    proposer = Script(prompt, [], never)
    for run in (
        lambda: speculate(target, proposer, prompt, count),
        lambda: decode_plain(target, prompt, count),
    ):
        with pytest.raises(UserError, match=message) as caught:
            run()
        assert "\n" not in str(caught.value)


def test_a_sequence_may_fill_the_context_window() -> None:
    """Prompt and output of exactly 256 tokens are fine, blocks at the edge included."""
    target = tiny_target()
    prompt = token_ids(246)
    expected = greedy(target, prompt, 10)
    for proposer in (
        Script(prompt, expected, always),
        DrafterProposer(tiny_drafter(target), target),
    ):
        assert speculate(target, proposer, prompt, 10, stop_ids=()).tokens == expected


def test_a_cache_that_cannot_be_rolled_back_is_refused() -> None:
    fine = SimpleNamespace(model_type="x", layer_types=["full_attention", "sliding_attention"])
    check_rollback(fine)
    for bad in (
        SimpleNamespace(model_type="qwen3_next", layer_types=["linear_attention"]),
        SimpleNamespace(model_type="mamba", state_size=16),
    ):
        with pytest.raises(UserError, match=rf"{bad.model_type}.* can't be rolled back"):
            check_rollback(bad)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"architecture": "llama_untied"}, "target_fingerprint"),
        ({"seed": 1}, "target_fingerprint"),
        ({"taps": (1, 3, 4)}, "target_layer_ids"),
    ],
)
def test_a_drafter_of_another_target_is_refused(other: dict[str, object], key: str) -> None:
    """Same shapes, silently useless drafts: the difference is named instead."""
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(UserError, match=f"another target .*{key}") as caught:
        DrafterProposer(drafter, tiny_target(**other))
    assert "\n" not in str(caught.value)


def test_another_mask_token_is_refused() -> None:
    target = tiny_target()
    moved = Target(target.model, None, target.target_layer_ids, MASK - 1, target.fingerprint)
    with pytest.raises(UserError, match="mask_token_id 95 != 94"):
        DrafterProposer(tiny_drafter(target), moved)


class Failing(Script):
    """Raises in the third cycle."""

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        if self.cycle == 2:
            raise RuntimeError("drafter broke")
        return super().propose(anchors, sampling, uniform, seen)


def test_an_exception_in_the_middle_leaves_no_hooks() -> None:
    """Neither a failing proposer nor a failing target leaves anything on the model."""
    target = tiny_target()
    expected = greedy(target, PROMPT, 20)
    with pytest.raises(RuntimeError, match="drafter broke"):
        speculate(target, Failing(PROMPT, expected, always), PROMPT, 20, stop_ids=())
    assert hook_count(target.model) == 0
    wild = Script(PROMPT, expected, never)
    wild.propose = lambda *_: Proposal(torch.tensor([[10_000, 3, 3]]))
    with pytest.raises(IndexError):
        speculate(target, wild, PROMPT, 20, stop_ids=())
    assert hook_count(target.model) == 0
    script = Script(PROMPT, expected, sometimes)
    assert speculate(target, script, PROMPT, 20, stop_ids=()).tokens == expected


# ---- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama_tied", "mistral_sliding", "gemma3_softcap"])
@pytest.mark.parametrize("name", HITS)
def test_target_cache_holds_the_committed_tokens_but_the_last(
    architecture: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected tokens are cropped in every cycle: a longer cache would shift all later
    positions.
    """
    target = tiny_target(architecture)
    expected = greedy(target, PROMPT, 30)
    caches: list[RowCache] = []
    lengths: list[int] = []

    def remember(*args: Any) -> RowCache:
        caches.append(RowCache(*args))
        return caches[-1]

    class Watching(Script):
        def propose(
            self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
        ) -> Proposal:
            lengths.append(caches[0].get_seq_length())
            assert lengths[-1] == sum(hidden.shape[1] for hidden in self.seen)
            return super().propose(anchors, sampling, uniform, seen)

    monkeypatch.setattr(loop_module, "RowCache", remember)
    decoded = speculate(target, Watching(PROMPT, expected, HITS[name]), PROMPT, 30, stop_ids=())
    assert decoded.tokens == expected
    assert lengths[0] == len(PROMPT)
    assert lengths == sorted(set(lengths))


def test_drafter_cache_holds_context_only() -> None:
    """One entry per committed token but the last; proposing adds nothing, a reset drops
    everything.
    """
    target = tiny_target()
    proposer = DrafterProposer(tiny_drafter(target, num_layers=3), target)
    hidden = target.forward(token_ids(9)[None]).hidden
    assert hidden is not None
    total = 0
    for piece in hidden.split([4, 1, 3, 1], dim=1):
        observe(proposer, piece)
        total += piece.shape[1]
        drafts = [propose(proposer, 7).tolist() for _ in range(2)]
        assert drafts[0] == drafts[1]
        assert len(drafts[0]) == K - 1
        assert len(proposer.context.key_values()) == 3
        for keys, values in proposer.context.key_values():
            assert keys.shape == values.shape == (1, 2, total, 8)
    proposer.begin(1)
    assert proposer.context.rows.longest == 0


def test_drafter_cache_is_one_short_of_the_committed_tokens() -> None:
    """In the loop: at each proposal the context is everything before the anchor."""
    target = tiny_target()
    committed: list[tuple[int, int]] = []

    class Watching(DrafterProposer):
        def propose(
            self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
        ) -> Proposal:
            committed.append((self.context.key_values()[0][0].shape[2], int(anchors[0])))
            return super().propose(anchors, sampling, uniform, seen)

    decoded = speculate(target, Watching(tiny_drafter(target), target), PROMPT, 20, stop_ids=())
    at = len(PROMPT)
    for (length, anchor), cycle in zip(committed, decoded.cycles, strict=False):
        assert length == at
        assert anchor == decoded.tokens[at - len(PROMPT)]
        at += cycle.committed


def test_block_size_may_differ_from_the_trained_one() -> None:
    """A drafter trained with blocks of 4 may draft 2 or 7 tokens: lossless all the same."""
    target = tiny_target()
    expected = greedy(target, PROMPT, 20)
    for block_size in (2, 7):
        proposer = DrafterProposer(tiny_drafter(target), target, block_size, longer=True)
        decoded = speculate(target, proposer, PROMPT, 20, stop_ids=())
        assert decoded.tokens == expected
        assert decoded.cycles[0].drafted == block_size - 1


# ---- draft vocabulary ----------------------------------------------------------------------------


def test_draft_vocabulary_maps_back_to_target_ids() -> None:
    """The best of the rows it has, as target ids; a narrow vocabulary costs hits, never
    correctness.
    """
    target = tiny_target("llama_untied")
    full = tiny_drafter(target)
    narrow = tiny_drafter(target, draft_vocab_size=20)
    narrow.load_state_dict({**full.state_dict(), "draft_ids": torch.arange(20) * 3 + 30})
    proposer = DrafterProposer(narrow, target)
    hidden = target.forward(token_ids(9)[None]).hidden
    assert hidden is not None
    observe(proposer, hidden)
    with torch.no_grad():
        logits = target.head(block_hidden(proposer, 7)[1:])
    best = [max(narrow.draft_ids.tolist(), key=lambda i: float(row[i])) for row in logits]
    assert propose(proposer, 7).tolist() == best
    assert best != logits.argmax(-1).tolist()
    expected = varied(greedy(target, PROMPT, 30))
    assert speculate(target, proposer, PROMPT, 30, stop_ids=()).tokens == expected


# ---- training state ------------------------------------------------------------------------------


def test_decoding_leaves_the_training_module_as_it_was() -> None:
    """Mode, gradients and weights of the drafter in training stay; the target stays in
    eval mode.
    """
    target = tiny_target()
    module = training_module(target, tiny_drafter(target)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    expected = greedy(target, PROMPT, 12)
    assert module.decode(PROMPT, 12).tokens == until_stop(expected, target.stop_ids)
    assert module.training
    assert all(m.training for m in module.drafter.modules())
    assert all(p.requires_grad for p in module.drafter.parameters())
    assert not target.model.training
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    assert hook_count(module.drafter) == 0


def test_decoding_copy_is_a_frozen_copy() -> None:
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=20).train()
    copied = decoding_copy(drafter, torch.bfloat16)
    assert not copied.training
    assert copied.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in copied.parameters())
    assert copied.draft_ids.dtype == torch.int64
    assert drafter.training
    assert drafter.dtype == torch.float32
    copied.fc.weight.zero_()
    assert drafter.fc.weight.abs().max() > 0


# ---- small parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "choices", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 0, 7, 8], 1),
        ([5, 6, 7], [0, 6, 7, 8], 0),
        ([], [4], 0),
    ],
)
def test_matching_stops_at_the_first_miss(
    drafts: list[int], choices: list[int], expected: int
) -> None:
    """Later matches don't count: the target saw a wrong token before them."""
    given = torch.tensor([drafts], dtype=torch.int64)
    assert accept_matching(given, torch.tensor([choices]), torch.tensor([9])).tolist() == [expected]


def test_until_stop_keeps_the_first_stop_token() -> None:
    assert until_stop([4, 5, 6, 5], {5}) == [4, 5]
    assert until_stop([4, 5], {9}) == [4, 5]
    assert until_stop([], {9}) == []


def test_accept_len_is_pooled_over_cycles() -> None:
    cycles = [Cycle(3, 3, 4), Cycle(3, 0, 1), Cycle(3, 3, 2)]
    assert Decoded([], cycles).accept_len == pytest.approx(7 / 3)


def test_divergence_of_equal_outputs_is_none() -> None:
    assert divergence(tiny_target(), PROMPT, [4, 5], [4, 5]) is None


def test_divergence_reports_the_first_difference_and_its_gap() -> None:
    """The gap is between the two tokens' logits after what both agree on, whichever output comes
    first.
    """
    target = tiny_target()
    plain = greedy(target, PROMPT, 6)
    ids = torch.cat([PROMPT, torch.tensor(plain[:2])])[None]
    logits = target.model(input_ids=ids).logits[0, -1]
    ours = [*plain[:2], (plain[2] + 7) % 96, 4, 4, 4]
    gap = float(logits[plain[2]] - logits[ours[2]])
    assert gap > 0
    for pair in ((ours, plain), (plain, ours)):
        at, found = divergence(target, PROMPT, *pair) or (-1, 0.0)
        assert at == 2
        assert found == pytest.approx(gap, rel=1e-4)


def test_divergence_in_length_is_no_rounding_tie() -> None:
    """One output ends early though all its tokens agree: that is a bug of the loop, an infinite
    gap.
    """
    target = tiny_target()
    assert divergence(target, PROMPT, [4, 5], [4, 5, 6]) == (2, float("inf"))
    assert divergence(target, PROMPT, [4, 5, 6], [4, 5]) == (2, float("inf"))
    assert divergence(target, PROMPT, [], [4]) == (0, float("inf"))


def test_both_proposers_speak_the_protocol() -> None:
    """The fakes of these tests have the methods and parameters of the protocol, so they test the
    real loop.
    """
    for cls in (Script, DrafterProposer):
        for method in ("begin", "observe", "propose", "keep"):
            ours = inspect.signature(getattr(cls, method)).parameters
            assert list(ours) == list(inspect.signature(getattr(Proposer, method)).parameters)
