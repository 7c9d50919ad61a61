"""Give a module on the meta device, sharded or not, memory for what this rank holds, and values."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetmesh.layout.intervals import Intervals
from hetmesh.layout.layout import Layout
from hetmesh.layout.mesh import MeshSpec
from hetmesh.layout.placements import sharded_dim
from hetmesh.models.weights.initial import Initial
from hetmesh.models.weights.lora import base_name
from hetmesh.models.weights.stored_form import with_offsets
from hetmesh.parallel.gradient_sums import local_part

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that activation checkpointing and torch.compile insert into parameter names."""


def unwrapped_name(fqn: str) -> str:
    """The FQN that a tensor had before its module was wrapped."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def plain_name(fqn: str) -> str:
    """The FQN that a tensor had before its module was wrapped or got adapters."""
    return base_name(unwrapped_name(fqn))


Sizes = MutableMapping[nn.Parameter, int]
"""Bytes of the storages of parameters."""


def materialize(
    module: nn.Module, device: torch.device, roots: Sequence[nn.Module] = (), later: Sizes | None = None
) -> None:
    """Give every parameter without memory uninitialised memory on `device`, and move buffers there, unless that is the
    CPU (where offloaded parameters are, but not the buffers of the same module). Tied parameters stay tied.

    Args:
        roots: the modules that wrap `module` or parts of it, where FSDP was applied to these.
        later: where given, parameters are without memory again at the end, and are here with what they need.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = empty_parameter(parameter, device)
                    if later is not None and _stays(made[id(parameter)]):
                        _free(made[id(parameter)], later)
                owner._parameters[name] = made[id(parameter)]
    if device.type != "cpu":
        move_buffers(module, device)
    for root in roots:
        if any(isinstance(part, FSDPModule) for part in root.modules()):
            root._apply(lambda tensor: tensor)  # FSDP keeps references to parameters; now it looks them up again
    for parameter in made.values():
        if later is not None and parameter not in later:
            _free(parameter, later)


def _stays(tensor: Tensor) -> bool:
    """Whether FSDP keeps a parameter in its memory, and copies it neither to pad it nor to pin it."""
    if not isinstance(tensor, DTensor):
        return True
    mesh, split = tensor.device_mesh, {dim for p in tensor.placements if (dim := sharded_dim(p)) is not None}
    return mesh.device_type == tensor.device.type and not any(tensor.shape[dim] % mesh.size() for dim in split)


def _free(parameter: nn.Parameter, later: Sizes) -> None:
    storage = local_part(parameter).untyped_storage()
    if storage.resizable():  # what is pinned in the host's memory is not
        later[parameter] = storage.nbytes()
        storage.resize_(0)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the buffers of `module` to `device`."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def draw_weights(module: nn.Module, initial: MutableMapping[str, Initial]) -> list[str]:
    """Give the parameters of `module` their values from `initial`, which has them by the names before the module was
    wrapped: this rank's rows and columns, a block of rows at a time. Values are removed from `initial` as they are
    used, so that those held in full are freed early.

    Returns:
        The names of the parameters that `initial` does not have, which are left as they were.
    """
    names: dict[int, list[str]] = {}
    held: dict[int, nn.Parameter] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(fqn))
        held[id(parameter)] = parameter
    others: list[str] = []
    with torch.no_grad():
        for key, parameter in held.items():
            found = [values for name in names[key] if (values := initial.pop(name, None)) is not None]
            if found:
                copy_part(*local_share(parameter.detach()), found[0], found[0].rows_per_block)
            else:
                others.append(names[key][0])
    return others


def local_share(tensor: Tensor) -> tuple[Tensor, tuple[Intervals, ...]]:
    """This rank's part of a tensor, and per dim the ordered global intervals that it holds."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(((0, size),) for size in tensor.shape)
    layout = Layout(MeshSpec.of(tensor.device_mesh), tensor.placements)
    return tensor.to_local(), layout.intervals(tuple(tensor.shape), dist.get_rank())


def copy_part(local: Tensor, regions: Sequence[Intervals], source: Any, rows: int | None = None) -> None:
    """Copy a part of a tensor from `source`, which is indexed by slices of the whole tensor.

    Args:
        regions: per dim, the ordered intervals of the whole tensor that `local` holds.
        rows: how many rows to copy at a time, aligned to the whole tensor; None: all at once.
    """
    for piece in itertools.product(
        *(with_offsets(region, rows if dim == 0 else None) for dim, region in enumerate(regions))
    ):
        target = tuple(slice(offset, offset + stop - start) for offset, start, stop in piece)
        wanted = tuple(slice(start, stop) for _, start, stop in piece)
        local[target].copy_(source[wanted] if wanted else source[...])


def empty_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """One like `parameter` with uninitialised memory on `device`."""
    # Not `from_local` for DTensors: that brings what is offloaded to the host back to the mesh's device.
    value = torch.empty_like(parameter.detach(), device=device)
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    if not isinstance(parameter, DTensor):
        made.__dict__.update(parameter.__dict__)  # attributes that a constructor may have set
    return made
