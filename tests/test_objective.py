"""The objective of whole batches against the target run by itself, slot by slot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import EveryAnchor, token_ids
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from torch import Tensor

from dflash_lightning.cli import main
from dflash_lightning.data.anchors import AllAnchors, Anchors, RandomAnchors, UniformAnchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.samples import Sample
from dflash_lightning.drafter.axes import Axes
from dflash_lightning.errors import UserError
from dflash_lightning.module import DFlashModule
from dflash_lightning.position_weights import DPaceWeights, PositionWeights
from dflash_lightning.slot_losses import (
    DataToken,
    Loss,
    Mix,
    TargetArgmax,
    TargetKL,
    TargetTV,
    Term,
)
from dflash_lightning.target import Target

K = 4
LENGTHS = [13, 9, 17]
MIX = Mix({"data": Term(DataToken(), 0.5), "argmax": Term(TargetArgmax(), 2.0)})
LOSSES: dict[str, Loss] = {
    "data": DataToken(),
    "argmax": TargetArgmax(),
    "kl": TargetKL(),
    "tv": TargetTV(),
    "mix": MIX,
}


def samples() -> list[Sample]:
    """Three documents; the second of two responses, with a gap that no slot may predict."""
    found = []
    for i, length in enumerate(LENGTHS):
        mask = torch.arange(length) >= 3
        if i == 1:
            mask[6] = False
        found.append(Sample(token_ids(length, seed=i), mask))
    return found


def batch_of(rows: list[list[int]], rule: Anchors | None = None, states: Any = None) -> Batch:
    documents = samples()
    collate = BlockCollator(rule or EveryAnchor(20), K, MASK, seed=0)
    return collate([[(i, 0, documents[i], states and states[i]) for i in row] for row in rows])


def module_of(
    target: Target,
    loss: Loss,
    weights: PositionWeights | None = None,
    draft_ids: Tensor | None = None,
    **changes: Any,
) -> DFlashModule:
    options: dict[str, Any] = {} if weights is None else {"position_weights": weights}
    module = DFlashModule(block_size=K, loss=loss, **options)
    size = None if draft_ids is None else len(draft_ids)
    module.target = target
    module.drafter = tiny_drafter(target, draft_vocab_size=size, **changes)
    if draft_ids is not None:
        module.drafter.draft_ids.copy_(draft_ids)
    return module


def slow_loss(loss: str, logits: Tensor, target: Tensor, label: int, known: list[int]) -> Any:
    """Return loss and share of one slot from whole logits of drafter and target `[V]`."""
    if loss == "mix":
        (one, a), (other, b) = (
            slow_loss(n, logits, target, label, known) for n in ("data", "argmax")
        )
        return 0.5 * one + 2 * other, (0.5 * a + 2 * b) / 2.5
    said = label if loss == "data" else int(target.argmax())
    drafted = logits[known].log_softmax(-1)
    if loss in ("data", "argmax"):
        if said not in known:
            return torch.zeros(()), 0.0
        return -drafted[known.index(said)], 1.0
    p = target.softmax(-1)[known]
    p, q = p / p.sum(), drafted.exp()
    return ((p * (p / q).log()).sum() if loss == "kl" else (p - q).abs().sum() / 2), 1.0


@pytest.mark.parametrize("vocab", ["full", "draft"])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_slot_is_taught_by_the_target_at_the_position_before(loss: str, vocab: str) -> None:
    target = tiny_target("qwen3")
    draft_ids = torch.arange(0, VOCAB, 2) if vocab == "draft" else None
    known = list(range(VOCAB)) if draft_ids is None else draft_ids.tolist()
    module = module_of(target, LOSSES[loss], draft_ids=draft_ids)
    batch = batch_of([[0], [1], [2]])
    output, denominator, _ = module.block_loss(batch)
    hidden = module.block_hidden(batch)
    shares, numerator = torch.zeros(()), torch.zeros(())
    for row, sample in enumerate(samples()):
        taught = target.forward(sample.ids[None], logits_to_keep=0).logits[0]
        for n, anchor in enumerate(batch.anchor_positions[row].tolist()):
            for k in range(1, K):
                at, weight = anchor + k, float(output.weights[row, n, k - 1])
                if not batch.block_keep_mask[row, n] or at >= len(sample.ids):
                    assert weight == 0
                    continue
                assert (weight > 0) == bool(sample.loss_mask[at])
                value, share = slow_loss(
                    loss, target.head(hidden[row, n, k]), taught[at - 1], int(sample.ids[at]), known
                )
                numerator, shares = numerator + weight * value, shares + weight * share
                expected = value if weight else torch.zeros(())
                torch.testing.assert_close(
                    output.slot_loss[row, n, k - 1], expected, rtol=1e-4, atol=1e-5
                )
    torch.testing.assert_close(output.numerator, numerator, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(denominator, shares, rtol=1e-5, atol=1e-5)
    if vocab == "draft" and loss != "kl" and loss != "tv":
        assert denominator < output.weights.sum(), "no label was outside the vocabulary"


@pytest.mark.parametrize("loss", ["kl", "mix"])
@pytest.mark.parametrize("rule", [RandomAnchors(5), UniformAnchors(), AllAnchors()])
@pytest.mark.parametrize("features", ["online", "store"])
def test_packed_rows_give_the_loss_of_their_documents(
    loss: str, rule: Anchors, features: str
) -> None:
    target, states = tiny_target("qwen3"), None
    module = module_of(target, LOSSES[loss], DPaceWeights())
    if features == "store":
        ones = [torch.ones_like(s.loss_mask)[None] for s in samples()]
        states = [
            target.document_states(s.ids[None], one, torch.zeros_like(s.ids)[None], final=True)[0]
            for s, one in zip(samples(), ones, strict=True)
        ]
    apart = [module.block_loss(batch_of([[i]], rule)) for i in range(3)]
    for rows in ([[0], [1], [2]], [[2, 0, 1]], [[1], [0, 2]]):
        output, denominator, _ = module.block_loss(batch_of(rows, rule, states))
        numerator = torch.stack([o.numerator for o, _, _ in apart]).sum()
        torch.testing.assert_close(output.numerator, numerator, rtol=1e-5, atol=1e-4)
        weight = torch.stack([d for _, d, _ in apart]).sum()
        torch.testing.assert_close(denominator, weight, rtol=1e-5, atol=1e-5)


def test_what_is_right_does_not_depend_on_loss_and_weights() -> None:
    """It is the data's token, whatever the drafter is trained to say."""
    target = tiny_target("qwen3")
    batch, ids = batch_of([[0, 1], [2]]), torch.arange(0, VOCAB, 2)
    found = []
    for loss in LOSSES.values():
        for weights in (None, DPaceWeights()):
            found.append(module_of(target, loss, weights, ids).block_loss(batch)[2])
    assert all(torch.equal(right, found[0]) for right in found)
    module = module_of(target, DataToken(), None, ids)
    said = target.head(module.block_hidden(batch))[..., ids].argmax(dim=-1)
    assert torch.equal(found[0], ((ids[said] == batch.labels) & batch.label_mask)[..., 1:])


