"""What a run says at its end."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_lightning.data.prompts import Split
from dflash_lightning.data.summary import Summary
from dflash_lightning.decoding.cost import Cost
from dflash_lightning.decoding.report import DecodingReport


def decoding_table(
    found: DecodingReport,
    split: str,
    folder: Path | None,
    block_sizes: dict[int, DecodingReport] | None = None,
    cost: Cost | None = None,
) -> None:
    """Print the figures of a decoded split, where the run lies, and how to look at it."""
    table = Table(
        title=f"decoded {split} prompts: {found.prompts}", show_header=False, title_justify="left"
    )
    low, high = min(found.speedup_per_prompt), max(found.speedup_per_prompt)
    rates = "  ".join(f"{k}: {rate:.2f}" for k, rate in enumerate(found.survival, start=1))
    rows = {
        "accept length, pooled": f"{found.accept_len:.3f} tokens a cycle "
        f"({found.cycles} cycles, K={found.block_size})",
        "accept length, mean over prompts": f"{found.accept_len_per_prompt:.3f}",
        "accepted up to position": rates,
        "speed": f"{found.tokens_per_s:.1f} tokens/s (a cycle: draft {found.draft_ms:.1f} ms, "
        f"verify {found.verify_ms:.1f} ms, other {found.overhead_ms:.1f} ms)",
        "plain decoding": f"{found.plain_tokens_per_s:.1f} tokens/s "
        f"(a step: {found.plain_step_ms:.1f} ms)",
        "speedup": f"{found.speedup:.2f} x (by prompt {low:.2f} to {high:.2f})",
        "lossless": found.lossless,
    }
    if found.batch_size > 1:
        rows["decoded together"] = f"{found.batch_size} prompts"
    for name, speed in found.others.items():
        rows[name.replace("_", " ")] = f"{speed:.1f} tokens/s"
    for size, other in (block_sizes or {}).items():
        rows[f"with K={size}"] = (
            f"accept length {other.accept_len:.3f}, speedup {other.speedup:.2f} x"
        )
    if cost is not None:
        rows["by the cost model"] = (
            f"speedup {cost.speedup(found.accept_len):.2f} x (draft {cost.draft_ms:.1f} ms, verify "
            f"{cost.verify_ms:.1f} ms, step {cost.plain_ms:.1f} ms; {cost.parameters / 1e6:.1f}M "
            "parameters)"
        )
    if folder is not None:
        rows["run"] = str(folder)
        rows["look at it"] = f"tensorboard --logdir {folder.parent.parent}"
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def preparation_table(summaries: Mapping[Split, Summary], cache_dir: Path) -> None:
    """Print what each prepared split holds, a column a split."""
    found = {split: summary.plain() for split, summary in summaries.items()}
    table = Table(title=f"prepared, in {cache_dir}", title_justify="left")
    table.add_column(no_wrap=True)
    for split in found:
        table.add_column(split, justify="right")
    for key in next(iter(found.values()), {}):
        values = [numbers[key] for numbers in found.values()]
        if any(values):
            name = key.replace("_", " ") + (" (50, 99, 100%)" if "length" in key else "")
            table.add_row(name, *(_cell(key, value) for value in values))
    Console().print(table)


def _cell(key: str, value: float | dict[str, int]) -> str:
    if isinstance(value, dict):
        return ", ".join(str(value[q]) for q in ("50%", "99%", "100%") if q in value)
    return f"{value:.1%}" if key.startswith("share") else f"{value:,}"
