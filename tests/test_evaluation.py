"""What decoding held-out prompts reports: the figures by hand, and the callback that logs them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import PROMPT, greedy, token_ids
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import save_tiny_target, tiny_drafter, tiny_model, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lightning.cli import main
from dflash_lightning.decoding import evaluate as evaluate_module
from dflash_lightning.decoding.compare import other_decoders, tokens_per_second
from dflash_lightning.decoding.cost import measure_cost
from dflash_lightning.decoding.evaluate import evaluate, marked_text
from dflash_lightning.decoding.loop import decode
from dflash_lightning.decoding.outcome import Cycle, Decoded
from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.decoding.report import Divergence, report
from dflash_lightning.drafter.axes import Axes
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target

PROMPTS = [PROMPT, token_ids(17, 3), token_ids(9, 4)]


# ---- figures -------------------------------------------------------------------------------------


def two_prompts() -> list[Decoded]:
    """K = 4. Prompt 0: tokens 10..16 in 3 cycles; prompt 1: 20, 21, 22 in one, cut by its end."""
    first = [
        Cycle(3, 1, 2, [11, 99, 13]),  # becomes 11 12
        Cycle(3, 2, 3, [13, 14, 99]),  # becomes 13 14 15
        Cycle(1, 0, 1, [99]),  # becomes 16; one token was left to make
    ]
    second = [Cycle(3, 3, 2, [21, 22, 23])]  # becomes 21 22, a stop token
    return [
        Decoded([10, 11, 12, 13, 14, 15, 16], first, 1.0, 0.3, 0.9, 3.4),
        Decoded([20, 21, 22], second, 0.5, 0.2, 0.4, 1.6),
    ]


def plain_of(decoded: list[Decoded], seconds: list[float]) -> list[Decoded]:
    return [
        Decoded(list(d.tokens), [Cycle(0, 0, 1)] * (len(d.tokens) - 1), 0.5, 0.0, s - 0.5, s)
        for d, s in zip(decoded, seconds, strict=True)
    ]


def test_figures_by_hand() -> None:
    decoded = two_prompts()
    found = report(decoded, plain_of(decoded, [6.8, 3.2]), [], 4, 2, {"prompt_lookup": 7.0})
    assert found.cycles == 4
    assert found.accepted_histogram == [1, 1, 1, 1]
    assert found.accept_len == pytest.approx(8 / 4)
    assert found.accept_len_per_prompt == pytest.approx((6 / 3 + 2 / 1) / 2)
    assert found.survival == pytest.approx([3 / 4, 2 / 3, 1 / 3])  # three cycles drafted 3
    assert found.conditional == pytest.approx([3 / 4, (2 / 3) / (3 / 4), (1 / 3) / (2 / 3)])
    # Slot 1: 11, 13, -, 21 of 4. Slot 2: 99 is not 12; 14; 22 of 3. Slot 3: 13 though 99 broke the
    # block, 99 is not 15, and the place of 23 is beyond the end: 1 of 2.
    assert found.marginal == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found.tokens_per_s == pytest.approx(10 / 5)
    assert found.plain_tokens_per_s == pytest.approx(10 / 10)
    assert found.speedup == pytest.approx(2.0)
    assert found.speedup_per_prompt == pytest.approx([2.0, 2.0])
    assert found.prefill_ms == pytest.approx(750)
    assert found.draft_ms == pytest.approx((100 + 200) / 2)
    assert found.verify_ms == pytest.approx((300 + 400) / 2)
    assert found.overhead_ms == pytest.approx((1200 / 3 + 500) / 2)
    assert found.plain_step_ms == pytest.approx((6300 / 6 + 2700 / 2) / 2)
    assert found.identical == 2
    assert found.batch_size == 2
    assert found.scalars()["decode/prompt_lookup_tokens_per_s"] == 7.0
    assert json.loads(json.dumps(found.to_dict()))["survival"] == found.survival


def test_figures_per_prompt_by_hand() -> None:
    decoded = two_prompts()
    plain, ids = plain_of(decoded, [6.8, 3.2]), [[1, 2], [3]]
    first, second = report(decoded, plain, [], 4, prompts=ids).per_prompt
    assert first.prompt == report(decoded, plain, [], 4, prompts=ids).per_prompt[0].prompt
    assert first.prompt != second.prompt
    assert (first.tokens, first.cycles, first.committed) == (7, 3, 6)
    assert first.accepted_histogram == [1, 1, 1, 0]
    assert first.drafted_histogram == [0, 1, 0, 2]
    assert first.speedup == pytest.approx(2.0)
    assert (second.tokens, second.cycles, second.committed) == (3, 1, 2)
    assert second.accepted_histogram == [0, 0, 0, 1]
    assert (second.draft_seconds, second.verify_seconds, second.seconds) == (0.2, 0.4, 1.6)
    assert (second.plain_tokens, second.plain_seconds) == (3, 3.2)
    assert report(decoded, plain, [], 4).per_prompt == []


def test_pooled_and_per_prompt_accept_length_differ() -> None:
    long = Decoded(list(range(13)), [Cycle(3, 2, 3)] * 4, total_s=1.0)
    short = Decoded(list(range(2)), [Cycle(3, 0, 1)], total_s=1.0)
    found = report([long, short], plain_of([long, short], [1.0, 1.0]), [], 4)
    assert found.accept_len == pytest.approx(13 / 5)
    assert found.accept_len_per_prompt == pytest.approx(2.0)


def test_a_prompt_that_ends_in_the_prefill_has_no_cycles() -> None:
    """NaN where nothing was measured, and nothing NaN is logged."""
    only = Decoded([1], [], 0.5, total_s=0.5)
    found = report([only], plain_of([only], [0.5]), [], 4)
    assert math.isnan(found.accept_len)
    assert all(map(math.isnan, found.survival + found.marginal + found.conditional))
    assert all(map(math.isfinite, found.scalars().values()))


def test_a_wide_gap_is_an_alarm_and_a_tie_is_a_tie() -> None:
    decoded = two_prompts()
    plain = plain_of(decoded, [1.0, 1.0])
    tie = report(decoded, plain, [Divergence(0, 3, 0.125)], 4)
    assert tie.identical == 1
    assert tie.lossless.startswith("yes, up to rounding (1 of 2")
    alarm = report(decoded, plain, [Divergence(0, 3, 0.125), Divergence(1, 1, 3.0)], 4)
    assert alarm.identical == 0
    assert alarm.lossless.startswith("NO (0 of 2")


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.fixture
def parts() -> tuple[Target, DrafterProposer]:
    target = tiny_target()
    return target, DrafterProposer(tiny_drafter(target), target)


def test_counts_do_not_depend_on_the_batch_size(parts: tuple[Target, DrafterProposer]) -> None:
    target, proposer = parts
    found = [evaluate(target, proposer, PROMPTS, 16, size)[0] for size in (1, 2, 8)]
    assert [f.batch_size for f in found] == [1, 2, 8]
    for other in found[1:]:
        for key in ("cycles", "accept_len", "survival", "marginal", "accepted_histogram"):
            assert getattr(other, key) == getattr(found[0], key), key
    assert all(f.identical == 3 and f.tokens_per_s > 0 for f in found)


def test_a_broken_loop_is_reported_with_place_and_gap(
    parts: tuple[Target, DrafterProposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proposer = parts
    honest = evaluate_module.decode

    def broken(target: Target, prompts: Any, proposer: Any, *args: Any) -> list[Decoded]:
        found = honest(target, prompts, proposer, *args)
        if proposer is not None:
            found[0].tokens[2] = (found[0].tokens[2] + 7) % 96
        return found

    monkeypatch.setattr(evaluate_module, "decode", broken)
    found, decoded = evaluate(target, proposer, PROMPTS[:2], 12, 2)
    [parted] = found.divergences
    assert (parted.prompt, parted.position) == (0, 2)
    ids = torch.cat([PROMPTS[0], torch.tensor(decoded[0].tokens[:2])])[None]
    logits = target.model(input_ids=ids).logits[0, -1]
    true = greedy(target, PROMPTS[0], 12)
    gap = float(logits[true[2]] - logits[decoded[0].tokens[2]])
    assert parted.logit_gap == pytest.approx(gap, rel=1e-4)
    assert found.identical == 1


def test_cost_leaves_the_proposer_usable(parts: tuple[Target, DrafterProposer]) -> None:
    """A pass a token shows in the draft time: it is timed, not assumed."""
    target, proposer = parts
    walker = DrafterProposer(tiny_drafter(target, axes=Axes(drafting="autoregressive")), target)
    block, walk = (measure_cost(target, p, PROMPTS[1]) for p in (proposer, walker))
    assert walk.draft_ms > 1.5 * block.draft_ms
    assert min(block.draft_ms, block.verify_ms, block.plain_ms) > 0
    assert block.speedup(2.0) == 2 * block.speedup(1.0)
    expected = greedy(target, PROMPT, 8)
    assert decode(target, [PROMPT], proposer, 8, ())[0].tokens == expected


@pytest.mark.parametrize(("prompts", "size"), [([], 1), (PROMPTS, 0)])
def test_nothing_to_evaluate_is_one_line(
    parts: tuple[Target, DrafterProposer], prompts: list[Tensor], size: int
) -> None:
    with pytest.raises(UserError, match=r"no held-out prompt|batch_size: needs at least 1"):
        evaluate(*parts, prompts, 8, size)


def test_accepted_drafts_are_bold() -> None:
    class Words:
        tokenizer = object()

        def text(self, tokens: list[int] | Tensor) -> str:
            return "".join(f" {int(t)}" for t in tokens)

    decoded = Decoded([1, 2, 3, 4], [Cycle(3, 1, 2), Cycle(3, 0, 1)])
    text = marked_text(Words(), torch.tensor([7]), decoded)  # type: ignore[arg-type]
    assert text.endswith("> " + " 7\n\n 1 **2** 3 4")


# ---- what a user would take instead --------------------------------------------------------------


def test_other_decoders_give_the_targets_own_output(tmp_path: Path) -> None:
    """The assistant is the target itself here, which is also the best assistant there is."""
    target = tiny_target()
    folder = save_tiny_target(tmp_path / "assistant")
    decoders = other_decoders(["prompt_lookup", "assistant"], target, str(folder), tmp_path)
    expected = greedy(target, PROMPT, 20)
    ended = [t in target.stop_ids for t in expected]
    cut = expected[: ended.index(True) + 1] if any(ended) else expected
    for name, decoder in decoders.items():
        assert decoder(PROMPT, 20) == cut, name
        assert tokens_per_second(decoder, PROMPTS, 8) > 0


def test_assistants_that_cannot_be(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(UserError, match="needs the name of one"):
        other_decoders(["assistant"], target, None, tmp_path)
    config = LlamaConfig(**{**tiny_model("llama_tied").config.to_dict(), "vocab_size": 50})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="vocabulary of 50 tokens, the target one of 96"):
        other_decoders(["assistant"], target, str(tmp_path / "small"), tmp_path)


def test_fit_logs_other_block_sizes_and_decoders(
    experiment: Path, target_folder: Path, tmp_path: Path
) -> None:
    flags = {
        "decode.batch_size": "2",
        "decode.eval_block_sizes": "[2,4,6]",
        "decode.compare": "[plain,prompt_lookup,assistant]",
        "decode.assistant": str(target_folder),
        "trainer.default_root_dir": str(tmp_path),
    }
    main(["fit", "-c", str(experiment), *(x for k, v in flags.items() for x in (f"--{k}", v))])
    run = tmp_path / "d1-k4-g2-t3-a4-v40-s3" / "version_0"
    found = json.loads((run / "decode_val.json").read_text())
    assert found["batch_size"] == 2
    assert set(found["others"]) == {"prompt_lookup", "assistant"}
    assert set(found["block_sizes"]) == {"k2", "k6"}
    for size in (2, 6):
        other = found["block_sizes"][f"k{size}"]
        assert len(other["survival"]) == size - 1
        assert other["identical"] == other["prompts"] == 3
    events = EventAccumulator(str(run))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for tag in ("decode/overhead_ms", "decode/assistant_tokens_per_s", "decode_k6/accept_len"):
        assert tag in tags, tag
    assert "decode_k4/accept_len" not in tags
    cost = found["cost"]
    drafter = Drafter.from_pretrained(run / "drafter")
    assert cost["parameters"] == sum(p.numel() for p in drafter.parameters())
    cycle = cost["draft_ms"] + cost["verify_ms"]
    expected = found["accept_len"] * cost["plain_ms"] / cycle
    assert cost["expected_speedup"] == pytest.approx(expected)
    assert "cost/expected_speedup" in tags
