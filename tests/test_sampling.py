"""Tests of sampled decoding: the target's own distribution, whatever the drafter proposes.

The proof is statistical: a target of 8 tokens, whose joint distribution of the first tokens is
enumerated, against 20,000 sampled outputs of the real loop.
"""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from reference import PROMPT, block_hidden, greedy, observe, token_ids, varied
from tiny import tiny_drafter, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Decoded
from dflash_lightning.decoding.proposer import DrafterProposer, Proposal, Proposer
from dflash_lightning.decoding.sampling import (
    Sampling,
    accept_matching,
    accept_rejecting,
    distribution,
    draw,
    penalize,
)
from dflash_lightning.drafter.axes import Axes
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

V = 8
K = 4
RUNS = 20_000
ROWS = 2_000
P_VALUE = 1e-4
START = torch.tensor([1, 4, 2])
MATCH = Sampling(temperature=1.0)
REJECTION = Sampling(temperature=1.0, rule="rejection")


# ---- the exact distribution, and a test against it -----------------------------------------------


def survival(statistic: float, freedom: int) -> float:
    """Return the chance that a chi-square variable of so many degrees exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(cells: Tensor, exact: Tensor) -> float:
    """Return how likely the sampled cells `[N]` are under the exact distribution; rare ones pooled.

    A cell that can't occur and did makes it 0.
    """
    exact = exact.double().flatten()
    observed = torch.bincount(cells, minlength=len(exact)).double()
    if observed[exact == 0].sum() > 0:
        return 0.0
    expected = exact * observed.sum()
    rare = expected < 5
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([observed[~rare], observed[rare].sum()[None]])
    kept = pooled > 0
    statistic = ((found - pooled)[kept] ** 2 / pooled[kept]).sum()
    return survival(float(statistic), int(kept.sum()) - 1)


@pytest.fixture(scope="module")
def eight() -> Target:
    """A real target of 8 tokens, none of them special."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Target(model, None, [0, 1], V - 1, "eight")


def slow_distribution(logits: list[float], sampling: Sampling, seen: set[int]) -> list[float]:
    """Return the probabilities of one position, written out."""
    penalty = sampling.repetition_penalty
    logits = [
        (x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(logits)
    ]
    scaled = [x / sampling.temperature for x in logits]
    if sampling.top_k is not None:
        least = sorted(scaled, reverse=True)[: sampling.top_k][-1]
        scaled = [x if x >= least else -math.inf for x in scaled]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    weights = [w / sum(weights) for w in weights]
    if sampling.top_p is not None:
        kept, total = [], 0.0
        for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
            if total >= sampling.top_p:
                break
            kept.append(i)
            total += weights[i]
        weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    return [w / sum(weights) for w in weights]


def conditionals(target: Target, sampling: Sampling, depth: int = 4) -> list[Tensor]:
    """Return p(next | tokens so far) `[8]`, `[8, 8]`, ... of the first tokens after `START`."""
    tables = []
    for length in range(depth):
        histories = list(product(range(V), repeat=length))
        ids = torch.tensor([[*START.tolist(), *history] for history in histories])
        logits = target.model(input_ids=ids).logits[:, -1].double()
        rows = [
            slow_distribution(row, sampling, {*START.tolist(), *history})
            for row, history in zip(logits.tolist(), histories, strict=True)
        ]
        tables.append(torch.tensor(rows, dtype=torch.float64).view([V] * (length + 1)))
    return tables


def joint(tables: list[Tensor]) -> Tensor:
    """Return the distribution over all outputs of as many tokens as there are tables."""
    result = tables[0]
    for table in tables[1:]:
        result = result[..., None] * table
    return result


def cells(tokens: Tensor) -> Tensor:
    """Return one number per row of tokens `[N, n]`."""
    return sum((tokens[:, i] * V ** (tokens.shape[1] - 1 - i)) for i in range(tokens.shape[1]))


# ---- drafters of any quality ---------------------------------------------------------------------


class Tables:
    """Drafts from q(next | tokens so far); uniform beyond the tables.

    Args:
        tables: `[8]`, `[8, 8]`, ... .
        block_size: K.
        how: `sample`, `argmax` (a point mass) or, wrong, `argmax_as_sample`.
    """

    def __init__(self, tables: list[Tensor], block_size: int = K, how: str = "sample") -> None:
        self.tables, self.block_size, self.how = tables, block_size, how

    def begin(self, batch: int) -> None:
        self.index = torch.arange(batch)
        self.history: list[list[int]] = [[] for _ in range(batch)]

    def on_commit(self, index: int, tokens: list[int], accepted: int) -> None:
        self.history[index] += tokens

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        pass

    def keep(self, index: Tensor) -> None:
        self.index = self.index[index]

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        histories = [list(self.history[i]) for i in self.index.tolist()]
        assert [h[-1] for h in histories] == anchors.tolist()
        drafts, qs = [], []
        for slot in range(self.block_size - 1):
            q = torch.full((len(anchors), V), 1 / V)
            for depth in range(1, len(self.tables)):
                rows = [i for i, h in enumerate(histories) if len(h) == depth]
                past = torch.tensor([histories[i] for i in rows], dtype=torch.int64)
                if rows:
                    q[rows] = self.tables[depth][tuple(past.T)].float()
            sampled = draw(q, uniform[:, slot])
            chosen = sampled if self.how == "sample" else q.argmax(-1)
            for history, token in zip(histories, chosen.tolist(), strict=True):
                history.append(token)
            drafts.append(chosen)
            qs.append(q)
        tokens = torch.stack(drafts, dim=1)
        return Proposal(tokens, None if self.how == "argmax" else torch.stack(qs, dim=1))


def perfect(tables: list[Tensor]) -> list[Tensor]:
    return tables


def noisy(tables: list[Tensor]) -> list[Tensor]:
    return [0.5 * p + 0.5 * q for p, q in zip(tables, random(tables), strict=True)]


def random(tables: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        (1.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype)).softmax(-1) for p in tables
    ]


