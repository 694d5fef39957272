"""Precision defaults follow the machine."""

import logging
from pathlib import Path

import pytest

from dflash_lightning import precision
from dflash_lightning.cli import main
from dflash_lightning.target_spec import TargetConfig


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine without CUDA, whose CPU has the given flags."""

    def make(line: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nmodel name\t: avx512_bf16 in name only\n{line}\n")
        read = precision.cpu_flags
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr(precision, "cpu_flags", lambda: read(file))
        precision.multiplies_bfloat16.cache_clear()

    yield make
    precision.multiplies_bfloat16.cache_clear()


FAST = ["flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16", "Features\t: asimd i8mm bf16"]
SLOW = ["flags\t\t: fpu avx2 avx512f", "Features\t: asimd", "bugs\t\t: avx512_bf16", ""]


@pytest.mark.parametrize("line", [*FAST, *SLOW])
def test_defaults_are_bfloat16_just_where_the_cpu_multiplies_it(machine, line: str) -> None:
    machine(line)
    wanted = ("bfloat16", "bf16-mixed") if line in FAST else ("float32", "32-true")
    assert (TargetConfig().dtype, precision.trainer_precision()) == wanted


def test_no_linux_no_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags: avx512_bf16\n")
    assert precision.cpu_flags(tmp_path / "cpuinfo") == {"avx512_bf16"}
    assert precision.cpu_flags(tmp_path / "absent") == set()
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert precision.cpu_flags(tmp_path / "cpuinfo") == set()


@pytest.mark.parametrize("native", [True, False])
def test_on_cuda_the_device_says(monkeypatch: pytest.MonkeyPatch, machine, native: bool) -> None:
    machine(FAST[0] if not native else SLOW[0])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native)
    assert precision.multiplies_bfloat16() is native


HALF, FULL = (["--model.target.dtype", dtype] for dtype in ("bfloat16", "float32"))


@pytest.mark.parametrize(("line", "flags", "wanted", "warned"), [
    (FAST[0], HALF, ("bf16-mixed", "bfloat16"), False),
    (SLOW[0], FULL, ("32-true", "float32"), False),
    (SLOW[0], [*FULL, "--trainer.precision", "bf16-mixed"], ("bf16-mixed", "float32"), True),
    (SLOW[0], HALF, ("32-true", "bfloat16"), True),
])  # fmt: skip
def test_the_command_line_records_what_it_took_and_warns_of_emulation(
    machine, caplog: pytest.LogCaptureFixture, target_folder: Path, tmp_path: Path,
    line: str, flags: list[str], wanted: tuple[str, str], warned: bool,
) -> None:  # fmt: skip
    """(The default of the target's dtype is that of the machine at the time of import.)"""
    machine(line)
    words = ["--model.target.name", str(target_folder), "--model.target.num_taps", "3"]
    words += ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path), *flags]
    with caplog.at_level(logging.WARNING):
        config = main(words, run=False).config
    assert (config.trainer.precision, config.model.target.dtype) == wanted
    assert config.data.target.dtype == wanted[1]
    assert ("not known to multiply bfloat16" in caplog.text) is warned
