"""The frozen target LM: its embedding, its head, its tapped hidden states.

A `Target` is a plain object, not a `torch.nn.Module`, on purpose: a LightningModule that holds one
neither saves, casts, synchronises nor switches it to train mode.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from dflash_lightning.errors import UserError
from dflash_lightning.target_head import output_head
from dflash_lightning.target_rules import (
    FINAL,
    check_layer_ids,
    check_mask_token_id,
    reserved_token_ids,
    stop_token_ids,
)
from dflash_lightning.target_spec import TargetSpec


@dataclass
class TargetOutput:
    """What one target forward gives.

    `logits` `[B, n, V]` of the last n positions, `hidden` `[B, S, T*H]` or None.
    """

    logits: Tensor
    hidden: Tensor | None


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
        self.head = output_head(model, self.config)
        self.stop_ids = stop_token_ids(
            getattr(model, "generation_config", None), model.config, tokenizer
        )
        self._apart = False
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

    def text(self, ids: list[int] | Tensor, skip_special_tokens: bool = False) -> str:
        """Return token ids as text.

        Raises:
            UserError: The target came without a tokenizer.
        """
        if self.tokenizer is None:
            raise UserError("model.target.name: this target has no tokenizer")
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def reserved_ids(self) -> dict[int, str]:
        """Return the ids a mask token may not be, with their role."""
        return reserved_token_ids(self.config, self.tokenizer)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Return input embeddings `[..., H]` of token ids, with the target's own scale."""
        return self._embedding(ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int | Tensor = 1,
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
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        layer_ids: Sequence[int],
        position_ids: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the outputs `[B, S, H]` of the given decoder layers, without the head.

        `FINAL` among the ids is the state after the final norm.
        The `input_ids` `[B, S]` are right-padded; or, without a mask, documents one after the
        other, each of which starts where the `position_ids` `[B, S]` start again from 0.
        """
        with _captured([self._layers[i] for i in layer_ids if i != FINAL]) as taps:
            final = self.model.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
            )[0]
        found = iter(taps)
        return [final if i == FINAL else next(found) for i in layer_ids]

    def decoder_layer(self, layer_id: int) -> nn.Module:
        """Return the module of a decoder layer."""
        return self._layers[layer_id]

    def document_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        document_starts: Tensor,
        final: bool = False,
    ) -> Tensor:
        """Return the tapped states `[B, S, T*H]` of rows of documents, none of which sees another.

        Args:
            input_ids: Token ids `[B, S]`, right-padded.
            attention_mask: True for real tokens `[B, S]`.
            document_starts: Where in its row each token's document starts `[B, S]`; padding is a
                document of its own.
            final: Whether to append the final states, `[B, S, (T+1)*H]`.

        Raises:
            UserError: The target doesn't keep documents of one row apart.
        """
        packed = bool((document_starts.bool() & attention_mask).any())
        if packed and not self._apart:
            _check_apart(self)
            self._apart = True
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) - document_starts
        mask, places = (None, positions) if packed else (attention_mask.long(), None)
        layers = [*self.target_layer_ids, *([FINAL] if final else [])]
        return torch.cat(self.features(input_ids, mask, layers, places), dim=-1)


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


def _check_apart(target: Target) -> None:
    """Compare the states of two documents in one row with those of the second by itself.

    Raises:
        UserError: They differ: the target looks across documents.
    """
    ids = torch.arange(8, device=target.device)[None] % target.num_embeddings
    positions, layers = torch.arange(8, device=target.device)[None] % 4, target.target_layer_ids
    together = target.features(ids, None, layers, positions)[-1][:, 4:].float()
    alone = target.features(ids[:, 4:], None, layers)[-1].float()
    if (together - alone).abs().max() > 0.05 * alone.abs().max():
        raise UserError(
            f"data.packing: {type(target.model).__name__} does not keep the documents of one row "
            "apart; set data.packing=false or data.features=store"
        )
