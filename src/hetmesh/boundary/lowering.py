"""Which transport carries a step: decided from values alone, so that every rank decides the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, Step, TransferPlan

Lowering = Literal["auto", "p2p", "all_to_all", "dtensor"]
"""How a plan is carried out. Pieces that a rank already holds are copied locally under every lowering."""


@dataclass(frozen=True)
class LinkCost:
    """What a message costs: `message_us` per peer of a P2P exchange, `collective_us` per member of an all-to-all.

    Measured by `python tools/bench.py boundary --json` (`link_costs`) for gloo over loopback; NCCL runs both as
    grouped sends, where a collective saves the per-message launch.
    """

    message_us: float
    collective_us: float


LINK_COSTS = {
    "gloo": LinkCost(message_us=90.0, collective_us=70.0),
    "nccl": LinkCost(message_us=10.0, collective_us=4.0),
}

# Choosing all-to-all needs the message count of the busiest rank, hence all pieces. Beyond this many ranks a boundary
# is sparse (a rank talks to few others) and P2P is right without counting.
_COUNT_LIMIT = 64


def check_lowering(lowering: str) -> None:
    """Raise BoundaryError for a name that is no lowering."""
    if lowering not in get_args(Lowering):
        raise BoundaryError(f"lowering {lowering!r} is unknown; valid are {', '.join(get_args(Lowering))}")


@lru_cache(maxsize=128)
def choose(plan: TransferPlan, backend: str, lowering: str = "auto") -> str:
    """The lowering of `plan`: the given one where it can carry the plan, else the cheapest.

    Raises:
        BoundaryError: `dtensor` is asked for where DTensor.redistribute would be wrong or emulated.
    """
    if lowering == "dtensor" and not can_use_dtensor(plan.src, plan.dst, plan.shape, backend):
        raise BoundaryError(
            f"DTensor.redistribute cannot carry {plan.src} -> {plan.dst} on {backend}: it needs one shared mesh, even "
            "shards and one changing axis whose collective is not emulated; use lowering='p2p' or 'auto'"
        )
    if lowering != "auto":
        return lowering
    if can_use_dtensor(plan.src, plan.dst, plan.shape, backend):
        return "dtensor"
    return "all_to_all" if all(_prefers_all_to_all(step, backend) for step in plan.steps) else "p2p"


def can_use_dtensor(src: Layout, dst: Layout, shape: tuple[int, ...], backend: str) -> bool:
    """Whether torch's own redistribute does the same with the same bytes: one even collective on one axis."""
    if src.mesh != dst.mesh or not (src.is_dtensor and dst.is_dtensor) or src == dst:
        return False
    changed = [(p, q, n) for p, q, n in zip(src.placements, dst.placements, src.mesh.sizes, strict=True) if p != q]
    if len(changed) != 1 or not (_even(src, shape) and _even(dst, shape)):
        return False
    before, after, _ = changed[0]
    if isinstance(after, Replicate):
        return isinstance(before, Partial) or type(before) is Shard
    # gloo emulates these two by gathering everything.
    return backend == "nccl" and type(after) is Shard and (isinstance(before, Partial) or type(before) is Shard)


def _even(layout: Layout, shape: tuple[int, ...]) -> bool:
    for dim, size in enumerate(shape):
        parts = 1
        for placement, n in zip(layout.placements, layout.mesh.sizes, strict=True):
            if type(placement) is not Shard and not isinstance(placement, (Replicate, Partial)):
                return False
            if type(placement) is Shard and placement.dim == dim:
                parts *= n
        if size % parts:
            return False
    return True


def _prefers_all_to_all(step: Step, backend: str) -> bool:
    ranks = sorted({*step.src.mesh.ranks, *step.dst.mesh.ranks})
    if len(ranks) > _COUNT_LIMIT:
        return False
    cost = LINK_COSTS["nccl" if "nccl" in backend else "gloo"]
    messages = dict.fromkeys(ranks, 0)
    for piece in step.pieces:
        if piece.src != piece.dst:
            messages[piece.src] += 1
            messages[piece.dst] += 1
    return max(messages.values()) * cost.message_us > 2 * (len(ranks) - 1) * cost.collective_us
