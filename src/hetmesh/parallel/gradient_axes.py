"""The one map from parameter to mesh axes: over which its gradient is summed, and along which ranks hold parts of it.

Made once per module, after everything is sharded; read by the sums of gradients, by FSDP, by the global norm (which
counts replicas once) and by the check that replicas are equal. Pure: values of a mesh and of placements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hetmesh.graph.module_graph import LANE_AXES, dense_mesh
from hetmesh.layout.mesh import MeshSpec

SUM_ORDER = ("tp", *LANE_AXES, "cp")
"""The order of sums over several axes, equal on all ranks: those of few parameters come first."""


@dataclass(frozen=True)
class ParameterAxes:
    """How one parameter and its gradient lie on the mesh of its module (of its pipeline stage).

    Attributes:
        summed: axes over which what ranks compute are summands of the gradient, in the order in which they are summed.
        in_backward: of these, the axes over which the backward itself sums (FSDP and HSDP).
        sharded: axes along which ranks hold different elements; along all others they hold replicas.
    """

    summed: tuple[str, ...]
    in_backward: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()

    @property
    def after_backward(self) -> tuple[str, ...]:
        """Axes over which the gradient is still to be summed when the last backward is over."""
        return tuple(axis for axis in self.summed if axis not in self.in_backward)

    def is_first_replica(self, spec: MeshSpec, rank: int) -> bool:
        """Whether `rank` holds the first copy of its elements; over these ranks every element counts once. False for
        a rank outside `spec`."""
        return is_first(spec, rank, self.sharded)


def gradient_axes(
    parameters: Mapping[str, Tensor], spec: MeshSpec, partial_over_tp: Collection[str] = ()
) -> dict[str, ParameterAxes]:
    """The map of one module on the mesh `spec`.

    Args:
        parameters: by FQN, as a rank holds them: plain, or DTensors over some of the axes.
        partial_over_tp: FQNs of those that ranks along `tp` hold in full and use for shares of heads or tokens.
    """
    different_tokens = tuple(axis for axis in (*LANE_AXES, "cp") if spec.axis_size(axis) > 1)
    by_fsdp = fully_shard_axes(spec)
    out = {}
    for name, parameter in parameters.items():
        sharded = sharded_axes(parameter, spec)
        excluded = ("ep",) if is_expert(parameter) else ()  # its ranks send an expert all of its tokens
        axes = (*different_tokens, *(["tp"] if name in partial_over_tp else []))
        summed = tuple(sorted((axis for axis in axes if axis not in excluded), key=SUM_ORDER.index))
        in_backward = tuple(axis for axis in by_fsdp if axis not in excluded and parameter.ndim)  # FSDP skips scalars
        out[name] = ParameterAxes(summed, in_backward, sharded)
    return out


def is_first(spec: MeshSpec, rank: int, apart: Collection[str]) -> bool:
    """Whether `rank` is at coordinate 0 of all axes of `spec` but those `apart`. False for a rank outside it."""
    coordinate = spec.coordinate(rank)
    return coordinate is not None and all(
        c == 0 for axis, c in zip(spec.axes, coordinate, strict=True) if axis not in apart
    )


def fully_shard_axes(spec: MeshSpec) -> tuple[str, ...]:
    """The axes over which FSDP, or HSDP, sums gradients in the backward; none for a module that it does not shard."""
    lanes = tuple(axis for axis in LANE_AXES if spec.axis_size(axis) > 1)
    return lanes if dense_mesh(spec).axis_size("dp_shard") > 1 else ()


def is_expert(parameter: Tensor) -> bool:
    """Whether ranks along an `ep` axis hold different experts of a parameter."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def sharded_axes(parameter: Tensor, spec: MeshSpec) -> tuple[str, ...]:
    """Axes of `spec` along which ranks hold different elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    sharded = [n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)]
    if "dp_shard" in sharded and "ep" in spec.axes and not is_expert(parameter):
        sharded.append("ep")  # which is a part of that axis in the mesh of all parameters but experts
    return tuple(sharded)
