"""Boundary transfers between meshes: what arrives, and the time beside bare isend and irecv of the same bytes.

Ratios are judged where every rank has a GPU of its own: elsewhere messages go through a host. What a bare exchange
leaves out is what hetmesh may cost: packing, putting in place, the rows that a rank keeps.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from benchmarks.boundary.scenarios import Transfer, layout
from benchmarks.boundary.strategies import Planned
from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from hetmesh.boundary import World
from hetmesh.layout import Layout, RowSplit

FEATURES = 1024
SIZES = {"cuda": {"large": 16384, "small": 16}, "cpu": {"large": 256, "small": 16}}
"""Rows per rank, in float32: 64 MB on a GPU, as images of a few samples make them, and what only costs time to post."""
RATIO = 1.3
"""Of a large transfer. An H100 packs and puts in place at 1.5 TB/s or more what NVLink brings at 0.3: a tenth each, and
the rest for what the host does; an estimate, no machine with several GPUs was at hand."""
WARM_UP = 3


def run(place: Place) -> Found:
    """Both ways, round by round in turns."""
    place.need_kernels("messages")
    ranks = (min(place.gpus, 8) // 2 * 2 or 2) if place.on_gpu else 2
    rows = SIZES[place.device]
    every = run_ranks(measure, ranks, place, rows, place.steps, timeout=240)
    transfers = [_row(name, [of_rank[name] for of_rank in every]) for name in every[0]]
    for each in transfers:
        print("{name}: {hetmesh_ms:.2f} ms, bare messages {bare_ms:.2f} ms, ratio {ratio:.2f}".format(**each))
    large = [each["ratio"] for each in transfers if each["name"].startswith("large")]
    figures = {
        "ranks": ranks,
        "transfers": transfers,
        "wrong_values": sum(each["wrong_values"] for each in transfers),
        "large_ratio": max(large),
    }
    judged = place.on_gpu and place.gpus >= ranks
    left_out = {} if judged else {"times": "messages go through a host here: the ratio is shown and not judged"}
    return Found(figures, {"wrong_values": 0, **({"large_ratio": RATIO} if judged else {})}, left_out)


def transfers(ranks: int, rows: int) -> list[Transfer]:
    """Between halves of the ranks, and over all of them."""
    half, shape = ranks // 2, (rows, FEATURES)
    first = layout(range(half), [Shard(0)], dp=half)
    second, everyone = range(half, ranks), layout(range(ranks), [Shard(0)], dp=ranks)
    size = rows // 16  # sixteen samples, in another order among the lanes of the destination
    samples = [(i * 5 % 16 * size, (i * 5 % 16 + 1) * size) for i in range(16)]
    shuffled = RowSplit(0, tuple(tuple(samples[lane::ranks]) for lane in range(ranks)))
    pairs = {
        "disjoint, whole rows": (first, layout(second, [Shard(0)], dp=half)),
        "disjoint, features": (first, layout(second, [Shard(1)], tp=half)),
        "colocated, features": (everyone, layout(range(ranks), [Shard(1)], tp=ranks)),
        "colocated, shuffled rows": (everyone, layout(range(ranks), [shuffled], dp=ranks)),
    }
    return [Transfer(name, "forward", shape, src, dst) for name, (src, dst) in pairs.items()]


def measure(world: World, sizes: dict[str, int], rounds: int) -> dict[str, dict[str, Any]]:
    """On one rank: what it got wrong, and when it began and ended each round."""
    world.connect()
    found = {}
    for size, rows in sizes.items():
        for transfer in transfers(world.size, rows * world.size):
            local, want = (share(world, transfer.shape, side) for side in (transfer.src, transfer.dst))
            ways: dict[str, Planned | Bare] = {"hetmesh": Planned(world, transfer), "bare": Bare(world, transfer)}
            got = ways["hetmesh"].run(local)
            wrong = (got is None) != (want is None) or (got is not None and not torch.equal(got, want))
            spans: dict[str, list[float]] = {name: [] for name in ways}
            for i in range(WARM_UP + rounds):
                for name in random.Random(i).sample(list(ways), len(ways)):
                    seconds = _seconds(world, ways[name], local)
                    if i >= WARM_UP:
                        spans[name].append(seconds)
            found[f"{size}: {transfer.name}"] = {**spans, "wrong": int(wrong), "bytes": transfer.bytes}
    return found


class Bare:
    """The messages of hetmesh's plan and nothing else: packed beforehand, received in buffers, posted at once."""

    def __init__(self, world: World, transfer: Transfer) -> None:
        self.steps = []
        for step in Planned(world, transfer).plan.steps:
            receives = [(p.src, p.numel) for p in step.received(world.rank) if p.src != world.rank]
            sends = [(p.dst, p.numel) for p in step.sent(world.rank) if p.dst != world.rank]
            self.steps.append(
                [[(peer, torch.zeros(n, device=world.device)) for peer, n in m] for m in (receives, sends)]
            )

    def run(self, local: Tensor | None) -> None:
        """Post and wait; `local` is for nobody."""
        for receives, sends in self.steps:
            ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receives]
            ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends]
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()


def _seconds(world: World, way: Planned | Bare, local: Tensor | None) -> float:
    """From a barrier to what this rank has got, on its device."""
    world.accelerator.synchronize()
    dist.barrier()
    world.accelerator.synchronize()
    began = time.perf_counter()
    way.run(local)
    world.accelerator.synchronize()
    return time.perf_counter() - began


def share(world: World, shape: tuple[int, ...], side: Layout) -> Tensor | None:
    """This rank's part of a tensor whose elements say where they are; None outside the mesh."""
    if world.rank not in side.mesh:
        return None
    rows, columns = (
        torch.cat([torch.arange(a, b, device=world.device) for a, b in runs])
        for runs in side.intervals(shape, world.rank)
    )
    return ((rows[:, None] * 31 + columns * 7) % 8191).float()


def _row(name: str, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each round counts; the ratio is the median of the rounds'."""
    ours, bare = ([max(each) for each in zip(*(r[way] for r in of_ranks), strict=True)] for way in ("hetmesh", "bare"))
    return {
        "name": name,
        "bytes": of_ranks[0]["bytes"],
        "hetmesh_ms": 1e3 * statistics.median(ours),
        "bare_ms": 1e3 * statistics.median(bare),
        "ratio": statistics.median(a / b for a, b in zip(ours, bare, strict=True)),
        "wrong_values": sum(r["wrong"] for r in of_ranks),
    }
