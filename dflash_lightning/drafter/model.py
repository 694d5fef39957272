"""The DFlash drafter: blocks and tapped target states in, hidden states of the blocks out.

See arXiv 2602.06036, section 4. Training and decoding run the same layers; they differ in where the
context's keys and values come from (a whole sequence, or a cache) and in the attention function
they pass.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from dflash_lightning.drafter.attention import Attend
from dflash_lightning.drafter.config import DrafterConfig
from dflash_lightning.drafter.rope import Rotation, rotate, rotation

KeyValue = tuple[Tensor, Tensor]


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
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def key_value(self, hidden: Tensor, by: Rotation) -> KeyValue:
        """Return rotated keys and values `[B, kv_heads, S, head_dim]` of states `[B, S, H]`.

        The states are the context's or the block's.
        """
        values = self._heads(self.v_proj(hidden))
        keys = self.k_norm(self._heads(self.k_proj(hidden)))
        return rotate(keys, by, values.dtype), values

    def forward(self, hidden: Tensor, by: Rotation, context: KeyValue, attend: Attend) -> Tensor:
        """Return the attention output `[B, N*K, H]` of block states `[B, N*K, H]`."""
        k_block, v_block = self.key_value(hidden, by)
        q = rotate(self.q_norm(self._heads(self.q_proj(hidden))), by, v_block.dtype)
        k_context, v_context = context
        output = attend(q, k_context, v_context, k_block, v_block)
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DrafterLayer(nn.Module):
    """A pre-norm Qwen3-style layer around `DrafterAttention`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, by: Rotation, context: KeyValue, attend: Attend) -> Tensor:
        """Return the layer's output `[B, N*K, H]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by, context, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Drafter(PreTrainedModel):
    """A block-diffusion drafter.

    State-dict names are z-lab's, so its weights load there and in serving engines. It has no
    embedding and no head: both are the target's. `draft_ids` `[Vd]` lists the target tokens it can
    say (all of them, in order, where the draft vocabulary is full, and then it is not stored).
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "noise_embedding"
    supports_gradient_checkpointing = False
    _no_split_modules = ["DrafterLayer"]  # noqa: RUF012
    config: DrafterConfig
    draft_ids: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Qwen3RMSNorm):
            nn.init.ones_(module.weight)

    def context_key_values(self, target_hidden: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return each layer's keys and values of the context.

        Args:
            target_hidden: Tapped target states `[B, S, T*H]`.
            positions: Their absolute positions `[B, S]`.
        """
        if not torch.is_autocast_enabled(target_hidden.device.type):
            target_hidden = target_hidden.to(self.fc.weight.dtype)
        context = self.hidden_norm(self.fc(target_hidden))
        by = rotation(positions, self.config)
        layers = cast(Iterable[DrafterLayer], self.layers)
        return [layer.self_attn.key_value(context, by) for layer in layers]

    def forward(
        self,
        noise_embedding: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        attend: Attend,
    ) -> Tensor:
        """Return the blocks' final-normed hidden states `[B, N*K, H]`, ready for the target's head.

        Args:
            noise_embedding: Target embeddings of the blocks' input ids `[B, N*K, H]`.
            positions: Absolute position of each slot `[B, N*K]`.
            context: Per layer, keys and values from `context_key_values`.
            attend: Who sees whom; see `drafter.attention`.
        """
        by = rotation(positions, self.config)
        hidden = noise_embedding.to(self.fc.weight.dtype)
        for layer, key_value in zip(self.layers, context, strict=True):
            hidden = layer(hidden, by, key_value, attend)
        output: Tensor = self.norm(hidden)
        return output
