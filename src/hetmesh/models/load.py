"""Fill a module with the weights of a local checkpoint: each rank reads the slices of its own shards, nothing more.

The module is built without weights (`build_empty`), sharded without weights, and only then gets memory for what this
rank holds. So a rank's peak is its shard and, for a moment, a view of one tensor in its file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetmesh.layout.intervals import Intervals
from hetmesh.layout.layout import Layout
from hetmesh.layout.mesh import MeshSpec
from hetmesh.models.adapter import Adapter
from hetmesh.models.lora import base_name, is_adapter
from hetmesh.models.pretrained import Pretrained
from hetmesh.parallel.stages import absent_layers

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile put into parameter names."""


def check_weights(adapter: Adapter, module: nn.Module, pretrained: Pretrained) -> dict[str, str]:
    """The checkpoint's name of each parameter and persistent buffer of `module`, which may be sharded and without
    weights.

    Raises:
        RecipeError: the checkpoint's tensors are not those of the module.
    """
    expected, aliases = own_tensors(module)
    elsewhere = tuple(rf"{re.escape(layer)}\..*" for layer in absent_layers(module))  # with other pipeline stages
    return pretrained.match(expected, adapter.checkpoint_names, (*adapter.checkpoint_unused, *elsewhere), aliases)


def own_tensors(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of the parameters and persistent buffers of `module` without adapters, by name; and the further names of
    those that have several (tied weights) -> the first."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in _saved_tensors(module):
        first = names.setdefault(id(tensor), name)
        if first == name:
            expected[name] = tuple(tensor.shape)
        else:
            aliases[name] = first
    return expected, aliases


def load_weights(
    adapter: Adapter,
    module: nn.Module,
    pretrained: Pretrained,
    device: torch.device | str = "cpu",
    roots: Sequence[nn.Module] = (),
) -> None:
    """Give `module` (from `build_empty`, sharded or not) memory on `device` and the weights of the checkpoint.

    Every rank reads for itself; nothing is sent. Values are converted to the dtype of the parameters. Tied parameters
    stay tied. Adapters (LoRA) keep the values that they have.

    Args:
        roots: the modules that wrap `module` or parts of it, where FSDP was applied to these.

    Raises:
        RecipeError: the checkpoint's tensors are not those of the module; before anything is allocated.
    """
    from safetensors import safe_open

    found = check_weights(adapter, module, pretrained)
    materialize(module, torch.device(device))
    for root in roots:
        if any(isinstance(each, FSDPModule) for each in root.modules()):
            root._apply(lambda tensor: tensor)  # FSDP keeps references to parameters; now it looks them up again
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, tensor in _saved_tensors(module):
        if name in found:  # else it is tied to one that is
            by_file.setdefault(pretrained.tensors[found[name]].file, []).append((found[name], tensor))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as reader:
                for theirs, target in wanted:
                    fill(target, reader.get_slice(theirs))


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under every name that they have; without adapters."""
    for prefix, owner in module.named_modules():
        buffers = {n: b for n, b in owner._buffers.items() if n not in owner._non_persistent_buffers_set}
        for name, tensor in {**owner._parameters, **buffers}.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if tensor is not None and not is_adapter(fqn):
                yield plain_name(fqn), tensor


def plain_name(fqn: str) -> str:
    """The FQN that a tensor had before its module was wrapped or got adapters."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return base_name(fqn)


def fill(tensor: Tensor, source: Any) -> None:
    """Copy this rank's part of a tensor from `source`, which gives the elements asked for by slices."""
    local: Tensor = tensor.detach()
    regions: Sequence[Intervals] = [((0, size),) for size in local.shape]
    if isinstance(local, DTensor):
        layout = Layout(MeshSpec.of(local.device_mesh), tuple(local.placements))
        regions = layout.intervals(tuple(local.shape), dist.get_rank())
        local = local.to_local()
    for piece in itertools.product(*map(_with_offsets, regions)):
        here = tuple(slice(offset, offset + stop - start) for offset, start, stop in piece)
        there = tuple(slice(start, stop) for _, start, stop in piece)
        local[here].copy_(source[there] if there else source[...])


def _with_offsets(intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    """`(local start, global start, global stop)` of each interval."""
    offset = 0
    for start, stop in intervals:
        yield offset, start, stop
        offset += stop - start


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give every parameter without memory uninitialised memory on `device`, and move buffers there, unless that is the
    CPU (where offloaded parameters are, but not the buffers beside them). Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, device)
                owner._parameters[name] = made[id(parameter)]
    if device.type != "cpu":
        move_buffers(module, device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the buffers of `module` to `device`."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        local = torch.empty_like(parameter.to_local(), device=device)
        shape, stride = parameter.shape, parameter.stride()
        tensor: Tensor = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
    else:
        tensor = torch.empty_like(parameter, device=device)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """While the context lasts, parameters without memory are replaced by zeros that take no memory either.

    For code that makes real tensors beside a parameter, on its device (LoRA adapters).
    """
    zeros = {
        id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad)
        for p in module.parameters()
        if p.is_meta
    }
    originals = {id(zeros[id(p)]): p for p in module.parameters() if p.is_meta}
    _exchange(module, zeros)
    try:
        yield
    finally:
        _exchange(module, originals)


def _exchange(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in others:
                other = others[id(parameter)]
                other.requires_grad = parameter.requires_grad
                owner._parameters[name] = other