def adversarial(tables: list[Tensor]) -> list[Tensor]:
    """The less the target likes a token, the more the drafter does."""
    return [(-(p + 1e-9).log()).softmax(-1) for p in tables]


QUALITIES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "perfect": perfect,
    "noisy": noisy,
    "random": random,
    "adversarial": adversarial,
}


def sample(
    target: Target, proposer: Proposer | None, sampling: Sampling, count: int
) -> tuple[Tensor, list[Decoded]]:
    """Return the tokens `[RUNS, count]` of as many outputs, each of a seed of its own."""
    decoded: list[Decoded] = []
    for seed in range(0, RUNS, ROWS):
        prompts = [START] * ROWS
        hook = getattr(proposer, "on_commit", None)
        decoded += decode(target, prompts, proposer, count, (), sampling, 10_000_000 + seed, hook)
    return torch.tensor([d.tokens for d in decoded]), decoded


def check_lossless(tokens: Tensor, tables: list[Tensor]) -> None:
    """Check the joint distribution of the first three tokens, and of the last three of four."""
    exact = joint(tables[: tokens.shape[1]])
    assert p_value(cells(tokens[:, :3]), exact.sum(3) if exact.dim() == 4 else exact) > P_VALUE
    if exact.dim() == 4:
        assert p_value(cells(tokens[:, 1:4]), exact.sum(0)) > P_VALUE


# ---- losslessness --------------------------------------------------------------------------------


def grid() -> list[object]:
    """Everything; what runs by default is temperature 1 with a noisy and an adversarial drafter."""
    cases = []
    for rule, temperature, quality in product(("match", "rejection"), (0.7, 1.0, 1.5), QUALITIES):
        quick = temperature == 1.0 and quality in ("noisy", "adversarial")
        marks = () if quick else (pytest.mark.slow,)
        cases.append(pytest.param(rule, temperature, quality, marks=marks))
    return cases


@pytest.mark.parametrize(("rule", "temperature", "quality"), grid())
def test_sampled_output_has_the_targets_distribution(
    eight: Target, rule: str, temperature: float, quality: str
) -> None:
    """Both rules, at any temperature and with any drafter; accepted as often as theory says."""
    sampling = Sampling(temperature, rule=rule)
    tables = conditionals(eight, sampling)
    q = QUALITIES[quality](tables)
    proposer = Tables(q, how="argmax" if rule == "match" else "sample")
    tokens, decoded = sample(eight, proposer, sampling, 5)
    check_lossless(tokens[:, :4], tables)
    if rule == "match":
        best = q[1].float().argmax(-1, keepdim=True)
        chance = float((tables[0] * tables[1].gather(1, best)[:, 0]).sum())
    else:
        chance = float((tables[0] * torch.minimum(tables[1], q[1]).sum(-1)).sum())
    rate = sum(d.cycles[0].accepted > 0 for d in decoded) / RUNS
    assert abs(rate - chance) < 4.5 * math.sqrt(chance * (1 - chance) / RUNS) + 1e-5
    if rule == "rejection" and quality == "perfect":
        assert all(d.cycles[0].accepted == K - 1 for d in decoded[:ROWS])


