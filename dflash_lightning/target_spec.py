"""What is known of a target before its weights are loaded: all that data preparation needs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dflash_lightning.precision import target_dtype
from dflash_lightning.target_files import EMBEDDED_TARGET, fingerprint, target_folder
from dflash_lightning.target_rules import (
    check_layer_ids,
    check_mask_token_id,
    choose_mask_token_id,
    default_layer_ids,
    reserved_token_ids,
    stop_token_ids,
)


@dataclass
class TargetConfig:
    """Which language model is drafted for, and where the drafter looks into it.

    Args:
        name: Hub id (Qwen/Qwen3-4B), local folder, .gguf file, or package://PACKAGE/FILE for a file
            inside an installed package.
        dtype: Precision in which the frozen target is kept and run; unless said, bfloat16 where the
            machine multiplies it, else float32.
        revision: Hub revision (branch, tag or commit); null takes the default branch.
        num_taps: How many target layers the drafter sees, spread by the paper's rule; unused when
            target_layer_ids is given.
        target_layer_ids: Explicit tapped layers: id i is the output of decoder layer i, counted
            from 0; the last layer may not be tapped.
        mask_token_id: Embedding row that stands for a masked slot; null takes the tokenizer's mask
            token, else the first row beyond the tokenizer, else a reserved special token. Never
            pad, eos or bos.
    """

    name: str = EMBEDDED_TARGET
    dtype: Literal["bfloat16", "float16", "float32"] = field(default_factory=target_dtype)
    revision: str | None = None
    num_taps: int = 5
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None


@dataclass(frozen=True)
class TargetSpec:
    """A target resolved on disk, its weights not loaded: all that data preparation must know."""

    folder: Path
    dtype: str
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase
    config: Any
    target_layer_ids: list[int]
    mask_token_id: int
    stop_ids: frozenset[int]


def inspect_target(config: TargetConfig, cache_dir: Path) -> TargetSpec:
    """Resolve `config` to a folder, tapped layers and mask token, without loading weights.

    Raises:
        UserError: Unknown name, bad tapped layers or bad mask token.
    """
    folder = target_folder(config.name, config.revision, cache_dir)
    tokenizer = load_tokenizer(folder)
    text_config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    num_layers = int(text_config.num_hidden_layers)
    layer_ids = config.target_layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(num_layers, config.num_taps)
    reserved = reserved_token_ids(text_config, tokenizer)
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token_id(tokenizer, text_config.vocab_size, reserved)
    return TargetSpec(
        folder=folder,
        dtype=config.dtype,
        fingerprint=f"{fingerprint(folder)}-{config.dtype}",
        tokenizer=tokenizer,
        config=text_config,
        target_layer_ids=check_layer_ids(layer_ids, num_layers),
        mask_token_id=check_mask_token_id(mask_token_id, text_config.vocab_size, reserved),
        stop_ids=stop_token_ids(_generation_config(folder), text_config, tokenizer),
    )


def _generation_config(folder: Path) -> GenerationConfig | None:
    exists = (folder / "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(folder) if exists else None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target folder; padding goes right."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    return tokenizer
