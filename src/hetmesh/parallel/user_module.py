"""Modules that users have parallelised, with `parallelize_module` and `fully_shard`: who sums which gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hetmesh._torch_compat import fsdp_groups
from hetmesh.errors import GradientError, GraphError, LayoutError
from hetmesh.graph.module_graph import LANE_AXES
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel.apply import AdaptedModule, ParallelModule
from hetmesh.parallel.gradient_axes import SUM_ORDER, ParameterAxes, sharded_axes


def user_parallel_module(
    name: str, module: nn.Module, stage: AdaptedModule, spec: MeshSpec, device_mesh: DeviceMesh
) -> ParallelModule:
    """`module` on `spec`, unchanged. Gradients are summed over its lanes: by FSDP in the backward where it has the
    parameter, else by a `Reduction`. Tensor-parallel gradients are up to the user.

    Args:
        stage: what the runtime calls; holds `module`.

    Raises:
        GradientError: something in it averages gradients, or reduces them over other ranks than those of its lanes.
        LayoutError: a DTensor of it lies on a mesh with axes that `spec` does not have.
    """
    for fqn, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            raise GradientError(
                f"part {name!r}: {fqn or 'it'} is a DistributedDataParallel, which averages gradients; give the "
                "module inside: hetmesh sums gradients over its lanes by itself"
            )
    by_fsdp = dict(_by_fsdp(name, module, spec))
    lanes = tuple(axis for axis in LANE_AXES if spec.axis_size(axis) > 1)
    axes = {}
    for fqn, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            if not names or set(names) - set(spec.axes):
                raise LayoutError(
                    f"part {name!r}: {fqn} lies on a mesh with the axes {list(names)}, its mesh has {list(spec.axes)}; "
                    "shard it over hetmesh.device_mesh(mesh), or a slice of it by name"
                )
        summed = tuple(sorted(lanes, key=SUM_ORDER.index))
        axes[fqn] = ParameterAxes(summed, by_fsdp.get(id(parameter), ()), sharded_axes(parameter, spec))
    return ParallelModule(module, (stage,), spec, device_mesh, axes)


SharedSums = list[tuple[list[nn.Parameter], list[dist.ProcessGroup]]]
"""Parameters that several parts on one mesh have, and the groups over which their gradients are summed."""


def split_shared_sums(parts: Mapping[str, ParallelModule]) -> tuple[dict[str, ParallelModule], SharedSums]:
    """The parts of this rank, without the sums of parameters that several of them share; and these sums, for
    `sum_gradients` after the backwards of all parts. Raises GraphError if parts on different meshes share a parameter,
    or FSDP has it, which would sum it part by part."""
    owners: dict[int, str] = {}
    shared: dict[str, dict[int, nn.Parameter]] = {}
    for name, part in parts.items():
        for fqn, parameter in part.module.named_parameters():
            if (first := owners.setdefault(id(parameter), name)) == name:
                continue
            where = f"part {name!r}: {fqn} is a parameter of part {first!r} too"
            if part.spec != parts[first].spec:
                raise GraphError(
                    f"{where}, whose mesh is {parts[first].spec}, not {part.spec}: its gradient would not be summed "
                    "over both; give these parts one mesh, or a copy each"
                )
            if part.axes[fqn].in_backward:
                raise GraphError(f"{where}, and fully_shard sums its gradient for one part alone: leave that out there")
            shared.setdefault(first, {})[id(parameter)] = parameter
    several = {key for parameters in shared.values() for key in parameters}
    for name, part in parts.items():
        names = {fqn for fqn, p in part.module.named_parameters() if id(p) in several}
        axes = {fqn: replace(of, summed=()) if fqn in names else of for fqn, of in part.axes.items()}
        parts = {**parts, name: replace(part, axes=axes)}
    sums = SharedSums()
    for name, parameters in shared.items():
        lanes = [axis for axis in LANE_AXES if parts[name].spec.axis_size(axis) > 1]
        sums.append(([*parameters.values()], [parts[name].device_mesh.get_group(axis) for axis in lanes]))
    return dict(parts), sums


def _by_fsdp(name: str, module: nn.Module, spec: MeshSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Ids of the parameters that FSDP has, with the axes over which it sums their gradients."""
    for part, group in fsdp_groups(module):
        mesh: DeviceMesh = group.mesh_info.mesh
        where = f"part {name!r}: fully_shard of {part or 'the whole module'}"
        axes = _axes_of(mesh, spec)
        if axes is None:
            raise GradientError(
                f"{where} works on ranks {mesh.mesh.flatten().tolist()}, which are not those of the axes "
                f"{[axis for axis in spec.axes if axis in LANE_AXES]} of {spec}: its gradients would be summed over "
                "others than its lanes; give it hetmesh.device_mesh(mesh)['dp_shard'], say"
            )
        if not (group.reduce_grads and group.all_reduce_grads):
            raise GradientError(f"{where} has set_requires_gradient_sync(False): its gradients would not be summed")
        factor = mesh.size() if group.gradient_divide_factor is None else group.gradient_divide_factor
        if factor != 1:
            raise GradientError(
                f"{where} divides gradients by {factor:g}, and hetmesh sums them, over lanes as over microbatches: "
                f"other parts would get gradients that are {factor:g} times as large. Call "
                "hetmesh.sum_over_shards(module) on it before, and divide once, by `divide_by` of Pipeline.step"
            )
        yield from ((id(parameter.sharded_param), axes) for parameter in group.fsdp_params)


def _axes_of(mesh: DeviceMesh, spec: MeshSpec) -> tuple[str, ...] | None:
    """The lane axes of `spec` that `mesh` has for this rank; None if it has other ranks."""
    ranks = set(mesh.mesh.flatten().tolist())
    lanes = [axis for axis in LANE_AXES if axis in spec.axes]
    for count in range(1, len(lanes) + 1):
        for axes in combinations(lanes, count):
            merged = spec.merge(axes, "lanes") if count > 1 else spec
            if any(set(group) == ranks for group in merged.axis_groups("lanes" if count > 1 else axes[0])):
                return tuple(axis for axis in axes if spec.axis_size(axis) > 1)
    return None