@pytest.mark.parametrize("quality", ["noisy", pytest.param("random", marks=pytest.mark.slow)])
def test_argmax_with_the_ratio_rule_is_caught(eight: Target, quality: str) -> None:
    """The known wrong rule: argmax drafts accepted with min(1, p/q). The same test rejects it."""
    tables = conditionals(eight, REJECTION)
    proposer = Tables(QUALITIES[quality](tables), how="argmax_as_sample")
    tokens, _ = sample(eight, proposer, REJECTION, 5)
    assert p_value(cells(tokens[:, :3]), joint(tables[:3])) < P_VALUE
    with pytest.raises(AssertionError):
        check_lossless(tokens[:, :4], tables)


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_end_inside_a_block_keeps_the_distribution(
    eight: Target, rule: str, count: int
) -> None:
    """The draft that has no room counts as never made: accepting or rejecting it would skew."""
    sampling = Sampling(1.0, rule=rule)
    tables = conditionals(eight, sampling, count)
    how = "argmax" if rule == "match" else "sample"
    tokens, decoded = sample(eight, Tables(noisy(tables), how=how), sampling, count)
    assert tokens.shape[1] == count
    check_lossless(tokens, tables)
    assert all(d.cycles[0].drafted == count - 2 for d in decoded)


FILTERED = [
    Sampling(1.0, top_k=3, rule="rejection"),
    Sampling(1.3, top_p=0.7, rule="match"),
    Sampling(1.0, repetition_penalty=1.8, rule="rejection"),
    Sampling(1.5, top_k=5, top_p=0.9, repetition_penalty=0.6, rule="match"),
]


@pytest.mark.parametrize(
    ("sampling", "narrow"),
    [
        (REJECTION, True),
        (FILTERED[3], False),
        *[pytest.param(s, False, marks=pytest.mark.slow) for s in (REJECTION, *FILTERED[:3])],
        *[pytest.param(s, True, marks=pytest.mark.slow) for s in (MATCH, FILTERED[2])],
    ],
)
def test_a_real_drafter_keeps_the_distribution(
    eight: Target, sampling: Sampling, narrow: bool
) -> None:
    """Filters and penalties reach target and drafter; q is zero outside the draft vocabulary."""
    drafter = tiny_drafter(eight, draft_vocab_size=4 if narrow else None)
    if narrow:
        drafter.draft_ids.copy_(torch.tensor([1, 2, 5, 6]))
    tables = conditionals(eight, sampling)
    tokens, decoded = sample(eight, DrafterProposer(drafter, eight), sampling, 4)
    check_lossless(tokens, tables)
    accepted = sum(c.accepted for d in decoded for c in d.cycles)
    assert 0.02 < accepted / sum(c.drafted for d in decoded for c in d.cycles) < 0.98


