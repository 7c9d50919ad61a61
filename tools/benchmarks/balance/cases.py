"""Batches of a law, or of a file of lengths, as what balancers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.balance.laws import Law, Rows, whole
from benchmarks.balance.towers import price
from hetmesh.balance import BatchLoads, Slots
from hetmesh.data.lengths import read_lengths
from hetmesh.errors import RecipeError

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


def file_law(path: Path) -> Law:
    """A law that draws samples of a file of lengths (`hetmesh.data.lengths`), of any modules. `llm`, or else the last
    one of the first line, is the module that the others feed. Batches are drawn without repetition, where the file has
    enough samples.

    Raises:
        SystemExit: a line is something else; the message names it.
    """
    try:
        lengths = read_lengths(path)
    except RecipeError as error:
        raise SystemExit(str(error)) from error
    last = "llm" if "llm" in lengths.modules else lengths.modules[-1]
    modules = [name for name in lengths.modules if name != last] + [last]

    def law(count: int, rng: np.random.Generator, progress: float) -> Rows:
        chosen = rng.choice(len(lengths), count, replace=count > len(lengths))
        return {name: whole(lengths.of(name)[chosen]) for name in modules}

    return law