def test_the_target_runs_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = tiny_target(), list[bool]()
    compute = target.document_states

    def spy(*rows: Tensor, final: bool) -> Tensor:
        calls.append(final)
        return compute(*rows, final=final)

    monkeypatch.setattr(target, "document_states", spy)
    batch = batch_of([[0]])
    module_of(target, DataToken()).block_loss(batch)
    assert calls == [False]
    module_of(target, MIX).block_loss(batch)
    assert calls == [False, True]


def test_a_store_without_final_states_is_refused() -> None:
    target = tiny_target()
    states = [target.forward(s.ids[None]).hidden[0] for s in samples()]  # type: ignore[index]
    batch = batch_of([[0], [1]], states=states)
    module_of(target, DataToken()).block_loss(batch)
    with pytest.raises(UserError, match=r"data\.final_states"):
        module_of(target, TargetKL()).block_loss(batch)


def test_a_drafter_without_features_can_be_taught_by_the_target() -> None:
    target = tiny_target()
    batch = batch_of([[0], [2]])
    module = module_of(target, TargetKL(), axes=Axes(injection="none"))
    output, weight, _ = module.block_loss(batch)
    (output.numerator / weight).backward()
    assert output.numerator > 0


@pytest.mark.parametrize("loss", ["data", "kl"])
def test_the_markov_head_learns_from_the_token_before(loss: str) -> None:
    target = tiny_target()
    batch = batch_of([[0, 1], [2]])
    for draft_ids in (None, torch.arange(0, VOCAB, 2)):
        module = module_of(target, LOSSES[loss], draft_ids=draft_ids, axes=Axes(markov_rank=3))
        markov = module.drafter.markov
        assert markov is not None
        output, _, _ = module.block_loss(batch)
        output.numerator.backward()
        ours = {
            n: p.grad.clone() for n, p in module.drafter.named_parameters() if p.grad is not None
        }
        module.drafter.zero_grad()
        hidden = module.block_hidden(batch)
        previous = torch.cat([batch.noise_ids[..., :1], batch.labels[..., 1:-1]], dim=-1)
        logits = target.head(hidden[..., 1:, :])
        logits = (logits if draft_ids is None else logits[..., draft_ids]) + markov(previous)
        final = target.document_states(
            batch.input_ids, batch.attention_mask, batch.document_starts, final=True
        )[..., -32:]
        total = torch.zeros(())
        for row, n, k in (output.weights > 0).nonzero().tolist():
            taught = target.head(final[row, int(batch.anchor_positions[row, n]) + k])
            known = list(range(VOCAB)) if draft_ids is None else draft_ids.tolist()
            whole = torch.full((VOCAB,), -torch.inf)
            whole = whole.index_copy(0, torch.tensor(known), logits[row, n, k])
            label = int(batch.labels[row, n, k + 1])
            value, _ = slow_loss(loss, whole, taught, label, known)
            total = total + output.weights[row, n, k] * value
        total.backward()
        for name in ("markov.before.weight", "markov.after.weight", "fc.weight"):
            slow = module.drafter.get_parameter(name).grad
            assert slow is not None
            assert slow.abs().max() > 1e-3
            torch.testing.assert_close(ours[name], slow, rtol=1e-3, atol=1e-4)


