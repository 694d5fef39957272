"""Training by several processes, through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
    assert output.count("target reads answers: 100%") == (3 if features == "store" else 0)
