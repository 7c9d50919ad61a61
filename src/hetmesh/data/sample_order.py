"""The order of the samples of a run: an endless stream of indices of a source, a pure function of a place in it."""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np

from hetmesh.data.mixture import MixtureSource

SHUFFLED, GIVEN, TOKENS = "shuffled", "given", "tokens"
"""Orders by the name that a recipe gives them; another one is a module, by rising rows that it computes."""

DECK = 1024
"""Samples of a phase in which each source has its share, to the nearest whole number."""

_ROUNDS = 6  # of the Feistel network of `permuted`
_MASK = (1 << 64) - 1


class EpochOrder:
    """Epoch after epoch of a source, each sample once in every one.

    Args:
        size: samples of the source.
        shuffle: False keeps the source's order; else `seed` chooses another one for each epoch.
        key: of each sample, `[size]`: every epoch by its rising values, of equal ones in the source's order.
        name: of the key.
    """

    def __init__(
        self, size: int, seed: int = 0, *, shuffle: bool = True, key: np.ndarray | None = None, name: str = ""
    ) -> None:
        self.size, self.seed, self.shuffle, self.name = size, seed, shuffle and key is None, name
        self._rising = None if key is None else np.argsort(key, kind="stable")

    def indices(self, first: int, count: int) -> list[int]:
        """Those of `count` places of the stream from `first` on."""
        found: list[int] = []
        stop = first + count
        while first < stop:
            epoch, offset = divmod(first, self.size)
            end = min(offset + stop - first, self.size)
            first += end - offset
            if self._rising is not None:
                found += self._rising[offset:end].tolist()
            else:
                positions = range(offset, end)
                found += permuted(positions, self.size, self.seed, epoch) if self.shuffle else positions
        return found

    def until(self, place: int) -> str:
        """What the indices before `place` depend on, beside the seed, the source and whether it is shuffled."""
        if self._rising is None:
            return self.name
        return f"{self.name}, samples {zlib.crc32(self._rising[: place % self.size].tobytes()):08x}"


class PhasedOrder:
    """A mixture whose shares change. Of every `DECK` samples of a phase each source gives its share, shuffled among
    those of the others. Each source goes on where it was when a phase begins, in epochs of its own.

    Args:
        phases: by the step at which each begins, the first at 0, ascending: the weight of each source, in any unit; 0,
            or none: it gives no samples.
        batch: samples of a step.
        shuffle: False takes the samples of each source in its order.
    """

    def __init__(
        self,
        mixture: MixtureSource,
        phases: Mapping[int, Mapping[str, float]],
        batch: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
    ) -> None:
        self.mixture, self.phases, self.batch, self.seed, self.shuffle = mixture, phases, batch, seed, shuffle
        self._starts = [step * batch for step in phases]
        self._sizes = [len(source) for source in mixture.parts.values()]
        self._cards = [_cards([weights.get(name, 0.0) for name in mixture.names]) for weights in phases.values()]
        self._deck = lru_cache(maxsize=8)(self._shuffled_deck)

    @cached_property
    def _before(self) -> list[np.ndarray]:
        """How many samples each source has given when a phase begins."""
        lengths = [b - a for a, b in itertools.pairwise(self._starts)]
        given = [self._given(phase, length) for phase, length in enumerate(lengths)]
        return [*np.cumsum([np.zeros(len(self._sizes), np.int64), *given], axis=0)]

    def indices(self, first: int, count: int) -> list[int]:
        found: list[int] = []
        stop = first + count
        while first < stop:
            phase = bisect.bisect(self._starts, first) - 1
            end = min([stop, *self._starts[phase + 1 : phase + 2]])
            found += self._of_phase(phase, first - self._starts[phase], end - first)
            first = end
        return found

    def until(self, place: int) -> str:
        begun = [(step, weights) for step, weights in self.phases.items() if step * self.batch < place]
        said = [f"from step {step} {dict(sorted(weights.items()))}" for step, weights in begun]
        return ", ".join([*said, f"{self.batch} samples a step"])

    def _of_phase(self, phase: int, first: int, count: int) -> list[int]:
        decks = range(first // DECK, (first + count - 1) // DECK + 1)
        sources = np.concatenate([self._deck(phase, number) for number in decks])
        sources = sources[first % DECK :][:count]
        drawn = self._before[phase] + self._given(phase, first)
        found = np.empty(count, np.int64)
        for i, (start, size) in enumerate(zip(self.mixture.starts.values(), self._sizes, strict=True)):
            here = np.flatnonzero(sources == i)
            own = EpochOrder(size, self.seed + i, shuffle=self.shuffle)  # not in step with a source of equal size
            found[here] = np.array(own.indices(int(drawn[i]), len(here)), np.int64) + start
        return found.tolist()

    def _given(self, phase: int, count: int) -> np.ndarray:
        """How many of the first samples of a phase each source gives, int64 `[sources]`."""
        decks, rest = divmod(count, DECK)
        return decks * self._cards[phase] + np.bincount(self._deck(phase, decks)[:rest], minlength=len(self._sizes))

    def _shuffled_deck(self, phase: int, number: int) -> np.ndarray:
        """The source of each sample of a deck."""
        deck = np.repeat(np.arange(len(self._sizes)), self._cards[phase])
        return deck[permuted(range(DECK), DECK, self.seed, 1 + phase, number)]


SampleOrder = EpochOrder | PhasedOrder
"""What a Loader asks for indices."""


def _cards(weights: Sequence[float]) -> np.ndarray:
    """`DECK` in proportion to weights, by largest remainders; none that is above 0 gets nothing."""
    given = np.array(weights)
    ideal = given / given.sum() * DECK
    cards = np.maximum(np.floor(ideal).astype(np.int64), given > 0)
    for _ in range(abs(left := DECK - int(cards.sum()))):
        best = np.argmax(ideal - cards) if left > 0 else np.argmax(np.where(cards > 1, cards - ideal, -np.inf))
        cards[best] += np.sign(left)
    return cards


def permuted(positions: Sequence[int], size: int, *key: int) -> list[int]:
    """Where a random permutation of `0..size-1` sends `positions`, computed one by one: no size costs memory.

    A Feistel network permutes the smallest even-bit block of integers that holds `0..size-1`; results outside are sent
    through it again until they fall inside ("cycle walking": J. Black and P. Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002). The round function is the finaliser of splitmix64. For shuffling, not for secrets. Unlike a
    library's shuffle the order can never change with a version, so a resumed run continues the same one.

    Args:
        positions: in `0..size - 1`.
        size: 1..2**62.
        key: chooses the permutation, e.g. `(seed, epoch)`.
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    low = np.uint64((1 << int(half)) - 1)
    state = np.uint64(0)
    for part in key:
        state = _mix(np.array([part & _MASK], np.uint64) ^ _mix(np.array([state], np.uint64)))[0]
    round_keys = _mix(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64))

    values = np.array(positions, np.uint64)
    walking = np.ones(len(values), bool)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & low
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        values[walking] = left << half | right
        walking = values >= size
    return values.tolist()


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
