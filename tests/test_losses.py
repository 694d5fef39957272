"""The chunked loss against a slow reference that takes one slot at a time."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dflash_lightning.losses import LossOutput, TargetView, chunked_loss
from dflash_lightning.position_weights import (
    DPaceWeights,
    ExpWeights,
    PositionWeights,
    UniformWeights,
)
from dflash_lightning.slot_losses import (
    DataToken,
    Labels,
    Loss,
    Mix,
    TargetArgmax,
    TargetKL,
    TargetTV,
    Term,
    Wanted,
)
from dflash_lightning.target_head import OutputHead

BLOCKS, SLOTS, HIDDEN, ROWS, TOKENS, PLACES = 9, 4, 12, 31, 40, 50
CHUNKS = [1, 4, 7, 23, 1000]
MIX = Mix(
    {"data": Term(DataToken(), 0.3), "kl": Term(TargetKL()), "said": Term(TargetArgmax(), 2.0)}
)
LOSSES = {
    "data": DataToken(),
    "argmax": TargetArgmax(),
    "kl": TargetKL(),
    "tv": TargetTV(),
    "mix": MIX,
}
WEIGHTS = {"exp": ExpWeights(2.0), "uniform": UniformWeights(), "dpace": DPaceWeights(0.4)}


class Slots(NamedTuple):
    hidden: Tensor
    labels: Labels
    mask: Tensor
    context: Tensor
    states: Tensor
    """Final target states `[PLACES, HIDDEN]`."""
    places: Tensor
    weight: Tensor
    """Weight `[ROWS, HIDDEN]` of the head."""
    full: Tensor
    """Weight `[TOKENS, HIDDEN]` of the target's whole head: some of its tokens can't be drafted."""


def slots(dtype: torch.dtype = torch.float32, seed: int = 0) -> Slots:
    """Random blocks: of all shapes of label masks, one of them empty, some labels unknown."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def below(bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=generator)

    mask = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    mask[1, 2:] = mask[2, 0] = mask[3, 1] = mask[4] = False
    known = below(6, BLOCKS, SLOTS) > 0
    full = normal(TOKENS, HIDDEN)
    return Slots(
        normal(BLOCKS, SLOTS, HIDDEN),
        Labels(below(ROWS, BLOCKS, SLOTS) * known, known),
        mask,
        below(TOKENS, BLOCKS, SLOTS),
        normal(PLACES, HIDDEN),
        below(PLACES, BLOCKS, SLOTS),
        full[:ROWS].clone(),
        full,
    )


def target_view(s: Slots) -> TargetView:
    def read(states: Tensor) -> tuple[Labels, Tensor]:
        argmax = (states @ s.full.T).argmax(dim=-1)
        return Labels(argmax.clamp(max=ROWS - 1), argmax < ROWS), states @ s.weight.T

    return TargetView(s.states, s.places, read)


def loss_of(
    s: Slots,
    head: Any = None,
    loss: Loss | None = None,
    weights: PositionWeights | None = None,
    chunk: int = 1000,
) -> LossOutput:
    return chunked_loss(
        s.hidden,
        s.labels,
        s.mask,
        OutputHead(s.weight) if head is None else head,
        loss,
        weights,
        s.context,
        target_view(s) if loss is not None and loss.needs else None,
        chunk,
    )


