"""The LightningModule under a real Trainer on CPU, with a tiny target and its own answers."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.blocks import Batch
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.draft_vocab import choose_draft_vocab, to_draft_rows
from dflash_lightning.data.prompts import Prompt, PromptSource, Split
from dflash_lightning.data.rows import row_prompt
from dflash_lightning.decoding.loop import decode
from dflash_lightning.drafter.attention import full_attention
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.module import DFlashModule
from dflash_lightning.target_spec import TargetConfig

K = 4
GAMMA = 2.0
QUESTIONS = ["what is 2+2?", "hi", "a long question about many things", "go", "two words", "why?"]
UNEQUAL = ["xy", "a" * 9 + "b" * 60, "no", "the quick brown fox jumps over the lazy dog"]


@dataclass
class SameEverywhere(PromptSource):
    """Gives the same rows in every split."""

    rows: list[dict[str, str]]

    def stream(self, split: Split) -> Iterator[Prompt]:
        return (row_prompt(f"{split} {i}", row) for i, row in enumerate(self.rows))

    def fingerprint(self) -> str:
        return json.dumps(self.rows)


@dataclass(frozen=True)
class Lab:
    """A tiny target on disk and one cache for all tests, so that each question is answered once."""

    root: Path
    target: TargetConfig

    def data(self, questions: list[str] | None = None, **changes: Any) -> DFlashDataModule:
        """The target answers the questions; validation and test are the training questions."""
        rows = [{"prompt": q} for q in questions or QUESTIONS]
        options: dict[str, Any] = {
            "prompts": SameEverywhere(rows),
            "target": self.target,
            "block_size": K,
            "max_new_tokens": 20,
            "anchors": RandomAnchors(6),
            "batch_size": 2,
            "cache_dir": str(self.root / "cache"),
        }
        return DFlashDataModule(**{**options, **changes})

    def given(self, answers: list[str], **changes: Any) -> DFlashDataModule:
        """Samples whose answers are given, and so have the lengths a test wants."""
        rows = [{"prompt": "say", "response": answer} for answer in answers]
        return self.data(prompts=SameEverywhere(rows), responses="given", **changes)

    def module(self, seed: int = 0, **changes: Any) -> DFlashModule:
        pl.seed_everything(seed, verbose=False)
        options: dict[str, Any] = {"target": self.target, "block_size": K, "num_layers": 2}
        return DFlashModule(**{**options, "lr": 3e-3, **changes})

    def ready(
        self, data: DFlashDataModule, **changes: Any
    ) -> tuple[DFlashModule, DFlashDataModule]:
        """A module that has met its target and data, not trained."""
        module = self.module(**changes)
        trainer().validate(module, datamodule=data, verbose=False)
        return module, data


@pytest.fixture(scope="session")
def lab(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    target = TargetConfig(name=str(target_folder), dtype="float32", num_taps=3)
    return Lab(tmp_path_factory.mktemp("lab"), target)


def trainer(*callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "callbacks": list(callbacks),
    }
    if "max_steps" not in changes and "max_epochs" not in changes:
        options.pop("limit_val_batches")
    return pl.Trainer(**{**options, **changes})


def weights_of(module: DFlashModule) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.drafter.state_dict().items()}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0
) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


@dataclass
class Watch(pl.Callback):
    """Keeps, step by step, what a run did."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """As the optimizer used them: normalised and clipped."""
    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    anchors: list[list[Any]] = field(default_factory=list)
    """Of each batch, token ids and anchors."""
    change: Callable[[DFlashModule], None] | None = None
    """Called before the first step."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.change is not None:
            self.change(pl_module)
        self.initial = weights_of(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            named = pl_module.drafter.named_parameters()
            self.gradients.append({name: p.grad.clone() for name, p in named})
            self.lrs.append(optimizer.param_groups[0]["lr"])

        trainer.optimizers[0].register_step_post_hook(after)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.anchors.append([batch.input_ids.tolist(), batch.anchor_positions.tolist()])
        metrics = trainer.callback_metrics
        if len(self.losses) < len(self.gradients) and "train/loss" in metrics:
            self.losses.append(float(metrics["train/loss"]))
            self.tokens.append(float(metrics["train/supervised_tokens"]))


def fitted(module: DFlashModule, data: DFlashDataModule, **changes: Any) -> Watch:
    change = changes.pop("change", None)
    watch = Watch(change=change)
    trainer(watch, **changes).fit(module, datamodule=data)
    return watch


# ---- the loss of a batch -------------------------------------------------------------------------


def slow_loss(
    module: DFlashModule, data: DFlashDataModule, batch: Batch, draft_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, list[list[bool | None]]]:
    """Return sum(w * CE), sum(w) and, block by block, whether each slot is right (None: no label).

    One block at a time: the target is run by itself on one unpadded row, the context is cut before
    the anchor, and nothing is masked.
    """
    assert module.target is not None
    model, drafter = module.target.model, module.drafter
    numerator, denominator = torch.zeros(()), torch.zeros(())
    right: list[list[bool | None]] = []
    for row in range(len(batch.input_ids)):
        length = int(batch.attention_mask[row].sum())
        ids, supervised = batch.input_ids[row, :length], batch.loss_mask[row, :length]
        with torch.no_grad():
            states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[i + 1] for i in data.spec.target_layer_ids], dim=-1)
        for anchor in batch.anchor_positions[row][batch.block_keep_mask[row]].tolist():
            context = drafter.context_key_values(taps[:, :anchor], torch.arange(anchor)[None])
            slots = torch.tensor([[int(ids[anchor])] + [data.spec.mask_token_id] * (K - 1)])
            positions = torch.arange(anchor, anchor + K)[None]
            embedded = model.get_input_embeddings()(slots)
            hidden = drafter(embedded, positions, context, full_attention)[0]
            block: list[bool | None] = []
            for k in range(1, K):
                at = anchor + k
                if at >= length or not supervised[at]:
                    block.append(None)
                    continue
                logits = linear(hidden[k], model.get_output_embeddings().weight)
                label = int(ids[at])
                if draft_ids is not None:
                    known = draft_ids.tolist()
                    if label not in known:
                        block.append(False)
                        continue
                    logits, label = logits[draft_ids], known.index(label)
                weight = math.exp(-(k - 1) / GAMMA)
                numerator = numerator + weight * cross_entropy(logits, torch.tensor(label))
                denominator = denominator + weight
                block.append(bool(logits.argmax() == label))
            right.append(block)
    return numerator, denominator, right


