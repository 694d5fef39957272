"""Which precision suits this machine: bfloat16 where the hardware multiplies it, else float32."""

import functools
import platform
from pathlib import Path
from typing import Literal

CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""What Linux calls bfloat16 products in /proc/cpuinfo, on x86 and on Arm."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether the CUDA device, or without one the CPU, multiplies bfloat16 by itself.

    Where it can't, torch emulates it at a fraction of float32's speed: a training step of
    experiments/lab.yaml takes ten times as long on a Zen 3. Where it can't be told (no Linux), no.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(CPU_FLAGS & cpu_flags())


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return what the first CPU can do, in the kernel's words; empty where no file says it."""
    if platform.system() != "Linux" or not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return set()


def target_dtype() -> Literal["bfloat16", "float32"]:
    """Return the default of `model.target.dtype`."""
    return "bfloat16" if multiplies_bfloat16() else "float32"


def trainer_precision() -> Literal["bf16-mixed", "32-true"]:
    """Return the default of `trainer.precision`."""
    return "bf16-mixed" if multiplies_bfloat16() else "32-true"