SYSTEMS = [
    Axes(drafting="autoregressive"),
    Axes(drafting="autoregressive", injection="input"),
    Axes(markov_rank=3),
    Axes(injection="none"),
    Axes(denoising_steps=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("axes", SYSTEMS, ids=lambda axes: axes.short_name)
@pytest.mark.parametrize("narrow", [False, True])
def test_every_way_of_drafting_keeps_the_distribution(
    eight: Target, axes: Axes, narrow: bool
) -> None:
    """Where a draft depends on the one sampled before it, q is the distribution it came from."""
    drafter = tiny_drafter(eight, axes=axes, draft_vocab_size=4 if narrow else None)
    if narrow:
        drafter.draft_ids.copy_(torch.tensor([1, 2, 5, 6]))
    sampling = MATCH if axes.denoising_steps > 1 else REJECTION
    tokens, decoded = sample(eight, DrafterProposer(drafter, eight), sampling, 4)
    check_lossless(tokens, conditionals(eight, sampling))
    accepted = sum(c.accepted for d in decoded for c in d.cycles)
    assert 0.02 < accepted / sum(c.drafted for d in decoded for c in d.cycles) < 0.98


def test_plain_sampling_has_the_targets_distribution(eight: Target) -> None:
    tables = conditionals(eight, MATCH)
    tokens, decoded = sample(eight, None, MATCH, 4)
    check_lossless(tokens, tables)
    assert all(len(d.cycles) == 3 for d in decoded)


def test_a_point_mass_under_the_ratio_rule_is_the_match_rule(eight: Target) -> None:
    """Accepted with min(1, p/1) = p, else a sample of p without that token: the same output law."""
    tables = conditionals(eight, REJECTION)
    mass = [torch.nn.functional.one_hot(q.argmax(-1), V).double() for q in noisy(tables)]
    tokens, _ = sample(eight, Tables(mass), REJECTION, 5)
    check_lossless(tokens[:, :4], tables)


def test_the_seed_decides(eight: Target) -> None:
    """Prompt i of a batch is seeded with (seed + i); torch's global generator is not touched."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    proposer = DrafterProposer(tiny_drafter(eight), eight)

    def run(seed: int, rows: int = 4) -> list[list[int]]:
        state = torch.get_rng_state()
        outputs = decode(eight, [START] * rows, proposer, 12, (), REJECTION, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [d.tokens for d in outputs]

    assert run(5) == run(5)
    assert run(5)[1:] == run(6, 3)
    assert len({tuple(tokens) for tokens in run(5)}) == 4
    assert before.shape == torch.get_rng_state().shape


def test_chi_square_survival_is_the_tables() -> None:
    for statistic, freedom, expected in (
        (3.841, 1, 0.05),
        (18.307, 10, 0.05),
        (149.449, 100, 1e-3),
    ):
        assert survival(statistic, freedom) == pytest.approx(expected, rel=2e-3)
    exact = torch.tensor([0.5, 0.5, 0.0])
    assert p_value(torch.tensor([0, 1] * 50), exact) == 1.0
    assert p_value(torch.tensor([0, 1] * 50 + [2]), exact) == 0.0
    assert p_value(torch.tensor([0] * 70 + [1] * 30), exact) == pytest.approx(6.33e-5, rel=1e-2)


# ---- filters and penalties -----------------------------------------------------------------------


def random_logits(rows: int = 6, ties: bool = False) -> Tensor:
    logits = 2 * torch.randn(rows, 40, generator=torch.Generator().manual_seed(11))
    return logits.round() if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, 3, 40, 99])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_distribution_is_the_slow_one(
    ties: bool, top_k: int | None, top_p: float | None, temperature: float
) -> None:
    """All tied at the k-th place stay; ties at the edge of top-p go by id."""
    logits = random_logits(ties=ties)
    sampling = Sampling(temperature, top_k, top_p)
    expected = [slow_distribution(row, sampling, set()) for row in logits.tolist()]
    found = distribution(logits, sampling)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-7)
    assert torch.equal(found > 0, torch.tensor(expected) > 0)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)))


def test_ties_at_the_edges() -> None:
    """Written out: top-k keeps both of two tied tokens, top-p the first of them."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert (distribution(logits, Sampling(1.0, top_k=1))[0] > 0).tolist() == [False, True, True, 0]
    assert (distribution(logits, Sampling(1.0, top_p=0.3))[0] > 0).tolist() == [0, True, False, 0]
    quarter = distribution(torch.zeros(1, 4), Sampling(1.0, top_p=0.5))
    assert quarter.tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize(("top_k", "top_p"), [(5, None), (None, 0.8), (9, 0.6)])
def test_filters_are_those_of_transformers(top_k: int | None, top_p: float | None) -> None:
    logits = random_logits()
    scores = logits / 0.8
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = distribution(logits, Sampling(0.8, top_k, top_p))
    torch.testing.assert_close(found, scores.softmax(-1))
    assert 1 < int((found > 0).sum(-1).max()) < 20


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 4.0])
def test_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits()
    ids = torch.randint(40, (6, 15), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    torch.testing.assert_close(penalize(logits, seen, penalty), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_and_almost_zero_are_greedy(dtype: torch.dtype) -> None:
    """No overflow to NaN however low the temperature, in float32 whatever the logits' dtype."""
    logits = (100 * random_logits()).to(dtype)
    best = torch.nn.functional.one_hot(logits.float().argmax(-1), 40).float()
    for temperature in (0.0, 1e-6, 1e-38):
        found = distribution(logits, Sampling(temperature))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, best)


# ---- penalties in the loop -----------------------------------------------------------------------


class Known:
    """Drafts a known continuation of one prompt; slot 3 of every second block is wrong."""

    block_size = K

    def __init__(self, prompt: Tensor, continuation: list[int]) -> None:
        self.sequence, self.start = [*prompt.tolist(), *continuation, 3, 3, 3], len(prompt)

    def begin(self, batch: int) -> None:
        self.at, self.cycle = 0, 0

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        self.at += int(counts[0])

    def propose(
        self, anchors: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None
    ) -> Proposal:
        assert seen is not None
        told = set(self.sequence[: self.at + 1])
        assert set(seen[0].nonzero()[:, 0].tolist()) == told
        assert self.sequence[self.at] == anchors[0]
        drafts = self.sequence[self.at + 1 : self.at + K]
        self.cycle += 1
        if self.cycle % 2:
            drafts[2] = (drafts[2] + 1) % 90
        return Proposal(torch.tensor([drafts]))

    def keep(self, index: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    "architecture", ["llama_tied", "mistral_sliding", "gemma3_softcap", "qwen3_padded"]
)
@pytest.mark.parametrize("penalty", [1.4, 0.9])
def test_greedy_with_a_penalty_is_generates(architecture: str, penalty: float) -> None:
    """Token for token: drafted tokens count as seen for the slots behind them."""
    target = tiny_target(architecture)
    prompts = [PROMPT, token_ids(17, 4)]
    expected = [greedy(target, prompt, 24, penalty) for prompt in prompts]
    assert expected[0] != greedy(target, PROMPT, 24)
    sampling = Sampling(repetition_penalty=penalty)
    proposer = DrafterProposer(tiny_drafter(target), target)
    for who in (proposer, None):
        found = decode(target, prompts, who, 24, (), sampling)
        assert [d.tokens for d in found] == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        [found] = decode(target, [prompt], Known(prompt, tokens), 24, (), sampling)
        assert found.tokens == tokens
        assert [c.accepted for c in found.cycles[:4]] == [2, 3, 2, 3]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(repetition_penalty=3.0), *FILTERED[2:]])
