"""Trains the lab's target: a small Llama on Python source text that is on this machine anyway.

    OMP_NUM_THREADS=1 python experiments/lab/train.py --minutes 100 --work lab_work

Its text is the standard library, without the held-out files of `dflash_lightning.data.stdlib`, and
every other `.py` file of the environment. Killed and started again it goes on.
"""

import argparse
import csv
import hashlib
import importlib.metadata
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_lightning.data.stdlib import source_text, stdlib_files, stdlib_folder

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>"]
PAD, BOS, EOS, MASK = range(4)
TEMPLATE = (  # nothing is added: an answer goes on where the prompt ends
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
LENGTH = 512
ROWS = 8  # of a micro-batch
EPSILON = 1e-6


def config() -> LlamaConfig:
    """Return the architecture: 4.3M parameters."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=10,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def corpus() -> tuple[list[str], list[str], list[str]]:
    """Return pieces of the standard library, of all else, and of the held-out files, no twins."""
    site = Path(sysconfig.get_path("purelib"))
    held_out, ours = [*stdlib_files("val"), *stdlib_files("test")], stdlib_files("train")
    rest = [f for f in stdlib_folder().rglob("*.py") if "site-packages" not in f.parts]
    rest = sorted({*rest, *site.rglob("*.py")} - {*held_out, *ours})
    taken: set[bytes] = set()
    found = []
    for files in (held_out, ours, rest):
        kept = []
        for file in files:
            text = source_text(file) if file.stat().st_size <= 300_000 else ""
            for piece in pieces(text):
                key = hashlib.sha1("".join(piece.split()).encode()).digest()
                if key not in taken and piece.strip():
                    taken.add(key)
                    kept.append(piece)
        found.append(kept)
    return found[1], found[2], found[0]


def pieces(text: str) -> Iterator[str]:
    """Yield a module's text in pieces of 1,200 characters or more, cut at two empty lines."""
    held = ""
    for part in text.split("\n\n\n"):
        held = f"{held}\n\n\n{part}" if held else part
        if len(held) >= 1200:
            yield held
            held = ""
    if held:
        yield held


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 2,048 ids, the special ones first."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=2048, min_frequency=2, special_tokens=SPECIAL, show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        chat_template=TEMPLATE,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def packed(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray[Any, Any]:
    """Return the texts as rows `[n, LENGTH + 1]` of ids, one after the other, nothing padded."""
    parts = []
    for start in range(0, len(texts), 2000):
        encoded = tokenizer.backend_tokenizer.encode_batch(
            texts[start : start + 2000], add_special_tokens=False
        )
        parts += [np.array([BOS, *e.ids, EOS], dtype=np.uint16) for e in encoded]
    stream = np.concatenate(parts)
    rows = (len(stream) - 1) // LENGTH
    return np.lib.stride_tricks.sliding_window_view(stream, LENGTH + 1)[::LENGTH][:rows].copy()


def parameters(c: LlamaConfig) -> dict[str, Tensor]:
    """Return fresh float32 weights; those with the same input are one matrix."""
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    inside, width = c.num_attention_heads * c.head_dim, c.hidden_size
    deep = 1 / math.sqrt(2 * c.num_hidden_layers)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns) * scale / math.sqrt(columns)

    found = {"embed": torch.randn(c.vocab_size, width) * 0.02, "norm": torch.ones(width)}
    for n in range(c.num_hidden_layers):
        found[f"{n}.qkv"] = normal(heads, width)
        found[f"{n}.out"] = normal(width, inside, deep)
        found[f"{n}.up"] = normal(2 * c.intermediate_size, width)
        found[f"{n}.down"] = normal(width, c.intermediate_size, deep)
        found[f"{n}.norm1"], found[f"{n}.norm2"] = torch.ones(width), torch.ones(width)
    return {name: value.requires_grad_() for name, value in found.items()}


def to_llama(c: LlamaConfig, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    """Return the weights as a transformers model."""
    model = LlamaForCausalLM(c)
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights["embed"])
        model.model.norm.weight.copy_(weights["norm"])
        for n, layer in enumerate(model.model.layers):
            a, m = layer.self_attn, layer.mlp
            pairs = zip(
                (a.q_proj, a.k_proj, a.v_proj), weights[f"{n}.qkv"].split((q, kv, kv)), strict=True
            )
            for module, value in (
                *pairs,
                (a.o_proj, weights[f"{n}.out"]),
                *zip((m.gate_proj, m.up_proj), weights[f"{n}.up"].chunk(2), strict=True),
                (m.down_proj, weights[f"{n}.down"]),
                (layer.input_layernorm, weights[f"{n}.norm1"]),
                (layer.post_attention_layernorm, weights[f"{n}.norm2"]),
            ):
                module.weight.copy_(value)
    return model


