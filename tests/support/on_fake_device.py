"""What tests of the fake device do in a process of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import scaled_dot_product_attention

from hetmesh._torch_compat import fake_process_group
from hetmesh.dryrun.device_work import DeviceWork
from hetmesh.dryrun.fake_device import FakeAccelerator
from hetmesh.dryrun.fake_tensors import FakeTensors
from hetmesh.dryrun.host_waits import HostWaits


def entered(call: Callable[[FakeAccelerator, DeviceWork], Any]) -> tuple[Any, list[tuple[str, str, str, int]]]:
    """What `call` returns on the fake device, and where the host waited: direction, operation, model's line, count."""
    waits, accelerator = HostWaits(), FakeAccelerator.make()
    with FakeTensors(accelerator, waits) as tensors, DeviceWork(waits, tensors.fake) as work:
        tensors.observe = work.note
        result = call(accelerator, work)
    return result, [(w.direction, w.what, w.model.rpartition("/")[2], n) for w, n in waits.counts.items()]


def planted(accelerator: FakeAccelerator, work: DeviceWork) -> str:
    """Ask for a value of the device; returns the line on which it does."""
    x = torch.ones(4, 4, device=accelerator.device) @ torch.ones(4, 4, device=accelerator.device)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    x.sum().item()
    return f"on_fake_device.py:{line}"


def lists(accelerator: FakeAccelerator, work: DeviceWork) -> list[Any]:
    """Values of indices from the host, as lists, and what is computed of them."""
    lengths = accelerator.pinned(torch.tensor([3, 1, 2])).to(accelerator.device, non_blocking=True)
    offsets = torch.zeros(4, dtype=torch.int64, device=accelerator.device)
    offsets[1:] = lengths.cumsum(0)
    rows = torch.randn(3, 5, device=accelerator.device)
    chosen = rows[lengths > 1]
    unknown = rows.argmax(1)
    offsets[0] = unknown.sum()
    return [lengths.tolist(), list(chosen.shape), (lengths == 2).nonzero().tolist(), offsets.tolist()]


def by_values(accelerator: FakeAccelerator, work: DeviceWork) -> Tensor:
    """A shape that only the device could know."""
    rows = torch.randn(3, 5, device=accelerator.device)
    return rows[rows.sum(1) > 0]


def copies(accelerator: FakeAccelerator, work: DeviceWork) -> None:
    """One that waits, in four."""
    host, device = torch.randn(1000), accelerator.device
    pinned = accelerator.pinned(host)
    on_device = pinned[10:].to(device, non_blocking=True)
    accelerator.empty_pinned(on_device).copy_(on_device, non_blocking=True)
    host.to(device, non_blocking=True)
    torch.tensor(2.0) * on_device  # a number is an argument of the kernel
    again = host.pin_memory()
    assert again.is_pinned()
    assert not host.is_pinned()
    again.to(device, non_blocking=True)


def trained(accelerator: FakeAccelerator, work: DeviceWork) -> dict[str, Any]:
    """A step of a layer under autocast."""
    layer = nn.Linear(64, 32, bias=False, device=accelerator.device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    before = work.live
    with work.span("forward"), torch.autocast(accelerator.device.type, torch.bfloat16):
        out = layer(torch.zeros(8, 64, device=accelerator.device))
    kind = out.dtype
    with work.span("backward"):
        out.float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del out
    return {
        "dtype": str(kind),
        "weights": before,
        "flops": (work.by_action["forward"].flops, work.by_action["backward"].flops),
        "behind": work.live,
    }


def sharded(accelerator: FakeAccelerator, work: DeviceWork) -> int:
    """The most bytes that an operation on a DTensor takes of a rank that holds a fourth of it."""
    with fake_process_group(4):
        mesh = DeviceMesh(accelerator.device.type, torch.arange(4), _init_backend=False)
        x = DTensor.from_local(torch.empty(2, 1024, device=accelerator.device), mesh, [Shard(0)], run_check=False)
        with work.span("sum"):
            x + x
    return work.spans[0].peak - work.spans[0].before


def attended(accelerator: FakeAccelerator, work: DeviceWork) -> tuple[int, int]:
    """The most bytes of attention without and with a mask, over 1024 tokens of 2 heads of 64 in bf16."""
    q = torch.zeros(1, 2, 1024, 64, device=accelerator.device, dtype=torch.bfloat16, requires_grad=True)
    with work.span("causal"):
        scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool, device=accelerator.device)
    with work.span("masked"):
        scaled_dot_product_attention(q, q, q, mask).sum().backward()
    causal, masked = work.spans
    return causal.peak - causal.before, masked.peak - masked.before
