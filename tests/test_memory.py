"""A data set larger than memory streams: the peak of `fit` hardly grows with the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROW = 16_000
CHILD = """
import sys
from pathlib import Path
from dflash_lightning.cli import main
main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print("PEAK", next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def write_rows(path: Path, size: int) -> int:
    """Write about `size` bytes of chats, no two alike; returns how many."""
    answer = "the answer is some words and some more words, " * (ROW // 46)
    before, after = json.dumps({"prompt": "Q#", "response": answer + "#"}).split("#", 1)
    after = after.replace("#", " ")
    count = max(200, size // (len(before) + len(after) + 8))
    with path.open("w") as stream:
        for start in range(0, count, 1000):
            rows = range(start, min(start + 1000, count))
            stream.write("".join(f"{before}{i:08d}{after}\n" for i in rows))
    return count


def peak(target: Path, folder: Path, size: int) -> int:
    """Return the peak resident memory of a fit in bytes."""
    folder.mkdir()
    file = folder / "chats.jsonl"
    write_rows(file, size)
    command = f"""fit --data.prompts JsonlPrompts --data.prompts.train {file}
        --data.responses given --data.max_length 64 --data.anchors.num_anchors 4
        --data.cache_dir {folder / "cache"} --model.target.name {target}
        --model.target.num_taps 3 --model.target.dtype float32 --model.num_layers 1
        --model.block_size 4 --model.draft_vocab 40 --decode.num_prompts 1
        --decode.final_prompts 1 --decode.max_new_tokens 4 --trainer.accelerator cpu
        --trainer.max_steps 5
        --trainer.max_epochs -1 --trainer.limit_val_batches 1 --trainer.logger false
        --trainer.enable_checkpointing false --trainer.enable_progress_bar false"""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *command.split()], capture_output=True, text=True, check=False
    )
    file.unlink()
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return int(done.stdout.split("PEAK ")[1].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_peak_memory_does_not_follow_the_file(target_folder: Path, tmp_path: Path) -> None:
    small = peak(target_folder, tmp_path / "small", 2 * 10**6)
    large = peak(target_folder, tmp_path / "large", 4 * 10**8)
    print(f"peak of fit: {small / 1e6:.0f} MB on 2 MB, {large / 1e6:.0f} MB on 400 MB")
    assert large - small < 1e8
