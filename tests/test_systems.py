"""The named systems of `experiments/`: fit, checkpoint, resume, saving and generate with each."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from dflash_lightning.cli import main
from dflash_lightning.commands import run_command
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SYSTEMS = {
    "dflash": "d1-k4-g2-t3-a4-v40-s3",
    "input_fusion": "d1-k4-g2-t3-a4-input-v40-s3",
    "no_features": "d1-k4-g2-t3-a4-none-v40-s3",
    "iterative": "d1-k4-g2-t3-a4-steps3-v40-s3",
    "eagle3": "d1-k4-g2-t3-a4-input-ar-v40-s3",
    "kv_autoregressive": "d1-k4-g2-t3-a4-ar-v40-s3",
    "dspark": "d1-k4-g2-t3-a4-markov64-v40-s3",
}


def flags(system: str, root: Path) -> list[str]:
    """Return what the system's file says beyond its base, as flags."""
    content = yaml.safe_load((EXPERIMENTS / f"{system}.yaml").read_text())
    assert content.pop("base") == "quickstart.yaml"
    axes = content.get("model", {}).get("axes", {})
    return [
        *(word for key, value in axes.items() for word in (f"--model.axes.{key}", str(value))),
        "--trainer.default_root_dir",
        str(root),
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_trains_resumes_and_decodes(
    system: str, experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", "-c", str(experiment), *flags(system, tmp_path)]
    main(command)
    run = tmp_path / SYSTEMS[system] / "version_0"
    found = json.loads((run / "decode_val.json").read_text())
    assert found["identical"] == found["prompts"] == 3
    last = run / "checkpoints" / "last.ckpt"
    main([*command, "--ckpt_path", str(last), "--trainer.max_steps", "6"])
    again = tmp_path / SYSTEMS[system] / "version_1"
    more = json.loads((again / "decode_val.json").read_text())
    assert more["identical"] == 3
    weights = [torch.load(r / "checkpoints" / "last.ckpt", weights_only=True) for r in (run, again)]
    assert [w["global_step"] for w in weights] == [4, 6]
    drafter = Drafter.from_pretrained(again / "drafter")
    for key, value in drafter.state_dict().items():
        saved = weights[1]["state_dict"][f"drafter.{key}"]
        assert torch.equal(value, saved), key
        moved = weights[0]["state_dict"][f"drafter.{key}"]
        assert key == "draft_ids" or not torch.equal(saved, moved), f"{key} is not trained"
    capsys.readouterr()
    words = ["--prompt", "3 and 4?", "--max_new_tokens", "8", "--compare"]
    run_command("generate", ["--ckpt", str(again), *words])
    assert "the same tokens" in capsys.readouterr().err


def test_a_checkpoint_of_another_system_is_refused(experiment: Path, tmp_path: Path) -> None:
    command = ["fit", "-c", str(experiment), "--trainer.max_steps", "1"]
    main([*command, *flags("eagle3", tmp_path)])
    last = tmp_path / SYSTEMS["eagle3"] / "version_0" / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError, match=r"injection: input -> none; drafting: autoreg"):
        main([*command, *flags("no_features", tmp_path), "--ckpt_path", str(last)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--model.axes.injection", "none", "--model.axes.drafting", "autoregressive"], "drafting"),
        (["--model.axes.injection", "cross"], "injection"),
        (["--model.axes.denoising_steps", "9"], "needs 1 to 3"),
    ],
)
def test_nonsense_is_refused_when_the_config_is_read(
    wrong: list[str], words: str, experiment: Path
) -> None:
    with pytest.raises(UserError, match=rf"model\.axes.*{words}"):
        main(["-c", str(experiment), *wrong], run=False)
