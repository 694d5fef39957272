"""Sweeps: which trials there are and how each ends. Most tests train nothing: a trial's command
line is read for real, and a stand-in says what came of it.
"""

import io
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
import yaml
from optuna.trial import TrialState
from rich.console import Console

from dflash_lightning.cli import main
from dflash_lightning.commands import run_command
from dflash_lightning.errors import UserError
from dflash_lightning.sweeps import worker
from dflash_lightning.sweeps.cells import command, stored
from dflash_lightning.sweeps.live import View
from dflash_lightning.sweeps.locks import Presence
from dflash_lightning.sweeps.parsing import Meaning, check_cells, meaning
from dflash_lightning.sweeps.reading import read_spec
from dflash_lightning.sweeps.spec import LOGGED
from dflash_lightning.sweeps.study import Trials, open_storage
from dflash_lightning.sweeps.trial import Outcome, Watch, train

SWEEPS = sorted((Path(__file__).parent.parent / "sweeps").rglob("*.yaml"))
ROOT = Path(__file__).parent.parent


def choices(*values: Any) -> dict[str, Any]:
    return {"class_path": "CategoricalDistribution", "init_args": {"choices": list(values)}}


class Sweep:
    """A sweep's file, and a stand-in for training that keeps what it was asked for."""

    def __init__(self, experiment: Path, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        self.content: dict[str, Any] = {
            "experiments": str(experiment),
            "space": {"model.num_layers": choices(1, 2)},
            "seeds": [0, 1],
            "objectives": [{"metric": "decode/accept_len"}],
            "results": str(self.results),
        }
        self.trained: list[tuple[Any, int]] = []
        self.reported: list[str] = []
        self.key, self.identity = "model.num_layers", ""
        self.fate: Callable[[Any, int], Outcome | BaseException | None] = lambda *_: None

    def write(self, name: str = "depth", **changes: Any) -> list[str]:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**self.content, **changes}))
        return ["-c", str(file)]

    def run(self, *flags: str, name: str = "depth", **changes: Any) -> list[tuple[Any, int]]:
        """Run the sweep; return what was trained: the cell's value and the seed."""
        self.trained = []
        run_command("sweep", [*self.write(name, **changes), *flags])
        return self.trained

    def train(self, words: Sequence[str], folder: Path, watch: Watch, workers: int) -> Outcome:
        value = words[words.index(f"--{self.key}") + 1]
        value = json.loads(value) if value[0].isdigit() else value
        seed = int(words[words.index("--seed_everything") + 1])
        self.trained.append((value, seed))
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"config_hash": self.identity}))
        fate = self.fate(value, seed)
        if isinstance(fate, BaseException):
            raise fate
        score = float(value) if not isinstance(value, str) else 1.0
        return fate or Outcome({"decode/accept_len": score + seed / 10, "decode/speedup": 0.5})

    def meaning(self, words: Sequence[str]) -> Meaning:
        """Read a trial's command line, and remember what a run of it would write of itself."""
        read = meaning(words)
        self.identity = read.identity
        return read

    def study(self, name: str = "depth") -> optuna.Study:
        spec = read_spec(["-c", str(self.folder / f"{name}.yaml")])
        return optuna.load_study(study_name=name, storage=open_storage(spec))

    def ended(self, name: str = "depth") -> list[tuple[Any, int]]:
        """Return cell and seed of the complete trials."""
        done = self.study(name).get_trials(states=[TrialState.COMPLETE])
        return sorted((next(iter(t.params.values())), t.user_attrs["seed"]) for t in done)

    def reasons(self, name: str = "depth") -> list[str]:
        failed = self.study(name).get_trials(states=[TrialState.FAIL])
        return [trial.user_attrs["reason"] for trial in failed]


