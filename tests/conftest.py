from pathlib import Path

import pytest
import torch
from tiny import save_tiny_target

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama target with tokenizer, as a model folder."""
    return save_tiny_target(tmp_path_factory.mktemp("target"))
