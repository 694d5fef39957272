import json
import os
from pathlib import Path
from threading import RLock

import pytest
import torch
import yaml
from tiny import save_tiny_target
from tqdm import tqdm

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
tqdm.monitor_interval = 0
tqdm.set_lock(RLock())  # its own is shared with forked children: one killed inside keeps it


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama target with tokenizer, as a model folder."""
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def experiment(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML that trains a tiny drafter for a tiny target in a second."""
    folder = tmp_path_factory.mktemp("experiment")
    rows = [{"messages": [{"role": "user", "content": f"{n} and {n + 1}?"}]} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "seed_everything": 3,
        "model": {
            "target": {"name": str(target_folder), "dtype": "float32", "num_taps": 3},
            "block_size": 4,
            "num_layers": 1,
            "draft_vocab": 40,
            "lr": 1e-3,
        },
        "data": {
            "prompts": {
                "class_path": "JsonlPrompts",
                "init_args": {"train": str(folder / "prompts.jsonl"), "held_out": 3},
            },
            "max_new_tokens": 16,
            "anchors": {"class_path": "RandomAnchors", "init_args": {"num_anchors": 4}},
            "batch_size": 4,
            "features": "store",
            "cache_dir": str(folder / "cache"),
        },
        "decode": {"every_n_steps": 2, "num_prompts": 2, "final_prompts": 3, "max_new_tokens": 12},
        "trainer": {
            "max_steps": 4,
            "max_epochs": -1,
            "precision": "32-true",
            "accelerator": "cpu",
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "default_root_dir": str(folder / "runs"),
        },
    }
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
