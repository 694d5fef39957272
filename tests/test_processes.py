"""Training by several processes, through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_lightning.cli import main
from dflash_lightning.errors import UserError


@pytest.mark.slow
@pytest.mark.parametrize("features", ["online", "store"])
def test_two_processes_train_on_packed_rows(
    target_folder: Path, tmp_path: Path, features: str
) -> None:
    """Rank 0 makes what the cache lacks, both read it, neither waits for the other for ever."""
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Q{i}", "response": "so " * (1 + i % 13) + "it is."} for i in range(120)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"""fit --data.prompts JsonlPrompts --data.prompts.train {file}
        --data.responses given --data.packing true --data.max_length 128 --data.batch_size 4
        --data.anchors.num_anchors 4 --data.features {features} --data.num_workers 1
        --data.cache_dir {tmp_path / "cache"} --model.target.name {target_folder}
        --model.target.num_taps 3 --model.target.dtype float32 --model.num_layers 1
        --model.block_size 4 --decode.num_prompts 1 --decode.final_prompts 1
        --decode.max_new_tokens 4 --trainer.accelerator cpu --trainer.devices 2
        --trainer.strategy ddp --trainer.max_steps 6 --trainer.max_epochs -1
        --trainer.limit_val_batches 1 --trainer.default_root_dir {tmp_path / "runs"}
        --trainer.enable_progress_bar false"""
    done = subprocess.run(
        [sys.executable, "-m", "dflash_lightning", *command.split()],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert list((tmp_path / "runs").rglob("decode_val.json"))
    assert "forked" not in output
    made = list((tmp_path / "cache").rglob("shard_*.bin"))
    assert len(made) == (9 if features == "store" else 0)
    # a bar is drawn at its end once or twice, at its start once
    assert output.count("target reads answers:   0%") == (3 if features == "store" else 0)


def gradients(folder: Path, processes: int, case: str) -> list[dict[str, Tensor]]:
    """Return the gradient that the optimizer of each process saw in its first step."""
    folder.mkdir()
    child = Path(__file__).with_name("ddp.py")
    done = subprocess.run(
        [sys.executable, str(child), str(folder), str(processes), case],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unequal", "no anchor"])
def test_two_processes_have_the_gradient_of_the_joint_batch(case: str, tmp_path: Path) -> None:
    """Also when one of them has nothing to learn from; the target is none of their parameters."""
    (joint,) = gradients(tmp_path / "one", 1, case)
    first, second = gradients(tmp_path / "two", 2, case)
    assert joint.keys() == first.keys() == second.keys()
    assert max(float(g.abs().max()) for g in joint.values()) > 1e-3
    for name, gradient in joint.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["fsdp", "fsdp_cpu_offload", "FSDPStrategy", "ModelParallelStrategy", "deepspeed_stage_2"],
)
def test_sharding_is_refused_in_one_line(name: str, target_folder: Path, tmp_path: Path) -> None:
    words = f"fit --model.target.name {target_folder} --trainer.strategy {name}"
    with pytest.raises(
        UserError, match=rf"(?i)^trainer\.strategy: {name} is not supported.*take ddp$"
    ):
        main(words.split())
