"""Run folders as `fit` and `sweep` leave them, made up, with a known truth."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

DEPTH = "model.num_layers"


def fake_prompts(
    rng: np.random.Generator,
    acceptance: float,
    count: int = 16,
    block_size: int = 6,
    cycles: int = 50,
    draft_ms: float = 10.0,
    names: Sequence[str] | None = None,
    spread: float = 0.08,
    hardness_seed: int = 7,
) -> list[dict[str, Any]]:
    """Return per-prompt figures: each draft is accepted with a prompt's probability, in a row.

    A prompt is as hard in every run (`hardness_seed`); the mean over prompts is `acceptance`.
    """
    hardness = np.random.default_rng(hardness_seed).normal(0, spread, count)
    hardness -= hardness.mean()
    rows = []
    for i in range(count):
        rate = float(np.clip(acceptance + hardness[i], 0.02, 0.98))
        drafts = rng.random((cycles, block_size - 1)) < rate
        accepted = drafts.cumprod(axis=1).sum(axis=1)
        committed = int((accepted + 1).sum())
        draft_s, verify_s = cycles * draft_ms / 1e3, cycles * 0.066
        plain_s = (committed + 1) * 0.058 * float(rng.normal(1, 0.02))
        seconds = draft_s + verify_s + 0.1
        rows.append(
            {
                "prompt": names[i] if names else f"p{i:02d}",
                "tokens": committed + 1,
                "cycles": cycles,
                "committed": committed,
                "accepted_histogram": np.bincount(accepted, minlength=block_size).tolist(),
                "drafted_histogram": [0] * (block_size - 1) + [cycles],
                "seconds": seconds,
                "draft_seconds": draft_s,
                "verify_seconds": verify_s,
                "plain_tokens": committed + 1,
                "plain_seconds": plain_s,
                "speedup": plain_s / seconds,
            }
        )
    return rows


def fake_decoded(prompts: list[dict[str, Any]], draft_ms: float = 10.0) -> dict[str, Any]:
    """Return what decode_val.json holds, as far as `report` reads it."""
    committed, cycles = (sum(row[k] for row in prompts) for k in ("committed", "cycles"))
    return {
        "prompts": len(prompts),
        "block_size": len(prompts[0]["accepted_histogram"]),
        "accept_len": committed / cycles,
        "batch_size": 1,
        "per_prompt": prompts,
        "cost": {
            "parameters": 1_000_000,
            "draft_ms": draft_ms,
            "verify_ms": 66.0,
            "plain_ms": 58.0,
        },
        "block_sizes": {},
    }


def fake_run(
    folder: Path,
    decoded: dict[str, Any],
    model: dict[str, Any],
    seed: int = 0,
    tokens: int | None = 600_000,
    trial: dict[str, Any] | None = None,
    workers: int = 1,
    curves: bool = False,
) -> Path:
    """Write a run folder; `curves` also writes an event file over supervised tokens."""
    folder.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "trainer": {"default_root_dir": str(folder.parent), "max_steps": 800},
        "model": {"target": {"name": "fake/target", "dtype": "float32", "num_taps": 5}, **model},
        "data": {"prompts": {"class_path": "dflash_lightning.data.sources.WordProblems"}},
        "decode": {"max_new_tokens": 96},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "decode_val.json").write_text(json.dumps(decoded))
    if tokens is not None:
        record = {
            "command": ["python", "-m", "dflash_lightning", "fit", "--seed_everything", str(seed)],
            "seed": seed,
            "supervised_tokens": tokens,
            "budget": {"tokens": tokens},
            "environment": {
                "machine": "host: fake",
                "workers": workers,
                "versions": {"torch": "2"},
            },
        }
        (folder / "run.json").write_text(json.dumps(record))
    if trial is not None:
        (folder / "trial.json").write_text(json.dumps({**trial, "seed": seed}))
    if curves:
        _write_curves(folder, decoded["accept_len"], tokens or 0)
    return folder


def fake_study(
    folder: Path,
    acceptance: dict[Any, float],
    seeds: Sequence[int] = (0, 1, 2),
    key: str = DEPTH,
    seed_spread: float = 0.01,
    curves: bool = False,
    failed: Sequence[Any] = (),
    prompts: int = 16,
    objectives: Sequence[tuple[str, str]] = (("decode/accept_len", "maximize"),),
) -> Path:
    """Write a study: value of `key` -> acceptance of a draft."""
    folder.mkdir(parents=True)
    values = [*acceptance, *failed]
    numeric = all(isinstance(v, int) for v in values)
    distribution: BaseDistribution = (
        IntDistribution(min(values), max(values)) if numeric else CategoricalDistribution(values)
    )
    sweep = {
        "experiments": ["experiments/quickstart.yaml"],
        "space": {key: {"class_path": type(distribution).__name__, "init_args": {}}},
        "seeds": list(seeds),
        "objectives": [{"metric": m, "direction": d} for m, d in objectives],
        "budget": {"tokens": 600_000},
        "storage": None,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.create_study(
        study_name=folder.name, storage=storage, directions=[d for _, d in objectives]
    )
    study.set_user_attr("metric_names", [m for m, _ in objectives])
    number = 0
    for seed in seeds:
        for value, rate in acceptance.items():
            draft_ms = 5.0 + 4.0 * (value if numeric else number % 3)
            rng = np.random.default_rng([seed, number])
            moved = rate + np.random.default_rng([99, seed, number]).normal(0, seed_spread)
            decoded = fake_decoded(fake_prompts(rng, moved, prompts, draft_ms=draft_ms), draft_ms)
            layers = value if key == DEPTH else 3
            name = f"d{value}-k6-g3-t5-s{seed}" if key == DEPTH else f"{value}-s{seed}"
            trial = {"study": folder.name, "trial": number, "cell": {key: value}, "values": {}}
            fake_run(
                folder / name,
                decoded,
                {"num_layers": layers, "block_size": 6},
                seed,
                trial=trial,
                curves=curves,
            )
            found = {
                "decode/accept_len": decoded["accept_len"],
                "decode/speedup": 1.0,
                "decode/draft_ms": draft_ms,
            }
            study.add_trial(
                optuna.trial.create_trial(
                    params={key: value},
                    distributions={key: distribution},
                    values=[found[m] for m, _ in objectives],
                    user_attrs={"seed": seed},
                )
            )
            number += 1
    for value in failed:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL,
                params={key: value},
                distributions={key: distribution},
                user_attrs={"seed": seeds[0], "reason": "out of memory"},
            )
        )
    return folder


def _write_curves(folder: Path, accept_len: float, tokens: int) -> None:
    writer = EventFileWriter(str(folder))
    for i in range(1, 31):
        at, share = tokens * i // 30, i / 30
        scalars = {
            "train/loss": 4.0 - 2.0 * share,
            "val/loss": 4.2 - 1.8 * share,
            "val/accept_len": 1 + (accept_len - 0.9) * share,
            "decode/accept_len": 1 + (accept_len - 1) * share,
            "decode/speedup": 0.8 + 0.5 * share,
        }
        for tag, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1e9 + i, step=at, summary=summary))
    writer.close()
