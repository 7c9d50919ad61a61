"""Whether a source is still the one that a place in the data was saved of: a few samples stand for all."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

from hetmesh.data.mixture import KEY, MixtureSource
from hetmesh.data.source import Source
from hetmesh.errors import SampleError

LOOKED_AT = 64
"""Samples of a source, and of each source of a mixture: of another order, hardly one is where it was."""

MENDED = 0.25
"""Of these, so many may differ: whoever mends a sample that ended a run goes on with it."""

Groups = Mapping[str, list[int]]
"""By what a recipe calls a source, the indices of the samples that stand for it."""


def lengths(source: Source) -> str:
    """How many samples the sources of a mixture have; empty for another source."""
    parts = source.parts.items() if isinstance(source, MixtureSource) else ()
    return ", ".join(f"{name} {len(part)}" for name, part in parts)


def looked_at(source: Source) -> Groups:
    """The samples of `source` that are looked at."""
    if not isinstance(source, MixtureSource):
        return {"data.source": _spread(len(source))}
    starts = source.starts
    return {f"{KEY} {n!r}": [starts[n] + i for i in _spread(len(part))] for n, part in source.parts.items()}


def _spread(size: int) -> list[int]:
    count = min(LOOKED_AT, size)
    return [size * i // count for i in range(count)]


def checksums(source: Source, indices: Iterable[int], reading: AbstractContextManager[object]) -> str:
    """Of the metadata and of the tokens of each sample; `reading` is held while one is read."""
    found = []
    for index in indices:
        facts, tokens = "unreadable", b""
        with reading, contextlib.suppress(SampleError):
            facts = repr(source.meta(index))
            tokens = source.load(index, ()).tokens.numpy().tobytes()
        found.append(f"{zlib.crc32(facts.encode()):08x}{zlib.crc32(tokens):08x}")
    return " ".join(found)


def compared(groups: Groups, before: str, now: str) -> tuple[list[str], list[str]]:
    """What has changed between two `checksums` of all samples of `groups`: what makes a source another one, and what
    may be mended samples, a line each."""
    pairs = zip(before.split(), now.split(), strict=False)
    other: list[str] = []
    mended: list[str] = []
    for name, indices in groups.items():
        # Those of older checkpoints are of metadata alone.
        found = [(i, old != new[: len(old)]) for i, (old, new) in zip(indices, pairs, strict=False)]
        changed = [i for i, differs in found if differs]
        if changed:
            told = (
                f"of {len(indices)} samples of {name} looked at, {len(changed)} are others than those that were there, "
                f"the first at place {changed[0]}"
            )
            (other if len(changed) > MENDED * len(indices) else mended).append(told)
    return other, mended
