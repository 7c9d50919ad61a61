"""Whether a layout fits a machine's memory, by how much, and what the fullest rank is full of, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hetmesh.formatting import counted, ranks_text
from hetmesh.records.metrics import amount
from hetmesh.simulate import MemoryFit, RankMemory

_WORDS = {
    "optimizer": "optimizer state",
    "gathered": "gathered by FSDP",
    "sums": "gradients being summed",
    "rows": "rows of boundaries",
}


def verdict(fit: MemoryFit) -> str:
    """`"fits h100: 44.1 GB of 80.0 GB on the fullest rank, 35.9 GB (45%) to spare"`."""
    peak = _bytes(fit.peak_bytes)
    if fit.fits is None:
        return f"{peak} on the fullest rank; the memory of machine {fit.machine} is not known: name one (--machine)"
    share = f"{_bytes(abs(fit.spare_bytes))} ({100 * abs(fit.spare_bytes) / fit.memory_bytes:.0f}%)"
    of = f"{peak} of {_bytes(fit.memory_bytes)} on the fullest rank"
    return (
        f"fits {fit.machine}: {of}, {share} to spare"
        if fit.fits
        else (f"does not fit {fit.machine}: {of}, {share} too much")
    )


def fit_lines(fit: MemoryFit) -> Iterator[str]:
    """The verdict, what the fullest rank holds, and on which batch."""
    yield f"memory: {verdict(fit)}"
    memory = fit.ranks[fit.fullest]
    alike = [rank for rank, each in fit.ranks.items() if each.total == memory.total]
    yield f"  rank {ranks_text(tuple(alike))} in {memory.at}: {contents(memory)}"
    yield (
        f"  on the largest batch that {counted(fit.samples, 'sample')} of {fit.drawn:,} can make; what kernels "
        "allocate inside, and fragments, are not in it"
    )


def contents(memory: RankMemory) -> str:
    """What a rank holds, largest first, without what is less than a hundredth."""
    parts = sorted(memory.parts.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{_WORDS.get(name, name)} {_bytes(size)}" for name, size in parts if 100 * size >= memory.total > 0
    )


def fit_json(fit: MemoryFit) -> dict[str, Any]:
    """The verdict and what ranks hold, as plain values."""
    return {
        "machine": fit.machine,
        "memory_bytes": fit.memory_bytes,
        "fits": fit.fits,
        "fullest": fit.fullest,
        "peak_bytes": fit.peak_bytes,
        "spare_bytes": fit.spare_bytes if fit.memory_bytes else None,
        "samples": fit.samples,
        "drawn": fit.drawn,
        "ranks": {rank: asdict(memory) for rank, memory in fit.ranks.items()},
    }


def _bytes(size: int) -> str:
    return f"{amount(size).strip()}B"
