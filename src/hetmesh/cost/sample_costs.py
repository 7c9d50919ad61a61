"""SampleCosts: what each sample of a batch costs a module, as whole numbers, for all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetmesh.cost.flops import module_flops
from hetmesh.cost.shapes import ModuleShape
from hetmesh.cost.work import Work, sample_work
from hetmesh.graph import ModuleGraph, SampleMeta

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
        return _counts(graph, module, samples) @ np.array(self.forward, np.int64)


def _counts(graph: ModuleGraph, module: str, samples: Sequence[SampleMeta]) -> np.ndarray:
    """`sample_work` of all samples at once: int64 `[samples, 3]`, rows, pairs and targets."""
    out = np.zeros((len(samples), 3), np.int64)
    if module == graph.sink.name:
        out[:, 0] = [sample.tokens for sample in samples]
        out[:, 1] = out[:, 0] ** 2
        out[:, 2] = [sample.num_targets for sample in samples]
    elif graph.inputs(module):
        out[:, 0] = [sample.rows.get(module, 0) for sample in samples]
    else:
        each = [sample_work(graph, module, sample) for sample in samples]
        out[:, 0], out[:, 1] = [work.rows for work in each], [work.pairs for work in each]
    return out
