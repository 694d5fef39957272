"""A drafter's memory of the committed tokens: keys and values of rows with own lengths."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_lightning.decoding.cache import RowBuffer, Rows
from dflash_lightning.drafter.attention import Attend, full_attention
from dflash_lightning.drafter.model import Drafter, KeyValue
from dflash_lightning.target import Target


class DraftContext:
    """The context of a batch of rows, as the drafter's layers see it; it holds no block's keys.

    Args:
        drafter: Says how target states or tokens become keys and values.
        target: Gives the embedding.
        batch: B.
    """

    def __init__(self, drafter: Drafter, target: Target, batch: int) -> None:
        self.drafter, self.target = drafter, target
        self.rows = Rows(batch, target.device)
        self.windows = drafter.config.windows()
        self.known: Tensor | None = None
        if drafter.config.injection == "input":
            self.known = torch.zeros(
                batch, drafter.config.hidden_size, dtype=drafter.dtype, device=target.device
            )
        self._buffers = [(RowBuffer(), RowBuffer()) for _ in self.windows]

    def observe(self, hidden: Tensor, counts: Tensor, tokens: Tensor) -> None:
        """Take newly committed positions; see `Proposer.observe`."""
        places = self.rows.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        if self.drafter.config.injection == "kv":
            new = self.drafter.context_key_values(hidden, places)
        else:
            known = None
            if self.known is not None:
                fused = torch.cat([self.known[:, None], self.drafter.fused(hidden)], dim=1)
                known = fused[:, :-1]
                self.known = fused[torch.arange(len(fused), device=fused.device), counts]
            inputs = self.drafter.enter(self.target.embed(tokens), known)
            new = self.drafter.stream_key_values(
                inputs, places, lambda layer, *qkv: self._over_itself(layer, places, *qkv)
            )
        for layer, states in enumerate(new):
            self._write(layer, *states)
        self.rows.set(self.rows.lengths + counts)

    def key_values(self) -> list[KeyValue]:
        """Return each layer's keys and values of the context `[B, kv_heads, longest, head_dim]`."""
        return [(k.read(self.rows), v.read(self.rows)) for k, v in self._buffers]

    def keep(self, index: Tensor) -> None:
        """Keep only the rows in `index`."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.keep(index)
        if self.known is not None:
            self.known = self.known[index]
        self.rows.set(self.rows.lengths[index])

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> KeyValue:
        k, v = self._buffers[layer]
        return k.write(keys, self.rows), v.write(values, self.rows)

    def _over_itself(
        self, layer: int, places: Tensor, q: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        keys, values = self._write(layer, new_keys, new_values)
        index = torch.arange(keys.shape[2], device=keys.device)
        visible = index <= places[..., None]
        if (window := self.windows[layer]) is not None:
            visible &= index > places[..., None] - window
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=visible[:, None], enable_gqa=True
        )


def slot_attention(rows: Rows, first: int, count: int, causal: bool, window: int | None) -> Attend:
    """Attend from slots `first .. first + count - 1` of each row's block.

    To the row's own context, and to the block's slots up to the last of these: the rule of
    `drafter.attention`.
    """
    if rows.even and window is None and (count == 1 or not causal):
        return full_attention
    device = rows.lengths.device
    query = torch.arange(first, first + count, device=device)
    slot = torch.arange(first + count, device=device)
    place = rows.lengths[:, None, None] + query[:, None]
    key = torch.arange(rows.longest, device=device)
    context = (key < rows.lengths[:, None, None]).expand(-1, count, -1)
    block = torch.ones(count, first + count, dtype=torch.bool, device=device)
    if causal:
        block &= slot <= query[:, None]
    if window is not None:
        context = context & (key > place - window)
        block &= slot > query[:, None] - window
    mask = torch.cat([context, block.expand(len(context), -1, -1)], dim=-1)[:, None]

    def attend(
        q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        keys = torch.cat([k_context, k_block], dim=2)
        values = torch.cat([v_context, v_block], dim=2)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return attend
