"""The lab's target as it is committed, and a drafter trained for it."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from reference import block_hidden, decode_plain, every_block, observe, speculate, training_module

from dflash_lightning.cli import main
from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.data.stdlib import StdlibPrompts, source_text, stdlib_files
from dflash_lightning.decoding.proposer import DrafterProposer
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.runs import load_drafter
from dflash_lightning.sweeps.parsing import check_cells
from dflash_lightning.sweeps.reading import read_spec
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_spec import TargetConfig, inspect_target

ROOT = Path(__file__).parent.parent
LAB = ROOT / "experiments" / "lab"
SWEEPS = sorted((ROOT / "sweeps" / "lab").glob("*.yaml"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The committed target in float32."""
    config = TargetConfig(name=str(LAB), dtype="float32")
    return load_target(inspect_target(config, tmp_path_factory.mktemp("cache")))


def last_of_log() -> dict[str, float]:
    with (LAB / "log.csv").open() as stream:
        return {key: float(value) for key, value in list(csv.DictReader(stream))[-1].items()}


def held_out_loss(target: Target, characters: int = 3000) -> tuple[float, float]:
    """Return nats a token and bits a byte of the first characters of each validation file."""
    assert target.tokenizer is not None
    nats, tokens, size = 0.0, 0, 0
    for file in stdlib_files("val"):
        text = source_text(file)[:characters]
        ids = torch.tensor(
            target.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        )
        for row in ids.split(512):
            if len(row) > 1:
                logits = target.forward(row[None], logits_to_keep=0, tap=False).logits[0, :-1]
                nats += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
                tokens += len(row) - 1
                size += len(target.text(row[1:]).encode())
    return nats / tokens, nats / size / math.log(2)


def test_what_is_committed_is_small_and_whole() -> None:
    assert sum(file.stat().st_size for file in LAB.iterdir() if file.is_file()) < 12_000_000
    training = json.loads((LAB / "training.json").read_text())
    assert {"argv", "python", "torch", "transformers", "tokenizers", "corpus"} <= set(training)
    assert last_of_log()["tokens"] > 3e6


def test_it_has_room_for_five_taps_and_a_mask_row_that_no_text_uses(target: Target) -> None:
    assert target.config.num_hidden_layers == 10
    assert target.target_layer_ids == [1, 2, 4, 6, 7]
    assert target.mask_token_id == 3
    assert target.stop_ids == {2}
    assert 3e6 < sum(p.numel() for p in target.model.parameters()) < 6e6


def test_its_tokenizer_gives_back_what_it_took(target: Target) -> None:
    assert target.tokenizer is not None
    for text in (
        *(source_text(file) for file in stdlib_files("val")),
        "tabs\t\tand  spaces \n\n\n  at ends  ",
        "na\u00efve \u2211 \u6f22\u5b57 \U0001f642\r\n",
    ):
        ids = target.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        assert target.text(ids) == text
        assert not {0, 1, 2, 3} & set(ids)


