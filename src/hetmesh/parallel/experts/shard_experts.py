"""Spread the experts of a module over its mesh: `ep` along the experts, `tp` along their inner features, FSDP over
what is left of `dp_shard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hetmesh.boundary import World
from hetmesh.layout import MeshSpec
from hetmesh.parallel.experts.block import INNER, WITHIN, ExpertBlock, ExpertLayers, make_expert_block
from hetmesh.parallel.experts.routed_tokens import RoutedTokens
from hetmesh.parallel.experts.token_exchange import ExpertRanks
from hetmesh.parallel.linear import enter, leave


def apply_expert_parallel(module: nn.Module, layers: ExpertLayers, device_mesh: DeviceMesh) -> None:
    """Make the blocks of `layers` ExpertBlocks and shard their experts, in place; after tensor parallelism, before
    sequence parallelism. Every rank must hold the same full weights; nothing is sent. `device_mesh`: the whole mesh of
    the module (of its stage), whose size along `ep` divides the experts, and along `tp` their inner features."""
    spec, tokens = MeshSpec.of(device_mesh), RoutedTokens()
    tp = device_mesh.get_group("tp") if spec.axis_size("tp") > 1 else None
    module.hetmesh_experts = tokens  # type: ignore[assignment]
    for number, name in enumerate(layers.blocks):
        block: Any = module.get_submodule(name)
        make_expert_block(
            block,
            layers=layers,
            number=number,
            peers=_peers(device_mesh, spec, name),
            tokens=tokens,
            placement=tuple(range(layers.count)),
            sharing=device_mesh.get_group("cp") if spec.axis_size("cp") > 1 else None,
            balances=True,
            enter=None if tp is None else _on(enter, tp),
            leave=None if tp is None else _on(leave, tp),
        )
        _shard(block.experts, device_mesh, spec)


def apply_expert_sharding(root: nn.Module, device_mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    """Let FSDP shard the experts inside `root` over what `ep` leaves of `dp_shard`: ranks along `ep` hold different
    ones. Before everything around them is sharded over both. Along dim 0 where each rank gets an expert, else within
    each. Without an `ep` axis they are sharded with their block. `arguments`: of `fully_shard`, but for the mesh."""
    spec = MeshSpec.of(device_mesh)
    if spec.axis_size("ep") == 1:
        return
    shards = spec.axis_size("dp_shard")
    axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis == "dp_shard" or spec.axis_size(axis) > 1)
    for block in root.modules():
        if not isinstance(block, ExpertBlock):
            continue
        each = block.layers.count // spec.axis_size("ep")
        dims = {id(p): WITHIN[name] for name, p in block.experts.named_parameters() if each < shards}
        fully_shard(block.experts, mesh=device_mesh[axes], shard_placement_fn=_along(dims), **arguments)


def _along(dims: Mapping[int, int]) -> Callable[[nn.Parameter], Shard]:
    """The placement of a parameter by its id; along dim 0 where `dims` has none."""
    return lambda parameter: Shard(dims.get(id(parameter), 0))


def _peers(device_mesh: DeviceMesh, spec: MeshSpec, name: str) -> ExpertRanks:
    ranks = spec.axis_size("ep")
    if ranks == 1:
        return ExpertRanks(World.current(), None, 1, 0, f"experts of {name}")
    group = device_mesh.get_group("ep")
    return ExpertRanks(World.current(), group, ranks, device_mesh.get_local_rank("ep"), f"experts of {name}")


def _on(collective: Any, group: Any) -> Any:
    return lambda x: collective(x.contiguous(), group)


def _shard(experts: nn.Module, device_mesh: DeviceMesh, spec: MeshSpec) -> None:
    """Replace each parameter by a DTensor of this rank's experts, and of its share of their inner features."""
    axes = tuple(axis for axis in ("ep", "tp") if spec.axis_size(axis) > 1)
    for name, full in list(experts.named_parameters()) if axes else ():
        dims = {"ep": 0, "tp": INNER[name]}
        own = full.detach()
        for axis in axes:
            size = own.shape[dims[axis]] // spec.axis_size(axis)
            own = own.narrow(dims[axis], device_mesh.get_local_rank(axis) * size, size)
        placements = [Shard(dims[axis]) for axis in axes]
        # Cloned, or the part would keep the memory of the whole.
        sharded = DTensor.from_local(
            own.clone(), device_mesh[axes], placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
