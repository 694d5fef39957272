"""The target's output head, as the drafter borrows it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_lightning.errors import UserError


@dataclass(frozen=True)
class OutputHead:
    """The target's output head, borrowed by reference.

    Weight `[V, H]`, bias `[V]`, scale and soft-cap of the logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether backward looks at the logits again, so that they must stay as they are."""
        return self.softcap is not None

    def __call__(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Return logits `[..., V]` in the weight's dtype for final-normed states `[..., H]`.

        `previous`, the token before each, is for heads that look at it; this one doesn't.
        """
        rows = hidden.to(self.weight.dtype).reshape(-1, hidden.shape[-1])  # a slice: 30 x slower
        logits = nn.functional.linear(rows, self.weight, self.bias).view(*hidden.shape[:-1], -1)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def rows(self, ids: Tensor) -> "OutputHead":
        """Return the head over the vocabulary rows `ids` `[Vd]` only."""
        bias = None if self.bias is None else self.bias[ids].contiguous()
        return replace(self, weight=self.weight[ids].contiguous(), bias=bias)


def output_head(model: PreTrainedModel, config: Any) -> OutputHead:
    """Return the head of a causal LM, with the scale and soft-cap that its config names.

    Raises:
        UserError: The model has none.
    """
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
