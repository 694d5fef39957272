"""The frozen target LM: its embedding, its head, its tapped hidden states.

A `Target` is a plain object, not a `torch.nn.Module`, on purpose: a LightningModule that holds one
neither saves, casts, synchronises nor switches it to train mode.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicCache

from dflash_lightning.errors import UserError
from dflash_lightning.target_files import EMBEDDED_TARGET, fingerprint, target_folder


@dataclass
class TargetConfig:
    """Which language model is drafted for, and where the drafter looks into it."""

    name: str = EMBEDDED_TARGET
    """Hub id (Qwen/Qwen3-4B), local folder, .gguf file, or package://PACKAGE/FILE for a file inside
    an installed package."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision in which the frozen target is kept and run."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); null takes the default branch."""
    num_taps: int = 5
    """How many target layers the drafter sees, spread by the paper's rule; unused when
    target_layer_ids is given."""
    target_layer_ids: list[int] | None = None
    """Explicit tapped layers: id i is the output of decoder layer i, counted from 0; the last layer
    may not be tapped."""
    mask_token_id: int | None = None
    """Embedding row that stands for a masked slot; null takes the tokenizer's mask token, else the
    first row beyond the tokenizer, else a reserved special token. Never pad, eos or bos."""


@dataclass
class TargetOutput:
    """What one target forward gives.

    `logits` `[B, n, V]` of the last n positions, `hidden` `[B, S, T*H]` or None.
    """

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class OutputHead:
    """The target's output head, borrowed by reference.

    Weight `[V, H]`, bias `[V]`, scale and soft-cap of the logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` in the weight's dtype for final-normed states `[..., H]`."""
        logits = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def rows(self, ids: Tensor) -> "OutputHead":
        """Return the head over the vocabulary rows `ids` `[Vd]` only."""
        bias = None if self.bias is None else self.bias[ids].contiguous()
        return replace(self, weight=self.weight[ids].contiguous(), bias=bias)


class Target:
    """A frozen causal LM in eval mode, with taps on the wanted decoder layers.

    Args:
        model: Any Hugging Face causal LM; it is frozen and put into eval mode.
        tokenizer: Its tokenizer; only needed for text and for choosing a mask token.
        target_layer_ids: Tapped layers, ascending; id `i` is the output of decoder layer `i`.
        mask_token_id: Embedding row of a masked slot; checked against range, pad, eos and bos.
        fingerprint: Identity of the weights, for cache keys and checkpoints.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        target_layer_ids: Sequence[int],
        mask_token_id: int,
        fingerprint: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.fingerprint = fingerprint
        self._embedding = cast(nn.Embedding, model.get_input_embeddings())
        self._layers = _decoder_layers(model, self.config.num_hidden_layers)
        self.target_layer_ids = check_layer_ids(target_layer_ids, len(self._layers))
        self.mask_token_id = check_mask_token_id(
            mask_token_id, self.num_embeddings, self.reserved_ids()
        )
        self.head = _output_head(model, self.config)
        self.stop_ids = stop_token_ids(model, tokenizer)
        _check_borrowed_parts(self)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._embedding.weight.dtype

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding (may exceed the tokenizer's vocabulary)."""
        return int(self._embedding.weight.shape[0])

    def reserved_ids(self) -> dict[int, str]:
        """Return the ids a mask token may not be, with their role."""
        return reserved_token_ids(self.config, self.tokenizer)

    def to(self, device: torch.device) -> "Target":
        """Move the weights; returns self."""
        if self.device != device:
            self.model.to(device)
            self.head = _output_head(self.model, self.config)
        return self

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Return input embeddings `[..., H]` of token ids, with the target's own scale."""
        return self._embedding(ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        logits_to_keep: int = 1,
        tap: bool = True,
    ) -> TargetOutput:
        """Run the target on `input_ids` `[B, S]`, after what `cache` holds (and extending it).

        Args:
            input_ids: Token ids `[B, S]`.
            attention_mask: 1 for real tokens `[B, past + S]`; None when nothing is padded.
            position_ids: Positions `[B, S]`; None counts on from the cache.
            cache: Key/value cache; None computes without one.
            logits_to_keep: Logits of the last n positions only; 0 means all of them.
            tap: Whether to return the tapped hidden states.
        """
        with _captured([self._layers[i] for i in self.target_layer_ids] if tap else []) as taps:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
                logits_to_keep=logits_to_keep,
            )
        return TargetOutput(output.logits, torch.cat(taps, dim=-1) if tap else None)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, attention_mask: Tensor, layer_ids: Sequence[int]
    ) -> list[Tensor]:
        """Return the outputs `[B, S, H]` of the given decoder layers, without the head.

        The `input_ids` `[B, S]` are right-padded.
        """
        with _captured([self._layers[i] for i in layer_ids]) as taps:
            self.model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            )
        return taps


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
    )


def load_target(spec: TargetSpec, device: torch.device | str = "cpu") -> Target:
    """Load, freeze and check the target of `spec`.

    Raises:
        UserError: A head or embedding that can't be borrowed.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=getattr(torch, spec.dtype))
    return Target(
        model.to(device),
        spec.tokenizer,
        spec.target_layer_ids,
        spec.mask_token_id,
        spec.fingerprint,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target folder; padding goes right."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    return tokenizer


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


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Return every id that ends generation.

    From the generation config, the model config and the tokenizer.
    """
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update(
            value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        )
    return frozenset(int(i) for i in found)


@contextmanager
def _captured(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of `layers`, in their order, while the context is open."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> list[nn.Module]:
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise UserError(
            f"model.target.name: no list of {num_layers} decoder layers in {type(model).__name__}"
        )
    return list(found[0])


def _output_head(model: PreTrainedModel, config: Any) -> OutputHead:
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(
            f"model.target.name: {type(model).__name__} has no output head; a causal LM is needed"
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(
        head.weight,
        getattr(head, "bias", None),
        scale,
        getattr(config, "final_logit_softcapping", None),
    )


def _check_borrowed_parts(target: Target) -> None:
    """Compare the borrowed embedding and head with what the target itself computes, on four tokens.

    Raises:
        UserError: They differ: the drafter would be trained in another space than it is used in.
    """
    ids = torch.arange(4, device=target.device)[None] % target.num_embeddings
    entered: list[Tensor] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    handle = target._layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with torch.no_grad():
            logits = target.model(input_ids=ids, use_cache=False).logits
            final = target.model.base_model(input_ids=ids, use_cache=False)[0]
    finally:
        handle.remove()
    name = type(target.model).__name__
    if not torch.allclose(entered[0], target.embed(ids), rtol=1e-2, atol=1e-3):
        raise UserError(
            f"model.target.name: {name} adds something to its embedding (learned positions?): "
            "not supported"
        )
    if not torch.allclose(logits.float(), target.head(final).float(), rtol=2e-2, atol=1e-2):
        raise UserError(
            f"model.target.name: the logits of {name} are not its head over its last hidden state: "
            "not supported"
        )
