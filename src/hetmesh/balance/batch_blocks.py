"""BatchBlocks: the windows and groups common to modules with different microbatches and lanes, and the way back.

A *window* is what the module with fewest microbatches calls a microbatch, a *group* what the one with fewest lanes
calls a lane. A block is one window of one group: each module has at least one microbatch and lane in it. Samples are
balanced over blocks with the work of all modules in view; inside a block each module then splits its samples
independently, within its caps. Rows never leave their window, so no module waits for a later microbatch of another, and
stay in their group of lanes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.caps import NO_CAP, within_caps
from hetmesh.balance.local_search import resplit
from hetmesh.balance.lpt import SCALE, as_table, from_table, least_loaded, normalised
from hetmesh.errors import GraphError


@dataclass(frozen=True, eq=False)
class BatchBlocks:
    """The windows and groups of `slots`."""

    slots: Slots

    @property
    def windows(self) -> int:
        """Microbatches of the module that has fewest."""
        return min(self.slots.microbatches)

    @property
    def groups(self) -> int:
        """Lanes of the module that has fewest."""
        return min(self.slots.lanes)

    @property
    def count(self) -> int:
        """Number of blocks. Block `window * groups + group` is that window of that group."""
        return self.windows * self.groups

    @cached_property
    def window_of(self) -> tuple[np.ndarray, ...]:
        """Per module, the window of each of its microbatches."""
        return tuple(np.arange(count) * self.windows // count for count in self.slots.microbatches)

    @cached_property
    def group_of(self) -> tuple[np.ndarray, ...]:
        """Per module, the group of each of its lanes: runs of lanes, or those on ranks of the last module's there."""
        last = np.arange(self.slots.lanes[-1]) * self.groups // self.slots.lanes[-1]
        return tuple(self._groups(i, last) for i in range(len(self.slots.lanes)))

    def _groups(self, module: int, last: np.ndarray) -> np.ndarray:
        lanes, affinity = self.slots.lanes[module], self.slots.affinity[module]
        runs = np.arange(lanes) * self.groups // lanes
        if affinity is None or module == len(self.slots.lanes) - 1:
            return runs
        shared = np.zeros((lanes, self.groups), np.int64)
        np.add.at(shared.T, last, np.asarray(affinity).T)
        room = np.bincount(runs, minlength=self.groups)
        out = np.full(lanes, -1, np.int64)
        for pair in np.argsort(-shared, axis=None, kind="stable").tolist():
            lane, group = divmod(pair, self.groups)
            if out[lane] < 0 and room[group]:
                out[lane] = group
                room[group] -= 1
        return out

    @cached_property
    def parts(self) -> np.ndarray:
        """Into how many microbatches and lanes each module splits each block, int64 `[modules, blocks]`."""
        modules = range(len(self.slots.lanes))
        windows = [np.bincount(self.window_of[i], minlength=self.windows) for i in modules]
        groups = [np.bincount(self.group_of[i], minlength=self.groups) for i in modules]
        return np.array([np.outer(w, g).ravel() for w, g in zip(windows, groups, strict=True)])

    @cached_property
    def uniform(self) -> bool:
        """Whether every block should hold as much as every other."""
        return bool((self.parts == self.parts[:, :1]).all())

    @cached_property
    def target(self) -> np.ndarray:
        """What each block should hold of normalised loads, int64 `[blocks, modules]`."""
        whole = np.array(self.slots.microbatches) * np.array(self.slots.lanes)
        return np.rint(self.parts / whole[:, None] * float(SCALE * self.count)).astype(np.int64).T

    def normalised(self, loads: BatchLoads) -> np.ndarray:
        """The work of `loads` such that blocks hold `SCALE` on average."""
        return normalised(loads.work, self.count)

    def by_window(self, assignment: Assignment, loads: BatchLoads) -> np.ndarray:
        """The work of each group of lanes in each window, padding included: of lanes side by side that of the busiest,
        of microbatches the sum. int64 `[groups, windows, modules]`."""
        out = np.zeros((self.groups, self.windows, loads.work.shape[1]), np.int64)
        for i, bins in enumerate(assignment.sums(loads.work)):
            bins = bins + self.slots.overhead[i]
            if loads.pads and i == len(self.slots.lanes) - 1:
                bins = bins + assignment.padding_work(loads)
            lanes = np.zeros((len(bins), self.groups), np.int64)
            np.maximum.at(lanes.T, self.group_of[i], bins.T)
            np.add.at(out[:, :, i].T, self.window_of[i][: len(bins)], lanes)
        return out

    def late(self, assignment: Assignment) -> np.ndarray:
        """Whether the last module takes some samples of a group and window one window later, bool
        `[groups, windows]`."""
        out = np.zeros((self.groups, self.windows), bool)
        first = int(len(self.slots.lanes) > 1) - 1  # an encoder; all agree
        where = np.flatnonzero(assignment.deferred)
        out[
            self.group_of[first][assignment.lane[where, first]],
            self.window_of[first][assignment.microbatch[where, first]],
        ] = True
        return out


