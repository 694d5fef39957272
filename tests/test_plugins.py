"""A loss, position weights and an anchor rule from outside the package, by `class_path` alone."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from dflash_lightning.cli import main
from dflash_lightning.errors import UserError

TOYS = '''
"""What a user would write beside an experiment."""

from dflash_lightning.data.anchors import Anchors
from dflash_lightning.position_weights import PositionWeights
from dflash_lightning.slot_losses import Loss

CALLS = []


class SquaredMiss(Loss):
    """(1 - q)^2 of the target's argmax."""

    needs = frozenset({"argmax"})

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, logits, wanted):
        CALLS.append("loss")
        said = logits.softmax(-1).gather(-1, wanted.argmax.rows[:, None])[:, 0]
        return self.scale * (1 - said) ** 2


class LastSlotFirst(PositionWeights):
    def __init__(self, step: float = 1.0) -> None:
        self.step = step

    def __call__(self, labelled, probabilities):
        CALLS.append("weights")
        assert probabilities is None
        return 1 + self.step * labelled.float().cumsum(-1)


class EveryOther(Anchors):
    num_anchors = None

    def choose(self, candidates, generator, block_size):
        CALLS.append(block_size)
        return candidates[::2]
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of toys that can be imported."""
    (tmp_path / "my_toys.py").write_text(TOYS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_toys", raising=False)
    return "my_toys"


def test_toys_train_and_resume(
    toys: str, experiment: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = yaml.safe_load(experiment.read_text())
    config["model"]["loss"] = {
        "class_path": f"{toys}.SquaredMiss",
        "init_args": {"scale": 3.0},
    }
    config["model"]["position_weights"] = {"class_path": f"{toys}.LastSlotFirst"}
    config["data"]["anchors"] = {"class_path": f"{toys}.EveryOther"}
    config["trainer"]["default_root_dir"] = str(tmp_path / "runs")
    keep = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    config["trainer"]["callbacks"] = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep}
    ]
    file = tmp_path / "toys.yaml"
    file.write_text(yaml.safe_dump(config))
    straight = main(["fit", "-c", str(file)])
    run = (
        tmp_path / "runs" / "d1-k4-glastslotfirst1-t3-squaredmiss3-everyother-v40-s3" / "version_0"
    )
    calls = sys.modules[toys].CALLS
    assert {"loss", "weights", 4} <= set(calls)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["loss"]["init_args"]["scale"] == 3.0
    [half] = (run / "checkpoints").glob("*step=2.ckpt")
    calls.clear()
    resumed = main(["fit", "-c", str(run / "config.yaml"), "--ckpt_path", str(half)])
    assert resumed.trainer.global_step == 4
    assert "loss" in calls
    for name, weight in straight.model.drafter.named_parameters():
        assert torch.equal(resumed.model.drafter.get_parameter(name), weight), name
    last = run / "checkpoints" / "last.ckpt"
    with caplog.at_level("INFO", logger="dflash_lightning"):
        other = main(
            ["fit", "-c", str(experiment), "--ckpt_path", str(last), "--trainer.max_steps", "5"]
        )
    assert other.trainer.global_step == 5
    for words in (
        f"model.loss.class_path: {toys}.SquaredMiss -> dflash_lightning.slot_losses.DataToken",
        "model.position_weights.class_path",
        "data.anchors.class_path",
    ):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("model.loss", "my_toys.LastSlotFirst"),
        ("model.loss", "my_toys.Missing"),
        ("model.position_weights", "no_such_module.Weights"),
        ("data.anchors", "my_toys.SquaredMiss"),
    ],
)
def test_a_class_path_that_does_not_fit_is_one_line(
    toys: str, experiment: Path, key: str, path: str
) -> None:
    with pytest.raises(UserError) as error:
        main(["fit", "-c", str(experiment), f"--{key}", path])
    assert "\n" not in str(error.value)
    assert key in str(error.value)
    assert path.rpartition(".")[2] in str(error.value)
