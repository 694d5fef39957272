"""One training step: ours against the same loss as a plain trainer computes it, in one run.

    python benchmarks/train_step.py                                   # SmolLM2-135M's shapes, small
    python benchmarks/train_step.py --length 1024 --anchors 256 --dtype bfloat16 --vocab 8192
    python benchmarks/train_step.py --quick true                      # seconds, for a look

The reference is in this file: a dense mask of all slots over all context and all slots, keys and
values repeated for grouped queries, all K slots through the head, float32 logits, chunks of 128
blocks recomputed under checkpointing. Both have the same weights, batch and optimizer; loss and
gradients are compared in float32 before anything is timed. A step is forward, backward, clipping
and AdamW; the target's states are given, as they are with a store.

Ours runs with freed memory kept (`dflash_lightning.memory`), the reference with what the C library
does by itself, or with `--same_allocator true` like ours.

Memory is the peak of the process's resident set during one step (the kernel's high-water mark, set
back before it) above what weights, gradients and optimizer state already take.
"""

import ctypes
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lightning.budget import Schedule
from dflash_lightning.data.blocks import Batch
from dflash_lightning.drafter.attention import Visibility, dense_mask
from dflash_lightning.drafter.config import drafter_config
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.rope import rotate, rotation
from dflash_lightning.drafter.training import training_hidden
from dflash_lightning.flops import batch_flops
from dflash_lightning.memory import MMAP_THRESHOLD, TRIM_THRESHOLD, keep_freed_memory
from dflash_lightning.objective import Objective
from dflash_lightning.optimizer import adamw_with_cosine
from dflash_lightning.position_weights import ExpWeights
from dflash_lightning.slot_losses import DataToken
from dflash_lightning.target import Target

BLOCKS_PER_CHECKPOINT = 128
Step = Callable[[], Tensor]


def main(
    length: int = 512,
    anchors: int = 64,
    block_size: int = 16,
    layers: int = 5,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    vocab: int | None = None,
    hidden_size: int = 576,
    target_vocab: int = 49_152,
    repeats: int = 5,
    loss_chunk: int | None = None,
    gradient_checkpointing: bool = False,
    only: Literal["ours", "reference"] | None = None,
    profile: bool = False,
    quick: bool = False,
    device: str = "cpu",
    compile: bool = False,
    memory: bool = True,
    same_allocator: bool = False,
    out: str | None = None,
) -> dict[str, Any]:
    """Measure one training step.

    Args:
        length: S, tokens of the sequence.
        anchors: N, blocks.
        block_size: K.
        layers: Drafter layers; 5 layers of the target are tapped.
        dtype: bfloat16 is mixed precision: float32 weights and optimizer state.
        vocab: Size of the draft vocabulary; null is the whole one, V.
        hidden_size: H; heads of 64, three queries to a key, an MLP of 8/3 H.
        target_vocab: V.
        repeats: Timed steps of each, interleaved, after one untimed.
        loss_chunk: Slots whose logits exist at once; null takes the module's default.
        gradient_checkpointing: Let ours run each layer again in the backward pass.
        only: Time just one of the two.
        profile: Print where a step of ours goes by operation instead.
        quick: A small shape, whatever else is said.
        device: Where.
        compile: Compile the drafter of ours.
        memory: Measure memory too, in steps of its own.
        same_allocator: Let the reference keep freed memory too.
        out: Write the figures here as JSON.
    """
    if quick:
        length, anchors, block_size, layers, hidden_size, target_vocab = 48, 8, 4, 2, 192, 512
        vocab = None if vocab is None else 128
    torch.manual_seed(0)
    place = torch.device(device)
    sizes = hidden_size, target_vocab, layers, block_size
    small = bench(*sizes, vocab, "float32", place, min(length, 256), min(anchors, 32), loss_chunk)
    difference = compare(small)
    del small
    work = bench(*sizes, vocab, dtype, place, length, anchors, loss_chunk)
    work.same_allocator = same_allocator
    work.drafter.gradient_checkpointing = gradient_checkpointing
    if compile:
        work.drafter.compile()
    losses = {"ours": work.ours, "reference": work.reference}
    if only is not None:
        losses = {only: losses[only]}
    steps = {name: work.step(loss) for name, loss in losses.items()}
    for step in steps.values():
        step()
    if profile:
        show_profile(steps["ours"])
        return {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = [matmul_peak(place, getattr(torch, dtype))]
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(timed(step, place))
        peaks.append(matmul_peak(place, getattr(torch, dtype)))
    peak_bytes = {}
    for name, loss in losses.items() if memory else ():
        work.step(loss, keep_gradients=True)()
        peak_bytes[name] = peak_extra(work.step(loss, keep_gradients=True), place)
    times, peak = {name: median(found) for name, found in seconds.items()}, max(peaks)
    flops = batch_flops(work.drafter.config, work.batch)
    floor = flops / peak
    figures: dict[str, Any] = {
        "shape": {"S": length, "N": anchors, "K": block_size, "H": hidden_size, "V": target_vocab},
        "layers": layers,
        "draft_vocab": vocab,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "same_allocator": same_allocator,
        "gradient_checkpointing": gradient_checkpointing,
        "largest difference in float32": difference,
        "useful_gflop": flops / 1e9,
        "matmul_peak_gflops": peak / 1e9,
        "floor_s": floor,
        "step_s": times,
        "step_s_all": seconds,
        "over_the_floor": {name: t / floor for name, t in times.items()},
        "peak_extra_mb": {name: size / 1e6 for name, size in peak_bytes.items()},
    }
    if only is None:
        figures["speed, ours over reference"] = times["reference"] / times["ours"]
    if len(peak_bytes) == 2:
        share = peak_bytes["ours"] / peak_bytes["reference"]
        figures["memory, ours over reference"] = share
    text = json.dumps(figures, indent=1)
    if out is not None:
        Path(out).write_text(text + "\n")
    print(text)
    return figures


# ---- what is measured ----------------------------------------------------------------------------


class Bench:
    """A drafter, the target it borrows embedding and head from, a batch, and two losses of it."""

    def __init__(
        self, drafter: Drafter, target: Target, batch: Batch, dtype: str, chunk: int | None
    ) -> None:
        self.drafter, self.target, self.batch, self.dtype = drafter, target, batch, dtype
        weights = ExpWeights()
        self.objective = Objective(drafter, target, DataToken(), weights, chunk or 512)
        slots = torch.ones(1, batch.noise_ids.shape[-1] - 1, device=batch.labels.device)
        self.weights = weights(slots.bool(), None)
        made = adamw_with_cosine(drafter, 6e-4, (0.9, 0.999), 0.0, Schedule(1000, 40, float))
        self.optimizer: Any = made["optimizer"]
        self.same_allocator = False

    def ours(self) -> Tensor:
        batch, states = self.batch, self.batch.target_hidden
        hidden = training_hidden(self.drafter, self.target, batch, states, "auto")
        output, denominator, _ = self.objective(hidden, batch, states)
        return output.numerator / denominator

    def reference(self) -> Tensor:
        hidden = reference_hidden(self.drafter, self.target, self.batch)
        return reference_loss(hidden, self.batch, self.objective.draft_head.weight, self.weights)

    def backward(self, loss: Callable[[], Tensor]) -> Tensor:
        mixed = self.dtype == "bfloat16"
        kind = self.batch.labels.device.type
        with torch.autocast(kind, torch.bfloat16) if mixed else nullcontext():
            value = loss()
        value.backward()
        return value.detach()

    def step(self, loss: Callable[[], Tensor], keep_gradients: bool = False) -> Step:
        def run() -> Tensor:
            allocator(keep=self.same_allocator or loss == self.ours)
            value = self.backward(loss)
            nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not keep_gradients)
            return value

        return run