class Forward:
    """The model's loss, written for the CPU: bfloat16 all through, attention as two products.

    PyTorch's fused attention takes 4 times as long there, most of it backwards.
    """

    def __init__(self, c: LlamaConfig) -> None:
        self.c = c
        half = torch.arange(0, c.head_dim, 2) / c.head_dim
        angle = torch.arange(LENGTH)[:, None] / 10000**half
        self.cos = torch.cat([angle.cos()] * 2, -1)[:, None].bfloat16()
        self.sin = torch.cat([angle.sin()] * 2, -1)[:, None].bfloat16()
        self.mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1).bfloat16()

    def __call__(self, weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Return the mean loss of a token of rows `[B, LENGTH + 1]`."""
        c, ids = self.c, rows[:, :-1]
        w = {name: value.bfloat16() for name, value in weights.items()}
        x = F.embedding(ids, w["embed"])
        for n in range(c.num_hidden_layers):
            x = x + F.linear(
                self.attend(F.linear(norm(x, w[f"{n}.norm1"]), w[f"{n}.qkv"])), w[f"{n}.out"]
            )
            gate, up = F.linear(norm(x, w[f"{n}.norm2"]), w[f"{n}.up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"{n}.down"])
        logits = F.linear(norm(x, w["norm"]), w["embed"])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def attend(self, qkv: Tensor) -> Tensor:
        """Return what causal attention makes of queries, keys and values `[B, S, ...]`."""
        c, (B, S, _) = self.c, qkv.shape
        nq, nk, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qkv = qkv.view(B, S, nq + 2 * nk, size)
        qk, v = qkv[:, :, : nq + nk], qkv[:, :, nq + nk :]
        a, b = qk.chunk(2, -1)
        qk = qk * self.cos + torch.cat((-b, a), -1) * self.sin
        group = nq // nk
        q = qk[:, :, :nq].reshape(B, S, nk, group, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(B * nk, group * S, size) * size**-0.5
        k = qk[:, :, nq:].permute(0, 2, 3, 1).reshape(B * nk, size, S)
        scores = torch.bmm(q, k).view(B * nk, group, S, S) + self.mask
        shares = scores.softmax(-1).view(B * nk, group * S, S)
        out = torch.bmm(shares, v.permute(0, 2, 1, 3).reshape(B * nk, S, size))
        return out.view(B, nk, group, S, size).permute(0, 3, 1, 2, 4).reshape(B, S, nq * size)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm of `x` `[..., H]`."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


class Rows:
    """Rows in a random order without end, a new order each time round."""

    def __init__(self, rows: np.ndarray[Any, Any], seed: int) -> None:
        self.rows, self.seed, self.around = rows, seed, -1

    def row(self, n: int) -> np.ndarray[Any, Any]:
        """Return the n-th row `[LENGTH + 1]`."""
        around, place = divmod(n, len(self.rows))
        if self.around != around:
            self.around = around
            self.order = np.random.default_rng([self.seed, around]).permutation(len(self.rows))
        found: np.ndarray[Any, Any] = self.rows[self.order[place]]
        return found


def main() -> None:
    """Train, validate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=65.0, help="training time, pauses included"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the tokens and checkpoint"
    )
    parser.add_argument("--lr", type=float, default=0.02, help="of the matrices (Muon)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of 8 rows a step")
    parser.add_argument("--stdlib", type=float, default=0.5, help="share of the standard library")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    c = config()
    tokens = args.work / "tokens.npz"
    if not tokens.exists():
        ours, rest, held_out = corpus()
        for number, texts in enumerate((ours, rest)):
            random.Random(number).shuffle(texts)
        tokenizer = make_tokenizer(ours + rest[: len(rest) // 20])
        tokenizer.save_pretrained(args.work / "tokenizer")
        sizes = {"bytes": [sum(len(t.encode()) for t in x) for x in (ours, rest, held_out)]}
        arrays = {
            n: packed(tokenizer, x)
            for n, x in zip(("ours", "rest", "held"), (ours, rest, held_out), strict=True)
        }
        sizes["tokens"] = [int(a.shape[0]) * LENGTH for a in arrays.values()]
        (args.work / "corpus.json").write_text(json.dumps(sizes))
        np.savez(args.work / "partial.npz", **arrays)
        (args.work / "partial.npz").rename(tokens)
    sizes = json.loads((args.work / "corpus.json").read_text())
    print("standard library, the rest, held out:", sizes, flush=True)
    data = np.load(tokens)
    ours, rest, held = Rows(data["ours"], 1), Rows(data["rest"], 2), data["held"]
    bytes_per_token = sizes["bytes"][2] / sizes["tokens"][2]

    weights = parameters(c)
    matrices = [v for n, v in weights.items() if v.ndim == 2 and n != "embed"]
    others = [v for n, v in weights.items() if v.ndim == 1 or n == "embed"]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=args.lr / 4, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    peak = [group["lr"] for o in optimizers for group in o.param_groups]
    forward: Any = Forward(c)
    run = forward if args.no_compile else torch.compile(forward)
    step, spent, log = 0, 0.0, []
    saved = args.work / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        with torch.no_grad():
            for name, value in state["weights"].items():
                weights[name].copy_(value)
        for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        step, spent, log = state["step"], state["spent"], state["log"]
        print("goes on at step", step, flush=True)

    @torch.no_grad()
    def validation(rows: int) -> float:
        chosen = held[
            np.linspace(0, len(held) - 1, min(rows, len(held)) // ROWS * ROWS).astype(int)
        ]
        parts = torch.from_numpy(chosen.astype(np.int64)).split(ROWS)
        return sum(float(run(weights, part)) for part in parts) / len(parts)

    def save(final: bool) -> None:
        state = {
            "weights": {n: v.detach() for n, v in weights.items()},
            "optimizers": [o.state_dict() for o in optimizers],
            **{"step": step, "spent": spent, "log": log},
        }
        torch.save(state, saved.with_suffix(".partial"))
        saved.with_suffix(".partial").rename(saved)
        folder = args.out if final else args.work / "latest"
        to_llama(c, weights).to(torch.bfloat16).save_pretrained(folder)
        PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer").save_pretrained(folder)
        with (folder / "log.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(log[0]))
            writer.writeheader()
            writer.writerows(log)

    started, losses, shown = time.monotonic() - spent, [], time.monotonic()
    saved_at = time.monotonic()
    per_step = ROWS * args.accumulate
    share = round(per_step * args.stdlib)
    while spent < args.minutes * 60:
        done = spent / (args.minutes * 60)
        scale = min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))
        groups = [group for o in optimizers for group in o.param_groups]
        for group, lr in zip(groups, peak, strict=True):
            group["lr"] = lr * scale
        rows = [ours.row(step * share + n) for n in range(share)]
        rows += [rest.row(step * (per_step - share) + n) for n in range(per_step - share)]
        random.Random(step).shuffle(rows)
        for part in torch.from_numpy(np.stack(rows).astype(np.int64)).split(ROWS):
            loss = run(weights, part) / args.accumulate
            loss.backward()
            losses.append(float(loss.detach()) * args.accumulate)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        spent = time.monotonic() - started
        last = spent >= args.minutes * 60
        if time.monotonic() - shown > 180 or last or step == 10:
            nats = validation(10**9 if last else 64)
            spent = time.monotonic() - started
            log.append(
                {
                    "step": step,
                    "tokens": step * per_step * LENGTH,
                    "minutes": round(spent / 60, 2),
                    "cpu_seconds": round(time.process_time(), 1),
                    "lr": round(groups[0]["lr"], 6),
                    "train_nats_per_token": round(sum(losses) / len(losses), 4),
                    "val_nats_per_token": round(nats, 4),
                    "val_bits_per_byte": round(nats / bytes_per_token / math.log(2), 4),
                }
            )
            losses, shown = [], time.monotonic()
            print(log[-1], flush=True)
        if time.monotonic() - saved_at > 300:
            save(final=False)
            saved_at = time.monotonic()
    save(final=True)
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "tokenizers")}
    report = {"argv": sys.argv[1:], "python": sys.version.split()[0], **versions, "corpus": sizes}
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
