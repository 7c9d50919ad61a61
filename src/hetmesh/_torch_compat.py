"""Every private torch name that hetmesh uses, in one place, so that a torch upgrade is checked in one place."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "StridedShard",
    "TorchDispatchMode",
    "all_gather_single",
    "averaged_over",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "fake_process_group",
    "fsdp_groups",
    "grouped_mm",
    "one_gloo_device",
    "reduce_scatter_single",
    "set_group_timeout",
    "shared_buffer",
    "split_backward",
    "tree_leaves",
]

# torch 2.13 renamed these two and warns at every use of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Public from torch 2.10 on.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

# scaled_dot_product_attention's kernel for the CPU, with the logsumexp that the public function does not return.
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def split_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's `stage_backward_input` and `stage_backward_weight`. What they import takes a second; only the schedule
    zero_bubble needs them."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    return stage_backward_input, stage_backward_weight


def averaged_over(roots: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """FSDP2 modules in the autograd graph behind `roots` that average their gradients because nobody told them
    otherwise (`set_gradient_divide_factor`): name and over how many ranks.

    FSDP puts a node of its own on the inputs of a module, where they carry a gradient; it knows the parameters.
    """
    if "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules:
        return
    todo, seen = [node for node in roots if node is not None], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions if before is not None]
        if type(node).__name__ == "RegisterPostBackwardFunctionBackward":
            group = node.param_group
            ranks = group.mesh_info.mesh.size()
            trained = any(each.sharded_param.requires_grad for each in group.fsdp_params)
            if trained and ranks > 1 and group.gradient_divide_factor is None:
                yield repr(group._module_fqn or ""), ranks


def fsdp_groups(module: Any) -> Iterator[tuple[str, Any]]:
    """What FSDP2 gathers and reduces at a time, inside `module`: FQN of the part, and its `FSDPParamGroup`, which has
    `mesh_info.mesh`, `fsdp_params` with a `sharded_param` each, `gradient_divide_factor` (None: the ranks of the mesh)
    and `reduce_grads`."""
    from torch.distributed.fsdp import FSDPModule

    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            one = getattr(state, "_fsdp_param_group", None)  # before torch 2.13
            for group in several or ([one] if one is not None else []):
                yield name, group


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Gloo groups made in the body share one device, whose thread wakes up a hundred times a second whether anything
    arrives or not: with a device for each of 60 groups, four idle processes spend a third of a core on it.

    `new_group` takes no options for gloo. Connections are made at once: those made on first contact get their numbers
    per group, which one device cannot tell apart, and making one waits for the peer where no timeout is looked at.
    """
    if not dist.is_gloo_available():
        yield
        return
    theirs = distributed_c10d.ProcessGroupGloo

    class OnSharedDevice(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            options: Any = theirs._Options()  # type: ignore[attr-defined]
            for name, value in more.items():  # torch 2.14 passes enable_reconfigure, which is an option too
                if value:
                    setattr(options, name, value)
            options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
            options._threads, options._timeout = 2 * len(options._devices), timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = theirs  # type: ignore[misc]


@cache
def _gloo_devices(interfaces: str) -> list[Any]:
    """As gloo groups make them by default: one per interface."""
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces.split(",")]


def shared_buffer(size: int) -> torch.Tensor:
    """uint8 `[size]` in memory that other processes can map: a tensor made elsewhere would be copied there."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


set_group_timeout = _set_pg_timeout
"""`set_group_timeout(timeout, group)`: how long collectives of an existing process group may wait."""


@contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    """This process as rank 0 of `size` that do not exist: collectives send nothing, and what they return has the right
    shape and no meaning. Only where there is no process group yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