@pytest.fixture
def sweep(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    made = Sweep(experiment, tmp_path)
    monkeypatch.setattr(worker, "train", made.train)
    monkeypatch.setattr(worker, "meaning", made.meaning)
    monkeypatch.setattr("dflash_lightning.report.report", made.reported.append)
    return made


# ---- which trials there are ----------------------------------------------------------------------


def test_every_cell_is_trained_with_every_seed_all_cells_of_a_seed_first(sweep: Sweep) -> None:
    assert sweep.run() == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert sweep.ended() == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert sweep.reported == [str(sweep.results / "depth")]
    folder = sweep.results / "depth"
    found = json.loads((folder / "d2-k4-g2-t3-a4-v40-s1" / "trial.json").read_text())
    assert found["cell"] == {"model.num_layers": 2}
    assert (found["study"], found["seed"]) == ("depth", 1)
    assert found["values"] == {"decode/accept_len": 2.1}
    kept = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert kept["sampler"]["class_path"].endswith("BruteForceSampler")
    assert (kept["seeds"], kept["budget"]) == ([0, 1], None)
    assert kept["objectives"] == [{"metric": "decode/accept_len", "direction": "maximize"}]
    study = sweep.study()
    assert study.user_attrs["metric_names"] == study.metric_names == ["decode/accept_len"]
    words = shlex.split(study.trials[3].user_attrs["command"])[3:]
    assert (
        meaning(words).identity
        == meaning(
            command(read_spec(sweep.write()), {"model.num_layers": 2}, 1, "d2-k4-g2-t3-a4-v40-s1")
        ).identity
    )


def test_a_started_study_goes_on_and_takes_only_what_is_missing(sweep: Sweep) -> None:
    sweep.run(seeds=[0])
    assert sweep.run() == [(1, 1), (2, 1)]
    assert sweep.run() == []
    grown = {"model.num_layers": choices(1, 2, 4)}
    assert sweep.run(space=grown) == [(4, 0), (4, 1)]
    assert sweep.ended() == [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)]


def test_several_experiments_and_aliases_are_dimensions(sweep: Sweep, experiment: Path) -> None:
    other = sweep.folder / "shallow.yaml"
    other.write_text(experiment.read_text().replace("lr: 0.001", "lr: 0.002"))
    sweep.key = "model.lr"
    sweep.run(
        experiments=[str(experiment), "shallow.yaml"],
        space={"rate": choices("low", "high")},
        aliases={
            "low": {"model.lr": 0.1, "model.position_weights": "UniformWeights"},
            "high": {"model.lr": 0.2, "model.block_size": 6},
        },
        seeds=[0],
    )
    found = {
        file.parent.name: json.loads(file.read_text())["cell"]
        for file in sweep.results.glob("depth/*/trial.json")
    }
    assert found == {
        "d1-k4-guniform-t3-a4-v40-experimentexperiment-ratelow-s0": {
            "experiment": "experiment",
            "rate": "low",
        },
        "d1-k4-guniform-t3-a4-v40-experimentshallow-ratelow-s0": {
            "experiment": "shallow",
            "rate": "low",
        },
        "d1-k6-g3-t3-a4-v40-experimentexperiment-ratehigh-s0": {
            "experiment": "experiment",
            "rate": "high",
        },
        "d1-k6-g3-t3-a4-v40-experimentshallow-ratehigh-s0": {
            "experiment": "shallow",
            "rate": "high",
        },
    }


def test_a_number_keeps_its_key_and_brings_what_goes_with_it(sweep: Sweep) -> None:
    """So that a sweep over depth may give each depth its own learning rate."""
    with_rates = {"1": {"model.lr": 0.25}, "2": {"model.lr": 0.125}}
    assert sweep.run(aliases=with_rates) == [(1, 0), (2, 0), (1, 1), (2, 1)]
    words = [shlex.split(trial.user_attrs["command"]) for trial in sweep.study().trials]
    rates = [(w[w.index("--model.num_layers") + 1], w[w.index("--model.lr") + 1]) for w in words]
    assert rates == 2 * [("1", "0.25"), ("2", "0.125")]
    grown = {**with_rates, "4": {"model.lr": 0.0625}}
    space = {"model.num_layers": choices(1, 2, 4)}
    assert sweep.run(space=space, aliases=grown) == [(4, 0), (4, 1)]
    with pytest.raises(UserError, match=r"aliases: study depth has"):
        sweep.run(space=space, aliases={**grown, "2": {"model.lr": 0.5}})
    with pytest.raises(UserError, match=r"aliases: study depth has"):
        sweep.run(space=space, aliases=with_rates)


