"""Figures for TensorBoard and reports."""

from matplotlib.figure import Figure

from dflash_lightning.decoding.report import DecodingReport


def acceptance_figure(found: DecodingReport) -> Figure:
    """Return the share of cycles that accepted at least k drafts, for k = 1..K-1."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(1, found.block_size), found.survival, color="tab:blue")
    axes.set(
        xlabel="position in the block",
        ylabel="share of cycles accepted up to here",
        ylim=(0, 1),
        xticks=range(1, found.block_size),
        title=f"decoded, accept length {found.accept_len:.2f} ({found.cycles} cycles)",
    )
    return figure
