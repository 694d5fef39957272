"""The chunked loss against a slow reference that takes one slot at a time."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dflash_lightning.losses import chunked_loss, token_cross_entropy
from dflash_lightning.target_head import OutputHead

SLOTS, HIDDEN, ROWS = 23, 12, 31
CHUNKS = [1, 2, 7, 23, 1000]

Head = Callable[[Tensor], Tensor]


class Slots(NamedTuple):
    hidden: Tensor
    labels: Tensor
    weights: Tensor
    weight: Tensor
    """Weight `[ROWS, HIDDEN]` of the head."""


def slots(dtype: torch.dtype = torch.float32, seed: int = 0) -> Slots:
    """Random slots, every fifth of them with weight 0."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(SLOTS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(ROWS, (SLOTS,), generator=generator)
    weights = torch.rand(SLOTS, generator=generator, dtype=torch.float64) + 0.1
    weights[::5] = 0
    wide = torch.promote_types(dtype, torch.float32)
    return Slots(hidden.to(dtype), labels, weights.to(wide), weight.to(dtype))


def reference(s: Slots, head: Head, slot_loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`sum(w * loss)`, one slot at a time."""
    total = s.weights.new_zeros(())
    for hidden, label, weight in zip(s.hidden, s.labels, s.weights, strict=True):
        total = total + weight * slot_loss(head(hidden).to(s.weights.dtype), label)
    return total


def minus_log_softmax(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of one slot, written out."""
    return logits.exp().sum().log() - logits[label]


def value_and_gradient(
    s: Slots, loss: Callable[[Slots], Tensor], upstream: float = 1.0
) -> tuple[Tensor, Tensor]:
    hidden = s.hidden.clone().requires_grad_()
    value = loss(s._replace(hidden=hidden))
    (value * upstream).backward()
    assert hidden.grad is not None
    return value.detach(), hidden.grad


@pytest.mark.parametrize("chunk", CHUNKS)
def test_value_and_gradient_are_those_of_the_slow_reference(chunk: int) -> None:
    s = slots()
    head = OutputHead(s.weight)
    ours = value_and_gradient(
        s, lambda x: chunked_loss(x.hidden, x.labels, x.weights, head, chunk=chunk).numerator
    )
    slow = value_and_gradient(s, lambda x: reference(x, head, minus_log_softmax))
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-5)


def test_every_chunk_size_gives_the_same() -> None:
    s = slots()
    head = OutputHead(s.weight)
    found = [chunked_loss(s.hidden, s.labels, s.weights, head, chunk=c) for c in CHUNKS]
    for other in found[1:]:
        torch.testing.assert_close(other.numerator, found[0].numerator)
        torch.testing.assert_close(other.slot_loss, found[0].slot_loss)
        assert torch.equal(other.predictions, found[0].predictions)


@pytest.mark.parametrize("chunk", [3, 100])
def test_gradcheck_in_float64(chunk: int) -> None:
    s = slots(torch.float64)
    head = OutputHead(s.weight, bias=torch.linspace(-1, 1, ROWS, dtype=torch.float64), softcap=4.0)

    def numerator(hidden: Tensor) -> Tensor:
        return chunked_loss(hidden, s.labels, s.weights, head, chunk=chunk).numerator

    hidden = s.hidden.clone().requires_grad_()
    assert numerator(hidden).dtype == torch.float64
    assert torch.autograd.gradcheck(numerator, (hidden,))


def test_backward_scales_with_what_is_done_to_the_numerator() -> None:
    s = slots()
    head = OutputHead(s.weight)

    def loss(x: Slots) -> Tensor:
        return chunked_loss(x.hidden, x.labels, x.weights, head, chunk=5).numerator

    once = value_and_gradient(s, loss)[1]
    scaled = value_and_gradient(s, loss, upstream=-2.5)[1]
    torch.testing.assert_close(scaled, -2.5 * once)


def test_slot_loss_and_predictions_are_those_of_each_slot_and_detached() -> None:
    s = slots()
    head = OutputHead(s.weight)
    output = chunked_loss(s.hidden.requires_grad_(), s.labels, s.weights, head, chunk=4)
    for m in range(SLOTS):
        logits = s.weight @ s.hidden[m].detach()
        torch.testing.assert_close(output.slot_loss[m], minus_log_softmax(logits, s.labels[m]))
        assert output.predictions[m] == logits.argmax()
    assert output.numerator.requires_grad
    assert not output.slot_loss.requires_grad
    assert not output.predictions.requires_grad


