"""Train, decode and compare DFlash block-diffusion drafters (arXiv 2602.06036)."""

__version__ = "0.1.0"
