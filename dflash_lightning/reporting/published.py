"""Published numbers of the same ablations. None of them was measured here.

They are of another target, another budget and other prompts, so only their direction compares.
Source: the DFlash paper, arXiv 2602.06036 v2, greedy decoding unless said.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A table of a paper."""

    source: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]
    """Varied keys that it belongs beside: what these begin with, or lie in."""


_DATA = "100k training samples"
_BOTH = "speedup / accept length"
_SETS = tuple(f"{name} ({_BOTH})" for name in ("Math500", "HumanEval", "MT-Bench"))

PUBLISHED = (
    Published(
        "arXiv 2602.06036, Table 6",
        f"Qwen3-4B, K=16, 5 taps, {_DATA}, greedy",
        ("layers", *_SETS),
        (
            ("3", "4.69 / 5.64", "3.90 / 4.61", "2.38 / 3.18"),
            ("5", "4.71 / 5.99", "3.96 / 4.94", "2.35 / 3.37"),
            ("8", "4.64 / 6.33", "3.96 / 5.29", "2.23 / 3.50"),
        ),
        ("model.num_layers",),
    ),
    Published(
        "arXiv 2602.06036, Table 7",
        f"Qwen3-4B, 3 layers, K=16, {_DATA}, greedy",
        ("taps", *_SETS),
        (
            ("3", "4.49 / 5.38", "3.80 / 4.47", "2.32 / 3.07"),
            ("5", "4.69 / 5.64", "3.90 / 4.61", "2.38 / 3.18"),
        ),
        ("model.target.num_taps", "model.target.target_layer_ids"),
    ),
    Published(
        "arXiv 2602.06036, Table 8",
        f"Qwen3-4B, 8 layers, 5 taps, {_DATA}, greedy; gamma moves with K",
        ("K trained -> K decoded", f"Math500 ({_BOTH})"),
        (
            ("16 -> 16", "4.64 / 6.33"),
            ("16 -> 8", "3.87 / 5.09"),
            ("8 -> 16", "3.78 / 5.02"),
            ("8 -> 8", "3.97 / 5.21"),
        ),
        ("model.block_size", "decode.eval_block_sizes"),
    ),
    Published(
        "arXiv 2602.06036, Table 9",
        f"Qwen3-4B, 5 layers, K=8, {_DATA}, greedy",
        ("system", *(f"{name} ({_BOTH})" for name in ("GSM8K", "HumanEval", "MT-Bench"))),
        (
            ("EAGLE-3, 5 layers (input, autoregressive)", "2.1 / 4.2", "2.2 / 4.3", "1.4 / 3.1"),
            ("KV injection, autoregressive", "2.4 / 4.8", "2.3 / 4.6", "1.5 / 3.4"),
            ("input fusion, block", "2.9 / 3.5", "2.9 / 3.5", "2.0 / 2.6"),
            ("KV injection, block (DFlash)", "3.3 / 4.2", "3.2 / 4.0", "2.2 / 3.0"),
        ),
        ("experiment", "model.axes.injection", "model.axes.drafting"),
    ),
    Published(
        "arXiv 2602.06036, Table 10",
        "Qwen3-4B, 5 layers, no target features, greedy",
        ("system", *(f"{name} ({_BOTH})" for name in ("GSM8K", "Math500"))),
        (("no target features", "2.83 / 3.38", "3.73 / 4.61"),),
        ("experiment", "model.axes.injection"),
    ),
    Published(
        "arXiv 2602.06036, Table 13",
        f"Qwen3-4B, 3 layers, 5 taps, K=16, {_DATA}, greedy",
        ("anchors", *_SETS),
        (
            ("uniform partition", "4.13 / 4.94", "3.29 / 3.86", "2.13 / 2.80"),
            ("sampled", "4.69 / 5.64", "3.90 / 4.61", "2.38 / 3.18"),
        ),
        ("data.anchors",),
    ),
    Published(
        "arXiv 2602.06036, Figure 5, read off the plot",
        "accept length after epochs 1, 2, 3, 4, 5 and 9",
        ("position weights", "1", "2", "3", "4", "5", "9"),
        (
            ("decaying", "4.4", "5.3", "5.8", "6.1", "6.2", "6.4"),
            ("uniform", "4.2", "5.2", "5.6", "6.0", "6.2", "6.4"),
        ),
        ("model.position_weights",),
    ),
    Published(
        "arXiv 2607.05147 (DSpark), Table 1: other authors, all three trained on equal data",
        "Qwen3-4B, 7 tokens drafted, temperature 1",
        ("system", *(f"{n} (accept length)" for n in ("GSM8K", "HumanEval", "MT-Bench"))),
        (
            ("EAGLE-3", "5.14", "4.16", "2.39"),
            ("DFlash", "5.40", "4.74", "3.07"),
            ("DSpark", "6.11", "5.38", "3.64"),
        ),
        ("experiment", "model.axes.markov_rank"),
    ),
)


def published(keys: Sequence[str]) -> list[Published]:
    """Return the tables that belong beside a comparison over these keys."""

    def about(table: Published, key: str) -> bool:
        return key.startswith(table.keys) or any(k.startswith(f"{key}.") for k in table.keys)

    return [table for table in PUBLISHED if any(about(table, key) for key in keys)]
