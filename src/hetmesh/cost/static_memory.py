"""Bytes that a module keeps on each rank for the whole run: parameters, gradients, optimizer state.

Activations, what FSDP gathers for a moment, and boundary buffers are not in here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetmesh.cost.shapes import ModuleShape, WeightShape
from hetmesh.graph import ModuleSpec, dense_mesh
from hetmesh.layout import MeshSpec

OPTIMIZER_COPIES: Mapping[str, int] = {"AdamW": 2, "Adam": 2, "SGD": 0}
"""Tensors of the size of a parameter that an optimizer keeps for it (SGD here has no momentum)."""


@dataclass(frozen=True)
class StaticMemory:
    """What one rank holds of one module.

    Attributes:
        elements: of all its parameters.
        parameters, gradients, optimizer: bytes. What is frozen has no gradient and no optimizer state.
        largest: bytes of the largest gradient.
        update: the most that the step of a `WeightShape.optimizer` holds for its parameter.
    """

    elements: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    largest: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def beside(self, other: StaticMemory) -> StaticMemory:
        """What a rank holds of two modules."""
        elements, parameters = self.elements + other.elements, self.parameters + other.parameters
        gradients, optimizer = self.gradients + other.gradients, self.optimizer + other.optimizer
        most = max(self.largest, other.largest), max(self.update, other.update)
        return StaticMemory(elements, parameters, gradients, optimizer, *most)


def static_memory(
    module: ModuleShape,
    mesh: MeshSpec,
    itemsize: int,
    optimizer: str,
    stages: Sequence[Collection[str]] = (),
    copies: int = 0,
) -> dict[int, StaticMemory]:
    """Per rank of `mesh`, with shards as tensor parallelism and FSDP cut them (tensor parallelism first, then dim 0).
    Experts are split over `ep` first, and by FSDP over what `ep` leaves of `dp_shard`; all else over both.

    Args:
        itemsize: bytes of one element of parameters, gradients and optimizer state.
        optimizer: its name in a recipe.
        stages: the layers of each pipeline stage, stage i at coordinate i modulo the size of `pp`; none: not split.
        copies: bytes of an element of frozen parameters and of copies of the others, which FSDP makes only as it
            gathers them (`ModuleOptions.compute_copies`); 0: there are none.
    """
    cells = _cells(module, _Split.of(mesh), itemsize, optimizer, tuple(map(tuple, stages)), copies)
    index = np.zeros(mesh.sizes, np.int64)
    coordinates = dict(zip(mesh.axes, np.indices(mesh.sizes), strict=True))
    for axis in ("pp", "tp", "dp_shard", "ep"):
        index = index * mesh.axis_size(axis) + coordinates.get(axis, 0)
    return dict(zip(mesh.ranks, map(cells.__getitem__, index.ravel().tolist()), strict=True))


@dataclass(frozen=True)
class _Split:
    """Sizes of the axes along which ranks hold different parts; `dense`: FSDP shards all but experts, too."""

    pp: int
    tp: int
    shards: int
    ep: int
    dense: bool

    @classmethod
    def of(cls, mesh: MeshSpec) -> _Split:
        pp, tp, shards, ep = map(mesh.axis_size, ("pp", "tp", "dp_shard", "ep"))
        return cls(pp, tp, shards, ep, dense_mesh(mesh).axis_size("dp_shard") > 1)


@lru_cache(maxsize=1024)
def _cells(
    module: ModuleShape,
    split: _Split,
    itemsize: int,
    optimizer: str,
    stages: tuple[tuple[str, ...], ...],
    copies: int,
    firsts: bool = False,
) -> tuple[StaticMemory, ...]:
    """What ranks hold by their coordinate along `pp`, `tp`, `dp_shard` and `ep`: all else replicates; `firsts`: only of
    the first ranks along all but `pp`, which hold the largest parts of everything."""
    cells: list[StaticMemory] = []
    for place in range(split.pp):
        elements, trainable, state, largest, update = np.zeros((5, split.tp, split.shards, split.ep), np.int64)
        equal = Counter(
            (w.shape, w.tp_dim, w.within, w.trainable, w.optimizer)
            for w in place_weights(module, split.pp, place, stages)
        )
        for (shape, tp_dim, within, trained, own), count in equal.items():
            one = _held_elements(shape, tp_dim, within, split)
            elements += count * one
            trainable += count * one * trained
            state += count * one * trained * (OPTIMIZER_COPIES.get(optimizer, 0) if own is None else own.copies)
            np.maximum(largest, one * trained, out=largest)
            if own is not None:  # the gathered parameter, gradient and state; and two tensors that the step makes
                held = math.prod(shape) * (4 + own.copies) if own.whole else 2 * one
                np.maximum(update, held * trained, out=update)
        numbers = np.stack([elements, trainable, state, largest, update], -1).reshape(-1, 5)
        for n, *rest in numbers[: 1 if firsts else None].tolist():
            held = itemsize * n
            if copies:
                held = (itemsize + copies * (not split.dense)) * rest[0] + copies * (n - rest[0])
            cells.append(StaticMemory(n, held, *(itemsize * each for each in rest)))
    return tuple(cells)


def update_bytes(held: Sequence[StaticMemory], optimizer: str, implementation: str, weight_decay: bool) -> int:
    """Bytes that the optimizer's step holds for a moment beyond parameters, gradients and state.

    A fused kernel updates in place. "foreach" works on all parameters of a group at once, and groups are of one
    module: Adam and AdamW make the root of the second moments, Adam with weight decay and SGD with it a sum with the
    gradients (`torch.optim.adam._multi_tensor_adam`, `torch.optim.sgd._multi_tensor_sgd`). "for-loop" makes the same of
    one parameter at a time, Adam's root twice. What a class of its own makes is assumed to be two tensors.

    Args:
        held: by one rank, of each module.
        optimizer, implementation: their names in a recipe; SGD has no fused kernel for DTensors: it is "foreach".
    """
    own = max((cell.update for cell in held), default=0)
    if optimizer not in OPTIMIZER_COPIES:
        return own
    adam = optimizer in ("Adam", "AdamW")
    summed = int(weight_decay and optimizer != "AdamW")
    if implementation == "for-loop":
        return max((2 * adam + summed) * max((cell.largest for cell in held), default=0), own)
    if implementation == "fused" and adam:
        return own
    return max((adam + summed) * max((cell.gradients for cell in held), default=0), own)


def module_memory(shape: ModuleShape, spec: ModuleSpec, optimizer: str) -> dict[int, StaticMemory]:
    """`static_memory` of a module of a graph: its mesh, its stages, the dtype of its parameters."""
    itemsize, copies = spec.options.parameter_dtype.itemsize, _copies(spec)
    return static_memory(shape, spec.mesh, itemsize, optimizer, spec.splits, copies)


def most_held(shape: ModuleShape, spec: ModuleSpec, optimizer: str) -> int:
    """Bytes that the rank holds of a module of a graph that holds most of it."""
    split, itemsize = _Split.of(spec.mesh), spec.options.parameter_dtype.itemsize
    splits = tuple(map(tuple, spec.splits))
    return max(cell.total for cell in _cells(shape, split, itemsize, optimizer, splits, _copies(spec), True))


def _copies(spec: ModuleSpec) -> int:
    return spec.options.row_dtype.itemsize if spec.options.compute_copies else 0


def place_weights(
    module: ModuleShape, pp: int, place: int, stages: Sequence[Collection[str]] = ()
) -> tuple[WeightShape, ...]:
    """The parameters that the ranks at coordinate `place` of a `pp` axis of that size hold, each once: those of the
    layers of their stages, tied ones included, and a copy of what belongs to no layer."""
    own = {layer for run in stages[place::pp] for layer in run}
    kept = (layer for layer in module.layers if not stages or not layer.name or layer.name in own)
    return ModuleShape(module.name, tuple(kept)).weights


def _held_elements(shape: tuple[int, ...], tp_dim: int | None, within: int | None, split: _Split) -> np.ndarray:
    """Elements of a parameter on each rank: int64 [tp, dp_shard, ep], or what broadcasts to it."""
    tp, shards, ep = split.tp, split.shards, split.ep
    if within is None or ep == 1:
        if not split.dense:
            return _shard_elements(shape, tp_dim, tp, 1)[:, :, None]
        return _shard_elements(shape, tp_dim, tp, shards * ep).reshape(tp, shards, ep)
    own = shape[0] // ep, *shape[1:]
    if own[0] < shards:  # each expert in equal parts
        return _shard_elements(own, tp_dim, tp, 1)[:, :, None] // shards
    return _shard_elements(own, tp_dim, tp, shards)[:, :, None]


@lru_cache(maxsize=4096)
def _shard_elements(shape: tuple[int, ...], tp_dim: int | None, tp: int, shards: int) -> np.ndarray:
    """Elements of a parameter on each rank: int64 [tp, dp_shard]."""
    if not shape:
        return np.ones((tp, shards), np.int64)
    first = np.full(tp, shape[0])
    rest = np.full(tp, math.prod(shape[1:]))
    if tp_dim == 0:
        first = _chunks(first[:1], tp)[0]
    elif tp_dim is not None:
        rest = rest // shape[tp_dim] * _chunks(np.array([shape[tp_dim]]), tp)[0]
    return _chunks(first, shards) * rest[:, None]


def _chunks(sizes: np.ndarray, parts: int) -> np.ndarray:
    """The lengths of torch.chunk's parts of each size, 0 after the last one: int64 [sizes, parts]."""
    length = -(-sizes // parts)[:, None]
    return np.clip(sizes[:, None] - length * np.arange(parts), 0, length)


def tensor_parallel_elements(weight: WeightShape, tp: int) -> int:
    """Elements of a parameter on the first of `tp` tensor parallel ranks, before FSDP: the most that one has."""
    return int(_shard_elements(weight.shape, weight.tp_dim, tp, 1)[0, 0])
