"""The benchmark of a training step runs, and what it claims of memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEMORY = """
import json, sys
from statistics import median
sys.path.insert(0, "benchmarks")
import torch
from train_step import allocator, bench, peak_extra
found = {"ours": [], "reference": []}
for blocks in (64, 128, 256):
    work = bench(192, 8192, 2, 16, None, "float32", torch.device("cpu"), 512, blocks, 128)
    for name, peaks in found.items():
        loss = getattr(work, name)
        work.step(loss, keep_gradients=True)()
        step = work.step(loss, keep_gradients=True)
        peaks.append(median(peak_extra(step, torch.device("cpu")) for _ in range(5)))
print(json.dumps(found))
"""


def python(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


FULL = pytest.param(["--dtype", "float32"], id="full")
SMALLER = pytest.param(["--vocab", "128"], id="draft vocabulary", marks=pytest.mark.slow)
"""In bfloat16, whose peak takes a minute where the machine does not multiply it."""


@pytest.mark.parametrize("more", [FULL, SMALLER])
def test_ours_and_the_plain_step_are_compared_and_timed(more: list[str], tmp_path: Path) -> None:
    words = ["benchmarks/train_step.py", "--quick", "true", "--repeats", "2"]
    printed = python(*words, "--out", str(tmp_path / "found.json"), *more)
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(printed) == found
    assert 0 < found["largest difference in float32"] < 1e-4
    assert found["step_s"].keys() == found["peak_extra_mb"].keys() == {"ours", "reference"}
    ratio = found["step_s"]["reference"] / found["step_s"]["ours"]
    assert found["speed, ours over reference"] == pytest.approx(ratio)
    floor = 1e9 * found["useful_gflop"] / (1e9 * found["matmul_peak_gflops"])
    assert found["floor_s"] == pytest.approx(floor)


@pytest.mark.slow
def test_peak_memory_grows_linearly_with_the_blocks() -> None:
    """Four times the blocks: about four times the memory, where a square would be sixteen times.

    What the C library returns to the system, and when, moves single peaks by a tenth.
    """
    found = json.loads(python("-c", MEMORY))
    ours, reference = found["ours"], found["reference"]
    print({name: [round(x / 1e6) for x in peaks] for name, peaks in found.items()})
    assert ours[2] < 4.6 * ours[0]
    assert ours[2] - ours[1] < 2.5 * (ours[1] - ours[0])
    assert 2.5 * ours[2] < reference[2]