def bench(
    hidden_size: int,
    target_vocab: int,
    layers: int,
    block_size: int,
    vocab: int | None,
    dtype: str,
    device: torch.device,
    length: int,
    anchors: int,
    chunk: int | None,
) -> Bench:
    """Build a drafter and a random target, and draw a batch of one sequence."""
    heads, taps = hidden_size // 64, [1, 2, 3, 4, 5]
    config = LlamaConfig(
        vocab_size=target_vocab,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads // 4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).to(device, getattr(torch, dtype))
    model.model.layers = nn.ModuleList()  # only its embedding and its head are used
    made = drafter_config(
        config,
        num_layers=layers,
        block_size=block_size,
        mask_token_id=target_vocab - 1,
        target_layer_ids=taps,
        draft_vocab_size=vocab,
        target_name="random",
        target_fingerprint="random",
    )
    target = borrowed(model, config, target_vocab)
    drafter = Drafter(made).to(device).train()
    generator = torch.Generator().manual_seed(1)
    batch = random_batch(length, anchors, block_size, hidden_size, vocab or target_vocab, generator)
    batch = Batch(*(None if x is None else x.to(device) for x in batch))
    assert batch.target_hidden is not None
    states = batch.target_hidden.to(getattr(torch, dtype))
    return Bench(drafter, target, batch._replace(target_hidden=states), dtype, chunk)


def borrowed(model: LlamaForCausalLM, config: LlamaConfig, target_vocab: int) -> Target:
    """Return what a target lends: embedding and head of `model`."""
    from types import SimpleNamespace

    from dflash_lightning.target_head import output_head

    model.requires_grad_(False)
    found: Any = SimpleNamespace(
        embed=model.get_input_embeddings(),
        head=output_head(model, config),
        num_embeddings=target_vocab,
    )
    return found


def random_batch(
    length: int, anchors: int, size: int, hidden: int, vocab: int, generator: torch.Generator
) -> Batch:
    """Return one row: anchors without replacement over the whole sequence, ascending."""

    def below(bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=generator)

    chosen = torch.randperm(length - size, generator=generator)[:anchors].sort().values + 1
    places = chosen[:, None] + torch.arange(size)
    ids = below(vocab, 1, length)
    noise = torch.full((1, anchors, size), vocab - 1)
    noise[0, :, 0] = ids[0, chosen]
    mask = torch.ones(1, anchors, size, dtype=torch.bool)
    mask[..., 0] = False
    every = torch.ones(1, length, dtype=torch.bool)
    return Batch(
        input_ids=ids,
        attention_mask=every,
        loss_mask=every,
        anchor_positions=chosen[None],
        block_keep_mask=torch.ones(1, anchors, dtype=torch.bool),
        noise_ids=noise,
        labels=ids[0, places][None],
        label_mask=mask,
        position_ids=places[None],
        document_starts=torch.zeros(1, length, dtype=torch.int64),
        target_hidden=torch.randn(1, length, 5 * hidden, generator=generator),
    )


# ---- the reference -------------------------------------------------------------------------------


def norm(x: Tensor, module: Any) -> Tensor:
    """RMSNorm as model code writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * wide.to(x.dtype)


def reference_hidden(drafter: Any, target: Target, batch: Batch) -> Tensor:
    """Return `[B, N, K, H]`: every slot sees all context and all slots, through a dense mask."""
    _, blocks, size = batch.noise_ids.shape
    states = batch.target_hidden
    assert states is not None
    length = states.shape[1]
    mask = dense_mask(Visibility(batch.anchor_positions, size, length))[:, None]
    where = torch.arange(length, device=states.device)[None]
    by = rotation(torch.cat([where, batch.position_ids.flatten(1)], dim=1), drafter.config)
    by_query = tuple(x[:, :, length:] for x in by)
    if not torch.is_autocast_enabled(states.device.type):
        states = states.to(drafter.fc.weight.dtype)
    context = norm(drafter.fc(states), drafter.hidden_norm)
    hidden = target.embed(batch.noise_ids).flatten(1, 2).to(drafter.norm.weight.dtype)
    for layer in drafter.layers:
        own, inputs = layer.self_attn, norm(hidden, layer.input_layernorm)
        both = torch.cat([context.to(inputs.dtype), inputs], dim=1)

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, 64)).transpose(1, 2)

        v = heads(own.v_proj(both))
        q = rotate(norm(heads(own.q_proj(inputs)), own.q_norm), by_query, v.dtype)
        k = rotate(norm(heads(own.k_proj(both)), own.k_norm), by, v.dtype)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + own.o_proj(attended.transpose(1, 2).flatten(2))
        inputs, mlp = norm(hidden, layer.post_attention_layernorm), layer.mlp
        hidden = hidden + mlp.down_proj(silu(mlp.gate_proj(inputs)) * mlp.up_proj(inputs))
    return norm(hidden, drafter.norm).unflatten(1, (blocks, size))


def reference_loss(hidden: Tensor, batch: Batch, head: Tensor, slots: Tensor) -> Tensor:
    """Return the weighted mean: all K slots, float32 logits, recomputed in the backward pass."""
    weights = torch.cat([slots.new_zeros(1), slots.flatten()]) * batch.label_mask

    def of_chunk(states: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = linear(states.to(head.dtype), head).float()
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()

    parts = zip(
        *(x.split(BLOCKS_PER_CHECKPOINT, dim=1) for x in (hidden, batch.labels, weights)),
        strict=True,
    )
    total = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
    return torch.stack(total).sum() / weights.sum()


# ---- measuring -----------------------------------------------------------------------------------


def compare(work: Bench) -> float:
    """Return the largest relative difference of loss and gradients between the two.

    Raises:
        AssertionError: It is over 1e-4.
    """
    found = []
    for loss in (work.ours, work.reference):
        value = work.backward(loss)
        found.append([value, *(p.grad.clone() for p in work.drafter.parameters())])
        work.optimizer.zero_grad()
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    assert max(apart) < 1e-4, f"ours and the reference differ by {max(apart):.1e}"
    return max(apart)


def timed(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of the fastest of some matmuls of shapes like a step's."""
    best = 0.0
    for m, n, k in ((1024, 1536, 576), (1024, 4096, 1024), (2048, 2048, 2048)):
        a, b = (
            torch.randn(m, k, device=device).to(dtype),
            torch.randn(n, k, device=device).to(dtype),
        )
        for _ in range(6):
            best = max(best, 2 * m * n * k / timed(lambda a=a, b=b: a @ b.T, device))
    return best


def peak_extra(step: Step, device: torch.device) -> int:
    """Return the bytes a step takes at its peak beyond what was there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def allocator(keep: bool) -> None:
    """Keep freed memory, as the package's training does, or set what glibc grows to by itself."""
    if keep:
        keep_freed_memory()
    else:
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(TRIM_THRESHOLD, 64 << 20)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def show_profile(step: Step) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