def test_its_template_adds_nothing_before_an_answer_and_ends_it(target: Target) -> None:
    assert target.tokenizer is not None
    asked, said = {"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "\ny = 2"}
    assert target.text(prompt_ids(target.tokenizer, [asked])) == "x = 1"
    whole = target.tokenizer.apply_chat_template([asked, said], tokenize=False)
    assert whole == "x = 1\ny = 2<eos>"


def test_its_loss_on_held_out_files_is_the_logged_one(target: Target) -> None:
    """The log's is over all held-out files, these are some of them, on this Python version."""
    logged = last_of_log()
    nats, bits = held_out_loss(target)
    assert abs(nats - logged["val_nats_per_token"]) < 0.3
    assert abs(bits - logged["val_bits_per_byte"]) < 0.2


def fit(folder: Path, steps: int, *flags: str) -> Path:
    """Train a drafter on the shipped experiment cut short; returns its run's folder."""
    main(
        [
            *("fit", "-c", str(ROOT / "experiments" / "lab.yaml")),
            *("--model.target.name", str(LAB), "--data.cache_dir", str(folder / "cache")),
            *("--trainer.default_root_dir", str(folder / "runs"), "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false", "--trainer.max_steps", str(steps)),
            *("--trainer.val_check_interval", str(steps), *flags),
        ]
    )
    return next((folder / "runs").glob("*/version_0"))


def held_out_ids(target: Target, count: int) -> list[torch.Tensor]:
    assert target.tokenizer is not None
    prompts = list(StdlibPrompts(64, 64, 64).stream("test"))[:count]
    return [torch.tensor(prompt_ids(target.tokenizer, p.messages[:1])) for p in prompts]


def trained(run: Path, target: Target) -> Drafter:
    """Return a run's drafter for the same target in float32."""
    drafter = load_drafter(run).float()
    drafter.config.target_fingerprint = target.fingerprint
    return drafter


def outputs_are_the_targets_own(target: Target, run: Path, count: int, tokens: int) -> None:
    """In float32 the pair's greedy output is plain decoding's, whatever is accepted."""
    proposer = DrafterProposer(trained(run, target), target)
    for ids in held_out_ids(target, count):
        expected = decode_plain(target, ids, tokens).tokens
        assert speculate(target, proposer, ids, tokens).tokens == expected


def training_equals_decoding(target: Target, run: Path) -> None:
    """Each block of a held-out text: as training sees it, and as the loop does."""
    drafter = trained(run, target)
    ids = held_out_ids(target, 1)[0][:40]
    batch = every_block([ids], drafter.config.block_size, target.mask_token_id)
    proposer = DrafterProposer(drafter, target)
    hidden = target.forward(ids[None]).hidden
    assert hidden is not None
    with torch.no_grad():
        blocks = training_module(target, drafter, "chunked").block_hidden(batch)[0]
        for anchor in range(1, 30):
            proposer.begin(1)
            observe(proposer, hidden[:, :anchor])
            found = block_hidden(proposer, int(ids[anchor]))
            torch.testing.assert_close(blocks[anchor], found, rtol=1e-4, atol=1e-4)


SHORT = (
    *("--data.prompts.num_train", "32", "--data.prompts.num_val", "4"),
    *("--data.prompts.num_test", "4", "--data.max_new_tokens", "32", "--model.num_layers", "1"),
    *("--decode.final_prompts", "2", "--decode.max_new_tokens", "12"),
)


def test_a_briefly_trained_pair_is_lossless_and_decodes_as_it_was_trained(
    target: Target, tmp_path: Path
) -> None:
    run = fit(tmp_path, 3, *SHORT)
    report = json.loads((run / "decode_val.json").read_text())
    assert report["prompts"] == 2
    outputs_are_the_targets_own(target, run, 2, 24)
    training_equals_decoding(target, run)


@pytest.mark.slow
def test_a_minute_of_training_is_seen_in_the_accept_length(target: Target, tmp_path: Path) -> None:
    """An untrained drafter has 1.00 to 1.01; so short a training gets well above 1.1."""
    few = ("--data.prompts.num_train", "512", "--model.num_layers", "1")
    run = fit(tmp_path, 400, *few, "--decode.final_prompts", "32")
    report = json.loads((run / "decode_val.json").read_text())
    assert report["accept_len"] > 1.12
    assert all(d["logit_gap"] <= 0.5 for d in report["divergences"])
    outputs_are_the_targets_own(target, run, 3, 48)


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_the_labs_sweeps_parse_and_their_cells_differ(file: Path) -> None:
    spec = read_spec(["-c", str(file)])
    assert (spec.name, spec.seeds) == (f"lab-{file.stem}", [0, 1, 2])
    assert list(spec.experiments) == ["lab"]
    cells = check_cells(spec)
    assert len({meaning.identity for _, meaning in cells}) == len(cells) >= 3
    assert all(m.config["model"]["target"]["name"] == "./experiments/lab" for _, m in cells)


def test_the_base_cell_is_shared_so_that_it_is_trained_once() -> None:
    shared = set.intersection(
        *(
            {meaning.identity for _, meaning in check_cells(read_spec(["-c", str(file)]))}
            for file in SWEEPS
            if file.stem in {"depth", "taps", "anchors"}
        )
    )
    assert len(shared) == 1


def test_away_from_the_checkout_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^model\.target\.name: no such folder: \./experiments/lab"
    ) as e:
        inspect_target(TargetConfig(name="./experiments/lab"), tmp_path)
    assert "checkout" in str(e.value)
    assert "\n" not in str(e.value)
