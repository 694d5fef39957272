"""Tests of batched decoding: every row as if it were alone, whatever its neighbours do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import greedy, hook_count, token_ids, varied
from tiny import ARCHITECTURES, MASK, VOCAB, tiny_drafter, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, Qwen3NextConfig

from dflash_lightning.decoding.cache import RowCache, Rows
from dflash_lightning.decoding.loop import OnCommit, decode
from dflash_lightning.decoding.outcome import Decoded, until_stop
from dflash_lightning.decoding.proposer import DrafterProposer, Proposal, Proposer, decoding_copy
from dflash_lightning.decoding.sampling import Sampling, distribution, draw
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

K = 4
COUNT = 20
LENGTHS = [4, 30, 1, 13, 12, 20, 7, 4]
"""Below, at and beyond the sliding window of 12; two equal ones."""
PROMPTS = [token_ids(length, 40 + i) for i, length in enumerate(LENGTHS)]
RULES = [Sampling(1.0), Sampling(1.0, rule="rejection")]


class Guided(DrafterProposer):
    """The real drafter does all its work; what is proposed are true continuations, up to `hits`.

    Args:
        target: Also makes the drafter.
        sequences: Prompt and continuation of each prompt.
        hits: How many slots are right, by prompt and its cycle.
        numbers: The prompts of the batch, as numbers in `sequences`.
    """

    def __init__(
        self,
        target: Target,
        sequences: list[list[int]],
        hits: Callable[[int, int], int],
        numbers: list[int],
    ) -> None:
        self.sequences, self.hits, self.numbers = sequences, hits, numbers
        super().__init__(tiny_drafter(target), target)

    def begin(self, batch: int) -> None:
        super().begin(batch)
        self.who = torch.tensor(self.numbers[:batch])
        self.drafts: dict[int, list[list[int]]] = {n: [] for n in self.numbers}

    def keep(self, index: Tensor) -> None:
        super().keep(index)
        self.who = self.who[index]

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        real = super().propose(anchors, sampling, uniform, seen)
        told = []
        for row, number in enumerate(self.who.tolist()):
            at, sequence = int(self.context.rows.lengths[row]), self.sequences[number]
            assert sequence[at] == anchors[row]
            hits = self.hits(number, len(self.drafts[number]))
            true = [*sequence[at + 1 : at + K], 3, 3, 3][: K - 1]
            told.append([t if i < hits else (t + 1) % 90 for i, t in enumerate(true)])
            self.drafts[number].append(real.tokens[row].tolist())
        return Proposal(torch.tensor(told))


def always(number: int, cycle: int) -> int:
    return K - 1


def never(number: int, cycle: int) -> int:
    return 0


def differing(number: int, cycle: int) -> int:
    """Row 0 always, row 1 never, row 2 now and then, and so on."""
    return (K - 1, 0, (0, 2, 3, 1, 0, 0, 3)[cycle % 7])[number % 3]


HITS = {"always": always, "never": never, "differing": differing}
_expected: dict[str, list[list[int]]] = {}


def continuations(target: Target, architecture: str) -> list[list[int]]:
    """Return `generate`'s greedy output of every prompt alone."""
    if architecture not in _expected:
        _expected[architecture] = [greedy(target, prompt, COUNT) for prompt in PROMPTS]
    return _expected[architecture]


def full(expected: list[list[int]]) -> list[list[int]]:
    return [[*p.tolist(), *tokens] for p, tokens in zip(PROMPTS, expected, strict=True)]


def outputs(decoded: list[Decoded]) -> list[list[int]]:
    return [d.tokens for d in decoded]


