"""Context-parallel attention: time of a balanced assignment against a contiguous one, and memory as ranks are added.

Two ranks, each pinned to a core with one thread, run attention forward and backward over 16,384 tokens of images and
text. The shares of visible tiles predict how much slower the contiguous assignment is (`tiles_ratio`: alone by the
largest; `predicted_ratio`: with what two busy cores slow each other down, measured between the rounds by plain
attention, `benchmarks.busy`). `measured_ratio` compares the time that the slower rank took, the best of alternating
rounds, waits included, so it means something on a quiet machine only; `cpu_ratio` the CPU seconds of the busiest rank's
thread. The slowdown, too, is that of the best rounds.
`hybrid` is of layers with a recurrence beside attention: how many times as long one rank takes as two, measured and
predicted (`hybrid.py`). Then 2, 4 and 8 ranks with as many tokens each: the peak of live bytes that attention allocates
(`memory_growth`: 8 ranks over 2, the worse of two masks), which no machine changes.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.hybrid import speedup
from benchmarks.busy import BusyMeter, attention, busy_slowdown, seconds_together
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.boundary import World
from hetmesh.context import Mask, assign
from hetmesh.runtime import LiveBytes
from hetmesh.testing.pool import WorkerPool
from support.mask_families import families, loads

JUDGES = ("src/hetmesh/attention", "src/hetmesh/context", "src/hetmesh/cost", "src/hetmesh/simulate")
"""What an output of it judges (`kept.py`)."""

POLICIES = ("contiguous", "balanced")
MASKS = ("image_bits", "causal")
RANKS = (2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--tokens", type=int, default=16_384, help="of the timed sequence (default: %(default)s)")
    parser.add_argument("--local-tokens", type=int, default=4096, help="per rank where memory is counted")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each assignment (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=2, help="query heads of 64 features, two to a key head")
    parser.add_argument("--hybrid-tokens", type=int, default=4096, help="of the row of a hybrid decoder")
    parser.add_argument("--mask", default="image_bits", help="of the timed sequence, a name of context.families")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of texts and images")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times on two ranks, then bytes on more."""
    mask = families(args.tokens, args.seed)[args.mask]
    shares = {policy: assign(mask, 2, policy=policy) for policy in POLICIES}
    found = {policy: loads(mask, shares[policy]) for policy in POLICIES}
    times: dict[str, list[list[tuple[float, float, int]]]] = {policy: [] for policy in POLICIES}
    rounds: list[list[tuple[float, float]]] = []
    with WorkerPool(2) as pool:
        for _ in range(args.rounds + 1):  # the first round plans, and is left out
            for policy in POLICIES:
                times[policy].append(pool.run(_timed, mask, shares[policy], args.heads, timeout=600.0))
            rounds.append(pool.run(_busy, args.heads, timeout=600.0))
    wall, cpu = (
        {policy: min(max(rank[i] for rank in ranks) for ranks in times[policy][1:]) for policy in POLICIES}
        for i in (0, 1)
    )
    memory, hybrid = {name: _memory(name, args) for name in MASKS}, speedup(args.hybrid_tokens, 2 * args.rounds)
    best = ([[min(each)] for each in zip(*rank, strict=True)] for rank in zip(*rounds, strict=True))
    slowdown = busy_slowdown((alone, together) for alone, together in best)
    predicted = {policy: seconds_together(found[policy].tiles, slowdown) for policy in POLICIES}
    return {
        "measured_ratio": round(wall["contiguous"] / wall["balanced"], 4),
        "predicted_ratio": round(predicted["contiguous"] / predicted["balanced"], 4),
        "tiles_ratio": round(max(found["contiguous"].tiles) / max(found["balanced"].tiles), 4),
        "busy_slowdown": round(slowdown[-1], 4),
        "cpu_ratio": round(cpu["contiguous"] / cpu["balanced"], 4),
        "memory_growth": round(max(peaks[str(RANKS[-1])] / peaks[str(RANKS[0])] for peaks in memory.values()), 4),
        "hybrid_speedup": round(hybrid["speedup"], 4),
        "hybrid_predicted": round(hybrid["predicted"], 4),
        "hybrid": hybrid,
        "policies": {
            policy: {
                "seconds": round(wall[policy], 4),
                "cpu_seconds": [round(min(r[rank][1] for r in times[policy][1:]), 4) for rank in range(2)],
                "tiles": found[policy].tiles,
                "tokens": found[policy].tokens,
                "received_bytes": [ranks[2] for ranks in times[policy][-1]],
            }
            for policy in POLICIES
        },
        "peak_bytes": memory,
        "load_average": os.getloadavg()[0],
    }