def test_the_drafter_is_penalised_slot_by_slot(narrow: bool, sampling: Sampling) -> None:
    """Against transformers' processor over all that occurred, drafts of the block included."""
    target = tiny_target("llama_untied")
    drafter = tiny_drafter(target, draft_vocab_size=40 if narrow else None, block_size=8)
    ids = torch.arange(96)
    if narrow:
        ids = torch.arange(40) * 2 + 3
        drafter.draft_ids.copy_(ids)
    proposer = DrafterProposer(drafter, target)
    prompt = token_ids(9)
    hidden = target.forward(prompt[None]).hidden
    assert hidden is not None
    observe(proposer, hidden)
    seen = torch.zeros(1, 96, dtype=torch.bool)
    seen[0, prompt] = True
    uniform = torch.rand(1, 8, generator=torch.Generator().manual_seed(2))
    before = seen.clone()
    proposal = proposer.propose(prompt[-1:], sampling, uniform, seen)
    assert torch.equal(seen, before)
    logits = target.head(block_hidden(proposer, int(prompt[-1]))[1:])[:, ids].detach()
    past, free = prompt.tolist(), []
    for slot in range(7):
        scores = torch.full((1, 96), -1e4)
        scores[0, ids] = logits[slot]
        process = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        scores = process(torch.tensor([past]), scores)
        scores = torch.full_like(scores, -torch.inf).index_copy(1, ids, scores[:, ids])
        if proposal.q is None:
            token = int(scores.argmax())
        else:
            q = distribution(scores, sampling)
            torch.testing.assert_close(proposal.q[:, slot], q)
            token = int(draw(q, uniform[:, slot]))
        free.append(int(ids[logits[slot].argmax()]))
        past.append(token)
        assert int(proposal.tokens[0, slot]) == token
    if sampling.repetition_penalty > 1:
        assert past[9:] != free
    assert (proposal.q is None) == (sampling.greedy or sampling.rule == "match")


# ---- small parts ---------------------------------------------------------------------------------


EDGES = [0.0, 2.0**-53, 0.3, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "weights", [[0, 0, 1, 0], [0, 3, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0, 1, 0], [1e-30, 0, 0]]
)
def test_draw_never_gives_a_token_of_probability_zero(
    dtype: torch.dtype, weights: list[float]
) -> None:
    """At either end of the uniform numbers, with zeros first, last and between."""
    probabilities = torch.tensor(weights, dtype=dtype).expand(len(EDGES), -1)
    tokens = draw(probabilities, torch.tensor(EDGES, dtype=torch.float64))
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()
    support = [i for i, w in enumerate(weights) if w > 0]
    assert (tokens[0], tokens[-1]) == (support[0], support[-1])
    assert tokens.tolist() == sorted(tokens.tolist())


