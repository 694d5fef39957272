"""What a user would take instead: transformers' own loops, timed on the same prompts."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_files import target_folder

Other = Literal["prompt_lookup", "assistant"]
Decoder = Callable[[Tensor, int], list[int]]


def other_decoders(
    names: Sequence[Other], target: Target, assistant: str | None, cache_dir: Path
) -> dict[str, Decoder]:
    """Return decoders by name, each a map from a prompt `[P]` and a length to new tokens.

    Args:
        names: `prompt_lookup` (drafts copied from the text so far) or `assistant` (classical
            speculative decoding with a small autoregressive model).
        target: The target.
        assistant: Name of the assistant model, as for a target; needed for `assistant`.
        cache_dir: Where a converted assistant is kept.

    Raises:
        UserError: No assistant given, or one of another vocabulary.
    """
    found: dict[str, Decoder] = {}
    for name in names:
        options: dict[str, Any] = {}
        if name == "prompt_lookup":
            options["prompt_lookup_num_tokens"] = 10
        else:
            options["assistant_model"] = _assistant(target, assistant, cache_dir)
        found[name] = _decoder(target, options)
    return found


def tokens_per_second(decoder: Decoder, prompts: Sequence[Tensor], max_new_tokens: int) -> float:
    """Return new tokens per second of wall time over all prompts, after one short warm-up."""
    decoder(prompts[0], 4)
    start = time.perf_counter()
    count = sum(len(decoder(prompt, max_new_tokens)) for prompt in prompts)
    return count / (time.perf_counter() - start)


def check_assistant(name: str | None, vocab_size: int, cache_dir: Path) -> Path:
    """Return the folder of an assistant model, before its weights are loaded.

    Raises:
        UserError: None given, or one of another vocabulary.
    """
    if name is None:
        raise UserError("decode.assistant: comparing with an assistant needs the name of one")
    folder = target_folder(name, None, cache_dir)
    found = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
    if found != vocab_size:
        raise UserError(
            f"decode.assistant: {name} has a vocabulary of {found} tokens, the target one of "
            f"{vocab_size}"
        )
    return folder


def _assistant(target: Target, name: str | None, cache_dir: Path) -> Any:
    folder = check_assistant(name, target.config.vocab_size, cache_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    return model.to(target.device).eval()


def _decoder(target: Target, options: dict[str, Any]) -> Decoder:
    lookup = {key: value for key, value in options.items() if key != "assistant_model"}
    models = {key: value for key, value in options.items() if key == "assistant_model"}

    def run(prompt: Tensor, max_new_tokens: int) -> list[int]:
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.stop_ids) or None,
            pad_token_id=0,
            **lookup,
        )
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            ids = prompt[None].to(target.device)
            output = target.model.generate(ids, generation_config=config, **models)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return list(output[0, prompt.numel() :].tolist())

    return run
