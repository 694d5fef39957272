"""The target's memory of a batch of sequences: a key/value cache whose rows have own lengths.

New states of row b are written behind its committed ones, over whatever a rejected draft left
there; rolling back is a smaller length. A row's stale states are hidden by the mask.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from dflash_lightning.errors import UserError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_GROWTH = 64


class Rows:
    """Committed lengths of the rows of a batch, shared by all layers of a cache.

    Args:
        batch: B.
        device: Where the lengths live.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest, self.even = 0, True

    def set(self, lengths: Tensor) -> None:
        """Take new committed lengths `[B]`."""
        self.lengths = lengths
        known = lengths.tolist()
        self.longest, self.even = max(known, default=0), len(set(known)) <= 1


class RowBuffer:
    """States `[B, heads, capacity, head_dim]`, written at each row's own place; grows as needed."""

    def __init__(self) -> None:
        self.data: Tensor | None = None

    def write(self, states: Tensor, rows: Rows) -> Tensor:
        """Put `states` `[B, heads, n, head_dim]` behind each row's committed ones.

        Returns:
            All states `[B, heads, longest + n, head_dim]`.
        """
        end = rows.longest + states.shape[2]
        if self.data is None or self.data.shape[2] < end:
            self._grow(states, end)
        assert self.data is not None
        if rows.even:
            self.data[:, :, rows.longest : end] = states
        else:
            places = rows.lengths[:, None] + torch.arange(states.shape[2], device=states.device)
            self.data.scatter_(2, places[:, None, :, None].expand_as(states), states)
        return self.data[:, :, :end]

    def read(self, rows: Rows) -> Tensor:
        """Return states `[B, heads, longest, head_dim]`, valid up to each row's length."""
        assert self.data is not None
        return self.data[:, :, : rows.longest]

    def keep(self, index: Tensor) -> None:
        """Keep only the rows in `index`."""
        if self.data is not None:
            self.data = self.data[index]

    def _grow(self, states: Tensor, end: int) -> None:
        batch, heads, _, size = states.shape
        grown = states.new_zeros(batch, heads, end + max(_GROWTH, end // 2), size)
        if self.data is not None:
            grown[:, :, : self.data.shape[2]] = self.data
        self.data = grown


class _RowLayer(DynamicLayer):
    """One decoder layer's keys and values, for transformers' attention."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.buffers = RowBuffer(), RowBuffer()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new states and return all of them."""
        self.is_initialized = True
        return (
            self.buffers[0].write(key_states, self.rows),
            self.buffers[1].write(value_states, self.rows),
        )

    def get_seq_length(self) -> int:
        """Return the longest row's committed length."""
        return self.rows.longest


class RowCache(Cache):
    """The target's cache of a batch; pass `masks` and `position_ids` with it.

    Args:
        model: The target's model; its configuration says which layers slide.
        batch: B, the number of rows.

    Raises:
        UserError: The target keeps a recurrent state, which can't be rolled back.
    """

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        config: Any = model.config.get_text_config(decoder=True)
        check_rollback(config, model._is_stateful)
        self.last_position = config.max_position_embeddings - 1
        self.rows = Rows(batch, model.device)
        self.window: int | None = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = ["full_attention" if self.window is None else "sliding_attention"]
        self.kinds = set(kinds)
        self.mapped = getattr(config, "layer_types", None) is not None
        layers = [_RowLayer(self.rows) for _ in range(config.num_hidden_layers)]
        self.buffers = [buffer for layer in layers for buffer in layer.buffers]
        super().__init__(layers=[*layers])

    def masks(self, count: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return who sees whom when each row gets `count` new tokens.

        Additive, `[B, 1, count, end]`: one mask, or one per layer type where the config lists them.
        """
        rows = self.rows
        end = rows.longest + count
        place = rows.lengths[:, None] + torch.arange(count, device=rows.lengths.device)
        key = torch.arange(end, device=rows.lengths.device)
        found = {}
        for kind in self.kinds:
            visible = key <= place[..., None]
            if kind == "sliding_attention" and self.window is not None:
                visible &= key > place[..., None] - self.window
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            hidden.masked_fill_(~visible, torch.finfo(dtype).min)
            found[kind] = hidden[:, None]
        return found if self.mapped else next(iter(found.values()))

    def positions(self, count: int) -> Tensor:
        """Return the positions `[B, count]` of each row's next `count` tokens.

        Those beyond the target's window, where a row gets more tokens than it has room for, are
        held at its end: a RoPE that depends on the highest position must not see them.
        """
        steps = torch.arange(count, device=self.rows.lengths.device)
        return (self.rows.lengths[:, None] + steps).clamp(max=self.last_position)

    def keep(self, index: Tensor) -> None:
        """Keep only the rows in `index` `[b]`."""
        for buffer in self.buffers:
            buffer.keep(index)
        self.rows.set(self.rows.lengths[index])


def check_rollback(config: Any, stateful: bool = False) -> None:
    """Refuse a target whose memory can't forget rejected tokens.

    Args:
        config: The target's text config.
        stateful: Whether transformers says that the model keeps a recurrent state.

    Raises:
        UserError: For example a linear-attention or state-space target.
    """
    foreign = set(getattr(config, "layer_types", None) or []) - ATTENTION_LAYERS
    recurrent = stateful or any(
        hasattr(config, key) for key in ("ssm_cfg", "state_size", "mamba_d_state")
    )
    if foreign or recurrent:
        kinds = ", ".join(sorted(foreign)) or "a recurrent state"
        raise UserError(
            f"model.target.name: {config.model_type} has layers ({kinds}) whose memory can't be "
            "rolled back, so it can't verify drafts"
        )
