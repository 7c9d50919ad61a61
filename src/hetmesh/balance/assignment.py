"""What a balancer is given, loads of samples and slots to fill, and what it returns: who is where. Whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from hetmesh.errors import GraphError

_LEFT_OUT = np.empty(0, np.int64)

Lengths = Callable[..., np.ndarray]
"""`lengths(work, backward, late=None)`: the length of each of some steps under a run's own placement and
schedule (`hetmesh.simulate.replay.StepReplay`)."""


@dataclass(frozen=True, eq=False)
class BatchLoads:
    """A global batch as numbers. Balancers are functions of these alone, so every rank gets the same result.

    Attributes:
        modules: names; every module feeds the last one, which computes the loss.
        work: int64 `[samples, modules]`: time of the forward of one sample through all layers of a module on one lane,
            in one unit for all modules (nanoseconds, say). Whole numbers, so that no sum depends on its order.
        tokens: int64 `[samples, modules]`: what counts against `Slots.max_tokens`; left out: `work`.
        keys: int64 `[samples]`, distinct: who a sample is, which breaks ties; left out: its place in these arrays.
        ids: what messages call the samples; left out: the keys.
        padding: where the last module pads its samples to the longest of their microbatch and lane: its work for a
            position, and for a position times the length. `tokens` are then its lengths. Zeros: nothing is padded.

    Raises:
        GraphError: shapes that do not fit, negative numbers, or keys that repeat.
    """

    modules: tuple[str, ...]
    work: np.ndarray
    tokens: np.ndarray = field(default_factory=lambda: _LEFT_OUT)
    keys: np.ndarray = field(default_factory=lambda: _LEFT_OUT)
    ids: Sequence[Any] = ()
    padding: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        work = np.asarray(self.work)
        tokens = work if self.tokens is _LEFT_OUT else np.asarray(self.tokens)
        keys = np.arange(len(work)) if self.keys is _LEFT_OUT else np.asarray(self.keys)
        shape = (len(keys), len(self.modules))
        for name, given in (("work", work), ("tokens", tokens)):
            if given.shape != shape or given.dtype.kind not in "iu" or (given.size and given.min() < 0):
                raise GraphError(
                    f"balance: {name} must be whole numbers from 0 on of shape {shape} (samples, modules "
                    f"{list(self.modules)}), got {given.dtype} {given.shape}"
                )
        if len(np.unique(keys)) != len(keys):
            raise GraphError("balance: the keys of samples must be distinct")
        for name, value in (("work", work), ("tokens", tokens), ("keys", keys)):
            object.__setattr__(self, name, np.ascontiguousarray(value, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.work)

    @property
    def digest(self) -> tuple[Any, ...]:
        """Equal for equal numbers and names, and hashable."""
        return self.modules, self.work.tobytes(), self.tokens.tobytes(), self.keys.tobytes(), self.padding

    def name(self, sample: int) -> Any:
        """What messages call the sample at place `sample`."""
        return self.ids[sample] if len(self.ids) else int(self.keys[sample])

    @property
    def pads(self) -> bool:
        return any(self.padding)

    def padded_work(self, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Work of the last module for `counts` samples, each as long as `lengths`, targets left out."""
        row, square = self.padding
        return counts * (row * lengths + square * lengths**2)

    def select(self, places: np.ndarray) -> BatchLoads:
        """The samples at `places`, in that order."""
        if np.array_equal(places, np.arange(len(self))):
            return self
        ids = [self.ids[i] for i in places.tolist()] if len(self.ids) else ()
        chosen = self.work[places], self.tokens[places], self.keys[places]
        return BatchLoads(self.modules, *chosen, ids, self.padding)


