"""A position in the data as a checkpoint keeps it, and whether it still means the same samples.

It is a step, the place of its first sample, and what that place depends on: the seed, the order and the lengths of the
sources, and checksums of a few samples, which stand for all.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from hetmesh.data.mixture import KEY, MixtureSource
from hetmesh.data.source import Source
from hetmesh.errors import RecipeError, SampleError

CHECKSUMS, PART_CHECKSUMS, PART_LENGTHS, ORDER = "source", "parts", "part_lengths", "order"
"""What a position calls the checksums of some samples, those of a mixture's sources, how many samples these have, and
`SampleOrder.until` it. Older positions do not have them."""

_KEYS = {
    "seed": "debug.seed",
    "source_length": "the number of samples of data.source",
    "part_lengths": "the number of samples of each source of data.mixture",
    "shuffle": "the loader's shuffle",
}
"""What the values that a position depends on are called in a recipe."""

CHECKED_SAMPLES = 64
"""Of a source, and of each source of a mixture: in another order, hardly one is where it was."""

MAX_CHANGED_SHARE = 0.25
"""Of the samples checked: whoever repairs a sample that ended a run goes on with it."""

ELSEWHERE = "the checkpoint's place in the data means other samples now"
RESTORE = (
    "restore what was, or start a new run from the saved weights: checkpoint.initial_load_path and another "
    "job.dump_folder"
)


class PositionIdentity:
    """What a position in `source` depends on; `reading` is held while a sample is read."""

    def __init__(self, source: Source, seed: int, shuffle: bool, reading: AbstractContextManager[object]) -> None:
        self.source, self._reading = source, reading
        parts = source.parts if isinstance(source, MixtureSource) else {}
        self._lengths = {"seed": seed, "source_length": len(source), "shuffle": int(shuffle)}
        self._part_lengths = ", ".join(f"{name} {len(part)}" for name, part in parts.items())
        self._checksums_key = PART_CHECKSUMS if parts else CHECKSUMS

    @property
    def _values(self) -> dict[str, Any]:
        return self._lengths | ({PART_LENGTHS: self._part_lengths} if self._part_lengths else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {**self._values, self._checksums_key: self._checksums}

    def compare(self, state: Mapping[str, Any]) -> list[str]:
        """Compare with the `state` of before.

        Returns:
            Which of the samples checked have changed, a line for each source; few enough to have been repaired.

        Raises:
            RecipeError: something is missing or differs, or a source has other samples at the same places (more than a
                few), so that the samples that come next would not be the same ones.
        """
        missing = {"step", "sample", *self._values} - set(state) - {PART_LENGTHS}
        if missing:
            raise RecipeError(f"checkpoint: the data position lacks {sorted(missing)}; it has {sorted(state)}")
        differs = {k: (state[k], v) for k, v in self._values.items() if k in state and state[k] != v}
        if differs:
            changes = ", ".join(f"{_KEYS[k]} was {old} and is {new}" for k, (old, new) in differs.items())
            raise RecipeError(f"{ELSEWHERE}: {changes}; {RESTORE}")
        before = state.get(self._checksums_key)
        if before is None or before == self._checksums:
            return []
        other, repaired = _changed(self._checked, before, self._checksums)
        if other:
            raise RecipeError(
                f"{ELSEWHERE}: {other[0]}: it was sorted, its text becomes other tokens, or it is another one; "
                f"{RESTORE}"
            )
        return repaired

    @cached_property
    def _checked(self) -> Mapping[str, list[int]]:
        """By what a recipe calls a source, the indices of the samples that stand for it."""
        if not isinstance(self.source, MixtureSource):
            return {"data.source": _spread(len(self.source))}
        parts, starts = self.source.parts, self.source.starts
        return {f"{KEY} {n!r}": [starts[n] + i for i in _spread(len(part))] for n, part in parts.items()}

    @cached_property
    def _checksums(self) -> str:
        """Of the metadata and of the tokens of each sample."""
        return " ".join(map(self._checksum, itertools.chain(*self._checked.values())))

    def _checksum(self, index: int) -> str:
        facts, tokens = "unreadable", b""
        with self._reading, contextlib.suppress(SampleError):
            facts = repr(self.source.meta(index))
            tokens = self.source.load(index, ()).tokens.numpy().tobytes()
        return f"{zlib.crc32(facts.encode()):08x}{zlib.crc32(tokens):08x}"


def _spread(size: int) -> list[int]:
    count = min(CHECKED_SAMPLES, size)
    return [size * i // count for i in range(count)]


def _changed(checked: Mapping[str, list[int]], before: str, now: str) -> tuple[list[str], list[str]]:
    """The sources of which many samples have changed, and those of which a few have, a line each."""
    pairs = zip(before.split(), now.split(), strict=False)
    other: list[str] = []
    repaired: list[str] = []
    for name, indices in checked.items():
        # Checksums of older checkpoints are of metadata alone.
        changes = [(i, old != new[: len(old)]) for i, (old, new) in zip(indices, pairs, strict=False)]
        if changed := [i for i, differs in changes if differs]:
            line = (
                f"{len(changed)} of the {len(indices)} samples of {name} that were checked have changed, the first at "
                f"place {changed[0]}"
            )
            (other if len(changed) > MAX_CHANGED_SHARE * len(indices) else repaired).append(line)
    return other, repaired
