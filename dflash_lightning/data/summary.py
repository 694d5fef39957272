"""What preparing a split gave, in numbers."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lightning.data.answers import Answer
from dflash_lightning.data.samples import Sample

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass
class Summary:
    """Counts samples and answers as they pass by; memory grows with the longest length only."""

    samples: int = 0
    answers: int = 0
    cut: int = 0
    empty: int = 0
    refused: int = 0
    inexact: int = 0
    too_long: int = 0
    bad_rows: int = 0
    supervised: int = 0
    sample_lengths: Counter[int] = field(default_factory=Counter)
    answer_lengths: Counter[int] = field(default_factory=Counter)

    def answer(self, answer: Answer, stop_ids: frozenset[int]) -> None:
        """Count an answer."""
        self.answers += 1
        self.cut += answer.finish == "length"
        self.refused += answer.finish == "refused"
        self.empty += not answer.ids or answer.ids[0] in stop_ids
        self.inexact += not answer.exact
        self.answer_lengths[len(answer.ids)] += 1

    def sample(self, sample: Sample) -> None:
        """Count a sample."""
        self.samples += 1
        self.supervised += int(sample.loss_mask.sum())
        self.sample_lengths[len(sample.ids)] += 1

    def write(self, path: Path) -> None:
        """Keep the counts beside what they count."""
        path.write_text(json.dumps(vars(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Summary":
        """Return the counts that `write` kept."""
        found = json.loads(path.read_text(encoding="utf-8"))
        lengths = {
            key: Counter({int(length): n for length, n in found[key].items()})
            for key in ("sample_lengths", "answer_lengths")
        }
        return cls(**{**found, **lengths})

    def plain(self) -> dict[str, Any]:
        """Return the numbers as plain types; lengths are in tokens."""
        share = 1 / max(1, self.answers)
        return {
            "samples": self.samples,
            "tokens": sum(length * n for length, n in self.sample_lengths.items()),
            "supervised_tokens": self.supervised,
            "sample_length": quantiles(self.sample_lengths),
            "answers": self.answers,
            "answer_length": quantiles(self.answer_lengths),
            "share_cut_by_limit": round(self.cut * share, 6),
            "share_empty": round(self.empty * share, 6),
            "answers_refused_by_server": self.refused,
            "answers_retokenized_inexactly": self.inexact,
            "prompts_too_long": self.too_long,
            "bad_rows": self.bad_rows,
        }


def quantiles(lengths: Counter[int]) -> dict[str, int]:
    """Return the quantiles of counted lengths: the least length that so large a share reaches.

    >>> quantiles(Counter({1: 5, 9: 5}))
    {'0%': 1, '10%': 1, '50%': 1, '90%': 9, '99%': 9, '100%': 9}
    """
    total, found = sum(lengths.values()), {}
    for q in QUANTILES if total else ():
        passed = 0
        for length in sorted(lengths):
            passed += lengths[length]
            if passed >= q * total:
                found[f"{q:.0%}"] = length
                break
    return found