@dataclass(frozen=True, eq=False)
class Slots:
    """What there is to fill, and how what fills it runs; one entry per module, in the order of `BatchLoads.modules`.

    Attributes:
        lanes: data-parallel coordinates.
        microbatches: of the step; those of modules may differ.
        max_tokens: hard cap of one lane and microbatch; None: no cap. Empty: none at all.
        stages: pipeline stages; empty: one each. What a step takes is judged by them.
        backward: how many times as long as its forward the backward of a module takes; empty: 2 each. 0: none.
        overhead: work that one microbatch costs beside its samples; empty: none.
        free: the number of microbatches may be another one than `microbatches`, where that is faster.
        deferral: the last module may take a sample one microbatch later than the modules that feed it.
        lockstep: lanes wait for each other in every microbatch (FSDP gathers layer by layer); otherwise once a step.
        affinity: per module None, or whole numbers `[its lanes, lanes of the last module]`: how many ranks of the one
            are ranks of the other. Rows that stay there need no message.
        lengths: what a step takes; None: what a 1F1B pipeline takes, with each module on ranks of its own.

    Raises:
        GraphError: a number that is not positive, or tuples of different lengths.
    """

    lanes: tuple[int, ...]
    microbatches: tuple[int, ...]
    max_tokens: tuple[int | None, ...] = ()
    stages: tuple[int, ...] = ()
    backward: tuple[float, ...] = ()
    overhead: tuple[int, ...] = ()
    free: bool = False
    deferral: bool = False
    lockstep: bool = False
    affinity: tuple[np.ndarray | None, ...] = ()
    lengths: Lengths | None = None

    @property
    def digest(self) -> tuple[Any, ...]:
        """Equal for equal slots, and hashable."""
        near = tuple(None if matrix is None else (matrix.shape, matrix.tobytes()) for matrix in self.affinity)
        return near, *(getattr(self, f.name) for f in fields(self) if f.name != "affinity")

    def __post_init__(self) -> None:
        count = len(self.lanes)
        defaults = {"max_tokens": None, "stages": 1, "backward": 2.0, "overhead": 0, "affinity": None}
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * count)
        for name in ("microbatches", *defaults):
            if len(getattr(self, name)) != count or not count:
                raise GraphError(f"balance: {name} needs one entry for each of {count} modules")
        for name in ("lanes", "microbatches", "stages"):
            if min(getattr(self, name)) < 1:
                raise GraphError(f"balance: {name} must be positive, got {getattr(self, name)}")
        for i, affinity in enumerate(self.affinity):
            if affinity is not None and np.shape(affinity) != (self.lanes[i], self.lanes[-1]):
                raise GraphError(
                    f"balance: the affinity of module {i} must have shape {(self.lanes[i], self.lanes[-1])}, "
                    f"got {np.shape(affinity)}"
                )

    @property
    def capped(self) -> bool:
        return any(cap is not None for cap in self.max_tokens)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Every sample of a global batch in one microbatch and lane of each module.

    Attributes:
        lanes: of each module.
        microbatches: of each module; where they were free, not those that were asked for.
        microbatch: int64 `[samples, modules]`.
        lane: int64 `[samples, modules]`.
        deferred: bool `[samples]`: whether the last module takes the sample one microbatch later than the rest.
        policy: who made it; `auto` says whom it chose.
        score: what a step with it takes by what `auto` compares, in the unit of that; None: not compared.
        tried: by `auto`: what it chose from, in that order; a single one where that was even enough.
    """

    lanes: tuple[int, ...]
    microbatches: tuple[int, ...]
    microbatch: np.ndarray
    lane: np.ndarray
    deferred: np.ndarray
    policy: str = ""
    score: float | None = None
    tried: tuple[Assignment, ...] = ()

    def __post_init__(self) -> None:
        for name, values, sizes in (
            ("microbatch", self.microbatch, self.microbatches),
            ("lane", self.lane, self.lanes),
        ):
            if values.shape != (len(self.deferred), len(sizes)):
                raise GraphError(f"assignment: {name} must have shape {(len(self.deferred), len(sizes))}")
            if values.size and (values.min() < 0 or (values >= np.array(sizes)).any()):
                raise GraphError(f"assignment: {name} must be below {sizes} for each module")

    def __len__(self) -> int:
        return len(self.deferred)

    def sums(self, values: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per module the sums of `values` `[samples, modules]` over each microbatch and lane, int64
        `[microbatches, lanes]`."""
        return tuple(
            _sums(values[:, i], self.microbatch[:, i] * lanes + self.lane[:, i], count * lanes).reshape(count, lanes)
            for i, (count, lanes) in enumerate(zip(self.microbatches, self.lanes, strict=True))
        )

    def padding_work(self, loads: BatchLoads) -> np.ndarray:
        """What the last module computes for padding in each microbatch and lane; int64 `[microbatches, lanes]`."""
        shape = self.microbatches[-1], self.lanes[-1]
        lengths, bins = loads.tokens[:, -1], self.microbatch[:, -1] * self.lanes[-1] + self.lane[:, -1]
        longest = np.zeros(shape[0] * shape[1], np.int64)
        np.maximum.at(longest, bins, lengths)
        real = _sums(loads.padded_work(np.ones_like(lengths), lengths), bins, len(longest))
        return (loads.padded_work(self.counts[-1].ravel(), longest) - real).reshape(shape)

    @cached_property
    def counts(self) -> tuple[np.ndarray, ...]:
        """Per module how many samples each microbatch and lane has, `[microbatches, lanes]`."""
        return self.sums(np.ones(self.lane.shape, np.int64))

    def permuted(self, places: np.ndarray) -> Assignment:
        """Of the samples at `places`, in that order."""
        arrays = self.microbatch[places], self.lane[places], self.deferred[places]
        tried = tuple(candidate.permuted(places) for candidate in self.tried)
        return Assignment(self.lanes, self.microbatches, *arrays, self.policy, self.score, tried)


def _sums(values: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros(count, np.int64)
    np.add.at(out, bins, values)
    return out


def check(loads: BatchLoads, slots: Slots, assignment: Assignment) -> Assignment:
    """`assignment`, if it keeps every cap of `slots`. Raises GraphError: names the module, microbatch, lane and cap."""
    for i, (name, bins) in enumerate(zip(loads.modules, assignment.sums(loads.tokens), strict=True)):
        cap = slots.max_tokens[i]
        if cap is not None and bins.size and bins.max() > cap:
            microbatch, lane = np.unravel_index(int(bins.argmax()), bins.shape)
            raise GraphError(
                f"balance: module {name!r} would take {bins.max()} tokens in microbatch {microbatch} of lane {lane}; "
                f"max_tokens is {cap}"
            )
    return assignment