# ---- from YAML -----------------------------------------------------------------------------------

MIX_OF_TWO = (
    "{class_path: Mix, init_args: {terms: {data: {weight: 0.5, loss: DataToken}, "
    "taught: {loss: TargetKL}}}}"
)


@pytest.mark.parametrize("loss", ["TargetArgmax", MIX_OF_TWO], ids=["argmax", "mix"])
def test_stored_and_online_states_teach_alike(loss: str, experiment: Path, tmp_path: Path) -> None:
    """From the command line; the store then holds the final states as one more layer."""
    (tmp_path / "loss.yaml").write_text(f"model:\n  loss: {loss}\n")
    found = []
    for features in ("online", "store"):
        flags = {
            "data.features": features,
            "data.cache_dir": str(tmp_path / "cache"),
            "trainer.max_steps": "2",
            "trainer.default_root_dir": str(tmp_path / features),
            "decode.final_prompts": "1",
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        cli = main(["fit", "-c", str(experiment), "-c", str(tmp_path / "loss.yaml"), *words])
        assert cli.datamodule.final_states
        stored = {path.parent.name for path in (tmp_path / "cache").rglob("shard_*.bin")}
        assert ("final" in stored) == (features == "store")
        found.append(cli)
    online, store = found
    for key in ("train/loss", "val/loss", "val/accept_len"):
        expected = float(online.trainer.callback_metrics[key])
        assert float(store.trainer.callback_metrics[key]) == pytest.approx(expected, rel=1e-4), key
    for name, weight in online.model.drafter.named_parameters():
        torch.testing.assert_close(
            store.model.drafter.get_parameter(name), weight, rtol=1e-3, atol=1e-4
        )


def test_a_mix_says_which_weight_is_wrong() -> None:
    with pytest.raises(UserError, match=r"model\.loss\.terms\.kl\.weight: .* got 0"):
        Mix({"data": Term(DataToken()), "kl": Term(TargetKL(), 0)})
    with pytest.raises(UserError, match=r"model\.loss\.terms: .* at least one term"):
        Mix({})