def _timed(rank: int, mask: Mask, shares: Any, heads: int) -> tuple[float, float, int]:
    """Seconds of this rank, those that its main thread computed, and bytes received."""
    _pin(rank)
    log = World.current().log
    log.clear()
    inputs, state = _inputs(shares[rank], heads, 64), ContextAttention(mask, shares, (0, 1))
    state.plan()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    _both(state, inputs)
    cpu = time.thread_time() - cpu
    return time.perf_counter() - wall, cpu, log.bytes_received()


def _busy(rank: int, heads: int) -> tuple[float, float]:
    """Seconds of plain attention, alone and beside the other rank."""
    _pin(rank)
    meter = BusyMeter(attention(heads, 64, 1024))
    meter.round()
    return meter.alone[0], meter.together[0]


def _pin(rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank]})


def _memory(name: str, args: argparse.Namespace) -> dict[str, int]:
    """Ranks -> peak live bytes of the rank that has most."""
    peaks = {}
    for ranks in RANKS:
        mask = families(ranks * args.local_tokens, args.seed)[name]
        with WorkerPool(ranks) as pool:
            peaks[str(ranks)] = max(pool.run(_peak, mask, assign(mask, ranks), ranks, timeout=600.0))
    return peaks


def _peak(rank: int, mask: Mask, shares: Any, ranks: int) -> int:
    inputs, state = _inputs(shares[rank], 2, 16), ContextAttention(mask, shares, range(ranks))
    with LiveBytes() as live:
        _both(state, inputs)
    return live.peak


def _inputs(runs: Any, heads: int, features: int) -> list[Tensor]:
    rows = sum(b - a for a, b in runs)
    return [torch.randn(n, rows, features).requires_grad_() for n in (heads, max(heads // 2, 1), max(heads // 2, 1))]


def _both(state: ContextAttention, inputs: list[Tensor]) -> None:
    out = state(*inputs)
    out.backward(out.detach())


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'assignment':<12} {'seconds':>8} {'cpu per rank':>20} {'tiles per rank':>18} {'MB received':>14}"]
    for policy, m in result["policies"].items():
        cpu, tiles = " ".join(f"{s:.3f}" for s in m["cpu_seconds"]), " ".join(map(str, m["tiles"]))
        received = " ".join(f"{size / 1e6:.2f}" for size in m["received_bytes"])
        lines.append(f"{policy:<12} {m['seconds']:>8.3f} {cpu:>20} {tiles:>18} {received:>14}")
    for name, peaks in result["peak_bytes"].items():
        lines.append(f"peak MB, {name}: " + ", ".join(f"{n} ranks {size / 1e6:.2f}" for n, size in peaks.items()))
    hybrid = result["hybrid"]
    seconds = "; ".join(
        f"{what}: one rank {one:.3f} s, two {two:.3f} s"
        for what, (one, two) in (("measured", hybrid["seconds"]), ("predicted", hybrid["predicted_seconds"]))
    )
    lines.append(f"hybrid decoder, {hybrid['cuts']} cuts of {hybrid['cut_bytes']:,} bytes per layer; {seconds}")
    lines += [f"{key:<16} {value:.4f}" for key, value in result.items() if isinstance(value, float)]
    return "\n".join(lines)
