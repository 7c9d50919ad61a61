"""Which transport carries a step: decided from values alone, so that every rank decides the same."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, TransferPlan, TransferStep

Transport = Literal["auto", "p2p", "all_to_all", "dtensor"]
"""How a plan is carried out. Pieces that a rank already holds are copied locally under every transport."""


@dataclass(frozen=True)
class LinkCost:
    """What carrying a step costs the busiest rank.

    Attributes:
        message_us: per message of a P2P exchange, sent or received.
        collective_us: per member of an all-to-all, once for sending and once for receiving, empty or not.
        copy_us_per_mb: per MB sent or received by an all-to-all: it goes through one flat buffer, while P2P sends
            from and receives into place.
    """

    message_us: float
    collective_us: float
    copy_us_per_mb: float


# gloo: measured by `python tools/bench.py boundary` with 8 processes on 2 cores over loopback. Only the ratios matter:
# an all-to-all pays where every rank has a little for every other (1 KiB each among 8: 8 ms against 9.5), not where a
# rank talks to three others (8.5 ms against 7.6) nor where messages are large.
# nccl: an estimate, no machine with several GPUs was at hand. It runs both as grouped sends, so an all-to-all saves the
# Python and launch cost per message, and pays for its copies at the speed of device memory.
LINK_COSTS = {
    "gloo": LinkCost(message_us=500.0, collective_us=400.0, copy_us_per_mb=570.0),
    "nccl": LinkCost(message_us=10.0, collective_us=4.0, copy_us_per_mb=2.0),
}

# Choosing all-to-all needs the messages of the busiest rank, hence all pieces: 2 ms for 16 ranks whose rows change.
# Beyond this many ranks a boundary is sparse (a rank talks to few others), and P2P is right without counting.
_COUNT_LIMIT = 16
# Gloo's all-gather and all-reduce take twice as long as the same bytes by P2P (16 MB among 8: 74 ms against 39).
_GLOO_COLLECTIVES = 2**16  # bytes of a tensor that they may carry all the same
_ITEMSIZE = 4  # bytes; close enough for choosing


MEMORY = "memory"
"""What carries messages where all ranks share one host's memory, as `choose` is told in place of a backend's name: a
message costs a tenth of what gloo's costs, and no collective of gloo is as fast as the same bytes by messages."""


def check_transport(transport: str) -> None:
    """Raise BoundaryError for a name that is no transport."""
    if transport not in get_args(Transport):
        raise BoundaryError(f"transport {transport!r} is unknown; valid are {', '.join(get_args(Transport))}")


@lru_cache(maxsize=128)
def choose(plan: TransferPlan, backend: str, transport: str = "auto") -> str:
    """The transport of `plan`: the given one where it can carry the plan, else the cheapest. `backend`: the name of the
    backend, or `MEMORY`. Raises BoundaryError: `dtensor` is asked for where DTensor.redistribute would be wrong or
    emulated."""
    if transport == "dtensor" and not can_use_dtensor(plan.src, plan.dst, plan.shape, backend):
        raise BoundaryError(
            f"DTensor.redistribute cannot carry {plan.src} -> {plan.dst} on {backend}: it needs one shared mesh, even "
            "shards and one changing axis whose collective is not emulated; use transport='p2p' or 'auto'"
        )
    if transport != "auto":
        return transport
    if plan.is_identity or backend == MEMORY:
        return "p2p"  # an identity has no messages
    small = math.prod(plan.shape) * _ITEMSIZE <= _GLOO_COLLECTIVES
    if ("nccl" in backend or small) and can_use_dtensor(plan.src, plan.dst, plan.shape, backend):
        return "dtensor"
    return "all_to_all" if all(_prefers_all_to_all(step, backend) for step in plan.steps) else "p2p"


def may_use_all_to_all(ranks: int) -> bool:
    """Whether a transfer among this number of ranks may be an all-to-all, which needs a process group of them."""
    return 1 < ranks <= _COUNT_LIMIT


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


def _prefers_all_to_all(step: TransferStep, backend: str) -> bool:
    ranks = sorted({*step.src.mesh.ranks, *step.dst.mesh.ranks})
    if len(ranks) > _COUNT_LIMIT:
        return False
    cost = LINK_COSTS["nccl" if "nccl" in backend else "gloo"]
    messages, elements = Counter[int](), Counter[int]()
    for piece in step.pieces:
        if piece.src != piece.dst:
            messages.update((piece.src, piece.dst))
            elements.update({piece.src: piece.numel, piece.dst: piece.numel})
    p2p = cost.message_us * max(messages.values(), default=0)
    copies = cost.copy_us_per_mb * _ITEMSIZE / 1e6 * max(elements.values(), default=0)
    return p2p > 2 * (len(ranks) - 1) * cost.collective_us + copies
