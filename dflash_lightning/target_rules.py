"""Which target layers are tapped, which embedding row is the mask, which tokens end a text."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import UserError

FINAL = -1
"""Among layer ids: the last layer's output after the final norm, which the head reads."""


def default_layer_ids(num_layers: int, num_taps: int) -> list[int]:
    """Return the paper's tapped layers: spread evenly from the second layer to the third from last.

    >>> default_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    >>> default_layer_ids(30, 1)
    [15]

    Raises:
        UserError: The target has too few layers for that many distinct taps (it needs
            `num_taps + 3`).
    """
    if num_taps < 1:
        raise UserError(f"model.target.num_taps: needs at least 1, got {num_taps}")
    if num_layers < num_taps + 3:
        raise UserError(
            f"model.target.num_taps: {num_taps} distinct taps need {num_taps + 3} target layers, "
            f"this target has {num_layers}; take fewer taps or give model.target.target_layer_ids"
        )
    if num_taps == 1:
        return [num_layers // 2]
    return [round(1 + j * (num_layers - 4) / (num_taps - 1)) for j in range(num_taps)]


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """Return the ids as a list if they are distinct, ascending and below the last layer (0 .. L-2).

    The last layer is refused because Hugging Face returns it after the final norm, unlike all
    others.
    """
    ids = list(layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise UserError(
            f"model.target.target_layer_ids: {ids} must be distinct, ascending and within "
            f"0..{num_layers - 2} (the target has {num_layers} layers and the last may not be "
            "tapped)"
        )
    return ids


def reserved_token_ids(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[int, str]:
    """Return the pad, eos and bos ids of a target with their names."""
    found: dict[int, str] = {}
    for role in ("bos", "eos", "pad"):
        for holder in (config, tokenizer):
            value = getattr(holder, f"{role}_token_id", None)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None:
                    found[int(token_id)] = role
    return found


def check_mask_token_id(token_id: int, num_embeddings: int, reserved: dict[int, str]) -> int:
    """Return `token_id` if it is an existing embedding row that is not pad, eos or bos."""
    if not 0 <= token_id < num_embeddings:
        raise UserError(
            f"model.target.mask_token_id: {token_id} is outside the target's embedding "
            f"(rows 0..{num_embeddings - 1})"
        )
    if token_id in reserved:
        raise UserError(
            f"model.target.mask_token_id: {token_id} is the target's {reserved[token_id]} token; "
            "take an unused row"
        )
    return token_id


def choose_mask_token_id(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, reserved: dict[int, str]
) -> int:
    """Return the embedding row of a masked slot.

    The tokenizer's mask token, else the first row beyond the tokenizer, else a reserved special
    token. For Qwen3 this is 151669, the row z-lab's drafters use. Special tokens that occur in the
    chat template are not taken.

    Raises:
        UserError: Nothing fits; the user must name a row.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    vocab = tokenizer.get_vocab()
    spare = max(vocab.values()) + 1  # not len(tokenizer): ids may have gaps
    if spare < num_embeddings:
        return spare
    template = str(tokenizer.chat_template or "")
    names = set(tokenizer.all_special_tokens)
    special = sorted((i, token) for token, i in vocab.items() if token in names)
    free = [i for i, token in special if i not in reserved and token not in template]
    if not free:
        raise UserError(
            "model.target.mask_token_id: this target has no mask token, no spare embedding row and "
            "no unused special token; name an embedding row that the training data never uses"
        )
    return free[-1]


def stop_token_ids(*holders: Any) -> frozenset[int]:
    """Return every id that ends generation.

    Args:
        holders: Whatever may name `eos_token_id`: generation config, model config, tokenizer.
    """
    found: set[int] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        found.update(
            value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        )
    return frozenset(int(i) for i in found)
