"""What a real browser and TensorBoard's server make of a report's summary run."""

import importlib.util
import json
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_runs import fake_study
from PIL import Image

from dflash_lightning.report import report


def _shots() -> ModuleType:
    file = Path(__file__).parent.parent / "benchmarks" / "tensorboard_shots.py"
    spec = importlib.util.spec_from_file_location("tensorboard_shots", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shots = _shots()


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{address}/data/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def coloured(file: Path, columns: slice) -> float:
    """Share of the pixels below the head that have a hue, in some columns."""
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)[130:, columns]
    return float((pixels.max(axis=2) - pixels.min(axis=2) > 40).mean())


@pytest.mark.slow
def test_tensorboard_shows_the_study(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "depth", {1: 0.3, 2: 0.6, 5: 0.5}, seeds=(0, 1), curves=True)
    report(str(folder))
    with shots.tensorboard(folder) as address:
        expected = {f"d{d}-k6-g3-t5-s{s}" for d in (1, 2, 5) for s in (0, 1)} | {"summary"}
        while not expected <= set(ask(address, "runs")):
            pass  # pytest's timeout ends it
        asked = {
            "experimentName": "",
            "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"],
            "colParams": [],
            "startIndex": 0,
            "sliceSize": 100,
        }
        rows = ask(address, "plugin/hparams/session_groups", asked)["sessionGroups"]
        assert [row["hparams"]["model.num_layers"] for row in rows] == [2, 5, 1]
        values = [row["metricValues"][0] for row in rows]
        assert {value["name"]["tag"] for value in values} == {"hp/accept_len"}
        assert [v["value"] for v in values] == sorted([v["value"] for v in values], reverse=True)
        layout = ask(address, "plugin/custom_scalars/layout")
        charts = [chart["title"] for group in layout["category"] for chart in group["chart"]]
        assert "accept length [tokens/cycle] by num_layers" in charts
        tag = "plugin/custom_scalars/scalars?run=summary&tag=summary/speedup"
        found = ask(address, tag)["tag_to_events"]["summary/speedup"]
        assert [step for _, step, _ in found] == [1, 2, 5]
        if shots.browser() is None:
            pytest.skip(
                f"screenshots need one of {', '.join(shots.BROWSERS)}; the rest was checked"
            )
        curves, boxes = slice(380, None), slice(0, 300)
        tabs = (
            ("scalars", curves, 0.004),
            ("custom_scalars", curves, 0.004),
            ("hparams", boxes, 0.006),
        )
        for name, part, least in tabs:
            file = tmp_path / f"{name}.png"
            shots.shoot(address, name, file)
            assert coloured(file, part) > least, f"{name} shows no curves or boxes"