def enlarged(module: DFlashModule) -> None:
    """Random weights large enough that attention, positions and context matter."""
    torch.manual_seed(1)
    for parameter in module.drafter.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else nn.init.uniform_(
            parameter, 0.5, 1.5
        )


def sharpened(module: DFlashModule, data: DFlashDataModule) -> None:
    """Train for a moment, so that some drafts are right and some are wrong."""
    trainer(max_epochs=25).fit(module, datamodule=data)


def the_batch(data: DFlashDataModule) -> Batch:
    batch: Batch = next(iter(data.train_dataloader()))
    return batch


def as_lists(correct: Tensor, batch: Batch) -> list[list[bool | None]]:
    """`correct` of the live blocks, None where a slot has no label."""
    valid = batch.label_mask[..., 1:]
    rows = zip(correct[batch.block_keep_mask], valid[batch.block_keep_mask], strict=True)
    return [[bool(c) if v else None for c, v in zip(*row, strict=True)] for row in rows]


@pytest.mark.parametrize("attention", ["dense", "chunked"])
@pytest.mark.parametrize("answers", ["target", "unequal"])
def test_loss_of_a_batch_is_the_slow_one(lab: Lab, attention: str, answers: str) -> None:
    data = lab.data(batch_size=6) if answers == "target" else lab.given(UNEQUAL, batch_size=4)
    module, data = lab.ready(data, attention=attention)
    enlarged(module)
    batch = the_batch(data)
    output, denominator, correct = module.block_loss(batch)
    slow, weight, right = slow_loss(module, data, batch)
    torch.testing.assert_close(output.numerator, slow, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(denominator, weight)
    assert as_lists(correct, batch) == right
    labels = [slot for block in right for slot in block if slot is not None]
    assert (answers == "target") or len(labels) < batch.label_mask[..., 1:].numel(), "no dead slots"


def test_right_slots_are_the_slow_ones_after_training(lab: Lab) -> None:
    data = lab.data(max_new_tokens=8)
    module = lab.module(lr=1e-2)
    sharpened(module, data)
    batch = the_batch(data)
    _, _, correct = module.block_loss(batch)
    right = slow_loss(module, data, batch)[2]
    assert as_lists(correct, batch) == right
    said = [slot for block in right for slot in block]
    assert True in said
    assert False in said


def test_loss_chunk_changes_nothing(lab: Lab) -> None:
    module, data = lab.ready(lab.data())
    batch = the_batch(data)
    whole = module.block_loss(batch)[0].numerator
    module.loss_chunk, module._objective = 3, None
    torch.testing.assert_close(module.block_loss(batch)[0].numerator, whole)


def test_gradient_checkpointing_trains_the_same_weights(lab: Lab) -> None:
    trained = []
    for again in (False, True):
        module, data = lab.module(gradient_checkpointing=again), lab.data()
        trainer(max_steps=3).fit(module, data)
        assert module.drafter.gradient_checkpointing is again
        trained.append(module.drafter.state_dict())
    for name, weights in trained[0].items():
        assert torch.equal(weights, trained[1][name]), name


def test_a_batch_with_dead_blocks_has_finite_gradients(lab: Lab) -> None:
    data = lab.given(["ab", "c" * 40], batch_size=2, anchors=RandomAnchors(32))
    module, data = lab.ready(data)
    batch = the_batch(data)
    assert not batch.block_keep_mask.all()
    assert (~batch.label_mask[..., 1:])[batch.block_keep_mask].any()
    output, denominator, _ = module.block_loss(batch)
    (output.numerator / denominator).backward()
    assert output.numerator.isfinite()
    for name, parameter in module.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    alone = batch._replace(
        **{
            key: getattr(batch, key)[1:]
            for key in batch._fields
            if isinstance(getattr(batch, key), Tensor)
        }
    )
    assert module.block_loss(alone)[0].numerator.isfinite()


# ---- the accumulation window ---------------------------------------------------------------------


GROUPINGS = {"1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}


def one_step(lab: Lab, answers: str, grouping: str, **changes: Any) -> tuple[DFlashModule, Watch]:
    """One optimizer step on four samples: batches of b samples, accumulated a times."""
    batch_size, accumulate = GROUPINGS[grouping]
    options: dict[str, Any] = {"batch_size": batch_size}
    data = (
        lab.data(QUESTIONS[:4], **options) if answers == "target" else lab.given(UNEQUAL, **options)
    )
    module = lab.module(lr=1e-4)  # small: Adam's first step turns rounding near 0 into up to +-lr
    watch = fitted(
        module,
        data,
        **{"max_steps": 1, "accumulate_grad_batches": accumulate, "change": enlarged, **changes},
    )
    assert len(watch.gradients) == 1
    assert len(watch.anchors) == accumulate
    return module, watch


@pytest.mark.parametrize("answers", ["target", "unequal"])
def test_grouping_samples_differently_gives_the_same_step(lab: Lab, answers: str) -> None:
    module, watch = one_step(lab, answers, "4x1")
    largest = max(float(g.abs().max()) for g in watch.gradients[0].values())
    assert largest > 1e-2, "a gradient this small would pass by the tolerance alone"
    scale = max(1.0, largest)
    for grouping in ("1x4", "2x2"):
        other, seen = one_step(lab, answers, grouping)
        assert_same(seen.initial, watch.initial)
        assert_same(seen.gradients[0], watch.gradients[0], tolerance=3e-6 * scale)
        assert_same(weights_of(other), weights_of(module), tolerance=1e-6)
        assert seen.losses == pytest.approx(watch.losses, rel=1e-5)
        assert seen.tokens == watch.tokens


def test_gradient_of_a_step_is_that_of_the_slow_loss(lab: Lab) -> None:
    _, watch = one_step(lab, "unequal", "2x2")
    module, data = lab.ready(lab.given(UNEQUAL, batch_size=4))
    module.drafter.load_state_dict(watch.initial)
    numerator, denominator, _ = slow_loss(module, data, the_batch(data))
    (numerator / denominator).backward()
    slow = {name: p.grad for name, p in module.drafter.named_parameters() if p.grad is not None}
    assert_same(watch.gradients[0], slow, tolerance=2e-6)
    assert watch.losses == pytest.approx([float((numerator / denominator).detach())], rel=1e-5)


def test_clipping_sees_the_normalised_gradient(lab: Lab) -> None:
    _, free = one_step(lab, "target", "2x2")
    _, clipped = one_step(lab, "target", "2x2", gradient_clip_val=0.05)
    norm = nn.utils.get_total_norm(list(free.gradients[0].values()))
    assert norm > 0.06
    expected = {name: g * 0.05 / norm for name, g in free.gradients[0].items()}
    assert_same(clipped.gradients[0], expected, tolerance=1e-6)
    _, loose = one_step(lab, "target", "2x2", gradient_clip_val=1.01 * float(norm))
    assert_same(loose.gradients[0], free.gradients[0])


def test_a_short_last_window_is_normalised_by_what_it_holds(lab: Lab) -> None:
    """Six samples, four a window: the second window holds two batches of one sample."""
    short = fitted(
        lab.module(lr=0.0), lab.data(batch_size=1), max_epochs=1, accumulate_grad_batches=4
    )
    order = [batch[0][0] for batch in short.anchors]
    assert len(order) == 6
    assert len(short.gradients) == 2
    module, data = lab.ready(lab.data(batch_size=6))
    module.drafter.load_state_dict(short.initial)
    samples = {tuple(s.ids.tolist()): i for i, s in enumerate(data.samples["train"])}
    rows = [samples[tuple(o)] for o in order[4:]]
    last = [[(i, 0, data.samples["train"][i], None)] for i in rows]
    batch = data.train_dataloader().collate_fn(last)  # type: ignore[misc]
    numerator, denominator, _ = slow_loss(module, data, batch)
    (numerator / denominator).backward()
    slow = {name: p.grad for name, p in module.drafter.named_parameters() if p.grad is not None}
    assert_same(short.gradients[1], slow, tolerance=2e-6)


def test_no_window_carries_into_the_next(lab: Lab) -> None:
    """With a learning rate of 0 every epoch over the same anchors has the same gradient."""
    watch = fitted(
        lab.module(lr=0.0),
        lab.data(QUESTIONS[:4], batch_size=2, anchors=RandomAnchors(100)),
        max_epochs=3,
        accumulate_grad_batches=2,
    )
    assert len(watch.gradients) == 3
    for step in (1, 2):
        assert_same(watch.gradients[step], watch.gradients[0], tolerance=1e-6)
    assert watch.losses == pytest.approx([watch.losses[0]] * 3, rel=1e-5)


def test_validation_in_the_middle_of_a_window_disturbs_nothing(lab: Lab) -> None:
    def run(**changes: Any) -> tuple[DFlashModule, Watch]:
        module = lab.module()
        data = lab.data(batch_size=1)
        watch = fitted(module, data, max_steps=3, accumulate_grad_batches=3, **changes)
        return module, watch

    module, plain = run()
    other, validated = run(val_check_interval=1, limit_val_batches=1.0, num_sanity_val_steps=2)
    assert "val/accept_len" in other.trainer.callback_metrics
    assert_same(weights_of(other), weights_of(module))
    assert validated.losses == plain.losses
    assert validated.tokens == plain.tokens


class StopInWindow(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        raise KeyboardInterrupt


def test_a_fit_after_one_that_stopped_in_a_window_starts_afresh(lab: Lab) -> None:
    data = lab.data(QUESTIONS[:4], batch_size=1)
    module = lab.module(lr=0.0)
    options: dict[str, Any] = {"max_steps": 1, "accumulate_grad_batches": 4}
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(StopInWindow(), **options).fit(module, datamodule=data)
    again = fitted(module, data, **options)
    fresh = fitted(lab.module(lr=0.0), data, **options)
    assert_same(again.gradients[0], fresh.gradients[0])
    assert again.losses == fresh.losses


# ---- draft vocabulary ----------------------------------------------------------------------------


def test_labels_outside_the_draft_vocabulary_weigh_nothing_and_are_misses(lab: Lab) -> None:
    module = lab.module(draft_vocab=12, lr=1e-2)
    data = lab.data(max_new_tokens=8)
    sharpened(module, data)
    ids = module.drafter.draft_ids
    batch = the_batch(data)
    output, denominator, correct = module.block_loss(batch)
    slow, weight, right = slow_loss(module, data, batch, ids)
    torch.testing.assert_close(output.numerator, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(denominator, weight)
    assert as_lists(correct, batch) == right
    outside = (to_draft_rows(ids, 96)[batch.labels] < 0) & (batch.label_mask)
    assert outside.any()
    assert not correct[outside[..., 1:]].any()
    assert correct.any(), "nothing right: misses prove nothing"
    assert denominator < output.weights.sum()


def test_draft_vocabulary_holds_the_most_frequent_answer_tokens(lab: Lab) -> None:
    module, data = lab.ready(lab.data(), draft_vocab=5)
    counts: dict[int, int] = {}
    for sample in data.samples["train"]:
        for token in sample.ids[sample.loss_mask].tolist():
            counts[token] = counts.get(token, 0) + 1
    top = sorted(counts, key=lambda token: (-counts[token], token))[:5]
    assert module.drafter.draft_ids.tolist() == sorted(top)


def test_validation_counts_labels_outside_the_draft_vocabulary(lab: Lab) -> None:
    """A drafter whose only token never occurs says row 0 everywhere, and is wrong everywhere."""
    data = lab.data()
    module, _ = lab.ready(data, draft_vocab=1)
    module.drafter.draft_ids.copy_(unused_tokens(data, 1))
    module._objective = None
    module.acceptance.reset()
    for batch in data.val_dataloader():
        module.validation_step(batch, 0)
    found = module.acceptance.compute()
    assert found["accept_len"] == 1
    assert not found["marginal"].any()


def unused_tokens(data: DFlashDataModule, count: int) -> Tensor:
    used = {token for sample in data.samples["train"] for token in sample.ids.tolist()}
    free = [token for token in range(90) if token not in used]
    return torch.tensor(free[:count])


@pytest.mark.parametrize("accumulate", [1, 6])
def test_a_window_without_any_weight_changes_nothing(lab: Lab, accumulate: int) -> None:
    data = lab.data(batch_size=1)
    data.setup("fit")

    def change(module: DFlashModule) -> None:
        module.drafter.draft_ids.copy_(unused_tokens(data, 2))

    module = lab.module(draft_vocab=2)
    watch = fitted(module, data, max_steps=1, accumulate_grad_batches=accumulate, change=change)
    for name, gradient in watch.gradients[0].items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name
    assert_same(weights_of(module), watch.initial)


def test_draft_vocabulary_is_counted_where_the_samples_lie(lab: Lab) -> None:
    """Lightning builds the module inside `with device:`, and the samples are on the CPU."""
    module, data = lab.ready(lab.data(), draft_vocab=5)
    with torch.device("meta"):
        ids = choose_draft_vocab(data.samples["train"], module.target.num_embeddings, 5)
    assert torch.equal(module.drafter.draft_ids, ids)


# ---- training ------------------------------------------------------------------------------------


def test_training_overfits_four_samples(lab: Lab) -> None:
    data = lab.data(QUESTIONS[:4], batch_size=4, max_new_tokens=10, anchors=RandomAnchors(10))
    module = lab.module(lr=1e-2)
    run = trainer(
        watch := Watch(), max_epochs=80, check_val_every_n_epoch=80, limit_val_batches=1.0
    )
    before = trainer().validate(module, datamodule=data, verbose=False)[0]
    run.fit(module, datamodule=data)
    after = run.callback_metrics
    assert sum(watch.losses[-5:]) / 5 < watch.losses[0] / 4
    assert after["val/loss"] < before["val/loss"] / 4
    assert before["val/accept_len"] < 1.3
    assert after["val/accept_len"] > 2.5
    assert after["val/accept_len_full_blocks"] > 2.5
    rates = [float(after[f"val/accept_rate/pos_{k}"]) for k in range(1, K)]
    assert rates == sorted(rates, reverse=True)
    assert float(after["val/accept_len_full_blocks"]) <= K


def test_validation_metrics_are_those_of_a_plain_loop(lab: Lab) -> None:
    module, data = lab.module(lr=1e-2), lab.data(max_new_tokens=8)
    trainer().validate(module, datamodule=data, verbose=False)
    sharpened(module, data)
    found = trainer().validate(module, datamodule=data, verbose=False)[0]
    blocks: list[list[bool | None]] = []
    total, weight = torch.zeros(()), torch.zeros(())
    for batch in data.val_dataloader():
        numerator, denominator, right = slow_loss(module, data, batch)
        total, weight, blocks = total + numerator, weight + denominator, blocks + right
    lengths = [
        next((k for k, s in enumerate(b) if not s), K - 1)
        for b in blocks
        if any(s is not None for s in b)
    ]
    full = [n for n, b in zip(lengths, blocks, strict=True) if None not in b]
    assert found["val/loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert found["val/accept_len"] == pytest.approx(1 + sum(lengths) / len(lengths))
    assert found["val/accept_len_full_blocks"] == pytest.approx(1 + sum(full) / len(full))
    for k in range(1, K):
        reached = [n >= k for n, b in zip(lengths, blocks, strict=True) if None not in b[:k]]
        assert found[f"val/accept_rate/pos_{k}"] == pytest.approx(sum(reached) / len(reached))
        scored = [b[k - 1] for b in blocks if b[k - 1] is not None]
        accuracy = sum(map(bool, scored)) / len(scored)
        assert found[f"val/slot_accuracy/pos_{k}"] == pytest.approx(accuracy)
    again = trainer().validate(module, datamodule=data, verbose=False)[0]
    assert again == found, "validation is not repeatable"
    tested = trainer().test(module, datamodule=data, verbose=False)[0]
    assert {k.replace("test/", "val/"): v for k, v in tested.items()} == found


def test_target_stays_frozen_and_in_eval_mode(lab: Lab) -> None:
    modes: list[tuple[bool, bool]] = []

    class Modes(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            modes.append((pl_module.drafter.training, pl_module.target.model.training))

    module = lab.module()
    run = trainer(Modes(), max_steps=4, val_check_interval=1, limit_val_batches=1)
    run.fit(module, datamodule=lab.data())
    assert modes == [(True, False)] * 4
    assert module.target is not None
    module.train()
    parts = list(module.target.model.modules())
    assert not any(part.training for part in parts)
    assert module.drafter.training
    original = tiny_model("llama_tied").state_dict()
    assert_same(dict(module.target.model.state_dict()), dict(original))
    assert not any(p.requires_grad for p in module.target.model.parameters())
    assert all(p.grad is None for p in module.target.model.parameters())


def test_optimizer_holds_the_drafter_and_spares_the_norms(lab: Lab) -> None:
    module = lab.module(weight_decay=0.1, betas=(0.8, 0.95), draft_vocab=9)
    run = trainer(max_steps=1)
    run.fit(module, datamodule=lab.data())
    decayed, spared = run.optimizers[0].param_groups
    names = {id(p): name for name, p in module.drafter.named_parameters()}
    held = [names.pop(id(p)) for group in (decayed, spared) for p in group["params"]]
    assert not names, "drafter parameters that nobody trains"
    assert len(held) == len(set(held))
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == spared["betas"] == (0.8, 0.95)
    assert all("norm" in name for name in held[len(decayed["params"]) :])
    assert not any("norm" in name for name in held[: len(decayed["params"])])


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_averages_that_never_forget_are_refused(lab: Lab, betas: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"model\.betas: each is 0 or more and below 1, got"):
        lab.module(betas=betas)


def test_learning_rate_warms_up_and_falls_as_a_cosine_by_step(lab: Lab) -> None:
    watch = fitted(lab.module(lr=1e-3, warmup_ratio=0.25), lab.data(), max_steps=12)
    warm = [1e-3 * n / 3 for n in range(3)]
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * n / 9)) for n in range(9)]
    assert watch.lrs == pytest.approx(warm + cosine)


def test_a_run_without_an_end_is_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match="max_steps"):
        trainer(max_epochs=-1, max_steps=-1).fit(lab.module(), datamodule=lab.data())


def test_schedule_counts_optimizer_steps_not_batches(lab: Lab) -> None:
    watch = fitted(
        lab.module(lr=1e-3, warmup_ratio=0.0),
        lab.data(batch_size=1),
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    assert watch.lrs == pytest.approx(
        [1e-3 * 0.5 * (1 + math.cos(math.pi * n / 6)) for n in range(6)]
    )


def test_bfloat16_mixed_keeps_float32_master_weights(lab: Lab) -> None:
    bfloat = replace(lab.target, dtype="bfloat16")
    module = lab.module(target=bfloat, lr=1e-4)
    watch = fitted(module, lab.data(target=bfloat), max_steps=3, precision="bf16-mixed")
    assert {p.dtype for p in module.drafter.parameters()} == {torch.float32}
    assert {g.dtype for g in watch.gradients[0].values()} == {torch.float32}
    assert module.target is not None
    assert module.target.dtype == torch.bfloat16
    assert all(math.isfinite(loss) for loss in watch.losses)
    moved = [(weights_of(module)[k] - v).abs().max() for k, v in watch.initial.items()]
    assert 0 < max(moved) < 1e-3, "steps this small are lost in bfloat16 weights"


def test_bfloat16_mixed_is_close_to_float32(lab: Lab) -> None:
    plain = fitted(lab.module(), lab.data(), max_steps=1, change=enlarged)
    mixed = fitted(lab.module(), lab.data(), max_steps=1, change=enlarged, precision="bf16-mixed")
    assert mixed.losses == pytest.approx(plain.losses, rel=0.03)


@pytest.mark.slow
def test_200_steps_in_bfloat16_end_where_float32_does(lab: Lab) -> None:
    """Within 2% of the loss, averaged over the last 20 steps; on the same target's states."""
    answers = [f"{n} and {n + 1} make {2 * n + 1}." for n in range(40)]
    found = {}
    for dtype, precision in (("float32", "32-true"), ("bfloat16", "bf16-mixed")):
        module = lab.module(lr=1e-3)
        watch = fitted(module, lab.given(answers), max_steps=200, precision=precision)
        found[dtype] = watch.losses
        states = module.trainer.optimizers[0].state.values()
        assert {x.dtype for state in states for x in state.values()} == {torch.float32}
    first, last = (
        {dtype: sum(losses[at]) / 20 for dtype, losses in found.items()}
        for at in (slice(20), slice(-20, None))
    )
    print(first, last)
    assert last["float32"] < 0.7 * first["float32"], "it learns, so that it could learn worse"
    assert last["bfloat16"] == pytest.approx(last["float32"], rel=0.02)


# ---- decoding ------------------------------------------------------------------------------------


def test_prediction_returns_text_and_accept_length(lab: Lab) -> None:
    module, data = lab.ready(lab.data())
    found = trainer().predict(module, datamodule=data)
    assert found is not None
    assert len(found) == len(data.held_out_prompts["test"]) == len(QUESTIONS)
    assert module.target is not None
    for prompt, answer in zip(data.held_out_prompts["test"], found, strict=True):
        [plain] = decode(module.target, [torch.tensor(prompt)], None, data.max_new_tokens)
        assert answer["token_ids"] == plain.tokens
        tokenizer = data.spec.tokenizer
        assert answer["text"] == tokenizer.decode(plain.tokens, skip_special_tokens=True)
        assert "user" in answer["prompt"]
        assert 1 <= answer["accept_len"] <= K


def test_decoding_leaves_mode_and_weights_alone(lab: Lab) -> None:
    module, data = lab.ready(lab.data())
    module.train()
    before = weights_of(module)
    module.decode(torch.tensor(data.held_out_prompts["test"][0]), 8)
    assert module.drafter.training
    assert all(p.requires_grad and p.grad is None for p in module.drafter.parameters())
    assert_same(weights_of(module), before)


@pytest.mark.parametrize("how", ["fit", "load_state_dict", "in place"])
def test_decoding_uses_the_weights_of_the_moment(lab: Lab, how: str) -> None:
    """Drafts of a trained drafter and of a changed one differ, whatever was decoded before."""
    data = lab.data(QUESTIONS[:4], batch_size=4, max_new_tokens=10, anchors=RandomAnchors(10))
    module, _ = lab.ready(data, lr=1e-2)
    prompt = torch.tensor(data.held_out_prompts["test"][0])
    before = module.decode(prompt, 10).accept_len
    if how == "fit":
        trainer(max_epochs=80).fit(module, datamodule=data)
    else:
        other = lab.module(lr=1e-2)
        trainer(max_epochs=80).fit(other, datamodule=data)
        if how == "load_state_dict":
            module.load_state_dict(other.state_dict())
        else:
            for ours, theirs in zip(
                module.drafter.parameters(), other.drafter.parameters(), strict=True
            ):
                ours.data.copy_(theirs.data)
    assert before < 1.5
    assert module.decode(prompt, 10).accept_len > 2


# ---- stored states -------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_losses_are_the_same_with_stored_states(lab: Lab, packing: bool) -> None:
    """Also validation; in float32, where only the order of sums differs."""
    found, scores = [], []
    for features in ("online", "store"):
        module, watch = lab.module(), Watch()
        data = lab.data(features=features, packing=packing, max_length=64)
        fit = trainer(watch, max_steps=12, max_epochs=-1, limit_val_batches=1.0)
        fit.fit(module, datamodule=data)
        assert bool(module.target_time.uses) == (features == "online")
        found.append(watch)
        scores.append({k: float(v) for k, v in fit.callback_metrics.items() if "val/" in k})
    assert len(found[0].losses) == 12
    assert found[0].losses[-1] < found[0].losses[0] - 0.05
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-6, abs=0)
    assert found[1].anchors == found[0].anchors
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


def test_the_target_runs_in_its_own_precision_under_mixed_precision(lab: Lab) -> None:
    """As it does when its states are stored, and when a drafter decodes."""
    module, data = lab.ready(lab.data())
    batch, seen, build = the_batch(data), [], module.drafter.context_key_values

    def spy(hidden: Tensor, positions: Tensor) -> Any:
        seen.append(hidden)
        return build(hidden, positions)

    module.drafter.context_key_values = spy  # type: ignore[method-assign]
    module.block_hidden(batch)
    with torch.autocast("cpu", torch.bfloat16):
        module.block_hidden(batch)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])


