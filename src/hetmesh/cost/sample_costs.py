"""SampleCosts: what each sample of a batch costs a module, as whole numbers, for all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetmesh.cost.flops import module_flops
from hetmesh.cost.shapes import ModuleShape
from hetmesh.cost.work import Work, samples_work
from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta

_UNITS = (Work(rows=1), Work(pairs=1), Work(targets=1))


@dataclass(frozen=True)
class SampleCosts:
    """What a module computes for a sample: linear in its rows, its (query, key) pairs and its targets.

    Attributes:
        forward: FLOPs per row, pair and target.
        backward: how many times as long as the forward everything after it takes; 0 where there is no backward.
    """

    forward: tuple[int, int, int]
    backward: float

    @classmethod
    def of(cls, shape: ModuleShape | None, *, upstream: bool) -> SampleCosts:
        """From the sizes of a module; where they are not known, every row costs the same.

        Args:
            upstream: whether a module that feeds it is trainable.
        """
        if shape is None:
            return cls((1, 0, 0), 2.0)
        units = [module_flops(shape, work, upstream=upstream) for work in _UNITS]
        once = units[0]
        return cls(tuple(unit.forward for unit in units), once.backward / once.forward if once.forward else 0.0)  # type: ignore[arg-type]

    def work(self, graph: ModuleGraph, module: str, samples: Sequence[SampleMeta]) -> np.ndarray:
        """Forward FLOPs of each sample over all ranks of a lane; int64 `[samples]`."""
        return samples_work(graph, module, MetaArrays.of(samples)) @ np.array(self.forward, np.int64)
