"""What a stage of a module computes and holds, by sizes alone: worked out once for many layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetmesh.cost import LayerShape, ModuleShape, upstream_flags
from hetmesh.cost.static_memory import place_weights, tensor_parallel_elements
from hetmesh.simulate.layer_costs import kinds


@lru_cache(maxsize=64)
def blocks(shape: ModuleShape) -> frozenset[str]:
    """The layers that are checkpointed and gathered by themselves (`hetmesh.parallel.apply.blocks`, by sizes)."""
    several = {
        layer.name: sum(w.numel for w in layer.weights)
        for layer in shape.layers
        if layer.name and len(layer.weights) > 2 and not layer.by_chunks
    }
    return frozenset(name for name, size in several.items() if 8 * size >= max(several.values()))


@lru_cache(maxsize=64)
def owners(shape: ModuleShape) -> dict[str, str]:
    """The block with which FSDP gathers each weight; empty for those of none."""
    by_name = {} if shape.gathered_whole else {f"{block}.": block for block in blocks(shape)}
    return {
        weight.name: next((block for prefix, block in by_name.items() if weight.name.startswith(prefix)), "")
        for weight in shape.weights
    }


@dataclass(frozen=True)
class StageContents:
    """What a stage computes and holds.

    Attributes:
        order: its layers: (kind, whether it is a block, whether anything trainable is before it).
        counts: how many there are of each.
        held: elements of the parameters of each block on one rank, before FSDP; under `""` those of none.
        trained: elements of all that is trained.
        experts: of experts that ranks share, which FSDP gathers apart from their block: as `held`, which lacks them.
        experts_trained: as `trained`, which lacks them.
        own_rows: elements, of `trained`, of which each tensor-parallel rank has a part of the gradient.
    """

    order: tuple[tuple[LayerShape, bool, bool], ...]
    counts: Mapping[tuple[LayerShape, bool, bool], int]
    held: Mapping[str, int]
    trained: int
    experts: Mapping[str, int]
    experts_trained: int
    own_rows: int = 0


@lru_cache(maxsize=4096)
def stage_contents(
    shape: ModuleShape, upstream: bool, names: tuple[str, ...] | None, first: bool, rest: bool, tp: int, ep: int = 1
) -> StageContents:
    """A stage with the layers `names`; None: with all of them.

    Args:
        upstream: whether anything before the module is trainable.
        first, rest: whether what belongs to no layer is computed here, and whether it is held here.
        tp: tensor parallel ranks.
        ep: ranks that share experts.
    """
    own = frozenset(names or ())
    alone = blocks(shape)
    order: list[tuple[LayerShape, bool, bool]] = []
    found: set[str] = set()
    for layer, kind, before in zip(shape.layers, kinds(shape), upstream_flags(shape, upstream), strict=True):
        if names is None or (layer.name in own if layer.name else first):
            order.append((kind, layer.name in alone, before))
            found.add(layer.name)
    kept = (x for x in shape.layers if names is None or (x.name in own if x.name else rest))
    held: dict[str, int] = {}
    experts: dict[str, int] = {}
    trained = experts_trained = own_rows = 0
    for weight in place_weights(ModuleShape("", tuple(kept)), 1, 0):
        owner, count = owners(shape)[weight.name], tensor_parallel_elements(weight, tp)
        if weight.expert and ep > 1:
            experts[owner] = experts.get(owner, 0) + count // ep
            experts_trained += count // ep * weight.trainable
        else:
            held[owner] = held.get(owner, 0) + count
            trained += count * weight.trainable
            own_rows += count * weight.trainable * weight.own_rows
    joined = _joined(held, [layer.name for layer in shape.layers if layer.name in found])
    return StageContents(tuple(order), Counter(order), joined, trained, experts, experts_trained, own_rows)


def _joined(held: dict[str, int], names: Sequence[str]) -> dict[str, int]:
    """The first block's weights under the name of the rest, where both are gathered together
    (`hetmesh.parallel.fully_shard.gathered_alone`)."""
    first = next((name for name in names if name and name in held), "")
    rest = held.get("", 0)
    if not first or not 0 < rest <= held[first]:
        return held
    return {"": rest + held[first]} | {owner: count for owner, count in held.items() if owner not in ("", first)}
