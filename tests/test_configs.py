"""Experiments that build on others."""

from pathlib import Path

import pytest
import yaml

from dflash_lightning.cli import main
from dflash_lightning.configs import with_bases
from dflash_lightning.errors import UserError


def test_bases_come_first_and_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "root.yaml").write_text("seed_everything: 1\n")
    (tmp_path / "mid.yaml").write_text("base: root.yaml\n")
    (tmp_path / "sub" / "top.yaml").write_text("base: ../mid.yaml\n")
    root, mid = tmp_path / "root.yaml", tmp_path / "sub" / ".." / "mid.yaml"
    top = tmp_path / "sub" / "top.yaml"
    expected = ["fit", "-c", str(mid.parent / "root.yaml"), "-c", str(mid), "-c", str(top), "--x"]
    assert with_bases(["fit", "-c", str(top), "--x"]) == expected
    assert with_bases(["fit", f"--config={top}", "--x"]) == expected
    assert with_bases(["-c", str(root)]) == ["-c", str(root)]
    assert with_bases(["--model.c", "x", "-c"]) == ["--model.c", "x", "-c"]
    assert with_bases(["-c", "nowhere.yaml"]) == ["-c", "nowhere.yaml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: nowhere.yaml", r"a\.yaml: base: no such file: .*nowhere\.yaml"),
        ("base: a.yaml", r"a\.yaml: base: it builds on itself"),
        ("base: [1]", r"a\.yaml: base: needs the name of a YAML file"),
    ],
)
def test_bad_bases_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        with_bases(["-c", str(tmp_path / "a.yaml")])
    assert "\n" not in str(error.value)


def test_the_file_wins_over_its_base_and_flags_over_both(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(experiment.read_text())
    (tmp_path / "top.yaml").write_text("base: base.yaml\nmodel:\n  num_layers: 3\n  lr: 0.5\n")
    flags = ["-c", str(tmp_path / "top.yaml"), "--model.lr", "0.25"]
    cli = main([*flags, "--trainer.default_root_dir", str(tmp_path / "runs")], run=False)
    assert (cli.model.num_layers, cli.model.block_size, cli.model.lr) == (3, 4, 0.25)


def test_a_runs_own_config_needs_no_base(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(experiment.read_text())
    (tmp_path / "top.yaml").write_text("base: base.yaml\nmodel:\n  num_layers: 2\n")
    runs = ["--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.max_steps", "1"]
    main(["fit", "-c", str(tmp_path / "top.yaml"), *runs])
    saved = tmp_path / "runs" / "d2-k4-g2-t3-a4-v40-s3" / "version_0" / "config.yaml"
    assert "base" not in yaml.safe_load(saved.read_text())
    main(["fit", "-c", str(saved)])
    again = yaml.safe_load((saved.parent.parent / "version_1" / "config.yaml").read_text())
    for key in ("model", "data", "decode"):
        assert again[key] == yaml.safe_load(saved.read_text())[key]
