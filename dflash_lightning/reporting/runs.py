"""Run folders -> runs: what was asked for, what was decoded, on which machine."""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dflash_lightning.errors import UserError
from dflash_lightning.reporting.statistics import Floats, Measured

DECODED = "decode_val.json"


@dataclass(frozen=True)
class Run:
    """One finished `fit`."""

    folder: Path
    name: str
    config: dict[str, Any] = field(repr=False)
    """Of `config.yaml`, keys joined by dots."""
    decoded: dict[str, Any] = field(repr=False)
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of `run.json`, empty where there is none."""
    trial: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of `trial.json`, empty where there is none."""

    @property
    def seed(self) -> int:
        """The seed, by which runs of a cell differ."""
        return int(self.config.get("seed_everything") or 0)

    @property
    def block_size(self) -> int:
        """K that the held-out prompts were decoded with."""
        return int(self.decoded["block_size"])

    @property
    def supervised_tokens(self) -> int | None:
        """How much it was trained on; None where it was not recorded."""
        found = self.record.get("supervised_tokens")
        return None if found is None else int(found)

    @property
    def shared_machine(self) -> bool:
        """Whether other workers trained beside it, so that its speeds say nothing."""
        return int(self.record.get("environment", {}).get("workers") or 1) > 1

    @property
    def hardware(self) -> str:
        """What its speeds were measured on, whatever the host is called; empty if unknown."""
        known = self.record.get("environment", {})
        parts = [str(known.get("machine", "")).partition(": ")[2]]
        parts += [f"{known[key]} {key}" for key in ("cores", "threads") if key in known]
        return ", ".join(filter(None, parts))

    @cached_property
    def measured(self) -> Measured:
        """What decoding the held-out prompts measured."""
        return _measured(self.seed, self.decoded, self.decoded.get("cost"))

    def at_block_size(self, block_size: int) -> Measured | None:
        """Return the same, decoded with another block size; None where it was not."""
        if block_size == self.block_size:
            return self.measured
        other = self.decoded.get("block_sizes", {}).get(f"k{block_size}")
        return None if other is None else _measured(self.seed, other, None)


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a study's folder, in a report's, or in any folder of runs.

    Raises:
        UserError: No such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"report: no such folder: {folder}")
    if (folder / "config.yaml").is_file():
        return [folder]
    found = sorted(p.parent for p in folder.glob("*/config.yaml"))
    found += sorted(p.parent for p in folder.glob("*/version_*/config.yaml"))
    found += sorted(p.parent for p in folder.glob("runs/*/config.yaml"))
    if found:
        return found
    if any((folder / name).exists() for name in ("sweep.yaml", "journal.log")):
        raise UserError(f"report: {folder} is an empty study: none of its trials has a run folder")
    raise UserError(
        f"report: {folder} is no study and no run: neither it nor its folders hold a config.yaml"
    )


def expand(patterns: Sequence[str]) -> list[Path]:
    """Return the run folders that paths and globs name, each once, in order.

    Raises:
        UserError: A pattern that names nothing, or a folder that is no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = sorted(glob.glob(str(Path(pattern).expanduser())))
        if not paths:
            raise UserError(f"--compare: no such run: {pattern}")
        for path in map(Path, paths):
            if path.is_dir():
                found.update(dict.fromkeys(find_runs(path)))
    if not found:
        raise UserError(f"--compare: no run folder among {' '.join(patterns)}")
    return list(found)


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs that can be compared, and of the others, by name, why not.

    Raises:
        UserError: None can be compared.
    """
    runs: list[Run] = []
    skipped: dict[str, str] = {}
    for folder in folders:
        try:
            runs.append(_read(folder))
        except UserError as error:
            skipped[_name(folder)] = str(error)
    if not runs:
        name, reason = next(iter(skipped.items()))
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise UserError(f"report: no run can be compared: {name}: {reason}{more}")
    return runs, skipped


def void_speeds(runs: Sequence[Run]) -> str | None:
    """Return why the speeds of runs can't be compared; None where they can."""
    if any(run.shared_machine for run in runs):
        return "several workers shared the machine"
    hardware = sorted({run.hardware for run in runs} - {""})
    if len(hardware) > 1:
        return f"the runs had different hardware ({' / '.join(hardware)})"
    return None


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys joined by dots.

    >>> flat({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': 1, 'c': [1, 2]}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _read(folder: Path) -> Run:
    config = _mapping(folder / "config.yaml")
    if not (folder / DECODED).is_file():
        raise UserError(f"no {DECODED}: it did not reach its end")
    decoded = _mapping(folder / DECODED)
    if not decoded.get("per_prompt"):
        raise UserError(
            f"{DECODED} has no figures per prompt: it is of an older version; train it again"
        )
    record, trial = (_mapping(folder / name, {}) for name in ("run.json", "trial.json"))
    run = Run(folder, _name(folder), flat(config), decoded, record, trial)
    try:
        run.measured.columns["committed"].sum()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{DECODED} is damaged ({error!r})") from error
    return run


def _mapping(file: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON or YAML file's mapping."""
    if absent is not None and not file.is_file():
        return absent
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file.name} can't be read ({str(error).splitlines()[0]})") from error
    if not isinstance(found, dict):
        raise UserError(f"{file.name} holds no mapping")
    return found


def _name(folder: Path) -> str:
    folder = folder.resolve()
    versioned = folder.name.startswith("version_")
    if versioned and folder.name != "version_0":
        return f"{folder.parent.name}/{folder.name}"
    return folder.parent.name if versioned else folder.name


def _measured(seed: int, decoded: dict[str, Any], cost: dict[str, Any] | None) -> Measured:
    """Return per-prompt columns of a decoding report; see `quantities` for what is made of them."""
    rows: list[dict[str, Any]] = decoded["per_prompt"]

    def column(name: str) -> Floats:
        return np.array([float(row[name]) for row in rows])

    names = (
        "tokens cycles committed seconds draft_seconds verify_seconds plain_tokens plain_seconds"
    )
    columns = {name: column(name) for name in names.split()}
    if cost is not None:
        gain = cost["plain_ms"] / (cost["draft_ms"] + cost["verify_ms"])
        columns["modelled"] = columns["committed"] * gain
    for k in range(1, int(decoded["block_size"])):
        for name in ("accepted", "drafted"):
            reached = [sum(row[f"{name}_histogram"][k:]) for row in rows]
            columns[f"{name}_{k}"] = np.array(reached, dtype=float)
    return Measured(seed, tuple(row["prompt"] for row in rows), columns)