class BigramHead(nn.Module):
    """A frozen head and a learned low-rank bias by the token before."""

    def __init__(self, s: Slots, rank: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.frozen = OutputHead(s.weight)
        self.first = nn.Parameter(torch.randn(TOKENS, rank, generator=generator).to(s.weight.dtype))
        self.second = nn.Parameter(torch.randn(ROWS, rank, generator=generator).to(s.weight.dtype))
        self.still = nn.Parameter(torch.ones(1, dtype=s.weight.dtype), requires_grad=False)

    def forward(self, states: Tensor, previous: Tensor | None) -> Tensor:
        return self.frozen(states) + self.still * (self.first[previous] @ self.second.T)


# ---- the slow reference --------------------------------------------------------------------------


def minus_log_softmax(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of one slot, written out."""
    return logits.exp().sum().log() - logits[label]


def slow_slot(name: str, logits: Tensor, s: Slots, b: int, k: int) -> tuple[Tensor, float]:
    """Return the loss of one slot and how much of it counts."""
    zero = logits.new_zeros(())
    state = s.states[s.places[b, k]]
    if name == "data":
        known = bool(s.labels.known[b, k])
        return (minus_log_softmax(logits, s.labels.rows[b, k]), 1.0) if known else (zero, 0.0)
    if name == "argmax":
        said = (s.full @ state).argmax()
        return (minus_log_softmax(logits, said), 1.0) if said < ROWS else (zero, 0.0)
    p, q = (s.weight @ state).softmax(-1), logits.softmax(-1)
    if name == "kl":
        return (p * (p / q).log()).sum(), 1.0
    if name == "tv":
        return 1 - torch.minimum(p, q).sum(), 1.0
    assert name == "mix"
    parts = [
        (w, *slow_slot(n, logits, s, b, k))
        for n, w in (("data", 0.3), ("kl", 1.0), ("argmax", 2.0))
    ]
    value = torch.stack([w * loss for w, loss, _ in parts]).sum()
    return value, sum(w * share for w, _, share in parts) / 3.3


def slow_weights(name: str, logits: list[Tensor], s: Slots, b: int) -> list[float]:
    """Return the weights of one block, by the definition."""
    if name == "exp":
        return [float(torch.tensor(-k / 2.0).exp()) for k in range(SLOTS)]
    if name == "uniform":
        return [1.0] * SLOTS
    survival, product = [], 1.0
    for k in range(SLOTS):
        said = float(logits[k].softmax(-1)[s.labels.rows[b, k]]) if s.labels.known[b, k] else 0.0
        product *= (0.6 * said + 0.4) if s.mask[b, k] else 0.0
        survival.append(product)
    return [sum(survival[k:]) for k in range(SLOTS)]


def reference(
    s: Slots, head: Any, loss: str = "data", weights: str = "uniform"
) -> tuple[Tensor, float]:
    """`sum(w * loss)` and `sum(w)`, one slot at a time."""
    total, denominator = s.hidden.new_zeros(()), 0.0
    for b in range(BLOCKS):
        logits = [head(s.hidden[b, k][None], s.context[b, k][None])[0] for k in range(SLOTS)]
        by_slot = slow_weights(weights, [x.detach() for x in logits], s, b)
        for k in range(SLOTS):
            if s.mask[b, k]:
                value, share = slow_slot(loss, logits[k], s, b, k)
                total, denominator = total + by_slot[k] * value, denominator + by_slot[k] * share
    return total, denominator


def value_and_gradient(
    s: Slots, loss: Callable[[Slots], Tensor], upstream: float = 1.0
) -> tuple[Tensor, Tensor]:
    hidden = s.hidden.clone().requires_grad_()
    value = loss(s._replace(hidden=hidden))
    (value * upstream).backward()
    assert hidden.grad is not None
    return value.detach(), hidden.grad


# ---- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_those_of_the_slow_reference(
    loss: str, weights: str, chunk: int
) -> None:
    s = slots()
    head = OutputHead(s.weight)
    ours = value_and_gradient(
        s, lambda x: loss_of(x, head, LOSSES[loss], WEIGHTS[weights], chunk).numerator
    )
    slow = value_and_gradient(s, lambda x: reference(x, head, loss, weights)[0])
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-5)
    denominator = loss_of(s, head, LOSSES[loss], WEIGHTS[weights], chunk).denominator
    assert float(denominator) == pytest.approx(reference(s, head, loss, weights)[1], rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 9, 100])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_gradcheck_in_float64(learned: bool, loss: str, weights: str, chunk: int) -> None:
    s = slots(torch.float64)
    frozen = OutputHead(s.weight, torch.linspace(-1, 1, ROWS, dtype=torch.float64), softcap=4.0)
    head = BigramHead(s) if learned else frozen
    by = WEIGHTS[weights]
    if weights == "dpace":  # detached weights: finite differences would move them too
        by = Frozen(loss_of(s, head, LOSSES[loss], by).weights)

    def numerator(hidden: Tensor, *_: Tensor) -> Tensor:
        return loss_of(s._replace(hidden=hidden), head, LOSSES[loss], by, chunk).numerator

    hidden = s.hidden.clone().requires_grad_()
    assert numerator(hidden).dtype == torch.float64
    learnt = [head.first, head.second] if isinstance(head, BigramHead) else []
    assert torch.autograd.gradcheck(numerator, (hidden, *learnt), fast_mode=True)


class Frozen(PositionWeights):
    """Gives the weights of all blocks as they were once; they are asked for in order."""

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.place = weights, 0

    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        found = self.weights[self.place : self.place + len(labelled)]
        self.place = (self.place + len(labelled)) % BLOCKS
        return found


@pytest.mark.parametrize("chunk", [1, 9, 100])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_learned_head_gets_the_slow_gradient(loss: str, weights: str, chunk: int) -> None:
    s = slots()
    ours, slow = BigramHead(s), BigramHead(s)
    hidden = s.hidden.requires_grad_()
    (-2.5 * loss_of(s, ours, LOSSES[loss], WEIGHTS[weights], chunk).numerator).backward()
    gradient, hidden.grad = hidden.grad, None
    (-2.5 * reference(s, slow, loss, weights)[0]).backward()
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-5)
    for one, other in ((ours.first, slow.first), (ours.second, slow.second)):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.abs().max() > 0.01
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert ours.still.grad is None


def test_a_learned_head_learns_from_states_that_take_no_gradient() -> None:
    s = slots()
    head = BigramHead(s)
    loss_of(s, head, chunk=6).numerator.backward()
    together = BigramHead(s)
    loss_of(s._replace(hidden=s.hidden.clone().requires_grad_()), together).numerator.backward()
    assert head.first.grad is not None
    torch.testing.assert_close(head.first.grad, together.first.grad)


def test_gradients_of_a_learned_head_add_up_over_batches() -> None:
    """Through autograd, so that hooks on parameters (accumulation, DDP) see them."""
    one, other = slots(seed=0), slots(seed=1)
    head, seen = BigramHead(one), list[int]()
    head.first.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    apart = []
    for s in (one, other):
        loss_of(s, head).numerator.backward()
        assert head.first.grad is not None
        apart.append(head.first.grad.clone())
        head.first.grad = None
    for s in (one, other):
        loss_of(s, head).numerator.backward()
    torch.testing.assert_close(head.first.grad, apart[0] + apart[1])
    assert len(seen) == 4


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_under_autocast_the_gradient_is_as_good_as_plain_autograds(learned: bool) -> None:
    s = slots()
    head: Any = BigramHead(s) if learned else OutputHead(s.weight)
    exact = value_and_gradient(s, lambda x: reference(x, head, "kl")[0])
    exact_head = _gradients(head)
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradient(s, lambda x: loss_of(x, head, TargetKL(), chunk=5).numerator)
        found_head = _gradients(head)
        plain = value_and_gradient(s, lambda x: reference(x, head, "kl")[0])
        plain_head = _gradients(head)
    assert found[0].dtype == torch.float32
    for ours, theirs, right in zip(
        [found[1], *found_head], [plain[1], *plain_head], [exact[1], *exact_head], strict=True
    ):
        apart = float((ours - right).norm() / right.norm())
        assert apart < max(0.01, 1.1 * float((theirs - right).norm() / right.norm()))


def _gradients(head: Any) -> list[Tensor]:
    """Return and forget the gradients of a head."""
    learnt = [head.first, head.second] if isinstance(head, BigramHead) else []
    found = [p.grad.clone() for p in learnt]
    for p in learnt:
        p.grad = None
    return found


def test_every_chunk_size_gives_the_same() -> None:
    s = slots()
    found = [loss_of(s, None, MIX, DPaceWeights(), c) for c in CHUNKS]
    for other in found[1:]:
        torch.testing.assert_close(other[:4], found[0][:4])
        assert torch.equal(other.predictions, found[0].predictions)


def test_backward_scales_with_what_is_done_to_the_numerator() -> None:
    s = slots()
    once = value_and_gradient(s, lambda x: loss_of(x, chunk=5).numerator)[1]
    scaled = value_and_gradient(s, lambda x: loss_of(x, chunk=5).numerator, upstream=-2.5)[1]
    torch.testing.assert_close(scaled, -2.5 * once)


def test_what_is_said_of_slots_is_each_slots_own_and_detached() -> None:
    s = slots()
    output = loss_of(s._replace(hidden=s.hidden.requires_grad_()), weights=ExpWeights(2.0), chunk=4)
    for b in range(BLOCKS):
        for k in range(SLOTS):
            if not s.mask[b, k]:
                assert output.slot_loss[b, k] == output.weights[b, k] == 0
                assert output.predictions[b, k] == -1
                continue
            logits = s.weight @ s.hidden[b, k].detach()
            expected, _ = slow_slot("data", logits, s, b, k)
            torch.testing.assert_close(output.slot_loss[b, k], expected)
            assert output.predictions[b, k] == logits.argmax()
    assert output.numerator.requires_grad
    assert not any(x.requires_grad for x in output[1:])


class Nothing(PositionWeights):
    def __call__(self, labelled: Tensor, probabilities: Tensor | None) -> Tensor:
        return torch.zeros(labelled.shape)


def test_all_weights_zero_give_finite_zeros() -> None:
    s = slots()
    s = s._replace(hidden=100 * s.hidden)
    value, gradient = value_and_gradient(s, lambda x: loss_of(x, weights=Nothing()).numerator)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert (loss_of(s, weights=Nothing()).predictions[s.mask] >= 0).all(), "scored all the same"


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_no_labelled_slot_gives_zero_and_backward_works(learned: bool) -> None:
    s = slots()
    s = s._replace(mask=torch.zeros_like(s.mask))
    head: Any = BigramHead(s) if learned else OutputHead(s.weight)
    output = loss_of(s, head)
    assert output.predictions.dtype == torch.int64
    assert (output.predictions == -1).all()
    assert output.denominator == 0
    value, gradient = value_and_gradient(s, lambda x: loss_of(x, head).numerator)
    assert value == 0
    assert value.dtype == torch.float32
    assert not gradient.any()
    if learned:
        assert not head.first.grad.any(), "zeros, not None: ranks must agree"


def test_unlabelled_slots_do_not_matter() -> None:
    s = slots()
    spoiled = s._replace(hidden=torch.where(s.mask[..., None], s.hidden, torch.nan))
    for one, other in zip(
        value_and_gradient(s, lambda x: loss_of(x, None, MIX, DPaceWeights()).numerator),
        value_and_gradient(spoiled, lambda x: loss_of(x, None, MIX, DPaceWeights()).numerator),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_head_with_bias_scale_and_softcap() -> None:
    s = slots()
    bias = torch.linspace(-2, 2, ROWS)
    head = OutputHead(s.weight, bias, scale=3.0, softcap=5.0)

    def by_hand(hidden: Tensor, _: Tensor) -> Tensor:
        return 5 * torch.tanh(3 * (hidden @ s.weight.T + bias) / 5)

    ours = value_and_gradient(s, lambda x: loss_of(x, head, chunk=6).numerator)
    slow = value_and_gradient(s, lambda x: reference(x, by_hand)[0])
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-5)
    assert (5 - s.hidden @ s.weight.T * 3).min() < 0, "the cap must bite somewhere"


def test_a_frozen_head_gets_no_gradient() -> None:
    s = slots()
    s.weight.requires_grad_()
    value_and_gradient(s, lambda x: loss_of(x, OutputHead(s.weight)).numerator)
    assert s.weight.grad is None


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_without_a_gradient_to_form_the_value_is_the_same(learned: bool) -> None:
    s = slots()
    head: Any = BigramHead(s) if learned else OutputHead(s.weight)
    with torch.no_grad():
        output = loss_of(s, head, chunk=4)
    assert not output.numerator.requires_grad
    torch.testing.assert_close(output.numerator, reference(s, head)[0].detach())


class Spy(DataToken):
    def __init__(self, look: Callable[[Tensor], None]) -> None:
        self.look = look

    def __call__(self, logits: Tensor, wanted: Wanted) -> Tensor:
        self.look(logits)
        return super().__call__(logits, wanted)


def test_bfloat16_states_still_have_a_float32_loss() -> None:
    exact, s, seen = slots(), slots(torch.bfloat16), list[torch.dtype]()
    spy = Spy(lambda logits: seen.append(logits.dtype))
    value, gradient = value_and_gradient(s, lambda x: loss_of(x, None, spy, chunk=5).numerator)
    value_32, gradient_32 = value_and_gradient(exact, lambda x: loss_of(x).numerator)
    assert set(seen) == {torch.float32}
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(value, value_32, rtol=0.02, atol=0)
    assert (gradient.float() - gradient_32).norm() / gradient_32.norm() < 0.03


@pytest.mark.parametrize("chunk", [1, 5, 9, 23])
def test_logits_never_exist_for_more_than_a_chunk(chunk: int) -> None:
    s = slots()
    sizes, earlier = list[int](), list[weakref.ref[Tensor]]()

    def head(hidden: Tensor, _: Tensor | None) -> Tensor:
        assert not [ref for ref in earlier if ref() is not None], "earlier logits are still alive"
        sizes.append(len(hidden))
        return hidden @ s.weight.T

    spy = Spy(lambda logits: earlier.append(weakref.ref(logits)))
    loss_of(s._replace(hidden=s.hidden.requires_grad_()), head, spy, DPaceWeights(), chunk)
    assert max(sizes) <= max(chunk, SLOTS)
    assert max(sizes) > chunk - SLOTS, "chunks are filled"
    assert sum(sizes) == int(s.mask.sum())


def test_the_target_is_read_chunk_by_chunk_too() -> None:
    s, sizes = slots(), list[int]()
    view = target_view(s)

    def read(states: Tensor) -> tuple[Labels | None, Tensor | None]:
        sizes.append(len(states))
        return view.read(states)

    spied = TargetView(s.states, s.places, read)
    chunked_loss(
        s.hidden, s.labels, s.mask, OutputHead(s.weight), TargetKL(), target=spied, chunk=8
    )
    assert max(sizes) <= 8
    assert sum(sizes) == int(s.mask.sum())