def test_a_number_with_a_fraction_has_a_name_too(sweep: Sweep) -> None:
    sweep.key = "model.position_weights.init_args.gamma"
    aliases = {"1.5": {"model.lr": 0.25}, "3": {"model.lr": 0.125}}
    sweep.run(space={sweep.key: choices(1.5, 3)}, aliases=aliases, seeds=[0])
    words = [shlex.split(trial.user_attrs["command"]) for trial in sweep.study().trials]
    assert [w[w.index("--model.lr") + 1] for w in words] == ["0.25", "0.125"]


def test_two_that_added_the_same_trial_train_it_once(sweep: Sweep) -> None:
    sweep.run(seeds=[0])
    study = sweep.study()
    twice = optuna.trial.create_trial(
        state=TrialState.WAITING,
        params={"model.num_layers": 1},
        distributions=study.trials[0].distributions,
        user_attrs={"seed": 1},
    )
    study.add_trial(twice)
    study.add_trial(twice)
    assert sweep.run() == [(1, 1), (2, 1)]
    assert sweep.reasons() == ["duplicate"]
    assert sweep.run() == []


def test_a_searching_sampler_tries_so_many_cells_and_no_point_twice(sweep: Sweep) -> None:
    rates = {"class_path": "FloatDistribution", "init_args": {"low": 1e-4, "high": 1e-2}}
    search: dict[str, Any] = {
        "space": {"model.lr": rates},
        "sampler": {"class_path": "TPESampler", "init_args": {"seed": 7}},
    }
    sweep.key = "model.lr"
    sweep.fate = lambda *_: Outcome({"decode/accept_len": 1.5})
    sweep.run(trials=1, **search)
    assert [seed for _, seed in sweep.trained] == [0, 1]
    sweep.run(trials=3, **search)
    assert [seed for _, seed in sweep.trained] == [0, 1, 0, 1]
    ended = sweep.ended()
    assert len(ended) == 6
    assert len({value for value, _ in ended}) == 3
    assert len(list(sweep.results.glob("depth/d1-k4-g2-t3-a4-v40-lr*-s1/trial.json"))) == 3


# ---- how trials end ------------------------------------------------------------------------------


def test_a_failing_trial_is_kept_with_its_reason_and_retried_only_if_asked(sweep: Sweep) -> None:
    sweep.fate = lambda layers, _: Outcome({}, "out of memory: 3 GiB") if layers == 1 else None
    assert sweep.run() == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert sweep.reasons() == ["out of memory: 3 GiB"] * 2
    assert sweep.run() == []
    sweep.fate = lambda *_: None
    assert sweep.run("--retry_failed") == [(1, 0), (1, 1)]
    assert len(sweep.ended()) == 4


def test_a_trial_without_the_objective_fails(sweep: Sweep) -> None:
    sweep.fate = lambda *_: Outcome({"val/loss": 1.0})
    sweep.run(seeds=[0])
    assert sweep.reasons() == ["the run gave no finite decode/accept_len"] * 2


def test_ctrl_c_gives_the_running_trial_back(sweep: Sweep) -> None:
    sweep.fate = lambda layers, seed: KeyboardInterrupt() if (layers, seed) == (2, 0) else None
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert sweep.trained == [(1, 0), (2, 0)]
    assert not (sweep.results / "depth" / "d2-k4-g2-t3-a4-v40-s0").exists()
    assert sweep.reasons() == ["interrupted"]
    sweep.fate = lambda *_: None
    assert sweep.run() == [(2, 0), (1, 1), (2, 1)]
    assert sweep.ended() == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("host", ["here", "elsewhere", "elsewhere but lively"])