def from_blocks(
    loads: BatchLoads, slots: Slots, block: np.ndarray, deferred: np.ndarray | None = None, *, policy: str = ""
) -> Assignment:
    """The assignment of samples whose block is known.

    Args:
        block: int64 `[samples]`; where samples are deferred, within caps already (`fitted`).
        deferred: bool `[samples]`: those that the last module takes one window later.

    Raises:
        GraphError: no way was found to keep a cap.
    """
    blocks = BatchBlocks(slots)
    if deferred is None:
        deferred = np.zeros(len(loads), bool)
        block = fitted(loads, blocks, block)
    microbatch, lane = np.empty_like(loads.work), np.empty_like(loads.work)
    for i in range(len(slots.lanes)):
        own = block + deferred * blocks.groups if i == len(slots.lanes) - 1 else block
        bins = _fitted_split(loads, blocks, i, own)
        microbatch[:, i], lane[:, i] = np.divmod(bins, slots.lanes[i])
    return Assignment(slots.lanes, slots.microbatches, microbatch, lane, deferred, policy)


def fitted(loads: BatchLoads, blocks: BatchBlocks, block: np.ndarray) -> np.ndarray:
    """The block of each sample, changed where one holds too much. Raises GraphError: no way was found."""
    slots = blocks.slots
    if not slots.capped:
        return block
    caps = np.array([NO_CAP if cap is None else cap for cap in slots.max_tokens]) * np.minimum(blocks.parts.T, 1 << 20)
    caps = np.where(np.array([cap is None for cap in slots.max_tokens]), NO_CAP, caps)
    found = within_caps(block, loads.tokens, caps, blocks.normalised(loads).max(1, initial=0))
    if found is None:
        raise _infeasible(loads, slots)
    return found


def _infeasible(loads: BatchLoads, slots: Slots) -> GraphError:
    totals = [int(total) for total in loads.tokens.sum(0)]
    parts = [
        f"{name!r}: {total} tokens in {count} microbatches of {lanes} lanes, max_tokens {cap}"
        for name, total, count, lanes, cap in zip(
            loads.modules, totals, slots.microbatches, slots.lanes, slots.max_tokens, strict=True
        )
        if cap is not None
    ]
    return GraphError(
        f"balance: the batch does not fit into its microbatches ({'; '.join(parts)}); raise max_tokens, or the number "
        "of microbatches"
    )


def _fitted_split(loads: BatchLoads, blocks: BatchBlocks, module: int, block: np.ndarray) -> np.ndarray:
    """The microbatch and lane of each sample in one module, as microbatch * lanes + lane."""
    slots, lanes = blocks.slots, blocks.slots.lanes[module]
    windows, groups = blocks.window_of[module], blocks.group_of[module]
    of_bin = (windows[:, None] * blocks.groups + groups[None, :]).ravel()
    bins = _split(loads.work[:, module], blocks, of_bin, block)
    cap = slots.max_tokens[module]
    if cap is None:
        return bins
    tokens, caps = loads.tokens[:, module : module + 1], np.full((len(of_bin), 1), cap)
    for allowed in (of_bin, windows[np.arange(len(of_bin)) // lanes]):  # inside its block, or else in its window
        found = within_caps(bins, tokens, caps, loads.work[:, module], allowed)
        if found is not None:
            return found
    raise GraphError(
        f"balance: samples of one microbatch do not fit into the lanes of module {loads.modules[module]!r} with "
        f"max_tokens {cap}; raise it, or the number of microbatches"
    )


def _split(work: np.ndarray, blocks: BatchBlocks, of_bin: np.ndarray, block: np.ndarray) -> np.ndarray:
    """The bin of each sample. `of_bin`: the block of each bin."""
    ordered = np.argsort(of_bin, kind="stable")
    if len(of_bin) == blocks.count:
        return ordered[block]
    starts = np.searchsorted(of_bin[ordered], np.arange(blocks.count + 1)).tolist()
    choices = [ordered[a:b].tolist() for a, b in itertools.pairwise(starts)]
    order = np.argsort(-work, kind="stable")
    bins = least_loaded(order, work, choices, group=block)
    table = as_table(bins, len(of_bin), spare=1)
    load = normalised(work[:, None], len(of_bin))
    return from_table(resplit(load, table, 12, group=of_bin), len(work))
