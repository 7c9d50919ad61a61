"""How long one rank among thousands plans a boundary whose ragged rows change at every step.

Timed is all that a rank does for one microbatch: both layouts from the rows per lane, the plan, its adjoint, the choice
of transport and the rank's own pieces of both. Meshes are static, so they are made before. Every measurement draws new
rows, so that no cache can help. Not timed: where pieces lie in the rank's tensors, which its first transfer works out.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed.tensor import Replicate, Shard

from hetmesh.boundary.transport import choose
from hetmesh.layout import Interval, Layout, MeshSpec, Placement, RowSplit, plan_transfer

FEATURES = 1024
RANKS_PER_NODE = 8
TP = 8

Lanes = list[list[Interval]]
"""Rows per lane."""

Draw = Callable[[random.Random], tuple[int, Lanes | None, Lanes | None]]
"""A new step: total rows, and the rows of each source and destination lane (None: the side is replicated)."""


class Case:
    """A source and a destination mesh, and how a step's rows are drawn.

    Args:
        over_tp: placement along the second axis of the destination mesh, if it has one.
    """

    def __init__(self, src: MeshSpec, dst: MeshSpec, draw: Draw, over_tp: Placement | None = None) -> None:
        self.src, self.dst, self.draw, self.over_tp = src, dst, draw, over_tp or Replicate()
        for mesh in (src, dst):  # what a mesh computes once per run
            hash(mesh), mesh.array, mesh.coordinate(0)

    def milliseconds(self, seed: int, rank: Callable[[Lanes | None, Lanes | None], int]) -> tuple[float, float]:
        """Wall and CPU time of one rank for the step drawn from `seed`."""
        rows, src_lanes, dst_lanes = self.draw(random.Random(seed))
        me = rank(src_lanes, dst_lanes)
        gc.collect()  # what drawing left behind; garbage of the planning itself is collected on its own time
        wall, cpu = time.perf_counter(), time.thread_time()
        src = _layout(self.src, src_lanes, Replicate())
        dst = _layout(self.dst, dst_lanes, self.over_tp)
        forward = plan_transfer((rows, FEATURES), src, dst, ranks_per_node=RANKS_PER_NODE)
        for plan in (forward, forward.transpose()):
            choose(plan, "gloo")
            for step in plan.steps:
                step.sent(me), step.received(me)
        return 1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)

    def busiest_source(self, src_lanes: Lanes | None, dst_lanes: Lanes | None) -> int:
        """The first rank of the source lane with most rows."""
        return self._busiest(self.src, src_lanes)

    def busiest_destination(self, src_lanes: Lanes | None, dst_lanes: Lanes | None) -> int:
        """The first rank of the destination lane with most rows."""
        return self._busiest(self.dst, dst_lanes)

    def _busiest(self, mesh: MeshSpec, lanes: Lanes | None) -> int:
        if lanes is None:
            return mesh.ranks[0]
        lane = max(range(len(lanes)), key=lambda i: sum(b - a for a, b in lanes[i]))
        return mesh.ranks[lane * (mesh.size // len(lanes))]


def cases(size: int) -> dict[str, Case]:
    """All cases among `size` ranks (a multiple of 16)."""
    everyone = range(size)
    permuted = list(everyone)
    random.Random(0).shuffle(permuted)
    encoder, llm = MeshSpec.make(everyone, dp=size), MeshSpec.make(everyone, dp=size // TP, tp=TP)
    half = MeshSpec.make(range(size // 2), tp=size // 2), MeshSpec.make(range(size // 2, size), dp=size // 2)
    runs, shuffled = partial(_runs, size, size // TP), partial(_shuffled, size, size // TP)
    to_all, to_half = partial(_runs, None, size), partial(_runs, None, size // 2)
    return {
        "DP N -> DP N/8 x TP 8, replicated over tp": Case(encoder, llm, runs),
        "DP N -> DP N/8 x TP 8, rows split over tp": Case(encoder, llm, runs, Shard(0)),
        "DP N -> DP N/8 x TP 8, destination ranks permuted": Case(
            encoder, MeshSpec.make(permuted, dp=size // TP, tp=TP), runs
        ),
        "DP N -> DP N/8 x TP 8, shuffled samples": Case(encoder, llm, shuffled),
        "DP N -> DP N/8 x TP 8, shuffled samples, rows split over tp": Case(encoder, llm, shuffled, Shard(0)),
        "one TP 8 group -> DP N": Case(MeshSpec.make(range(TP), tp=TP), encoder, to_all),
        "replicated on N/2 -> DP N/2": Case(*half, to_half),
    }


def plan_times(size: int, steps: int = 5) -> dict[str, dict[str, float]]:
    """Milliseconds per case: the slowest of five ranks (first, middle, last, busiest of each side), median of steps.

    Returns:
        Per case `ms`, and `cpu_ms`: what `ms` would be if nothing else ran on this machine.
    """
    times = {}
    for name, case in cases(size).items():
        ranks: list[Callable[[Lanes | None, Lanes | None], int]] = [
            *(lambda *_, r=r: r for r in (0, size // 2, size - 1)),
            case.busiest_source,
            case.busiest_destination,
        ]
        slowest = [
            [max(ms) for ms in zip(*(case.milliseconds(1000 * step + i, r) for i, r in enumerate(ranks)), strict=True)]
            for step in range(steps + 1)
        ]
        wall, cpu = (statistics.median(ms) for ms in zip(*slowest[1:], strict=True))  # the first step warms up
        times[name] = {"ms": round(wall, 2), "cpu_ms": round(cpu, 2)}
    return times


def _layout(mesh: MeshSpec, lanes: Lanes | None, over_tp: Placement) -> Layout:
    split = Replicate() if lanes is None else RowSplit(0, tuple(tuple(rows) for rows in lanes))
    return Layout(mesh, (split, over_tp)[: mesh.ndim])


def _runs(src: int | None, dst: int, rng: random.Random) -> tuple[int, Lanes | None, Lanes]:
    """Consecutive samples per lane: 4 per rank, each of 0 to 20 images of 16 rows."""
    edges = _samples(4 * max(src or 0, dst), rng)
    return edges[-1], None if src is None else _cut(edges, src, rng), _cut(edges, dst, rng)


def _cut(edges: Sequence[int], lanes: int, rng: random.Random) -> Lanes:
    """Runs of samples of unequal number."""
    cuts = [0, *sorted(rng.choices(range(len(edges)), k=lanes - 1)), len(edges) - 1]
    return [[(edges[a], edges[b])] for a, b in itertools.pairwise(cuts)]


def _shuffled(src: int, dst: int, rng: random.Random) -> tuple[int, Lanes, Lanes]:
    """A balancer's choice: every lane takes samples from anywhere."""
    samples = list(itertools.pairwise(_samples(4 * max(src, dst), rng)))
    sides = []
    for lanes in (src, dst):
        rng.shuffle(samples)
        sides.append([sorted(samples[i::lanes]) for i in range(lanes)])
    return sum(b - a for a, b in samples), sides[0], sides[1]


def _samples(number: int, rng: random.Random) -> list[int]:
    """Row edges of samples."""
    return list(itertools.accumulate((16 * rng.choice((0, 1, 1, 2, 3, 5, 20)) for _ in range(number)), initial=0))