def test_the_trial_of_a_killed_worker_is_trained_again(sweep: Sweep, host: str) -> None:
    class Killed(BaseException):
        pass

    sweep.fate = lambda layers, seed: Killed() if (layers, seed) == (2, 0) else None
    with pytest.raises(Killed):
        sweep.run()
    half = sweep.results / "depth" / "d2-k4-g2-t3-a4-v40-s0" / "run.json"
    assert half.is_file()
    study = sweep.study()
    (running,) = study.get_trials(states=[TrialState.RUNNING])
    if host != "here":
        there = {**running.user_attrs["worker"], "host": "elsewhere"}
        trial = optuna.trial.Trial(study, running._trial_id)
        trial.set_user_attr("worker", there)
        if host == "elsewhere":
            trial.set_user_attr("heartbeat", running.user_attrs["heartbeat"] - 400)
    sweep.fate = lambda *_: None
    if host == "elsewhere but lively":
        assert sweep.run() == [(1, 1), (2, 1)]
        assert half.is_file()
        return
    assert sweep.run() == [(2, 0), (1, 1), (2, 1)]
    assert sweep.ended() == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert sweep.reasons() == ["worker was killed"]


def test_a_trial_that_kills_its_worker_again_and_again_stays_failed(sweep: Sweep) -> None:
    class Killed(BaseException):
        pass

    sweep.fate = lambda layers, _: Killed() if layers == 1 else None
    for _ in range(3):
        with pytest.raises(Killed):
            sweep.run(seeds=[0])
        assert sweep.trained[-1] == (1, 0)
    assert sweep.run(seeds=[0]) == []
    assert sweep.reasons()[-1] == "worker was killed 3 times"
    assert sweep.ended() == [(2, 0)]


