"""What runs in the worker processes: every strategy once per round, interleaved, behind a barrier."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.boundary.scenarios import Transfer
from benchmarks.boundary.strategies import Bare, GatherBroadcast, LeaderBroadcast, Planned
from hetmesh.boundary import World
from hetmesh.layout import Layout
from hetmesh.testing import bounds

STRATEGIES = {
    "planned": Planned,
    "bare": Bare,
    "gather": GatherBroadcast,
    "leader": LeaderBroadcast,
    "p2p": partial(Planned, transport="p2p"),
    "all_to_all": partial(Planned, transport="all_to_all"),
}
LEAD_TIME = 5e-3  # s from agreeing on a start to the start: all ranks have heard of it by then
WARM_UP = 2  # rounds: connections are made on first use, and the allocator has to grow


@dataclass(frozen=True)
class Record:
    """What one rank saw of one transfer.

    Attributes:
        spans: per strategy and round, when this rank began and ended (s, a clock that all processes share).
        cpu: CPU seconds of this rank, all its threads.
        bytes: received in one run of hetmesh's plan, from the communication log; 0 if that was not asked for.
        transport: the transport that hetmesh chose.
        messages: that this rank sends and receives by `Bare`; 0 if that was not asked for.
    """

    spans: dict[str, list[tuple[float, float]]]
    cpu: dict[str, list[float]]
    bytes: int
    transport: str
    messages: int


def measure(rank: int, transfer: Transfer, names: Sequence[str], rounds: int) -> Record:
    """Run in every worker: check what each strategy brings, then time `rounds` runs of each.

    Raises:
        AssertionError: a strategy brought something else than this rank's share.
    """
    world = World.current()
    world.connect()
    dist.barrier()
    strategies = {name: STRATEGIES[name](world, transfer) for name in names}
    local, want = share(transfer, transfer.src, rank, summands=True), share(transfer, transfer.dst, rank)
    received, transport, messages = 0, "", 0
    for name, strategy in strategies.items():
        world.log.clear()
        got = strategy.run(local)
        if isinstance(strategy, Bare):
            messages = strategy.messages
            good = all(bool((message == peer).all()) for peer, message in got)
        else:
            good = (got is None) == (want is None) and (got is None or torch.equal(got, want))
        if not good:
            raise AssertionError(f"{name} brought rank {rank} something else: {transfer}")
        if name == "planned":
            received = world.log.bytes_received(transfer.name, transfer.direction)
            transport = strategy.transport
    del got, want
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for i in range(WARM_UP + rounds):
            for name in random.Random(i).sample(names, len(names)):  # nobody always comes after the same
                start = _start_together(rank)
                used = time.process_time()
                result = strategies[name].run(local)
                cpu[name].append(time.process_time() - used)
                spans[name].append((start, time.perf_counter()))
                del result
    finally:
        gc.enable()
    spans, cpu = ({name: some[WARM_UP:] for name, some in values.items()} for values in (spans, cpu))
    return Record(spans, cpu, received, transport, messages)


def _start_together(rank: int) -> float:
    """A barrier, then a wait for an agreed time: eight processes on two cores take a millisecond to leave a barrier."""
    dist.barrier()
    start = torch.tensor(time.perf_counter() + LEAD_TIME, dtype=torch.float64)
    dist.broadcast(start, 0)
    while (left := float(start) - time.perf_counter()) > 0:
        time.sleep(left)
    return float(start)


def duration(records: Sequence[Record], name: str, i: int) -> float:
    """Seconds from the start to the last rank's end in round `i`."""
    return max(r.spans[name][i][1] for r in records) - min(r.spans[name][i][0] for r in records)


def cpu_seconds(records: Sequence[Record], name: str, i: int) -> float:
    """CPU seconds of all ranks in round `i`."""
    return sum(r.cpu[name][i] for r in records)


def share(transfer: Transfer, side: Layout, rank: int, *, summands: bool = False) -> Tensor | None:
    """This rank's local tensor of the numbers 0, 1, 2, ... (exact in float32 below 2**24); None outside the mesh.

    Args:
        summands: for Partial axes: summands that add up to the numbers, not the numbers.
    """
    coordinate = side.mesh.coordinate(rank)
    if coordinate is None:
        return None
    value = torch.from_numpy(bounds.element_ids(transfer.shape, side, rank)).float()
    forget_elements()
    if summands and side.partial_axes:
        others = math.prod(side.mesh.sizes[i] for i in side.partial_axes) - 1
        first = all(coordinate[i] == 0 for i in side.partial_axes)
        value = value - others if first else torch.ones_like(value)
    return value.contiguous()


def forget_elements() -> None:
    """Drop the brute force's arrays of element numbers: twice the size of the tensor, for each layout."""
    bounds._held.cache_clear()
