"""The choices a drafter is made of, and which of them don't go together."""

from dataclasses import dataclass
from typing import Literal

from dflash_lightning.data.blocks import Noise
from dflash_lightning.errors import UserError


@dataclass(frozen=True)
class Axes:
    """The architecture's axes; the defaults are DFlash as published (arXiv 2602.06036).

    Args:
        fusion: `shared`: one map from the taps to the context, for all layers. `per_layer`: each
            drafter layer has its own.
        injection: `kv`: the fused target states are every layer's keys and values of the context.
            `input`: they enter with the token embeddings, each token with the state of the position
            before it, the last one known at inference; the layers run over the context themselves.
            `none`: no target states; the layers run over the context's tokens.
        drafting: `block`: one pass drafts the block. `autoregressive`: one causal pass a token;
            with `input`, the drafter's own last state takes the place of the target's.
        denoising_steps: 1: every slot is masked, in training and decoding. n: trained with a random
            share of the slots masked, decoded by n passes that each fix the most confident slots.
        in_block: Whether a slot sees the later slots of its block: `bidirectional` or `causal`.
        sliding_window: In sliding layers a query sees so many positions up to its own; null is all.
        sliding_layers: Layers with the window, counted from 0; null is all of them.
        markov_rank: Rank of a bias on the logits by the token drafted before (DSpark's head); null
            has none.
    """

    fusion: Literal["shared", "per_layer"] = "shared"
    injection: Literal["kv", "input", "none"] = "kv"
    drafting: Literal["block", "autoregressive"] = "block"
    denoising_steps: int = 1
    in_block: Literal["bidirectional", "causal"] = "bidirectional"
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None
    markov_rank: int | None = None

    def check(
        self, num_layers: int, block_size: int, gradient_checkpointing: bool = False
    ) -> "Axes":
        """Return self.

        Raises:
            UserError: A value is out of range, or two values make no sense together.
        """
        for key, problem in self._problems(num_layers, block_size, gradient_checkpointing):
            raise UserError(f"model.{'axes.' if hasattr(self, key) else ''}{key}: {problem}")
        return self

    @property
    def short_name(self) -> str:
        """What is not published DFlash, as part of a run's name: `-input-ar`; empty if all is."""
        layers = "" if self.sliding_layers is None else "l" + "".join(map(str, self.sliding_layers))
        words = (
            (self.fusion == "per_layer", "perlayer"),
            (self.injection != "kv", self.injection),
            (self.drafting == "autoregressive", "ar"),
            (self.denoising_steps > 1, f"steps{self.denoising_steps}"),
            (self.in_block == "causal", "causal"),
            (self.sliding_window is not None, f"w{self.sliding_window}{layers}"),
            (self.markov_rank is not None, f"markov{self.markov_rank}"),
        )
        return "".join(f"-{word}" for applies, word in words if applies)

    def _problems(
        self, num_layers: int, block_size: int, gradient_checkpointing: bool
    ) -> list[tuple[str, str]]:
        autoregressive, iterative = self.drafting == "autoregressive", self.denoising_steps > 1
        window, layers = self.sliding_window, self.sliding_layers
        outside = [i for i in layers or [] if not 0 <= i < num_layers]
        rules = (
            (
                block_size < 2,
                "block_size",
                f"needs at least 2 (an anchor and one slot), got {block_size}",
            ),
            (num_layers < 1, "num_layers", f"needs at least 1, got {num_layers}"),
            (
                gradient_checkpointing and autoregressive and self.injection == "input",
                "gradient_checkpointing",
                "each pass of autoregressive drafting with injection input goes on from the one "
                "before, and can't be run again alone: leave it false",
            ),
            (
                not 1 <= self.denoising_steps < block_size,
                "denoising_steps",
                f"needs 1 to {block_size - 1} (a slot a step), got {self.denoising_steps}",
            ),
            (
                self.fusion == "per_layer" and self.injection != "kv",
                "fusion",
                f"per_layer mixes what each layer is given by injection kv; with "
                f"{self.injection} there is one place or none: leave it shared",
            ),
            (
                autoregressive and self.injection == "none",
                "drafting",
                "autoregressive needs the target's states: take injection kv or input",
            ),
            (
                autoregressive and iterative,
                "denoising_steps",
                "autoregressive drafting has no masks to lift: leave it at 1",
            ),
            (
                autoregressive and self.in_block == "causal",
                "in_block",
                "autoregressive drafting is causal anyway: leave it out",
            ),
            (
                self.in_block == "causal" and iterative,
                "denoising_steps",
                "in a causal block no slot sees what a later one became: take "
                "in_block bidirectional",
            ),
            (
                self.markov_rank is not None and autoregressive,
                "markov_rank",
                "autoregressive drafting sees the token before anyway: leave it null",
            ),
            (
                self.markov_rank is not None and iterative,
                "markov_rank",
                "the markov head walks from slot to slot, denoising does not: take one of them",
            ),
            (
                self.markov_rank is not None and self.markov_rank < 1,
                "markov_rank",
                f"needs at least 1, got {self.markov_rank}",
            ),
            (
                window is not None and window < block_size,
                "sliding_window",
                f"needs at least the block size of {block_size}, got {window}",
            ),
            (
                layers is not None and window is None,
                "sliding_layers",
                "needs a sliding_window",
            ),
            (
                bool(outside),
                "sliding_layers",
                f"there are layers 0 to {num_layers - 1}, got {outside}",
            ),
        )
        return [(key, problem) for wrong, key, problem in rules if wrong]


def noise_of(drafting: str, denoising_steps: int) -> Noise:
    """Return what the slots of training blocks hold."""
    if drafting == "autoregressive":
        return "tokens"
    return "random" if denoising_steps > 1 else "masked"