def test_draw_inverts_the_sum() -> None:
    """Any shape in front; the weights need not sum to 1."""
    probabilities = torch.tensor([0.2, 0.0, 0.6, 1.2])
    uniform = torch.tensor([[0.0, 0.0999, 0.1001], [0.399, 0.401, 0.999]])
    assert draw(probabilities.expand(2, 3, 4), uniform).tolist() == [[0, 0, 2], [2, 3, 3]]


def test_draw_of_many_small_probabilities_has_no_bias() -> None:
    """A large vocabulary: the share of the second half is its probability, the last included."""
    probabilities = torch.full((1, 150_000), 1 / 150_000)
    uniform = (torch.arange(100) + 0.5) / 100
    tokens = draw(probabilities.expand(100, -1), uniform)
    assert (tokens - uniform.double() * 150_000).abs().max() <= 1


def one_hot(token: int) -> list[float]:
    return [float(i == token) for i in range(4)]


def rejecting(
    u: list[list[float]], q: list[list[float]], p: list[list[float]], room: int
) -> object:
    accepted, token = accept_rejecting(
        torch.tensor([[2, 3]]),
        torch.tensor([q]),
        torch.tensor([p]),
        torch.tensor([u], dtype=torch.float64),
        torch.tensor([room]),
    )
    return accepted.tolist(), token.tolist()


def test_rejection_by_hand() -> None:
    """Accept below p/q; the first miss draws from what p has above q; a full block from p."""
    q = [[0.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.5, 0.5]]
    p = [[0.25, 0.25, 0.25, 0.25], [0.1, 0.3, 0.3, 0.3], one_hot(1)]
    assert rejecting([[0.49, 0], [0.59, 0], [0, 0.9]], q, p, 9) == ([2], [1])
    assert rejecting([[0.51, 0.99], [0.0, 0], [0, 0]], q, p, 9) == ([0], [0])
    assert rejecting([[0.49, 0], [0.61, 0.2], [0, 0]], q, p, 9) == ([1], [0])
    assert rejecting([[0.49, 0], [0.61, 0.3], [0, 0]], q, p, 9) == ([1], [1])
    assert rejecting([[0.49, 0], [0.61, 0.99], [0, 0]], q, p, 9) == ([1], [1])


def test_rejection_without_room_draws_from_p() -> None:
    """The draft behind the last accepted one was never made: not p - q, and no acceptance."""
    q = [[0.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.5, 0.5]]
    p = [[0.25, 0.25, 0.25, 0.25], [0.1, 0.3, 0.3, 0.3], one_hot(1)]
    assert rejecting([[0.9, 0.99], [0, 0], [0, 0]], q, p, 0) == ([0], [3])
    assert rejecting([[0.0, 0.0], [0, 0.99], [0, 0]], q, p, 1) == ([1], [3])
    assert rejecting([[0.9, 0.99], [0, 0.5], [0, 0]], q, p, 1) == ([0], [0])


def test_rejection_where_p_and_q_are_equal_to_rounding() -> None:
    """Nothing left above q: draw from p rather than divide by nothing."""
    p = [[0.5, 0.5, 0.0, 0.0], one_hot(0), one_hot(1)]
    q = [[0.5, 0.5, 0.0, 0.0], one_hot(0)]
    assert rejecting([[0.0, 0.6], [0, 0], [0, 0]], q, p, 9) == ([0], [1])


def test_matching_has_room_for_so_many() -> None:
    drafts = torch.tensor([[5, 6, 7]]).expand(5, -1)
    choices = torch.tensor([[5, 6, 7, 8]]).expand(5, -1)
    room = torch.tensor([0, 1, 2, 3, 9])
    assert accept_matching(drafts, choices, room).tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature: needs 0 .* got -0.1"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"temperature": math.inf}, "temperature: .* got inf"),
        ({"top_k": 0}, "top_k: needs at least 1, got 0"),
        ({"top_p": 0.0}, "top_p: needs more than 0"),
        ({"top_p": 1.1}, "top_p: .* at most 1, got 1.1"),
        ({"top_p": math.nan}, "top_p: .* got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: needs more than 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty: .* got nan"),
        ({"rule": "argmax"}, "rule: must be match or rejection, got argmax"),
    ],
)
def test_bad_values_are_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Sampling(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_temperature_zero_decodes_greedily_under_either_rule(rule: str) -> None:
    target = tiny_target()
    expected = varied(greedy(target, PROMPT, 20))
    proposer = DrafterProposer(tiny_drafter(target), target)
    [found] = decode(target, [PROMPT], proposer, 20, (), Sampling(0.0, rule=rule), seed=9)
    assert found.tokens == expected
