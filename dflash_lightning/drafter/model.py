"""The DFlash drafter: blocks and tapped target states in, hidden states of the blocks out.

See arXiv 2602.06036, section 4. Training and decoding run the same layers; they differ in where the
context's keys and values come from (a whole sequence, or a cache) and in the attention functions
they pass, one a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dflash_lightning.drafter.attention import Attend
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.fused import MLP, RMSNorm, norm_and_rotate
from dflash_lightning.drafter.rope import Rotation, rotation

KeyValue = tuple[Tensor, Tensor]
StreamAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of layer n over the context itself: `(n, q, k, v) -> output`."""


class DrafterAttention(nn.Module):
    """Attention with KV injection: queries from the block, keys and values from context and block.

    The context enters through this layer's own `k_proj` and `v_proj`; it has no query, no output
    and no residual stream.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def key_value(self, hidden: Tensor, by: Rotation) -> KeyValue:
        """Return rotated keys and values `[B, kv_heads, S, head_dim]` of states `[B, S, H]`.

        The states are the context's or the block's.
        """
        values = self._heads(self.v_proj(hidden))
        keys = norm_and_rotate(self._heads(self.k_proj(hidden)), self.k_norm, by, values.dtype)
        return keys, values.transpose(1, 2)

    def forward(self, hidden: Tensor, by: Rotation, context: KeyValue, attend: Attend) -> Tensor:
        """Return the attention output `[B, N*K, H]` of block states `[B, N*K, H]`."""
        k_block, v_block = self.key_value(hidden, by)
        q = norm_and_rotate(self._heads(self.q_proj(hidden)), self.q_norm, by, v_block.dtype)
        k_context, v_context = context
        output = attend(q, k_context, v_context, k_block, v_block)
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DrafterLayer(nn.Module):
    """A pre-norm Qwen3-style layer around `DrafterAttention`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, by: Rotation, context: KeyValue, attend: Attend) -> Tensor:
        """Return the layer's output `[B, N*K, H]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by, context, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Fusion(nn.Module):
    """One map from the tapped states of a position to one state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """Return `[B, S, H]` for tapped states `[B, S, T*H]`."""
        return fuse(self.fc, self.hidden_norm, states)


class MarkovHead(nn.Module):
    """A bias on the logits by the token drafted before: a low-rank table of token pairs."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.markov_rank is not None
        self.before = nn.Embedding(config.vocab_size, config.markov_rank)
        rows = config.draft_vocab_size or config.vocab_size
        self.after = nn.Linear(config.markov_rank, rows, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """Return the bias `[..., Vd]` after target tokens `[...]`."""
        bias: Tensor = self.after(self.before(previous))
        return bias


class Drafter(PreTrainedModel):
    """A block-diffusion drafter, or one of the baselines it is compared with (`drafter.axes`).

    State-dict names are z-lab's, so the weights of the published architecture load there and in
    serving engines. It has no embedding and no head: both are the target's. `draft_ids` `[Vd]`
    lists the target tokens it can say (all of them, in order, where the draft vocabulary is full,
    and then it is not stored). With `gradient_checkpointing`, `forward` keeps only what enters each
    layer in training, and the backward pass runs the layer again; `attend` must be a pure function.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "inputs"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ["DrafterLayer"]  # noqa: RUF012
    config: DrafterConfig
    draft_ids: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        if config.injection != "none" and config.fusion == "shared":
            self.fc = nn.Linear(config.num_taps * size, size, bias=False)
            self.hidden_norm = RMSNorm(size, eps=config.rms_norm_eps)
        if config.fusion == "per_layer":
            self.fusions = nn.ModuleList(Fusion(config) for _ in range(config.num_hidden_layers))
        if config.injection == "input":
            self.in_proj = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.markov = None if config.markov_rank is None else MarkovHead(config)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)

    def context_key_values(self, states: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return each layer's keys and values of the context, for injection `kv`.

        Args:
            states: Tapped target states `[B, S, T*H]`.
            positions: Their absolute positions `[B, S]`.
        """
        by = rotation(positions, self.config)
        if self.config.fusion == "per_layer":
            contexts = [fusion(states) for fusion in self.fusions]
        else:
            contexts = [self.fused(states)] * len(self.layers)
        return [
            layer.self_attn.key_value(context, by)
            for layer, context in zip(self._layers(), contexts, strict=True)
        ]

    def fused(self, states: Tensor) -> Tensor:
        """Return one state `[B, S, H]` a position from its tapped ones `[B, S, T*H]`."""
        return fuse(self.fc, self.hidden_norm, states)

    def enter(self, embedded: Tensor, fused: Tensor | None) -> Tensor:
        """Return the layers' inputs `[..., H]` from token embeddings, with injection `input`.

        Args:
            embedded: Target embeddings of tokens `[..., H]`.
            fused: The fused state that each token enters with `[..., H]`; None but for `input`.
        """
        embedded = embedded.to(self.norm.weight.dtype)
        if fused is None:
            return embedded
        inputs: Tensor = self.in_proj(torch.cat([embedded, fused.to(embedded.dtype)], dim=-1))
        return inputs

    def stream_key_values(
        self, inputs: Tensor, positions: Tensor, attend: StreamAttend
    ) -> list[KeyValue]:
        """Run the layers over the context itself; return each layer's keys and values of it.

        For injection `input` and `none`. The last layer gives its keys and values only.

        Args:
            inputs: From `enter` `[B, S, H]`.
            positions: Absolute positions `[B, S]`.
            attend: Causal attention of layer n over the context.
        """
        by = rotation(positions, self.config)
        found: list[KeyValue] = []

        def over_itself(q: Tensor, _k: Tensor, _v: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append((k, v))
            return attend(len(found) - 1, q, k, v)

        *first, last = self._layers()
        nothing = inputs[:, None, :0]
        for layer in first:
            inputs = layer(inputs, by, (nothing, nothing), over_itself)
        found.append(last.self_attn.key_value(last.input_layernorm(inputs), by))
        return found

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        attend: Attend | Sequence[Attend],
    ) -> Tensor:
        """Return the blocks' final-normed hidden states `[B, N*K, H]`, ready for the target's head.

        Args:
            inputs: Target embeddings of the blocks' input ids `[B, N*K, H]`; see `enter`.
            positions: Absolute position of each slot `[B, N*K]`.
            context: Per layer, the context's keys and values.
            attend: Who sees whom, for all layers or one a layer; see `drafter.attention`.
        """
        by = rotation(positions, self.config)
        hidden = inputs.to(self.norm.weight.dtype)
        attends = attend if isinstance(attend, Sequence) else [attend] * len(self.layers)
        for layer, key_value, over in zip(self.layers, context, attends, strict=True):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = _again_in_backward(layer, hidden, by, key_value, over)
            else:
                hidden = layer(hidden, by, key_value, over)
        output: Tensor = self.norm(hidden)
        return output

    def _layers(self) -> list[DrafterLayer]:
        return cast(list[DrafterLayer], list(self.layers))


_again_in_backward = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Run a layer, keep what entered it; no drafter draws random numbers."""


def fuse(fc: nn.Linear, norm: nn.Module, states: Tensor) -> Tensor:
    """Return `norm(fc(states))` in the weights' dtype, or as autocast has it."""
    if not torch.is_autocast_enabled(states.device.type):
        states = states.to(fc.weight.dtype)
    fused: Tensor = norm(fc(states))
    return fused
