"""Batches of a law, or of a file of lengths, as what balancers take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.balance.laws import Law, Rows, whole
from benchmarks.balance.towers import price
from hetmesh.balance import BatchLoads, Slots

LANES, MICROBATCHES, STAGES = 4, 32, 4
POOL = 20_000  # samples from which the modules' mean work is taken


@dataclass(frozen=True)
class Case:
    """A law, with its modules priced.

    Attributes:
        modules: names, the LLM last.
        scale: per module, by what its work is multiplied: a static plan gives every module as many ranks as it needs,
            so that all modules have as much to do per stage on average.
        per_microbatch: nanoseconds, scaled too.
        slower: per module, how many times slower its hardware is than what `towers` prices.
    """

    name: str
    law: Law
    modules: tuple[str, ...]
    scale: Mapping[str, float]
    per_microbatch: tuple[int, ...]
    slower: Mapping[str, float]

    @classmethod
    def of(cls, name: str, law: Law, slower: Mapping[str, float] | None = None) -> Case:
        """The case of a law, from what many of its samples cost."""
        slower = slower or {}
        pool = law(POOL, np.random.default_rng(12345), 0.5)
        modules = tuple(pool)
        means = {m: float(price(m).work(*pool[m]).mean()) * slower.get(m, 1.0) for m in modules}
        scale = {m: means[modules[-1]] / means[m] if means[m] else 1.0 for m in modules}
        fixed = tuple(round(price(m).per_microbatch * scale[m] * slower.get(m, 1.0)) for m in modules)
        return cls(name, law, modules, scale, fixed, {m: slower.get(m, 1.0) for m in modules})

    def loads(self, count: int, seed: int, progress: float = 0.0) -> BatchLoads:
        """One batch of `count` samples."""
        rows = self.law(count, np.random.default_rng(seed), progress)
        columns = [price(m).work(*rows[m]) * self.slower[m] * self.scale[m] for m in self.modules]
        tokens = np.stack([rows[m][0] for m in self.modules], 1)
        return BatchLoads(self.modules, np.rint(np.stack(columns, 1)).astype(np.int64), tokens)

    def slots(self, lanes: int = LANES, microbatches: int = MICROBATCHES) -> Slots:
        """What there is to fill, with deferral allowed: lanes, microbatches and 4 pipeline stages per module."""
        count = len(self.modules)
        return Slots(
            (lanes,) * count,
            (microbatches,) * count,
            stages=(STAGES,) * count,
            overhead=self.per_microbatch,
            deferral=True,
        )


class BadLengths(SystemExit):
    """A file of lengths that is none; the message names the line."""


def file_law(path: Path) -> Law:
    """A law that draws samples of a file: one JSON object per line, `{"vision": 1024, "audio": 0, "llm": 700}`, tokens
    per module. Any names; `llm`, or else the last one of the first line, is the module that the others feed. What a
    line leaves out is 0. Batches are drawn without repetition, where the file has enough samples.

    Raises:
        BadLengths: a line is something else.
    """
    samples = list(_lines(path))
    if not samples:
        raise BadLengths(f"{path}: no samples")
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    last = "llm" if "llm" in names else list(samples[0])[-1]
    modules = [name for name in names if name != last] + [last]
    table = {name: np.array([sample.get(name, 0) for sample in samples], np.int64) for name in modules}

    def law(count: int, rng: np.random.Generator, progress: float) -> Rows:
        chosen = rng.choice(len(samples), count, replace=count > len(samples))
        return {name: whole(table[name][chosen]) for name in modules}

    return law


def _lines(path: Path) -> Iterator[dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadLengths(f"{path}: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise BadLengths(f"{path}, line {number}: not JSON: {error}") from error
        good = isinstance(sample, dict) and sample
        if not good or not all(type(value) is int and 0 <= value < 2**24 for value in sample.values()):
            raise BadLengths(
                f"{path}, line {number}: need tokens per module as whole numbers from 0 to 2**24, as in "
                f'{{"vision": 1024, "llm": 700}}; got {line.strip()[:80]}'
            )
        yield sample
