"""How keys and values of other ranks come, and how their gradients go back.

A chunk is one `Exchange`: its plan says which rows each rank takes from whom, and the transposed plan brings the
gradients back and sums those of rows that several ranks took, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from hetmesh.attention.attention_plan import TakenRows
from hetmesh.boundary import Exchange, Label, World
from hetmesh.boundary.process_groups import context_channel
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec, RowSplit, TransferPlan, plan_gradient, plan_transfer

Finish = Callable[[], Tensor]
"""Waits for what is in flight and returns it."""

# Boundaries of the same microbatch may be in flight between the same ranks; their tags count from 0. Fetches are over
# when attention returns, so these need not differ between calls.
_FIRST_TAG = 1 << 20


@dataclass(frozen=True)
class Wires:
    """The ranks of a context-parallel group, and the name of their traffic. `mesh`: one axis, in the order of the
    coordinates."""

    world: World
    mesh: MeshSpec
    name: str
    microbatch: int
    length: int

    @property
    def coordinate(self) -> int:
        """Of this rank. Raises BoundaryError outside the group."""
        found = self.mesh.coordinate(self.world.rank)
        if found is None:
            raise BoundaryError(f"{self.name}: rank {self.world.rank} is not one of {self.mesh}")
        return found[0]

    def label(self, direction: Literal["forward", "backward"], what: str = "") -> Label:
        """Keys go under the name; their gradients under the name and "gradients"."""
        return Label(f"{self.name}{what}", self.microbatch, direction)

    def channel(self) -> dist.ProcessGroup | None:
        """Of their messages, where the job has made one; else None, which stands for the group of all ranks."""
        return self.world.channel(context_channel(self.mesh.ranks))


def fetch(
    wires: Wires,
    shares: RowSplit,
    chunk: TakenRows,
    number: int,
    kv: Tensor,
    direction: Literal["forward", "backward"],
) -> Finish:
    """Start to bring chunk `number`; `kv` is this rank's `[rows, ...]`, such as `[rows, 2, key heads, features]`."""
    plan, _ = _plans(wires.mesh, shares, chunk.taken, chunk.served, (wires.length, *kv.shape[1:]))
    return exchange(wires, plan, kv, wires.label(direction), _FIRST_TAG + 2 * number)


def give_back(wires: Wires, shares: RowSplit, chunk: TakenRows, number: int, gradient: Tensor) -> Finish:
    """Start to send the gradient of a buffer to the owners of its rows; what comes belongs to `chunk.places`."""
    _, back = _plans(wires.mesh, shares, chunk.taken, chunk.served, (wires.length, *gradient.shape[1:]))
    return exchange(wires, back, gradient, wires.label("backward", " gradients"), _FIRST_TAG + 2 * number + 1)


def collect(total: Tensor, chunk: TakenRows, returning: Finish) -> None:
    """Add the gradients of own rows that other ranks used, which `give_back` brings, to those of all own rows."""
    came, at = returning(), 0
    for a, b in chunk.places:
        total[a:b] += came[at : at + b - a]
        at += b - a


def exchange(wires: Wires, plan: TransferPlan, local: Tensor, label: Label, tag: int = _FIRST_TAG) -> Finish:
    """Start to carry out a plan among the ranks of a group; its tag may be that of another which is over before."""
    # P2P needs no process group, which all ranks of the job would have to make; a job on NCCL has made one.
    exchange = Exchange(
        wires.world, plan, local, local.dtype, label, transport="p2p", tag=tag, group=wires.channel()
    ).start()

    def finish() -> Tensor:
        result = exchange.finish()
        assert result is not None
        return result

    return finish


@lru_cache(maxsize=256)
def _plans(
    mesh: MeshSpec, shares: RowSplit, taken: RowSplit, served: RowSplit, shape: tuple[int, ...]
) -> tuple[TransferPlan, TransferPlan]:
    """There, and back to the rows that were taken from each rank, not to all that it has."""
    dst = Layout(mesh, (taken,))
    return plan_transfer(shape, Layout(mesh, (shares,)), dst), plan_gradient(shape, dst, Layout(mesh, (served,)))
