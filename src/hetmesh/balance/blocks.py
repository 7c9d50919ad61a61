"""BatchBlocks: what modules with other numbers of lanes and microbatches have in common, and the way back to theirs.

A *window* is what the module with fewest microbatches calls a microbatch, a *group* what the one with fewest lanes
calls a lane. A block is one window of one group: each module has at least one microbatch and lane in it. Samples are
balanced over blocks with the work of all modules in view; inside a block each module then splits its own on its own.
Rows never leave their window, so no module waits for a later microbatch of another, and stay in their group of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.fill import SCALE, normalised
from hetmesh.balance.loads import BatchLoads, Slots


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
        """BatchBlocks; block `window * groups + group`."""
        return self.windows * self.groups

    @cached_property
    def window_of(self) -> tuple[np.ndarray, ...]:
        """Per module, the window of each of its microbatches."""
        return tuple(np.arange(count) * self.windows // count for count in self.slots.microbatches)

    @cached_property
    def group_of(self) -> tuple[np.ndarray, ...]:
        """Per module, the group of each of its lanes: runs of lanes, or those that share ranks with the lanes of the
        last module in the group."""
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
