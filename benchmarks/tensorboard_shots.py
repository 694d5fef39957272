"""What TensorBoard shows of a report, as pictures: starts it on loopback, shoots by Chromium.

python benchmarks/tensorboard_shots.py sweeps/results/depth --out shots

Needs a chromium (Debian: `apt-get install chromium`). Charts are drawn without smoothing, since the
x axis of the summary run is the swept number.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TABS = ("scalars", "custom_scalars", "hparams", "images", "timeseries")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextmanager
def tensorboard(logdir: Path, wait_s: float = 120) -> Iterator[str]:
    """Run TensorBoard on a free port of loopback until the block ends; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + wait_s
        while not _runs(address):
            if server.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"TensorBoard did not come up on {logdir}")
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def shoot(
    address: str, tab: str, file: Path, size: str = "1500,1500", limit_s: float = 120
) -> None:
    """Take a screenshot of a tab once its charts are drawn."""
    name = browser()
    if name is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                name,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={size}",
                "--virtual-time-budget=30000",
                f"--screenshot={file}",
                f"{address}/#{tab}&_smoothingWeight=0",
            ],
            check=True,
            timeout=limit_s,
            capture_output=True,
        )


def _runs(address: str) -> bool:
    """Whether the server answers, and has read the runs."""
    try:
        with urllib.request.urlopen(f"{address}/data/runs", timeout=5) as answer:
            return answer.read().strip() != b"[]"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("shots"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tensorboard(args.logdir) as address:
        time.sleep(5)  # all runs are read, not only the first
        for tab in TABS:
            shoot(address, tab, args.out / f"{tab}.png")
            sys.stdout.write(f"{args.out / tab}.png\n")


if __name__ == "__main__":
    main()
