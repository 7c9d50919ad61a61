"""Bytes that a module keeps on each rank for the whole run: parameters, gradients, optimizer state.

Activations, what FSDP gathers for a moment, and boundary buffers are not in here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetmesh.cost.shapes import ModuleShape, WeightShape
from hetmesh.layout import MeshSpec

OPTIMIZER_COPIES: Mapping[str, int] = {"AdamW": 2, "Adam": 2, "SGD": 0}
"""Tensors of the size of a parameter that an optimizer keeps for it (SGD here has no momentum)."""


@dataclass(frozen=True)
class StaticMemory:
    """What one rank holds of one module.

    Attributes:
        elements: of all its parameters.
        parameters, gradients, optimizer: bytes. What is frozen has no gradient and no optimizer state.
    """

    elements: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.parameters + self.gradients + self.optimizer


def static_memory(
    module: ModuleShape, mesh: MeshSpec, itemsize: int, optimizer: str, stages: Sequence[Collection[str]] = ()
) -> dict[int, StaticMemory]:
    """Per rank of `mesh`, with shards as tensor parallelism and FSDP cut them (tensor parallelism first, then dim 0).

    Args:
        itemsize: bytes of one element of parameters, gradients and optimizer state.
        optimizer: its name in a recipe.
        stages: the layers of each pipeline stage, stage i at coordinate i modulo the size of `pp`; none: not split.
    """
    held: dict[tuple[int, int, int], StaticMemory] = {}  # by coordinate along pp, tp and dp_shard: all else replicates
    result = {}
    for rank in mesh.ranks:
        coordinate = dict(zip(mesh.axes, mesh.coordinate(rank) or (), strict=True))
        key = coordinate.get("pp", 0), coordinate.get("tp", 0), coordinate.get("dp_shard", 0)
        if key not in held:
            sizes = mesh.axis_size("tp"), mesh.axis_size("dp_shard")
            own = {layer for run in stages[key[0] :: mesh.axis_size("pp")] for layer in run}
            kept = [layer for layer in module.layers if not stages or layer.name in own]
            weights = ModuleShape(module.name, tuple(kept)).weights
            local = [(weight, local_elements(weight, sizes, key[1:])) for weight in weights]
            trainable = itemsize * sum(n for weight, n in local if weight.trainable)
            elements = sum(n for _, n in local)
            held[key] = StaticMemory(
                elements, itemsize * elements, trainable, trainable * OPTIMIZER_COPIES.get(optimizer, 0)
            )
        result[rank] = held[key]
    return result


def local_elements(weight: WeightShape, sizes: tuple[int, int], coordinate: tuple[int, int]) -> int:
    """Elements of a parameter at one coordinate along (tp, dp_shard), where these axes have `sizes`."""
    shape = list(weight.shape)
    if weight.tp_dim is not None:
        shape[weight.tp_dim] = _chunk(shape[weight.tp_dim], sizes[0], coordinate[0])
    if shape:
        shape[0] = _chunk(shape[0], sizes[1], coordinate[1])
    return math.prod(shape)


def _chunk(size: int, parts: int, index: int) -> int:
    """The length of torch.chunk's part `index`; 0 behind the last one."""
    length = -(-size // parts)
    return max(0, min(length, size - index * length))
