"""Opens data sets of the Hugging Face `datasets` package, by local path or hub id."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_lightning.errors import UserError

OURS = ("messages", "conversations", "prompt", "response", "text")


def open_dataset(path: str, name: str | None, revision: str | None, split: str) -> Any:
    """Return one split, memory-mapped.

    Raises:
        UserError: The package is missing, or there is no such data set or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data.prompts: HuggingFacePrompts needs the package datasets: "
            'pip install "dflash-lightning[datasets]"'
        ) from error
    datasets.disable_progress_bars()
    folder = Path(path).expanduser()
    local = folder.is_dir()
    saved = local and any((folder / f).is_file() for f in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(
                str(folder) if local else path, name, split=split, revision=revision
            )
    except Exception as error:  # datasets raises what its backends raise, of any kind
        raise UserError(
            f"data.prompts.init_args.path: can't open {path} (split {split}): "
            f"{_first_line(error)}; give a hub id that this machine can reach, or a folder"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UserError(
                f"data.prompts: {path} has no split {split} (it has {', '.join(found)}); set "
                "data.prompts.init_args.train, val and test to its names"
            )
        return found[split]
    if saved and split != "train":
        raise UserError(f"data.prompts: {path} is a single split; leave out {split}")
    return found


def our_columns(found: Sequence[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return our name -> name in the data set, for those that it has.

    Raises:
        UserError: An unknown name on either side, or nothing to take.
    """
    key = "data.prompts.init_args.columns"
    names = dict(columns or {name: name for name in OURS if name in found})
    for ours, theirs in names.items():
        if ours not in OURS:
            raise UserError(f"{key}: {ours} is none of {', '.join(OURS)}")
        if theirs not in found:
            raise UserError(f"{key}: there is no column {theirs} (there are {', '.join(found)})")
    if not set(names) - {"response"}:
        raise UserError(
            f"{key}: say which column holds the prompts (there are {', '.join(found)}), as in "
            f"{{prompt: {found[0] if found else 'question'}}}"
        )
    return names


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
