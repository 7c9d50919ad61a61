"""What the model does not know, row by row: found by comparing published rows with each other, not by fitting."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.planner.published_rows import Row

OF_ALL_ROWS = (
    "how fast the measured framework's kernels are: the machine's efficiency is that of torch's matrix products on one "
    "H100 (tools/results/rates.json); `one_factor_fitted` shows what a factor of these rows' own would leave",
    "what it overlaps: sums of gradients and tensor parallelism's collectives count in full here, as hetmesh runs them",
    "how many microbatches an encoder goes ahead, how the LLM is cut behind an encoder on its first stage, and whether "
    "stages take turns on a rank",
    "in which dtype it adds up gradients (bf16 here), and how far an encoder without recomputation is ahead of "
    "the LLM's pipeline (all of the step here); `memory` has the figures with fp32 gradients",
)
_POINTS = 5.0
"""Gains that differ by more between rows of the same layouts are worth a line."""


def unexplained(rows: Sequence[Row], gains: Sequence[float]) -> list[list[str]]:
    """Per row its remarks.

    Args:
        gains: predicted, in percent.
    """
    found: list[list[str]] = []
    for i, row in enumerate(rows):
        said = []
        alike = [j for j, other in enumerate(rows) if j != i and _same(row, other)]
        apart = [j for j in alike if abs(rows[j].gain - row.gain) > abs(gains[j] - gains[i]) + _POINTS]
        if apart:
            others = ", ".join(f"{_name(rows[j])} {rows[j].gain:+.1f}" for j in apart)
            said.append(f"same layouts, GPUs and LLM, other published gains: {others} against {row.gain:+.1f}")
        for which, kind in enumerate(("homogeneous", "second")):
            larger = [
                j
                for j, other in enumerate(rows)
                if _same(row, other, which)
                and other.encoder * other.vision > row.encoder * row.vision
                and other.steps[which] < 0.98 * row.steps[which]
            ]
            if larger:
                others = ", ".join(_name(rows[j]) for j in larger)
                said.append(f"its {kind} layout was measured slower than with more encoder work: {others}")
        found.append(said)
    return found


def _name(row: Row) -> str:
    return f"{row.model} {100 * row.vision:g}%"


def _same(a: Row, b: Row, which: int | None = None) -> bool:
    if (a.llm, a.seq, a.global_batch, a.microbatches) != (b.llm, b.seq, b.global_batch, b.microbatches):
        return False
    chosen = range(2) if which is None else (which,)
    return all((a.layouts[i], a.gpus[i]) == (b.layouts[i], b.gpus[i]) for i in chosen)
