"""The command line end to end on a tiny target: what a user types and then finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.cli import main
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.run_names import run_name

MIXED = '{"kl": {"loss": "TargetKL", "weight": 0.9}, "ce": {"loss": "DataToken", "weight": 0.1}}'
UNIFORM = ["--model.position_weights", "UniformWeights"]


@pytest.fixture(scope="module")
def run(experiment: Path) -> Path:
    """The folder of one finished run."""
    main(["fit", "-c", str(experiment)])
    return experiment.parent / "runs" / "d1-k4-g2-t3-a4-v40-s3" / "version_0"


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def test_run_folder_holds_what_a_user_needs(run: Path) -> None:
    found = json.loads((run / "decode_val.json").read_text())
    assert found["prompts"] == 3
    assert found["identical"] == 3
    assert found["accept_len"] >= 1.0
    assert found["tokens_per_s"] > 0
    assert sum(found["accepted_histogram"]) == found["cycles"]
    assert isinstance(Drafter.from_pretrained(run / "drafter"), Drafter)
    kept = json.loads((run / "run.json").read_text())
    assert (kept["steps"], kept["seed"], kept["budget"]) == (4, 3, None)
    assert (kept["command"][0], kept["environment"]["workers"]) == ("fit", 1)
    assert kept["supervised_tokens"] > 0 < kept["train_seconds"]
    assert kept["environment"]["versions"]["torch"] == torch.__version__
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["num_layers"] == 1


def test_tensorboard_holds_curves_hparams_and_samples(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    tags = events.Tags()
    scalars = set(tags["scalars"])
    for tag in (
        "train/loss",
        "val/loss",
        "val/accept_len",
        "val/accept_rate/pos_1",
        "decode/accept_len",
        "decode/speedup",
        "decode/tokens_per_s",
        "decode/accept_rate/pos_3",
        "hp/accept_len",
    ):
        assert tag in scalars, tag
    assert "decode/acceptance" in tags["images"]
    assert any("decode/sample" in tag for tag in tags["tensors"])
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert [e.step for e in events.Scalars("decode/accept_len")] == [2, 4]
    assert (
        events.Scalars("hp/accept_len")[-1].value == events.Scalars("decode/accept_len")[-1].value
    )


def test_saved_config_trains_again_and_reuses_the_cache(run: Path, experiment: Path) -> None:
    cache = experiment.parent / "cache"
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}
    main(["fit", "-c", str(run / "config.yaml"), "--trainer.max_steps", "1"])
    after = {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}
    assert after == before
    assert (run.parent / "version_1" / "decode_val.json").is_file()


def test_checkpoint_holds_the_drafter_only(checkpoint: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    assert {key.split(".")[0] for key in state["state_dict"]} == {"drafter"}
    assert state["experiment"]["model"]["block_size"] == 4


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--model.num_layers", "2", "num_hidden_layers: 1 -> 2"),
        ("--model.block_size", "6", "block_size: 4 -> 6"),
        ("--model.target.num_taps", "2", "target_layer_ids"),
        ("--model.target.mask_token_id", "80", "mask_token_id"),
        ("--model.draft_vocab", "30", "draft_vocab_size: 40 -> 30"),
    ],
)
def test_resume_refuses_another_architecture(
    experiment: Path, checkpoint: Path, flag: str, value: str, key: str
) -> None:
    with pytest.raises(UserError, match="ckpt_path") as error:
        main(["fit", "-c", str(experiment), "--ckpt_path", str(checkpoint), flag, value])
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_resume_says_what_else_differs(
    experiment: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--trainer.max_steps", "5", "--model.lr", "0.5"]
    with caplog.at_level("INFO", logger="dflash_lightning"):
        cli = main(["fit", "-c", str(experiment), "--ckpt_path", str(checkpoint), *flags])
    assert cli.trainer.global_step == 5
    assert "model.lr: 0.001 -> 0.5" in caplog.text
    assert "trainer.max_steps: 4 -> 5" in caplog.text


def test_validate_test_and_predict(experiment: Path, checkpoint: Path) -> None:
    common = ["-c", str(experiment), "--ckpt_path", str(checkpoint)]
    validated = main(["validate", *common])
    assert float(validated.trainer.callback_metrics["val/accept_len"]) >= 1
    tested = main(["test", *common])
    assert float(tested.trainer.callback_metrics["test/accept_len"]) >= 1
    assert (Path(tested.trainer.log_dir) / "decode_test.json").is_file()
    predicted = main(["predict", *common])
    lines = (Path(predicted.trainer.log_dir) / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 3
    assert all(len(row["token_ids"]) <= 16 and row["accept_len"] >= 1 for row in rows)


def test_checkpoints_can_be_off_or_ones_own(experiment: Path) -> None:
    """The default `last.ckpt` neither contradicts `enable_checkpointing` nor doubles a user's."""
    off = main(["-c", str(experiment), "--trainer.enable_checkpointing", "false"], run=False)
    assert off.trainer.checkpoint_callback is None
    flags = ["--trainer.callbacks+", "lightning.pytorch.callbacks.ModelCheckpoint"]
    own = main(["-c", str(experiment), *flags], run=False)
    assert len(own.trainer.checkpoint_callbacks) == 1
    assert not own.trainer.checkpoint_callback.save_last


