"""The drafter's configuration.

Everything a checkpoint needs to be rebuilt and to be refused by the wrong target.
"""

from dataclasses import asdict, fields
from typing import Any

from transformers import PreTrainedConfig

from dflash_lightning.drafter.axes import Axes
from dflash_lightning.errors import UserError


class DrafterConfig(PreTrainedConfig):
    """Shape of a DFlash drafter; sizes follow the target unless said otherwise.

    Args:
        hidden_size: H, the target's.
        intermediate_size: Width of the SwiGLU MLP.
        num_hidden_layers: Drafter layers (depth); independent of the number of taps.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Size of one head.
        rms_norm_eps: Epsilon of every RMSNorm.
        rope_parameters: As in transformers 5; `rope_theta` has no default, since a wrong one trains
            well and drafts badly.
        max_position_embeddings: Context window of the target.
        vocab_size: Rows of the target's embedding.
        draft_vocab_size: Target tokens the drafter can say; null means all.
        block_size: K, the anchor included.
        mask_token_id: Embedding row of a masked slot.
        target_layer_ids: Tapped target layers.
        num_target_layers: L, decoder layers of the target.
        target_name: Where the target came from; it is looked for there again.
        target_revision: Its hub revision; null is the default branch.
        target_dtype: Precision in which the target ran.
        target_fingerprint: Identity of the target's weights.
        fusion: This and the following as in `drafter.axes.Axes`.
        injection: See there.
        drafting: See there.
        denoising_steps: See there.
        in_block: See there.
        sliding_window: See there.
        sliding_layers: See there.
        markov_rank: See there.
    """

    model_type = "dflash_drafter"

    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 5
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 0
    vocab_size: int = 0
    draft_vocab_size: int | None = None
    block_size: int = 16
    mask_token_id: int = -1
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 0
    target_name: str = ""
    target_revision: str | None = None
    target_dtype: str = "bfloat16"
    target_fingerprint: str = ""
    fusion: str = "shared"
    injection: str = "kv"
    drafting: str = "block"
    denoising_steps: int = 1
    in_block: str = "bidirectional"
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None
    markov_rank: int | None = None

    @property
    def num_taps(self) -> int:
        """T, the number of tapped target layers."""
        return len(self.target_layer_ids or [])

    @property
    def autoregressive(self) -> bool:
        """Whether each drafted token takes a pass of its own."""
        return self.drafting == "autoregressive"

    @property
    def causal(self) -> bool:
        """Whether a slot sees no later slot of its block."""
        return self.autoregressive or self.in_block == "causal"

    def windows(self) -> list[int | None]:
        """Return each layer's sliding window in positions, None where it sees everything."""
        layers = range(self.num_hidden_layers)
        sliding = set(layers if self.sliding_layers is None else self.sliding_layers)
        return [self.sliding_window if layer in sliding else None for layer in layers]


ARCHITECTURE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "draft_vocab_size",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_fingerprint",
    *(axis.name for axis in fields(Axes)),
)
"""What a resumed or evaluated checkpoint must share with the experiment."""


def drafter_config(
    target_config: Any,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: list[int],
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    target_name: str = "",
    target_revision: str | None = None,
    target_dtype: str = "bfloat16",
    target_fingerprint: str = "",
    axes: Axes = Axes(),  # noqa: B008
) -> DrafterConfig:
    """Return the configuration of a drafter for a target with text config `target_config`.

    Raises:
        UserError: A size is out of range, or the target has no RoPE base to take over.
    """
    axes.check(num_layers, block_size)
    heads = int(target_config.num_attention_heads)
    return DrafterConfig(
        hidden_size=target_config.hidden_size,
        intermediate_size=intermediate_size or target_config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        rms_norm_eps=getattr(target_config, "rms_norm_eps", None) or 1e-6,
        rope_parameters=rope_of(target_config),
        max_position_embeddings=target_config.max_position_embeddings,
        vocab_size=target_config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        num_target_layers=target_config.num_hidden_layers,
        target_name=target_name,
        target_revision=target_revision,
        target_dtype=target_dtype,
        target_fingerprint=target_fingerprint,
        **asdict(axes),
    )


def rope_of(target_config: Any) -> dict[str, Any]:
    """Return the target's RoPE parameters.

    Those of full attention where layer types differ (Gemma 3).

    Raises:
        UserError: The target states no `rope_theta`.
    """
    found = dict(getattr(target_config, "rope_parameters", None) or {})
    found = dict(found.get("full_attention", found))
    if "rope_theta" not in found:
        raise UserError(
            f"model.target.name: the config of {target_config.model_type} states no "
            "rope_parameters.rope_theta; a drafter trained with a guessed base would draft badly"
        )
    return found


def architecture_differences(saved: DrafterConfig, asked: DrafterConfig) -> list[str]:
    """Return one `key: saved -> asked` per architecture key that differs."""
    return [
        f"{key}: {getattr(saved, key)} -> {getattr(asked, key)}"
        for key in ARCHITECTURE_KEYS
        if getattr(saved, key) != getattr(asked, key)
    ]