def test_all_weights_zero_give_finite_zeros() -> None:
    s = slots()
    s = s._replace(weights=torch.zeros(SLOTS), hidden=100 * s.hidden)
    value, gradient = value_and_gradient(
        s, lambda x: chunked_loss(x.hidden, x.labels, x.weights, OutputHead(x.weight)).numerator
    )
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_slots_give_zero_and_backward_works() -> None:
    s = Slots(*(part[:0] for part in slots()[:3]), slots().weight)
    output = chunked_loss(s.hidden, s.labels, s.weights, OutputHead(s.weight))
    assert output.slot_loss.shape == output.predictions.shape == (0,)
    assert output.predictions.dtype == torch.int64
    value, gradient = value_and_gradient(
        s, lambda x: chunked_loss(x.hidden, x.labels, x.weights, OutputHead(x.weight)).numerator
    )
    assert value == 0
    assert value.dtype == torch.float32
    assert gradient.shape == (0, HIDDEN)


def test_slots_of_weight_zero_do_not_matter() -> None:
    s = slots()
    kept = s.weights > 0
    less = Slots(s.hidden[kept], s.labels[kept], s.weights[kept], s.weight)

    def loss(x: Slots) -> Tensor:
        return chunked_loss(x.hidden, x.labels, x.weights, OutputHead(x.weight), chunk=4).numerator

    value, gradient = value_and_gradient(s, loss)
    value_less, gradient_less = value_and_gradient(less, loss)
    torch.testing.assert_close(value, value_less)
    torch.testing.assert_close(gradient[kept], gradient_less)
    assert not gradient[~kept].any()


def test_head_with_bias_scale_and_softcap() -> None:
    s = slots()
    bias = torch.linspace(-2, 2, ROWS)
    head = OutputHead(s.weight, bias, scale=3.0, softcap=5.0)

    def by_hand(hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(3 * (s.weight @ hidden + bias) / 5)

    ours = value_and_gradient(
        s, lambda x: chunked_loss(x.hidden, x.labels, x.weights, head, chunk=6).numerator
    )
    slow = value_and_gradient(s, lambda x: reference(x, by_hand, minus_log_softmax))
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-5)
    assert (5 - s.hidden @ s.weight.T * 3).min() < 0, "the cap must bite somewhere"


def test_the_head_gets_no_gradient() -> None:
    s = slots()
    s.weight.requires_grad_()
    value_and_gradient(
        s, lambda x: chunked_loss(x.hidden, x.labels, x.weights, OutputHead(s.weight)).numerator
    )
    assert s.weight.grad is None


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_without_a_gradient_to_form_the_value_is_the_same(grad_enabled: bool) -> None:
    s = slots()
    head = OutputHead(s.weight)
    with torch.set_grad_enabled(grad_enabled):
        output = chunked_loss(s.hidden, s.labels, s.weights, head, chunk=4)
    assert not output.numerator.requires_grad
    torch.testing.assert_close(output.numerator, reference(s, head, minus_log_softmax))


def test_bfloat16_states_still_have_a_float32_loss() -> None:
    exact = slots()
    s = slots(torch.bfloat16)
    seen: list[torch.dtype] = []

    def slot_loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return token_cross_entropy(logits, labels)

    def loss(x: Slots) -> Tensor:
        return chunked_loss(
            x.hidden, x.labels, x.weights, OutputHead(x.weight), slot_loss, chunk=5
        ).numerator

    value, gradient = value_and_gradient(s, loss)
    value_32, gradient_32 = value_and_gradient(exact, loss)
    assert set(seen) == {torch.float32}
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(value, value_32, rtol=0.02, atol=0)
    difference = (gradient.float() - gradient_32).norm() / gradient_32.norm()
    assert difference < 0.03


def test_another_slot_loss_can_be_plugged_in() -> None:
    s = slots()
    head = OutputHead(s.weight)

    def squared_miss(logits: Tensor, labels: Tensor) -> Tensor:
        said = logits.softmax(dim=-1).gather(-1, labels[..., None])[..., 0]
        return (1 - said) ** 2

    ours = value_and_gradient(
        s,
        lambda x: chunked_loss(x.hidden, x.labels, x.weights, head, squared_miss, 5).numerator,
    )
    slow = value_and_gradient(s, lambda x: reference(x, head, squared_miss))
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours[0], reference(s, head, minus_log_softmax))


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_logits_never_exist_for_more_than_a_chunk(chunk: int) -> None:
    s = slots()
    sizes: list[int] = []
    earlier: list[weakref.ref[Tensor]] = []

    def slot_loss(logits: Tensor, labels: Tensor) -> Tensor:
        earlier.append(weakref.ref(logits))
        return token_cross_entropy(logits, labels)

    def head(hidden: Tensor) -> Tensor:
        assert not [ref for ref in earlier if ref() is not None], "earlier logits are still alive"
        sizes.append(len(hidden))
        return hidden @ s.weight.T

    chunked_loss(s.hidden.requires_grad_(), s.labels, s.weights, head, slot_loss, chunk)
    assert max(sizes) == chunk
    assert sum(sizes) == SLOTS
