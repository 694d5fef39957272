"""Sweeps in processes of their own: killed, interrupted, side by side, on a real database."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from dflash_lightning.sweeps.reading import read_spec
from dflash_lightning.sweeps.study import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PAIRS = [(layers, seed) for layers in (1, 2) for seed in (0, 1)]


class Workers:
    """A sweep's file, and processes that work on it."""

    def __init__(self, experiment: Path, folder: Path, storage: str | None) -> None:
        self.folder, self.file = folder / "results" / "depth", folder / "depth.yaml"
        depths = {"class_path": "CategoricalDistribution", "init_args": {"choices": [1, 2]}}
        content = {
            "experiments": str(experiment),
            "space": {"model.num_layers": depths},
            "settings": {"decode.every_n_steps": None, "trainer.val_check_interval": 30},
            "seeds": [0, 1],
            "budget": {"tokens": 8000},
            "storage": storage,
            "results": str(folder / "results"),
        }
        self.file.write_text(yaml.safe_dump(content))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_lightning", "sweep", "-c", str(self.file), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.processes.append(process)
        return process

    def study(self) -> optuna.Study:
        spec = read_spec(["-c", str(self.file)])
        return optuna.load_study(study_name="depth", storage=open_storage(spec))

    def trials(self, *states: TrialState) -> list[Any]:
        try:
            return self.study().get_trials(states=states)
        except KeyError:  # the first worker hasn't made it yet
            return []

    def training(self, pid: int | None = None) -> Any:
        """Return a trial that trains right now, of this process if it is given."""
        for trial in self.trials(TrialState.RUNNING):
            mine = pid in (None, trial.user_attrs["worker"]["pid"])
            if mine and (self.folder / trial.user_attrs.get("run", "?") / "run.json").is_file():
                return trial
        return None

    def check_every_cell_once(self) -> None:
        done = self.trials(TrialState.COMPLETE)
        found = [(t.params["model.num_layers"], t.user_attrs["seed"]) for t in done]
        assert sorted(found) == PAIRS
        assert not self.trials(TrialState.RUNNING, TrialState.WAITING)
        for layers, seed in PAIRS:
            run = self.folder / f"d{layers}-k4-g2-t3-a4-v40-s{seed}"
            assert json.loads((run / "run.json").read_text())["supervised_tokens"] >= 8000
            assert json.loads((run / "trial.json").read_text())["seed"] == seed


def wait_for(what: Callable[[], Any], seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError("it never came")


def ended(process: "subprocess.Popen[str]", status: int = 0) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == status, output[-3000:]
    assert "Traceback" not in output
    return output


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URL of a database server of Debian's package, run as nobody on the loopback."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        pytest.skip("no postgres in /usr/lib/postgresql (apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="postgresql", dir="/tmp"))
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        who = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place, binaries = str(folder / "data"), programs[-1].parent
    quiet: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, **who}
    make = ["initdb", "-D", place, "-A", "trust", "-U", "sweeper", "-E", "UTF8", "--no-sync"]
    subprocess.run([binaries / make[0], *make[1:], "--locale", "C"], check=True, **quiet)
    options = ["-D", place, "-p", str(port), "-k", str(folder), "-h", "127.0.0.1", "-F"]
    server = subprocess.Popen([programs[-1], *options], stderr=subprocess.DEVNULL, **quiet)
    try:
        ready = [binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        wait_for(lambda: subprocess.run(ready, check=False, **quiet).returncode == 0, 60)
        yield f"postgresql+psycopg://sweeper@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["journal", "postgresql"])
def workers(request: pytest.FixtureRequest, experiment: Path, tmp_path: Path) -> Iterator[Workers]:
    storage = None if request.param == "journal" else request.getfixturevalue("postgresql")
    made = Workers(experiment, tmp_path, storage)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_two_workers_one_of_them_killed_train_every_cell_once(workers: Workers) -> None:
    one = workers.start()
    wait_for(lambda: list(workers.folder.parent.glob(f".workers/*-{one.pid}-*")))
    other = workers.start()
    wait_for(lambda: workers.training(other.pid))
    victim = wait_for(lambda: workers.training(one.pid))
    one.send_signal(signal.SIGKILL)
    one.wait()
    output = ended(other)
    third = ended(workers.start())  # had the other ended before: the next start does it
    workers.check_every_cell_once()
    (failed,) = workers.trials(TrialState.FAIL)
    assert failed.number == victim.number
    assert failed.user_attrs["reason"] == "worker was killed"
    again = [t for t in workers.trials(TrialState.COMPLETE) if t.params == victim.params]
    assert victim.user_attrs["seed"] in [t.user_attrs["seed"] for t in again]
    assert "4 done" in third
    shared = [json.loads(f.read_text())["environment"] for f in workers.folder.glob("*/run.json")]
    assert {e["workers"] for e in shared} <= {1, 2}
    assert 2 in {e["workers"] for e in shared}
    assert "2 workers train on this machine" in output


@pytest.mark.parametrize("workers", ["journal"], indirect=True)
def test_ctrl_c_gives_the_trial_back_with_one_line(workers: Workers) -> None:
    process = workers.start()
    trial = wait_for(lambda: workers.training(process.pid))
    process.send_signal(signal.SIGINT)
    output = ended(process, 130)
    assert output.strip().splitlines()[-1].startswith("interrupted; the same command goes on")
    assert not (workers.folder / trial.user_attrs["run"]).exists()
    (failed,) = workers.trials(TrialState.FAIL)
    assert (failed.number, failed.user_attrs["reason"]) == (trial.number, "interrupted")
    ended(workers.start())
    workers.check_every_cell_once()


@pytest.mark.parametrize("workers", ["journal"], indirect=True)
def test_one_command_of_two_workers_trains_every_cell_once(workers: Workers) -> None:
    output = ended(workers.start("--workers", "2"))
    workers.check_every_cell_once()
    assert len({_pid(t) for t in workers.trials(TrialState.COMPLETE)}) == 2
    assert "4 done" in output
    assert (workers.folder / "report.md").is_file()
    assert "Traceback" not in (said := (workers.folder / "worker-2.log").read_text())
    assert "trial" in said
    runs = [json.loads(f.read_text())["environment"] for f in workers.folder.glob("*/run.json")]
    assert {e["workers"] for e in runs} == {2}


@pytest.mark.parametrize("workers", ["journal"], indirect=True)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_the_other_worker_ends_with_the_first(workers: Workers, sent: signal.Signals) -> None:
    first = workers.start("--workers", "2")
    other = wait_for(
        lambda: next((t for t in workers.trials(TrialState.RUNNING) if _pid(t) != first.pid), None)
    )
    wait_for(lambda: workers.training(_pid(other)))
    first.send_signal(sent)
    first.wait(60)
    wait_for(lambda: not Path(f"/proc/{_pid(other)}").exists(), 60)
    reasons = {_pid(t): t.user_attrs["reason"] for t in workers.trials(TrialState.FAIL)}
    assert reasons[_pid(other)] == "interrupted"
    assert not (workers.folder / "report.md").exists()
    if sent == signal.SIGKILL:  # one trial to reclaim and one given back
        ended(workers.start("--workers", "2"))
        workers.check_every_cell_once()


def _pid(trial: Any) -> int:
    return int(trial.user_attrs["worker"]["pid"])