def test_a_trial_that_was_trained_but_not_told_is_not_trained_again(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def tell(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_tell", tell)
        with pytest.raises(Killed):
            sweep.run(seeds=[0])
    assert sweep.trained == [(1, 0)]
    assert sweep.run(seeds=[0]) == [(2, 0)]
    assert sweep.ended() == [(1, 0), (2, 0)]


def test_a_configuration_is_trained_once_for_all_studies_of_a_results_folder(
    sweep: Sweep,
) -> None:
    sweep.run()
    assert sweep.run(name="wider", space={"model.num_layers": choices(2, 3)}) == [(3, 0), (3, 1)]
    copied = sweep.results / "wider" / "d2-k4-g2-t3-a4-v40-s0"
    source = sweep.results / "depth" / "d2-k4-g2-t3-a4-v40-s0"
    found = json.loads((copied / "trial.json").read_text())
    assert (found["study"], found["copied_from"]) == ("wider", str(source))
    assert json.loads((source / "trial.json").read_text())["study"] == "depth"
    assert (copied / "run.json").stat().st_ino == (source / "run.json").stat().st_ino
    assert sweep.ended("wider") == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_choices_of_text_are_fixed_and_a_new_study_copies_them(sweep: Sweep) -> None:
    sweep.key = "data.anchors"
    few = {"space": {"data.anchors": choices("RandomAnchors")}, "seeds": [0]}
    more = {"space": {"data.anchors": choices("RandomAnchors", "AllAnchors")}, "seeds": [0]}
    sweep.run(**few)
    with pytest.raises(UserError, match=r"space: data\.anchors: study depth has .*--name") as error:
        sweep.run(**more)
    assert "\n" not in str(error.value)
    assert sweep.run("--name", "wider", **more) == [("AllAnchors", 0)]


def test_a_copy_needs_the_new_objectives(sweep: Sweep) -> None:
    sweep.fate = lambda *_: Outcome({"decode/accept_len": 1.0})
    sweep.run(seeds=[0])
    sweep.fate = lambda *_: None
    both = [{"metric": "decode/accept_len"}, {"metric": "decode/speedup"}]
    assert sweep.run(name="wider", objectives=both, seeds=[0]) == [(1, 0), (2, 0)]


def test_hopeless_trials_are_pruned(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(words: Sequence[str], folder: Path, watch: Watch, workers: int) -> Outcome:
        layers = int(words[words.index("--model.num_layers") + 1])
        assert watch.hopeless is not None
        if watch.hopeless(50, float(layers)):
            return Outcome({}, "val/accept_len is low", pruned=True)
        return sweep.train(words, folder, watch, workers)

    monkeypatch.setattr(worker, "train", train)
    pruner = {
        "class_path": "MedianPruner",
        "init_args": {"n_startup_trials": 1, "n_warmup_steps": 10},
    }
    deep_first = {"model.num_layers": choices(3, 1, 2)}
    assert sweep.run(pruner=pruner, space=deep_first, seeds=[0]) == [(3, 0)]
    states = [trial.state for trial in sweep.study().trials]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
    assert sweep.run(pruner=pruner, space=deep_first, seeds=[0]) == []


# ---- bad input -----------------------------------------------------------------------------------

RANGE = {"class_path": "FloatDistribution", "init_args": {"low": 0.1, "high": 1.0}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"space": {"model.dpeth": choices(1)}}, r"space: dpeth=1: .*model\.dpeth"),
    ({"space": {"model.num_layers": choices(1, 0)}}, r"num_layers=0: model\.num_layers: .*least 1"),
    ({"space": {"model.num_layers": choices("two")}}, r"num_layers=two: .*model\.num_layers"),
    ({"space": {"model.lr": RANGE}}, r"space: model\.lr: a range without step"),
    ({"space": {"model.lr": {"class_path": "Foo"}}}, r"space"),
    ({"space": {"model.lr": choices()}}, r"space.*choices.*one or more"),
    ({"space": {}}, r"space: needs a key"),
    ({"space": {"seed_everything": choices(1, 2)}}, r"seed_everything: .*--seeds"),
    ({"settings": {"model.num_layers": 3}}, r"settings: model\.num_layers: .*in the space"),
    ({"settings": {"trainer.devices": 2}}, r"trainer\.devices: a trial has one device"),
    ({"settings": {"model.wdth": 3}}, r"model\.wdth"),
    ({"aliases": {"deep": {"model.num_layers": 3}}}, r"aliases: no choice .* called deep"),
    ({"sampler": {"class_path": "Foo"}}, r"sampler.*Foo"),
    ({"sampler": {"class_path": "TPESampler"}}, r"trials: .*how many cells"),
    ({"trials": 3}, r"trials: BruteForceSampler"),
    ({"objectives": [{"metric": "decode/acept_len"}]}, r"objectives: no run logs decode/acept_len"),
    ({"objectives": []}, r"objectives: needs one"),
    (
        {"objectives": [{"metric": "val/loss", "direction": "down"}]},
        r"objectives.*down",
    ),
    ({"pruner": {"class_path": "MedianPruner"}, "monitor": "val/acc"}, r"monitor: no run logs"),
    (
        {
            "pruner": {"class_path": "MedianPruner"},
            "objectives": [{"metric": "val/loss"}, {"metric": "decode/speedup"}],
        },
        r"pruner: .*one objective",
    ),
    ({"budget": {"hours": 3}}, r"budget: needs one of tokens"),
    ({"budget": {"tokens": -3}}, r"budget\.tokens: needs a positive"),
    ({"budget": {"tokens": 3, "minutes": 1}}, r"budget: needs one of"),
    ({"seeds": []}, r"seeds: needs one"),
    ({"seeds": [1, 1]}, r"seeds: one is there twice"),
    ({"experiments": "nowhere.yaml"}, r"experiments: no such file: nowhere\.yaml"),
    ({"experiments": []}, r"experiments: needs"),
    ({"storage": "oracle-of-delphi://x"}, r"storage: oracle-of-delphi"),
    ({"dpeth": 3}, r"dpeth"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD)
def test_bad_input_is_one_line_and_nothing_is_trained(
    sweep: Sweep, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        sweep.run(**wrong)
    assert "\n" not in str(error.value)
    assert not sweep.trained
    assert not list(sweep.results.glob("depth/*/*"))


OTHER: list[tuple[dict[str, Any], str]] = [
    ({"objectives": [{"metric": "val/loss"}]}, r"objectives: study depth has"),
    (
        {"objectives": [{"metric": "decode/accept_len", "direction": "minimize"}]},
        r"objectives: study depth has",
    ),
    ({"space": {"model.lr": choices(0.1, 0.2)}}, r"space: study depth has .*num_layers.*asked"),
    ({"budget": {"tokens": 1000}}, r"budget: study depth has None"),
    ({"settings": {"model.lr": 0.5}}, r"settings: study depth has"),
]


def test_a_study_of_another_sweep_is_refused(sweep: Sweep, experiment: Path) -> None:
    sweep.run(seeds=[0])
    for wrong, words in OTHER:
        with pytest.raises(UserError, match=words) as error:
            sweep.run(seeds=[0], **wrong)
        assert "\n" not in str(error.value)
        assert not sweep.trained
    changed = sweep.folder / "changed" / experiment.name
    changed.parent.mkdir()
    changed.write_text(experiment.read_text().replace("lr: 0.001", "lr: 0.002"))
    with pytest.raises(UserError, match=r"experiments: experiment has changed"):
        sweep.run(seeds=[0], experiments=str(changed))
    assert sweep.run(seeds=[0]) == []


def test_accept_length_alone_over_depth_gets_a_note(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.run(seeds=[0])
    said = capsys.readouterr().out
    assert said.count("always picks the deepest drafter") == 1
    assert "trial 1: num_layers=2 seed=0: decode/accept_len=2.000" in said
    both = [{"metric": "decode/accept_len"}, {"metric": "decode/speedup"}]
    sweep.run(seeds=[0], objectives=both, name="both")
    assert "always picks" not in capsys.readouterr().out


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: str(file.relative_to(ROOT / "sweeps")))
def test_every_shipped_sweep_is_read(file: Path) -> None:
    spec = read_spec(["-c", str(file)])
    assert check_cells(spec)
    assert spec.budget
    assert spec.settings.get("decode.final_prompts", 32) >= 16


def test_help_and_bad_keys_need_no_torch(sweep: Sweep) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from dflash_lightning.sweeps.reading import read_spec; "
        f"read_spec({sweep.write()}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)


def test_numbers_are_stored_so_that_they_may_grow() -> None:
    make = optuna.distributions.CategoricalDistribution
    assert stored(make([1, 3, 8])) == optuna.distributions.IntDistribution(1, 8)
    assert stored(make([0.5, 3])) == optuna.distributions.FloatDistribution(0.5, 3.0)
    assert stored(make([True, False])) == make([True, False])
    assert stored(make([3, "uniform"])) == make([3, "uniform"])


def test_workers_of_a_machine_are_counted_and_the_dead_are_not(tmp_path: Path) -> None:
    with Presence(tmp_path) as one, Presence(tmp_path) as other:
        left_by_a_killed_one = one.file.with_name(one.file.name + "x")
        left_by_a_killed_one.touch()
        assert one.alive() == other.alive() == 2
        assert not left_by_a_killed_one.exists()
    assert Presence(tmp_path).alive() == 0


def test_workers_divide_the_threads_and_say_that_speeds_are_void(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def train(words: Sequence[str], folder: Path, watch: Watch, workers: int) -> Outcome:
        seen.append((workers, torch.get_num_threads()))
        return sweep.train(words, folder, watch, workers)

    monkeypatch.setattr(worker, "train", train)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: seen.append(n))
    with Presence(sweep.results / ".workers"):
        sweep.run(seeds=[0])
    assert [x for x in seen if isinstance(x, int)] == [4, 4, 8]
    assert [x for x in seen if isinstance(x, tuple)] == [(2, 8), (2, 8)]
    assert capsys.readouterr().out.count("speeds measured now are void") == 1


def test_a_hopeless_trial_ends_in_the_middle_of_its_training(
    experiment: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, float]] = []

    def hopeless(step: int, value: float) -> bool:
        seen.append((step, value))
        return True

    words = ["fit", "-c", str(experiment), "--trainer.default_root_dir", str(tmp_path)]
    outcome = train(words, tmp_path / "run", Watch("val/accept_len", hopeless), 1)
    assert outcome.pruned
    assert [step for step, _ in seen] == [50]
    assert seen[0][1] >= 1.0


def test_a_monitor_that_no_run_logs_ends_the_trial_at_its_first_validation() -> None:
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=True, callback_metrics={"val/loss": 1.0}
    )
    watch = Watch("val/nothing", lambda *_: True)
    watch.on_validation_end(trainer, None)  # type: ignore[arg-type]
    trainer.sanity_checking = False
    with pytest.raises(UserError, match="monitor: this run logs no val/nothing"):
        watch.on_validation_end(trainer, None)  # type: ignore[arg-type]


def test_the_table_shows_states_values_and_what_fits(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.fate = lambda layers, _: Outcome({}, "out of memory") if layers == 3 else None
    sweep.run(space={"model.num_layers": choices(*range(1, 9))}, seeds=[0])
    spec = read_spec(["-c", str(sweep.folder / "depth.yaml")])
    view = View(Trials(spec, {}))
    view.console = Console(file=io.StringIO(), width=120, height=20, force_terminal=True)
    with view:
        view.refresh()
        part = view.console.file.getvalue()  # type: ignore[attr-defined]
    whole = view.console.file.getvalue()[len(part) :]  # type: ignore[attr-defined]
    assert "8 of 8 trials" in part
    assert "num_layers=8" in part
    assert "num_layers=1 " not in part
    for words in ("num_layers=1 ", "num_layers=8", "failed: out of memory", "8.000"):
        assert words in whole


def test_a_storages_password_stays_out_of_files(sweep: Sweep) -> None:
    args = sweep.write(storage="postgresql+psycopg://me:secret@host/db")
    spec = read_spec(args)
    assert spec.storage == "postgresql+psycopg://me:secret@host/db"
    assert spec.plain["storage"] == "postgresql+psycopg://me:***@host/db"


def test_real_trials_train_fail_and_can_be_pasted(experiment: Path, tmp_path: Path) -> None:
    """One cell trains, the other's loss becomes no number; pasting repeats the first."""
    made, metrics = Sweep(experiment, tmp_path), ["decode/accept_len", "cost/draft_ms"]
    made.content |= {
        "space": {"model.lr": choices(1e-3, 1e30)},
        "seeds": [5],
        "objectives": [{"metric": metric} for metric in metrics],
        "budget": {"tokens": 150},
    }
    made.run()
    (reason,) = made.reasons()
    assert reason.startswith("train/loss is ")
    (done,) = made.study().get_trials(states=[TrialState.COMPLETE])
    folder = made.results / "depth" / done.user_attrs["run"]
    run = json.loads((folder / "run.json").read_text())
    words = shlex.split(done.user_attrs["command"])[3:]
    assert run["command"] == words
    assert run["config_hash"] == meaning(words).identity
    again = [*words, "--model.gradient_checkpointing=true"]
    assert meaning(again).identity == meaning(words).identity
    assert run["environment"]["workers"] == 1
    assert run["budget"] == {"tokens": 150}
    trial = json.loads((folder / "trial.json").read_text())
    assert trial["values"] == dict(zip(metrics, done.values, strict=True))
    unknown = [m for m in trial["metrics"] if not re.fullmatch(LOGGED, m)]
    assert all(metric.startswith(("train/", "throughput/")) for metric in unknown)
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    again = tmp_path / "again"
    main([*words, "--trainer.logger.init_args.save_dir", str(again)])
    first, second = (
        json.loads((f / "decode_val.json").read_text())["accepted_histogram"]
        for f in (folder, again / folder.name)
    )
    assert first == second


def test_an_error_of_cleaning_up_after_an_interruption_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    monkeypatch.setattr("dflash_lightning.sweeps.trial.main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train([], tmp_path, Watch(), 1)