def test_print_config_round_trips(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = _printed(capsys, "-c", str(experiment), "--model.num_layers", "2")
    (tmp_path / "printed.yaml").write_text(printed)
    assert _printed(capsys, "-c", str(tmp_path / "printed.yaml")) == printed
    assert yaml.safe_load(printed)["model"]["num_layers"] == 2


def test_interpolation_honours_overrides(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(experiment.read_text())
    config["model"]["block_size"] = "${model.num_layers}"
    (tmp_path / "linked.yaml").write_text(yaml.safe_dump(config))
    printed = _printed(capsys, "-c", str(tmp_path / "linked.yaml"), "--model.num_layers", "6")
    assert yaml.safe_load(printed)["model"]["block_size"] == 6


def _printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fit", *flags, "--print_config"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.num_layer", "3"], ["model.num_layer"]),
        (["--model.target.nmae", "x"], ["model.target.nmae"]),
        (["--model.block_size", "four"], ["model.block_size", "four"]),
        (["--model.block_size", "1"], ["model.block_size", "at least 2"]),
        (["--data.block_size", "8"], ["data.block_size", "model.block_size"]),
        (["--model.block_size", "${model.depth}"], ["model.depth", "model.block_size"]),
        (["--model.loss_decay_gamma", "7"], ["model.loss_decay_gamma"]),
        (["--model.position_weights.gamma", "-1"], ["model.position_weights.gamma", "positive"]),
        (["--model.position_weights.gamma", "uniform"], ["model.position_weights", "uniform"]),
        ([*UNIFORM, "--model.position_weights.gamma", "3"], ["model.position_weights", "gamma"]),
        (
            ["--model.position_weights", "DPaceWeights", "--model.position_weights.alpha", "2"],
            ["model.position_weights.alpha", "0..1"],
        ),
        (["--model.loss", "Hinge"], ["model.loss", "Hinge"]),
        (["--model.loss", "Mix", "--model.loss.terms", "{}"], ["loss.terms", "one term"]),
        (["--model.loss", "Mix"], ["model.loss", "terms"]),
        (["--model.init_from_layers", "[1,2]"], ["model.init_from_layers", "num_layers=1"]),
        (["--model.init_from_layers", "[8]"], ["model.init_from_layers", "0..7"]),
        (["--data.anchors", "RandomAnchors", "--data.anchors.num_anchors", "0"], ["num_anchors"]),
        (["--model.draft_vocab", "100000"], ["model.draft_vocab", "1.."]),
        (["--model.target.name", "./nowhere"], ["model.target.name", "./nowhere"]),
        (["--model.target.num_taps", "7"], ["model.target.num_taps", "target_layer_ids"]),
        (["--model.target.target_layer_ids", "[3,7]"], ["model.target.target_layer_ids"]),
        (["--model.target.mask_token_id", "1"], ["model.target.mask_token_id", "eos"]),
        (["--model.target.mask_token_id", "96"], ["model.target.mask_token_id", "0..95"]),
        (["--data.prompts.train", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--data.prompts.held_out", "10"], ["held_out"]),
        (["--data.prompts.held_out", "0"], ["data.prompts", "val", "no prompt to decode"]),
        (["--decode.batch_size", "0"], ["decode.batch_size", "at least 1"]),
        (["--decode.max_new_tokens", "400"], ["decode.max_new_tokens", "context window of 256"]),
        (["--decode.eval_block_sizes", "[8,1]"], ["decode.eval_block_sizes", "2 or more"]),
        (["--decode.compare", "[beam]"], ["decode.compare", "beam"]),
        (["--decode.compare", "[assistant]"], ["decode.assistant", "needs the name of one"]),
        (["--ckpt_path", "nowhere.ckpt"], ["--ckpt_path", "nowhere.ckpt"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(
    experiment: Path, flags: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        main(["fit", "-c", str(experiment), *flags])
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_bad_row_names_file_and_line(experiment: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):
        main(["fit", "-c", str(experiment), "--data.prompts.train", str(bad)])


def test_validate_needs_a_checkpoint(experiment: Path) -> None:
    with pytest.raises(UserError, match="--ckpt_path: validate needs"):
        main(["validate", "-c", str(experiment)])


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "d1-k4-g2-t3-a4-v40-s3"),
        (["--model.position_weights.gamma", "7.5"], "d1-k4-g7.5-t3-a4-v40-s3"),
        (UNIFORM, "d1-k4-guniform-t3-a4-v40-s3"),
        (["--model.position_weights", "DPaceWeights"], "d1-k4-gdpace0.5-t3-a4-v40-s3"),
        (["--model.loss", "TargetKL"], "d1-k4-g2-t3-targetkl-a4-v40-s3"),
        (
            ["--model.loss", "Mix", "--model.loss.terms", MIXED, "--model.draft_vocab", "39"],
            "d1-k4-g2-t3-mixtargetkl0.9.datatoken0.1-a4-v39-s3",
        ),
        (["--data.anchors.num_anchors", "20"], "d1-k4-g2-t3-a20-v40-s3"),
        (["--model.target.target_layer_ids", "[0, 2]"], "d1-k4-g2-t0.2-a4-v40-s3"),
        (
            ["--data.anchors", "UniformAnchors", "--data.anchors.num_anchors", "7"],
            "d1-k4-g2-t3-uniformanchors7-v40-s3",
        ),
        (
            [
                "--data.anchors",
                "UniformAnchors",
                "--data.anchors.num_anchors",
                "null",
                "--model.init_from_layers",
                "[2]",
            ],
            "d1-k4-g2-t3-uniformanchors-v40-init2-s3",
        ),
        (["--model.init_from_layers", "last"], "d1-k4-g2-t3-a4-v40-initlast-s3"),
    ],
)
def test_run_name_says_what_varies(experiment: Path, flags: list[str], name: str) -> None:
    cli = main(["-c", str(experiment), *flags], run=False)
    assert run_name(cli.config) == name


def test_process_ends_with_status_2_and_no_traceback(experiment: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dflash_lightning",
        "fit",
        "-c",
        str(experiment),
        "--model.depth",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "model.depth" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_option_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "How many target layers the drafter sees",
        "Drafter layers (depth)",
        "the most frequent in the training answers",
        "Decode the validation prompts every so many optimizer steps",
    ):
        assert words in text, words