def batch_sizes(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the batch size of each of the target's forwards."""
    sizes: list[int] = []
    forward = target.forward

    def spy(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(ids))
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward", spy)
    return sizes


# ---- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_decodes_like_its_prompts_alone(architecture: str) -> None:
    """Real drafter and none; 3 and 8 prompts; the target's greedy output, cycle by cycle."""
    target = tiny_target(architecture)
    expected = continuations(target, architecture)
    varied(max(expected, key=lambda tokens: len(set(tokens))))
    proposer = DrafterProposer(tiny_drafter(target), target)
    alone = [decode(target, [prompt], proposer, COUNT, ())[0] for prompt in PROMPTS]
    assert outputs(alone) == expected
    for size in (3, 8):
        found = decode(target, PROMPTS[:size], proposer, COUNT, ())
        assert outputs(found) == expected[:size]
        assert [d.cycles for d in found] == [d.cycles for d in alone[:size]]
        assert outputs(decode(target, PROMPTS[:size], None, COUNT, ())) == expected[:size]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_accept_each_their_own(architecture: str) -> None:
    """Rows run apart by what they accept: outputs, cycles and the real drafter's drafts stay.

    The drafts are compared since a wrong drafter cache costs acceptance, never correctness.
    """
    target = tiny_target(architecture)
    expected = continuations(target, architecture)
    proposer = Guided(target, full(expected), differing, list(range(8)))
    alone, lonely_drafts = [], []
    for n, prompt in enumerate(PROMPTS):
        single = Guided(target, full(expected), differing, [n])
        alone += decode(target, [prompt], single, COUNT, ())
        lonely_drafts.append(single.drafts[n])
        whole = [c.accepted for c in alone[n].cycles if c.drafted == K - 1]
        assert whole == [differing(n, i) for i in range(len(whole))]
    assert outputs(alone) == expected
    for size in (3, 8):
        found = decode(target, PROMPTS[:size], proposer, COUNT, ())
        assert outputs(found) == expected[:size]
        assert [d.cycles for d in found] == [d.cycles for d in alone[:size]]
        for n in range(size):
            assert proposer.drafts[n][: len(lonely_drafts[n])] == lonely_drafts[n]
    assert len({tuple(d) for rows in proposer.drafts.values() for d in rows}) > 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masked_and_unmasked_paths_agree(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal lengths need no mask of ours; with it the output is the same."""
    target = tiny_target(architecture)
    prompts = [token_ids(15, 70 + i) for i in range(3)]
    expected = [greedy(target, prompt, COUNT) for prompt in prompts]
    sequences = [[*p.tolist(), *tokens] for p, tokens in zip(prompts, expected, strict=True)]
    proposer = Guided(target, sequences, always, [0, 1, 2])
    masked: list[int] = []
    masks = RowCache.masks

    def spy(cache: RowCache, count: int, dtype: torch.dtype) -> Any:
        masked.append(count)
        return masks(cache, count, dtype)

    monkeypatch.setattr(RowCache, "masks", spy)
    for who in (None, proposer):
        assert outputs(decode(target, prompts, who, COUNT, ())) == expected
    assert outputs(decode(target, prompts[:1], proposer, COUNT, ())) == expected[:1]
    assert masked == []
    take = Rows.set

    def uneven(rows: Rows, lengths: Tensor) -> None:
        take(rows, lengths)
        rows.even = False

    monkeypatch.setattr(Rows, "set", uneven)
    for who in (None, proposer):
        assert outputs(decode(target, prompts, who, COUNT, ())) == expected
    assert len(masked) == COUNT - 1 + -(-(COUNT - 1) // K)
    everyone = masked.copy()
    proposer.hits = differing
    assert outputs(decode(target, prompts, proposer, COUNT, ())) == expected
    assert len(masked) > len(everyone)


def test_mask_by_hand() -> None:
    """Rows of 2 and 0 committed tokens get 2 more; a window of 2 on sliding layers."""
    model = tiny_target("gemma3_softcap").model
    cache = RowCache(model, 2)
    cache.window = 2
    cache.rows.set(torch.tensor([2, 0]))
    masks = cache.masks(2, torch.float32)
    assert isinstance(masks, dict)
    visible = {kind: (mask[:, 0] == 0).int().tolist() for kind, mask in masks.items()}
    assert visible == {
        "full_attention": [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]],
        "sliding_attention": [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]],
    }
    assert cache.positions(2).tolist() == [[2, 3], [0, 1]]


@pytest.mark.parametrize("architecture", ["llama_tied", "mistral_sliding"])
def test_caches_grow(architecture: str) -> None:
    """Far beyond the first capacity, at different lengths in every row."""
    target = tiny_target(architecture)
    expected = [greedy(target, prompt, 130) for prompt in PROMPTS[1:4]]
    sequences = [[*p.tolist(), *e] for p, e in zip(PROMPTS[1:4], expected, strict=True)]
    proposer = Guided(target, sequences, differing, [0, 1, 2])
    found = decode(target, PROMPTS[1:4], proposer, 130, ())
    assert outputs(found) == expected
    assert len({len(d.cycles) for d in found}) == 3


def test_positions_stay_in_the_window() -> None:
    """A row at the window's end gets a neighbour's block width: a dynamic RoPE must not notice."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=40,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0},
    )
    target = Target(AutoModelForCausalLM.from_config(config), None, [0, 2], MASK)
    prompts = [token_ids(25, 1), token_ids(4, 2)]
    expected = [greedy(target, prompt, 15) for prompt in prompts]
    sequences = [[*p.tolist(), *tokens] for p, tokens in zip(prompts, expected, strict=True)]
    highest: list[int] = []
    forward = target.forward

    def spy(ids: Tensor, mask: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        highest.append(int(positions.max()))
        return forward(ids, mask, positions, *args, **kwargs)

    target.forward = spy
    proposer = Guided(
        target, sequences, lambda n, cycle: 0 if n else (3, 3, 3, 1, 0)[cycle], [0, 1]
    )
    assert outputs(decode(target, prompts, proposer, 15, ())) == expected
    assert max(highest) == 39


# ---- rows leave ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "mistral_sliding", "gemma3_softcap"])
@pytest.mark.parametrize("name", HITS)
def test_rows_end_each_at_their_own_stop(
    architecture: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished rows leave the batch at once, the first of them right after the prefill."""
    target = tiny_target(architecture)
    expected = continuations(target, architecture)
    stops = {expected[1][0], expected[0][6], expected[3][9]}
    wanted = [until_stop(tokens, stops) for tokens in expected]
    assert len(wanted[1]) == 1
    assert len({len(tokens) for tokens in wanted}) >= 4
    sizes = batch_sizes(target, monkeypatch)
    for proposer in (
        Guided(target, full(expected), HITS[name], list(range(8))),
        DrafterProposer(tiny_drafter(target), target),
        None,
    ):
        sizes.clear()
        found = decode(target, PROMPTS, proposer, COUNT, stops)
        assert outputs(found) == wanted
        cycles = [len(d.cycles) for d in found]
        still = [sum(c > done for c in cycles) for done in range(max(cycles))]
        assert sizes == [8, *still]
        assert all(sum(c.committed for c in d.cycles) == len(d.tokens) - 1 for d in found)


def test_one_row_left_alone_goes_on() -> None:
    """Every row but one ends at the prefill, whichever it is; the last one has all its cycles."""
    target = tiny_target("qwen2")
    expected = continuations(target, "qwen2")
    for n in range(3):
        others = {tokens[0] for i, tokens in enumerate(expected[:3]) if i != n}
        length = len(until_stop(expected[n][:10], others))
        assert length > 5
        proposer = Guided(target, full(expected), always, [0, 1, 2])
        found = decode(target, PROMPTS[:3], proposer, 10, others)
        assert outputs(found) == [e[: length if i == n else 1] for i, e in enumerate(expected[:3])]
        assert [len(d.cycles) > 1 for d in found] == [i == n for i in range(3)]


def test_all_rows_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prefill, by stop token or by length, or in a later cycle."""
    target = tiny_target("qwen2")
    expected = continuations(target, "qwen2")
    proposer = Guided(target, full(expected), always, list(range(8)))
    sizes = batch_sizes(target, monkeypatch)
    firsts = {tokens[0] for tokens in expected}
    for count, stops in ((COUNT, firsts), (1, ())):
        sizes.clear()
        found = decode(target, PROMPTS, proposer, count, stops)
        assert outputs(found) == [tokens[:1] for tokens in expected]
        assert all(d.cycles == [] for d in found)
        assert sizes == [8]
    sizes.clear()
    assert outputs(decode(target, PROMPTS, proposer, 9, ())) == [e[:9] for e in expected]
    assert sizes == [8, 8, 8]


# ---- what is reported ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", HITS)
def test_every_token_is_reported_once_and_in_order(name: str) -> None:
    target = tiny_target("qwen2")
    expected = continuations(target, "qwen2")
    stops = {expected[0][6], expected[3][9]}
    told: list[tuple[int, list[int], int]] = []
    proposer = Guided(target, full(expected), HITS[name], list(range(8)))
    found = decode(
        target, PROMPTS, proposer, COUNT, stops, on_commit=lambda *event: told.append(event)
    )
    for n, decoded in enumerate(found):
        events = [(tokens, accepted) for index, tokens, accepted in told if index == n]
        assert [t for tokens, _ in events for t in tokens] == decoded.tokens
        assert events[0] == (decoded.tokens[:1], 0)
        assert [len(tokens) for tokens, _ in events[1:]] == [c.committed for c in decoded.cycles]
        for (tokens, accepted), cycle in zip(events[1:], decoded.cycles, strict=True):
            assert accepted == min(cycle.accepted, len(tokens))
        whole = [c.accepted for c in decoded.cycles if c.drafted == K - 1]
        assert whole == [HITS[name](n, i) for i in range(len(whole))]
    assert [index for index, _, _ in told[:8]] == list(range(8))
    assert any(accepted == len(tokens) for _, tokens, accepted in told) == (name != "never")


def test_times_add_up_to_the_batchs() -> None:
    """Each row carries its share, so that the sum over rows is what the batch took."""
    target = tiny_target()
    proposer = Guided(target, full(continuations(target, "llama_tied")), differing, [0, 1, 2])
    found = decode(target, PROMPTS[:3], proposer, COUNT, ())
    for decoded in found:
        parts = decoded.prefill_s + decoded.draft_s + decoded.verify_s
        assert 0.5 * decoded.total_s < parts <= decoded.total_s * (1 + 1e-9)
    for part in ("prefill_s", "draft_s", "verify_s", "total_s"):
        assert getattr(found[0], part) > 0


# ---- sampled -------------------------------------------------------------------------------------


class Rollout:
    """Drafts with the target itself, mixed with noise: sampled drafts that are often accepted.

    Slow on purpose: a fresh forward without a cache for every slot of every row.
    """

    block_size = K

    def __init__(self, target: Target, prompts: list[Tensor]) -> None:
        self.target, self.prompts = target, prompts

    def on_commit(self, index: int, tokens: list[int], accepted: int) -> None:
        self.told.setdefault(index, []).extend(tokens)

    def begin(self, batch: int) -> None:
        self.told: dict[int, list[int]] = {}
        self.who = torch.arange(batch)

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        pass

    def keep(self, index: Tensor) -> None:
        self.who = self.who[index]

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        drafts, qs = [], []
        for row, n in enumerate(self.who.tolist()):
            past = [*self.prompts[n].tolist(), *self.told[n]]
            assert past[-1] == anchors[row]
            q = []
            for slot in range(K - 1):
                logits = self.target.model(input_ids=torch.tensor([past])).logits[0, -1]
                mixed = distribution(0.7 * logits, sampling)
                q.append(mixed)
                match = sampling.rule == "match"
                past.append(int(mixed.argmax() if match else draw(mixed, uniform[row, slot])))
            drafts.append(past[1 - K :])
            qs.append(torch.stack(q))
        return Proposal(torch.tensor(drafts), None if sampling.rule == "match" else torch.stack(qs))


def sampled_alone(
    target: Target, proposer: Callable[[list[Tensor]], Proposer], sampling: Sampling, size: int
) -> list[Decoded]:
    """Return each prompt's output alone, with the seed it has in a batch of seed 100."""
    found = []
    for n, prompt in enumerate(PROMPTS[:size]):
        who = proposer([prompt])
        hook: OnCommit | None = getattr(who, "on_commit", None)
        found += decode(target, [prompt], who, 14, (), sampling, 100 + n, hook)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", RULES, ids=lambda s: s.rule)
def test_a_sampled_batch_is_its_prompts_alone(architecture: str, sampling: Sampling) -> None:
    """Prompt i draws from seed + i in a batch of any size."""
    target = tiny_target(architecture)
    drafter = DrafterProposer(tiny_drafter(target), target)
    alone = sampled_alone(target, lambda _: drafter, sampling, 8)
    for size in (3, 8):
        found = decode(target, PROMPTS[:size], drafter, 14, (), sampling, seed=100)
        assert outputs(found) == outputs(alone[:size])
        assert [d.cycles for d in found] == [d.cycles for d in alone[:size]]
    assert outputs(alone) != [tokens[:14] for tokens in continuations(target, architecture)]


@pytest.mark.parametrize("architecture", ["llama_untied", "mistral_sliding"])
@pytest.mark.parametrize("sampling", RULES, ids=lambda s: s.rule)
def test_sampled_rows_run_apart(architecture: str, sampling: Sampling) -> None:
    """The same with drafts that are accepted, so that rows differ in length and end apart.

    In float64: in float32 a draw can fall between the roundings of a row alone and in a batch.
    """
    target = tiny_target(architecture)
    target.model.double()
    sampling = replace(sampling, temperature=0.7)
    alone = sampled_alone(target, lambda p: Rollout(target, p), sampling, 5)
    proposer = Rollout(target, PROMPTS)
    found = decode(target, PROMPTS[:5], proposer, 14, (), sampling, 100, proposer.on_commit)
    assert outputs(found) == outputs(alone)
    assert [d.cycles for d in found] == [d.cycles for d in alone]
    accepted = [c.accepted for d in found for c in d.cycles]
    assert set(accepted) >= {0, 1, 2}
    assert len({len(d.cycles) for d in found}) > 2


def test_a_penalised_batch_is_its_prompts_alone() -> None:
    """What a row has seen is its own, and leaves with it."""
    target = tiny_target()
    sampling = Sampling(1.0, repetition_penalty=1.5, rule="rejection")
    alone = sampled_alone(
        target, lambda _: DrafterProposer(tiny_drafter(target), target), sampling, 8
    )
    drafter = DrafterProposer(tiny_drafter(target), target)
    stops = {alone[0].tokens[0], alone[4].tokens[5]}
    found = decode(target, PROMPTS, drafter, 14, stops, sampling, seed=100)
    assert outputs(found) == [until_stop(d.tokens, stops) for d in alone]


# ---- errors and state ----------------------------------------------------------------------------


def test_an_exception_in_the_middle_leaves_nothing() -> None:
    """Neither hooks nor state: the same proposer decodes the next batch."""
    target = tiny_target()
    expected = continuations(target, "llama_tied")

    class Failing(Guided):
        broken = True

        def propose(self, *args: Any) -> Proposal:
            if self.broken and len(self.drafts[0]) == 2:
                raise RuntimeError("drafter broke")
            return super().propose(*args)

    proposer = Failing(target, full(expected), differing, list(range(8)))
    with pytest.raises(RuntimeError, match="drafter broke"):
        decode(target, PROMPTS, proposer, COUNT, ())
    assert hook_count(target.model) == 0
    proposer.broken = False
    assert outputs(decode(target, PROMPTS[:3], proposer, COUNT, ())) == expected[:3]


def test_decoding_leaves_everything_as_found() -> None:
    """Mixed precision around it does not reach in; random state and modes stay."""
    target = tiny_target()
    expected = continuations(target, "llama_tied")
    drafter = tiny_drafter(target)
    drafter.train()
    proposer = DrafterProposer(decoding_copy(drafter, target.dtype), target)
    random = torch.get_rng_state()
    own_config = target.model.generation_config.to_dict()
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        found = decode(target, PROMPTS[:3], proposer, COUNT, ())
        sampled = decode(target, PROMPTS[:3], proposer, COUNT, (), Sampling(1.0), seed=3)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    assert outputs(found) == expected[:3]
    again = decode(target, PROMPTS[:3], proposer, COUNT, (), Sampling(1.0), seed=3)
    assert outputs(sampled) == outputs(again)
    assert torch.equal(torch.get_rng_state(), random)
    assert drafter.training
    assert not target.model.training
    assert target.model.generation_config.to_dict() == own_config


def test_decoding_inside_decoding() -> None:
    """Nothing is kept outside a run: another one in the middle of it changes neither."""
    target, other = tiny_target(), tiny_target("mistral_sliding")
    expected = continuations(target, "llama_tied")
    inner = continuations(other, "mistral_sliding")
    found: list[list[list[int]]] = []

    def run(index: int, tokens: list[int], accepted: int) -> None:
        if index == 1:
            who = Guided(other, full(inner), differing, [0, 1, 2])
            found.append(outputs(decode(other, PROMPTS[:3], who, 9, ())))

    proposer = Guided(target, full(expected), differing, list(range(8)))
    outer = decode(target, PROMPTS[:4], proposer, 12, (), on_commit=run)
    assert outputs(outer) == [tokens[:12] for tokens in expected[:4]]
    assert len(found) == 12
    assert all(tokens == [e[:9] for e in inner[:3]] for tokens in found)


@pytest.mark.parametrize(
    ("lengths", "count", "message"),
    [
        ([], 4, "no prompt to decode"),
        ([4, 0, 3], 4, "prompt 1 is empty"),
        ([4, 3, 250], 7, r"prompt 2: its 250 tokens and max_new_tokens=7 exceed .* of 256"),
        ([4, 3], 0, "max_new_tokens: needs at least 1, got 0"),
    ],
)
def test_impossible_batches_are_one_line(lengths: list[int], count: int, message: str) -> None:
    target = tiny_target()
    for proposer in (DrafterProposer(tiny_drafter(target), target), None):
        with pytest.raises(UserError, match=message) as caught:
            decode(target, [token_ids(n) for n in lengths], proposer, count)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3NextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=0,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4),
    ],
    ids=lambda config: config.model_type,
)
def test_targets_with_a_recurrent_state_are_refused(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target = Target(model, None, [0, 2], MASK)
    with pytest.raises(UserError, match=rf"{config.model_type} .*can't be rolled back") as caught:
        decode(target, PROMPTS[:2], None, 4)
    assert "\n" not in str(caught.value)


def test_a_stateful_model_is_refused_whatever_its_config_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    monkeypatch.setattr(target.model, "_is_stateful", True)
    with pytest.raises(UserError, match=r"llama has layers .a recurrent state. .*rolled back"):
        decode(target, PROMPTS[:2], None, 4)


@pytest.mark.parametrize("size", [K + 1, 1, 0])
def test_block_sizes_out_of_range_are_refused(size: int) -> None:
    """Longer blocks than trained need permission; shorter than 2 draft nothing."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    with pytest.raises(UserError, match=rf"block_size: .*{size}") as caught:
        DrafterProposer(drafter, target, size)
    assert "\n" not in str(caught.value)
    if size > K:
        longer = DrafterProposer(drafter, target, size, longer=True)
        expected = continuations(target, "llama_tied")
        assert outputs(decode(target, PROMPTS[:3], longer, COUNT, ())) == expected[:3]
