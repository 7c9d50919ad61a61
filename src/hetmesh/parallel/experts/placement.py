"""Experts change places: all that ranks keep of them goes to other ranks, and tokens follow.

The number of an expert is what the router chooses; its place is where it lies along dim 0 of its parameters, and so
which rank computes it. Only places change, so results are equal within rounding of a token's sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hetmesh.balance.place_experts import Placement
from hetmesh.boundary import Exchange, Label, World
from hetmesh.layout import Layout, MeshSpec, RowSplit, TransferPlan, plan_transfer
from hetmesh.layout.placements import sharded_dim
from hetmesh.parallel.experts.block import ExpertBlock

StateOf = Callable[[nn.Parameter], Iterable[Tensor]]
"""What an optimizer keeps of a parameter that lies as the parameter does, in an order equal on all ranks."""


@torch.no_grad()
def move_experts(block: ExpertBlock, placement: Placement, state: StateOf, world: World) -> None:
    """Bring the experts of `block` to their places in `placement`, bit for bit, with the optimizer's state. Collective
    over the ranks that hold the block, while no forward or backward is under way. Gradients are dropped: they are of
    the experts that lay there.
    """
    number = 0
    for name, parameter in block.experts.named_parameters():
        for tensor in (parameter, *state(parameter)):
            assert isinstance(tensor, DTensor)
            plan = placement_plan(tensor, block.placement, placement, world)
            label = Label(f"{block.peers.name} change places, {name}", number)
            local = tensor.to_local()
            mine = local.to(world.device).reshape(plan.src.local_shape(plan.shape, world.rank))
            moved = Exchange(world, plan, mine, tensor.dtype, label, transport="p2p", tag=number).start().finish()
            assert moved is not None
            local.copy_(moved.view(local.shape))
            number += 1
        parameter.grad = None
    block.placement, block.places = placement, places_of(placement, world.device)


def places_of(placement: Placement, device: torch.device) -> Tensor | None:
    """The place of each expert, int64 `[experts]`; None where each is at its own number."""
    places = np.argsort(np.array(placement))
    return None if (places == np.arange(len(places))).all() else torch.from_numpy(places).to(device)


def placement_plan(tensor: DTensor, before: Placement, after: Placement, world: World) -> TransferPlan:
    """What travels between the ranks that hold the same part of different experts of `tensor`: those along `ep`, and
    along whatever else splits dim 0. Pure but for the tensor's layout, which is that of its places.

    The plan is of rows in the order of experts: `[experts, elements of this rank of each]`.
    """
    shape = tuple(tensor.shape)
    layout = Layout(MeshSpec.of(tensor.device_mesh), tuple(tensor.placements))
    ranks = _together(layout, world.rank)
    places = [[place for start, stop in layout.intervals(shape, r)[0] for place in range(start, stop)] for r in ranks]
    mesh = MeshSpec.make(ranks, place=len(ranks))
    src, dst = (
        Layout(mesh, (RowSplit(0, tuple(tuple((order[p], order[p] + 1) for p in held) for held in places)),))
        for order in (before, after)
    )
    width = math.prod(layout.local_shape(shape, world.rank)[1:])
    return plan_transfer((shape[0], width), src, dst, ranks_per_node=world.ranks_per_node)


def _together(layout: Layout, rank: int) -> list[int]:
    """The ranks that differ from `rank` only along axes that split dim 0."""
    own = layout.mesh.coordinate(rank)
    assert own is not None
    fixed = tuple(
        slice(None) if sharded_dim(placement) == 0 else at for placement, at in zip(layout.placements, own, strict=True)
    )
    return np.ravel(layout.mesh.array[fixed]).tolist()
