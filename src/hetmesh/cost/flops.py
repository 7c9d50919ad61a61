"""FLOPs of a module for given work: the transformer formula, aware of what is frozen.

A weight matrix costs 2 x its elements per row that it multiplies, attention 4 x its width per (query, key) pair (two
matrix products), a recurrence what its chunks take (`recurrence.py`), twice of that in its backward as well. Embedding
look-ups, norms and activations are left out, as in torchtitan's and PaLM's MFU; unlike there a head counts only the
positions where it runs, and a convolution counts. Of experts each row multiplies as many as it chooses, whichever they
are.

Backward (Cornstarch, arXiv 2503.11367, section 4): forward x (t + g), where t says that the weight is trainable and g
that something before the layer is, so that the gradient of its input is needed. Attention has no weights: if it needs
a backward at all, both factors of both products get a gradient, hence 2 x forward. (Cornstarch counts it like weights.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetmesh.cost.shapes import LayerShape, ModuleShape
from hetmesh.cost.work import Work, samples_work
from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta


@dataclass(frozen=True)
class Flops:
    """Floating point operations; a multiplication and an addition are two."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def layer_flops(layer: LayerShape, work: Work, *, upstream: bool) -> Flops:
    """Of one layer, over all ranks that share it. A head by chunks has its backward in its forward.

    Args:
        work: of the module.
        upstream: whether anything trainable comes before the layer: in this module or in one that feeds it.
    """
    rows = layer.rows(work)
    forward = backward = 0
    for weight in layer.weights:
        once = 2 * weight.multiplied * rows
        forward += once
        backward += once * (weight.trainable + upstream)
    attention = 4 * layer.attention_width * layer.pairs(work)
    if layer.by_chunks:
        return Flops(forward + backward)
    attention += sum(own.flops for own in layer.recurrences) * rows
    return Flops(forward + attention, backward + attention * 2 * (upstream or layer.trainable))


def module_flops(module: ModuleShape, work: Work, *, upstream: bool) -> Flops:
    """Of a whole module, over all its ranks. `upstream`: whether a module that feeds it, directly or not, is
    trainable."""
    total = Flops()
    for layer in module.layers:
        total += layer_flops(layer, work, upstream=upstream)
        upstream = upstream or layer.trainable
    return total


def token_costs(shape: ModuleShape, itemsize: int) -> tuple[int, int]:
    """By what ranks that share the tokens of an LLM weigh these: the FLOPs of a row in all layers, as (query, key)
    pairs, and the bytes that a cut of a sample sends in a step, as rows of keys and values, which are fetched for the
    forward and the backward and whose gradients go back. `(0, 0)` for one without recurrences. `itemsize`: bytes of an
    element of activations."""
    if not any(layer.recurrences for layer in shape.layers):
        return 0, 0
    row, pair = (module_flops(shape, work, upstream=False).forward for work in (Work(1), Work(pairs=1)))
    sent = [own.cut_bytes(itemsize) for layer in shape.layers for own in layer.recurrences]
    keys = sum(3 * 2 * layer.key_width * itemsize for layer in shape.layers)
    return row // max(pair, 1), sum(cut.forward + cut.backward for cut in sent) // max(keys, 1)


_UNITS = (Work(rows=1), Work(pairs=1), Work(targets=1))


@dataclass(frozen=True)
class SampleCosts:
    """What a module computes for a sample: linear in its rows, its (query, key) pairs and its targets.

    Attributes:
        forward: FLOPs per row, pair and target, or measured time on all ranks of a lane, in one unit for all modules.
            Times `1 + backward` it is all that a step does for these, of whatever part of it is in the forward.
        backward: how many times as long as the forward of a typical microbatch everything after it takes; 0 where there
            is no backward.
        overhead: what a microbatch costs beside its samples, in that unit; None: not measured.
    """

    forward: tuple[int, int, int]
    backward: float
    overhead: int | None = None

    @classmethod
    def of(cls, shape: ModuleShape | None, work: Work, *, upstream: bool) -> SampleCosts:
        """From the sizes of a module; where they are not known, every row costs the same. `work`: of a typical
        microbatch. `upstream`: whether a module that feeds it is trainable."""
        if shape is None:
            return cls((1, 0, 0), 2.0)
        whole = module_flops(shape, work, upstream=upstream)
        ratio = whole.backward / whole.forward if whole.forward else 0.0
        once = [round(module_flops(shape, unit, upstream=upstream).total / (1 + ratio)) for unit in _UNITS]
        return cls((once[0], once[1], once[2]), ratio)

    def work(self, graph: ModuleGraph, module: str, samples: Sequence[SampleMeta]) -> np.ndarray:
        """Of each sample over all ranks of a lane, in the unit of `forward`; int64 `[samples]`."""
        return samples_work(graph, module, MetaArrays.of(samples)) @ np.array(self.forward, np.int64)
