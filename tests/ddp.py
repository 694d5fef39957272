"""One optimizer step of two processes, or of one with the joint batch; run by test_processes.

python ddp.py OUT PROCESSES CASE
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from tiny import MASK, tiny_drafter, tiny_target
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dflash_lightning.data.anchors import RandomAnchors
from dflash_lightning.data.blocks import Batch, BlockCollator
from dflash_lightning.data.samples import Sample
from dflash_lightning.module import DFlashModule


def samples(case: str) -> list[Sample]:
    """Two rows for each of two ranks; in one case those of the second have no anchor."""
    made = []
    for index, length in enumerate((40, 23, 31, 36)):
        generator = torch.Generator().manual_seed(index)
        mask = torch.rand(length, generator=generator) < 0.8
        if case == "no anchor" and index >= 2:
            mask[:] = False
        made.append(Sample(torch.randint(3, 90, (length,), generator=generator), mask))
    return made


class Rank(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> int:
        return 0


def batch_of(processes: int, rank: int, case: str) -> Batch:
    rows = [(i, 0, sample, None) for i, sample in enumerate(samples(case))]
    mine = rows if processes == 1 else rows[2 * rank : 2 * rank + 2]
    collate = BlockCollator(RandomAnchors(6), 4, MASK, seed=0)
    return collate([[row] for row in mine])


class Kept(DFlashModule):
    """Writes the gradient that the optimizer sees."""

    out: Path

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        found = {name: p.grad for name, p in self.drafter.named_parameters()}
        assert self.target is not None
        wrapped = {id(p) for p in self.trainer.strategy.model.parameters()}
        assert wrapped == {id(p) for p in self.drafter.parameters()}, "and the target isn't"
        assert not wrapped & {id(p) for p in self.target.model.parameters()}
        torch.save(found, self.out / f"rank{self.global_rank}.pt")


def main(out: str, processes: int, case: str) -> None:
    torch.set_num_threads(1)
    module = Kept(block_size=4, attention="auto")
    module.out, module.target = Path(out), tiny_target()
    module.drafter = tiny_drafter(module.target)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    batch = batch_of(processes, trainer.global_rank, case)
    trainer.fit(module, DataLoader(Rank(), collate_fn=lambda _: batch))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
