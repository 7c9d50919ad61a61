"""What a step takes in a 1F1B pipeline, for many orders of microbatches and lanes at once: a recurrence over arrays.

The same recurrence as `hetmesh.simulate` on the `1f1b` schedule with messages that take no time (a test compares them),
at a thousandth of the price: it has neither a schedule, which would be validated, nor spans, and walks once for many
orders. Every forward and backward starts when its stage is free and its inputs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks

Score = Callable[[Assignment], float]
"""What a step with this assignment takes, in any unit; less is better."""


def pipeline_score(loads: BatchLoads, slots: Slots) -> Score:
    """The length of a step (`Slots.lengths`) of the slowest group of lanes, in the unit of `loads.work`."""

    def score(assignment: Assignment) -> float:
        adapted = replace(slots, microbatches=assignment.microbatches)
        work = BatchBlocks(adapted).by_window(assignment, loads)
        work = work.max(0, keepdims=True) if slots.lockstep else work
        late = BatchBlocks(adapted).late(assignment) if assignment.deferred.any() else None
        more = None
        if slots.lengths is not None:
            together = None if late is None else late.any(0)  # all lanes take one order
            return float(slots.lengths(work, slots.backward, together).max(initial=0.0))
        if late is not None:
            late = np.asarray(late.any(0, keepdims=True)) if slots.lockstep else late
            more = np.full(len(late), _needs_more(late, slots.stages[-1]).any())  # all lanes take one order
        return float(step_lengths(work, slots.stages, slots.backward, late=late, more=more).max(initial=0.0))

    return score


def step_lengths(
    work: np.ndarray,
    stages: Sequence[int],
    backward: Sequence[float],
    *,
    late: np.ndarray | None = None,
    more: np.ndarray | None = None,
) -> np.ndarray:
    """The length of each of some steps, float64 `[steps]`.

    Args:
        work: `[steps, microbatches, modules]`: forward of all stages of a module. The last module takes rows from all
            others, which run side by side.
        stages, backward: as in `Slots`.
        late: bool `[steps, microbatches]`: whether the last module takes some of a microbatch's rows one microbatch
            later. The backward of the encoders' microbatch then waits for two of the last module's (Entrain, with a
            whole backward). None: nothing is deferred.
        more: bool `[steps]`: whether encoders warm up with one more forward. None: where a late microbatch comes early
            enough for another forward to follow, as the schedule has it.
    """
    if late is not None:
        more = _needs_more(late, stages[-1]) if more is None else more
        out = np.empty(len(work))
        for extra in (False, True):
            some = np.flatnonzero(more == extra)
            if len(some):
                out[some] = _lengths(work[some], stages, backward, late[some], extra)
        return out
    return _lengths(work, stages, backward, None, False)


def _needs_more(late: np.ndarray, last_stages: int) -> np.ndarray:
    """Per step, whether an encoder holds one more: it still does a late microbatch when it warms up or goes on."""
    return np.asarray(late[:, : max(late.shape[1] - last_stages - 1, 0)].any(1))


def _lengths(
    work: np.ndarray, stages: Sequence[int], backward: Sequence[float], late: np.ndarray | None, more: bool
) -> np.ndarray:
    forward = np.moveaxis(work, 0, 2) / np.array(stages, float)[:, None]  # [microbatches, modules, steps]
    seconds = (forward, forward * np.array(backward, float)[:, None])
    module, actions = _actions(tuple(stages), work.shape[1], tuple(b > 0 for b in backward), late is not None, more)
    free: list[np.ndarray | None] = [None] * len(module)
    ends: list[np.ndarray] = []
    zero = np.zeros(len(work))
    for stage, kind, m, waits, next_wait in actions:
        start = free[stage]
        for wait in waits:
            start = ends[wait] if start is None else np.maximum(start, ends[wait])
        if start is None:
            start = zero
        if next_wait >= 0:
            assert late is not None
            start = np.where(late[:, m], np.maximum(start, ends[next_wait]), start)
        free[stage] = end = start + seconds[kind][m, module[stage]]
        ends.append(end)
    out = zero
    for last in free:
        out = out if last is None else np.maximum(out, last)
    return out


_Action = tuple[int, int, int, tuple[int, ...], int]
"""Stage, 0 for a forward and 1 for a backward, microbatch, the indices of the actions that it waits for, and of the one
that it waits for where its microbatch is late (-1: none)."""


@lru_cache(maxsize=64)
def _actions(
    stages: tuple[int, ...], microbatches: int, trained: tuple[bool, ...], deferral: bool, more: bool
) -> tuple[tuple[int, ...], tuple[_Action, ...]]:
    """The module of each stage, and the actions of 1F1B in an order in which whatever waits comes later."""
    module = tuple(i for i, count in enumerate(stages) for _ in range(count))
    starts = np.cumsum([0, *stages]).tolist()
    last = len(stages) - 1
    after = [s + 1 if s + 1 < starts[own + 1] else starts[last] if own != last else -1 for s, own in enumerate(module)]
    before = [[s for s, other in enumerate(after) if other == stage] for stage in range(len(module))]
    distance = [starts[own + 1] - 1 - s + (0 if own == last else stages[last]) for s, own in enumerate(module)]
    queues = [
        _turns(microbatches, d + 1 + (more and own != last), trained[own])
        for d, own in zip(distance, module, strict=True)
    ]
    done: dict[tuple[int, int, int], int] = {}
    out: list[_Action] = []
    position = [0] * len(module)
    while len(out) < sum(map(len, queues)):
        for stage, queue in enumerate(queues):
            while position[stage] < len(queue):
                kind, m = queue[position[stage]]
                crosses = kind == 1 and after[stage] == starts[last] and module[stage] != last
                late = (1, after[stage], m + 1) if deferral and crosses and m + 1 < microbatches else None
                waits = [(0, s, m) for s in before[stage]] if kind == 0 else [(1, after[stage], m)]
                waits = [wait for wait in waits if wait[1] >= 0]
                if any(wait not in done for wait in (*waits, *([late] if late else []))):
                    break
                done[kind, stage, m] = len(out)
                out.append((stage, kind, m, tuple(done[wait] for wait in waits), done[late] if late else -1))
                position[stage] += 1
    return module, tuple(out)


def _turns(microbatches: int, cap: int, trained: bool) -> list[tuple[int, int]]:
    """What one stage does, in order: it warms up, then alternates a backward and a forward."""
    if not trained:
        return [(0, m) for m in range(microbatches)]
    warm = min(cap, microbatches)
    out = [(0, m) for m in range(warm)]
    for m in range(microbatches):
        out.append((1, m))
        if m + warm < microbatches:
            out.append((0, m + warm))
    return out