# ---- checkpoints and resuming --------------------------------------------------------------------


@dataclass
class Straight:
    """Ten steps in one go, with a checkpoint after each."""

    watch: Watch
    weights: dict[str, Tensor]
    supervised_tokens: int
    folder: Path
    options: dict[str, Any]
    data: Callable[[], DFlashDataModule]

    def checkpoint(self, step: int) -> Path:
        (found,) = self.folder.glob(f"*-step={step}.ckpt")
        return found


def straight_run(
    lab: Lab, folder: Path, batch_size: int = 2, accumulate: int = 1, **end: int
) -> Straight:
    def data() -> DFlashDataModule:
        return lab.data(batch_size=batch_size, anchors=RandomAnchors(3))

    options: dict[str, Any] = {
        **(end or {"max_steps": 10}),
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 1.0,
    }
    watch = Watch()
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    module = lab.module()
    trainer(watch, keep, **options).fit(module, datamodule=data())
    return Straight(watch, weights_of(module), module.supervised_tokens, folder, options, data)


@pytest.fixture(scope="module")
def straight(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Three steps an epoch: step 5 lies in the middle of one, step 6 at the end."""
    return straight_run(lab, tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def accumulated(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Six batches and two steps an epoch, four batches a step and the rest."""
    return straight_run(lab, tmp_path_factory.mktemp("accumulated"), 1, 4)


@pytest.fixture(scope="module")
def epochs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The end is given in epochs, so the schedule has the batches counted before it resumes."""
    return straight_run(lab, tmp_path_factory.mktemp("epochs"), max_epochs=4)


@pytest.mark.parametrize(
    ("run", "step"),
    [
        ("straight", 5),
        ("straight", 6),
        ("accumulated", 5),
        ("epochs", 1),
        ("epochs", 5),
        ("epochs", 6),
    ],
)
def test_a_resumed_run_is_the_straight_run(
    lab: Lab, run: str, step: int, request: pytest.FixtureRequest
) -> None:
    whole: Straight = request.getfixturevalue(run)
    watch = Watch()
    module = lab.module(seed=7)
    second = trainer(watch, **whole.options)
    second.fit(module, datamodule=whole.data(), ckpt_path=whole.checkpoint(step))
    assert second.global_step == len(whole.watch.gradients)
    assert watch.lrs == whole.watch.lrs[step:]
    assert watch.anchors == whole.watch.anchors[-len(watch.anchors) :]
    if run != "accumulated":
        assert len(watch.anchors) == len(whole.watch.anchors) - step
    assert watch.losses == whole.watch.losses[step:]
    assert watch.tokens == whole.watch.tokens[step:]
    assert_same(weights_of(module), whole.weights)
    assert module.supervised_tokens == whole.supervised_tokens == whole.watch.tokens[-1]


@pytest.mark.parametrize("end", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
def test_a_run_resumed_after_the_validation_that_ended_an_epoch(
    lab: Lab, tmp_path: Path, end: dict[str, int]
) -> None:
    """The usual checkpoint: saved on a validation metric."""
    options: dict[str, Any] = {**end, "limit_val_batches": 1}
    best = ModelCheckpoint(
        tmp_path, monitor="val/accept_len", mode="max", save_top_k=-1, filename="{step}"
    )
    watch, module = Watch(), lab.module()
    trainer(watch, best, **options).fit(module, datamodule=lab.data())
    rest, resumed = Watch(), lab.module(seed=7)
    path = tmp_path / "step=3.ckpt"
    trainer(rest, **options).fit(resumed, datamodule=lab.data(), ckpt_path=path)
    assert rest.anchors == watch.anchors[3:]
    assert_same(weights_of(resumed), weights_of(module))


def test_a_position_is_used_once(lab: Lab, straight: Straight) -> None:
    """Validating a checkpoint, or resuming from one, does not shorten a later fit."""
    path = straight.checkpoint(2)
    module = lab.module()
    trainer().validate(module, datamodule=straight.data(), ckpt_path=path, verbose=False)
    assert len(fitted(module, straight.data(), max_epochs=1).anchors) == 3
    trainer(max_epochs=2).fit(module, datamodule=straight.data(), ckpt_path=path)
    assert len(fitted(module, straight.data(), max_epochs=1).anchors) == 3


def test_every_epoch_has_new_anchors_and_every_sample(straight: Straight) -> None:
    epochs = [straight.watch.anchors[n : n + 3] for n in (0, 3, 6)]
    seen = [
        sorted(
            (tuple(ids), tuple(anchors))
            for batch in epoch
            for ids, anchors in zip(*batch, strict=True)
        )
        for epoch in epochs
    ]
    assert all(len(epoch) == len(QUESTIONS) for epoch in seen)
    assert seen[0] != seen[1] != seen[2]


def test_checkpoint_holds_the_drafter_only(lab: Lab, straight: Straight) -> None:
    path = straight.checkpoint(10)
    checkpoint = torch.load(path, weights_only=True)
    assert all(key.startswith("drafter.") for key in checkpoint["state_dict"])
    saved = {k.removeprefix("drafter."): v for k, v in checkpoint["state_dict"].items()}
    assert_same(saved, straight.weights)
    drafter = sum(v.numel() * v.element_size() for v in saved.values())
    assert path.stat().st_size < 3 * drafter + 200_000, "more than weights and two moments"
    assert checkpoint["supervised_tokens"] == straight.supervised_tokens
    config = checkpoint["drafter_config"]
    assert config["block_size"] == K
    assert config["target_layer_ids"] == [1, 3, 5]


def test_size_of_a_checkpoint_does_not_grow_with_the_target(lab: Lab, straight: Straight) -> None:
    stored = torch.load(straight.checkpoint(1), weights_only=True)
    tensors = sum(v.numel() for v in stored["state_dict"].values())
    module, _ = lab.ready(lab.data())
    assert tensors == sum(p.numel() for p in module.drafter.parameters())


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "num_layers": ({"num_layers": 3}, {}, ["num_hidden_layers: 2 -> 3"]),
    "block_size": ({"block_size": 5}, {}, ["block_size: 4 -> 5"]),
    "draft vocabulary": ({"draft_vocab": 9}, {}, ["draft_vocab_size: None -> 9"]),
    "width": ({"intermediate_size": 64}, {}, ["intermediate_size: 48 -> 64"]),
    "taps": ({}, {"num_taps": 2}, ["target_layer_ids: [1, 3, 5] -> [1, 5]"]),
    "same number of taps": ({}, {"target_layer_ids": [1, 3, 4]}, ["target_layer_ids"]),
    "mask token": ({}, {"mask_token_id": 95}, ["mask_token_id: 90 -> 95"]),
    "target dtype": ({}, {"dtype": "bfloat16"}, ["target_fingerprint"]),
    "two keys": ({"num_layers": 1, "block_size": 3}, {}, ["num_hidden_layers", "block_size"]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["fit", "validate"])
def test_another_architecture_is_refused_by_key(
    lab: Lab, straight: Straight, change: str, method: str
) -> None:
    model, target_changes, named = CHANGES[change]
    target = replace(lab.target, **target_changes)
    module = lab.module(target=target, **model)
    data = lab.data(target=target, block_size=model.get("block_size", K))
    run = trainer(max_steps=11) if method == "fit" else trainer()
    with pytest.raises(UserError) as caught:
        getattr(run, method)(module, datamodule=data, ckpt_path=straight.checkpoint(5))
    assert all(key in str(caught.value) for key in named), caught.value


def test_another_target_of_the_same_shape_is_refused(
    lab: Lab, straight: Straight, tmp_path: Path
) -> None:
    tiny_model("llama_tied", seed=1).save_pretrained(tmp_path)
    lab_tokenizer = lab.data().spec.tokenizer
    lab_tokenizer.save_pretrained(tmp_path)
    target = replace(lab.target, name=str(tmp_path))
    with pytest.raises(UserError, match="target_fingerprint"):
        trainer(max_steps=11).fit(
            lab.module(target=target),
            datamodule=lab.data(target=target),
            ckpt_path=straight.checkpoint(5),
        )


def test_a_checkpoint_of_something_else_is_refused(
    lab: Lab, straight: Straight, tmp_path: Path
) -> None:
    checkpoint = torch.load(straight.checkpoint(5), weights_only=True)
    del checkpoint["drafter_config"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="not written by dflash_lightning"):
        trainer(max_steps=11).fit(
            lab.module(), datamodule=lab.data(), ckpt_path=tmp_path / "other.ckpt"
        )


def test_missing_or_surplus_weights_are_refused(
    lab: Lab, straight: Straight, tmp_path: Path
) -> None:
    checkpoint = torch.load(straight.checkpoint(5), weights_only=True)
    checkpoint["state_dict"]["drafter.surplus"] = checkpoint["state_dict"].pop("drafter.fc.weight")
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    with pytest.raises(RuntimeError, match=r"(?s)fc\.weight.*surplus"):
        trainer().validate(lab.module(), datamodule=lab.data(), ckpt_path=tmp_path / "bad.ckpt")


def test_another_draft_vocabulary_of_the_same_size_is_refused_in_fit(
    lab: Lab, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    first = lab.module(draft_vocab=6)
    trainer(keep, max_steps=2).fit(first, datamodule=lab.data(QUESTIONS[:3]))
    path = keep.best_model_path
    resumed = lab.module(draft_vocab=6)
    trainer(max_steps=3).fit(resumed, datamodule=lab.data(QUESTIONS[:3]), ckpt_path=path)
    other = lab.data(QUESTIONS[3:])
    module = lab.module(draft_vocab=6)
    with pytest.raises(UserError, match="draft vocabulary differs"):
        trainer(max_steps=3).fit(module, datamodule=other, ckpt_path=path)
    assert module.drafter.draft_ids.tolist() != first.drafter.draft_ids.tolist()
    judged, _ = lab.ready(other, draft_vocab=6)
    found = trainer().validate(judged, datamodule=other, ckpt_path=path, verbose=False)[0]
    assert judged.drafter.draft_ids.tolist() == first.drafter.draft_ids.tolist()
    total, weight = torch.zeros(()), torch.zeros(())
    for batch in other.val_dataloader():
        numerator, denominator, _ = slow_loss(judged, other, batch, first.drafter.draft_ids)
        total, weight = total + numerator, weight + denominator
    assert found["val/loss"] == pytest.approx(float(total / weight), rel=1e-5)


def test_validation_of_a_checkpoint_gives_what_training_logged(lab: Lab, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val/accept_len", mode="max")
    module = lab.module(lr=1e-2)
    data = lab.data(max_new_tokens=8)
    run = trainer(keep, max_epochs=20, check_val_every_n_epoch=20, limit_val_batches=1.0)
    run.fit(module, datamodule=data)
    logged = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val/")}
    found = trainer().validate(
        lab.module(seed=3),
        datamodule=lab.data(max_new_tokens=8),
        ckpt_path=keep.best_model_path,
        verbose=False,
    )[0]
    assert found == pytest.approx(logged)
    assert found["val/accept_len"] > 1.1


def test_saved_drafter_is_the_trained_one(lab: Lab, tmp_path: Path) -> None:
    module = lab.module(draft_vocab=7)
    trainer(max_steps=2).fit(module, datamodule=lab.data())
    module.drafter.save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), weights_of(module))
    assert loaded.config.to_dict()["target_layer_ids"] == [1, 3, 5]
    assert loaded.config.mask_token_id == module.drafter.config.mask_token_id


def test_another_datamodule_is_refused(lab: Lab) -> None:
    class Other(pl.LightningDataModule):
        def train_dataloader(self) -> list[int]:
            return [0]

    with pytest.raises(UserError, match="needs a DFlashDataModule"):
        trainer(max_steps=1).fit(lab.module(), datamodule=Other())


def test_copying_the_drafter_does_not_copy_the_target(lab: Lab) -> None:
    module, _ = lab.ready(lab.data())
    assert module.target is not None
    held = {id(p) for p in module.parameters()}
    assert not held & {id(p) for p in module.target.model.parameters()}
    assert {id(p) for p in module.drafter.parameters()} == held
    assert copy.deepcopy(module.drafter).state_dict().keys() == module.drafter.state_dict().keys()
