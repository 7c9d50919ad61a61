"""Boundaries between meshes: bytes against the fewest possible, time against what other systems do, time to plan.

    python tools/bench.py boundary --json

Eight gloo processes on this machine move float32 tensors of 16 MB (and a few small ones) between pairs of layouts,
forward and backward. Per transfer:

* bytes: received on all ranks by the communication log, over the brute-force bound of `hetmesh.testing.bounds`;
* time: median over rounds of first start to last end, behind a barrier; hetmesh's plan, bare messages,
  gather-and-broadcast and leader-then-broadcast (see strategies.py) take turns within each round. Plans are made
  before: their time is separate. CPU time of all ranks is given beside it: other load on the machine changes it little.

`*_vs_bare` are medians over rounds of the ratio within a round, over all transfers with messages (two of the large ones
have none): `median_time_ratio_vs_bare` and `max_time_ratio_vs_bare` over those of 16 MB, `small_time_ratio_vs_bare` is
the worst of those of 24 KB. Partial sources are left out: sums are no messages; their figures are in the table.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from typing import Any

from benchmarks.boundary import link_costs, measure, plan_time, scenarios
from benchmarks.boundary.scenarios import ITEMSIZE, LARGE, RANKS, Transfer
from hetmesh.testing import bounds
from hetmesh.testing.pool import WorkerPool

JUDGES = ("src/hetmesh/layout", "src/hetmesh/boundary")
"""What an output of it judges (`kept.py`)."""

STRATEGIES = ("planned", "bare", "gather", "leader")
PLAN_TIMES = ("ms", "cpu_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py boundary`."""
    parser.add_argument("--rounds", type=int, default=21, help="times that each transfer is made (default 21)")
    parser.add_argument("--size", choices=("large", "small", "all"), default="all", help="which tensors (default all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only scenarios whose name contains TEXT")
    parser.add_argument("--plan-ranks", type=int, nargs="*", default=[1024, 8192], help="ranks to plan among")
    parser.add_argument("--plan-steps", type=int, default=5, help="steps per planning case (default 5)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All figures; the keys are explained in this module's docstring and in `table`."""
    chosen = [
        *(scenarios.large() if args.size != "small" else ()),
        *(scenarios.small() if args.size != "large" else ()),
    ]
    transfers = [t for scenario in chosen if args.only in scenario.name for t in scenario.directions]
    # Planning first: nothing else runs then.
    plans = {ranks: plan_time.plan_times(ranks, args.plan_steps) for ranks in args.plan_ranks}
    with WorkerPool(RANKS, preload=("benchmarks.boundary.measure",)) as pool:
        entries = [_entry(pool, transfer, args.rounds) for transfer in transfers]
        costs = link_costs.link_costs(pool, 2 * args.rounds)
    judged = [e for e in entries if e["has_target"]]
    compared = [e for e in entries if e["messages"] and not e["sums"]]
    large, small = (
        [e["time_ratio_vs_bare"] for e in compared if (e["tensor_bytes"] >= LARGE) == big] for big in (1, 0)
    )
    return {
        "max_bytes_over_bound": max((e["bytes_over_bound"] for e in entries), default=None),
        "min_bytes_over_bound": min((e["bytes_over_bound"] for e in entries), default=None),
        "median_time_ratio_vs_bare": round(statistics.median(large), 3) if large else None,
        "max_time_ratio_vs_bare": max(large, default=None),
        "small_time_ratio_vs_bare": max(small, default=None),
        "max_time_ratio_vs_gather": max((e["time_ratio_vs_gather"] for e in judged), default=None),
        "max_time_ratio_vs_leader": max((e["time_ratio_vs_leader"] for e in judged), default=None),
        "max_cpu_ratio_vs_gather": max((e["cpu_ratio_vs_gather"] for e in judged), default=None),
        **{f"plan_{key}_{n}": max(t[key] for t in times.values()) for n, times in plans.items() for key in PLAN_TIMES},
        "plan_cases": {str(ranks): times for ranks, times in plans.items()},
        "link_costs": costs,
        "scenarios": entries,
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "processes": RANKS},
    }


def _entry(pool: WorkerPool, transfer: Transfer, rounds: int) -> dict[str, Any]:
    records = pool.run(measure.measure, transfer, STRATEGIES, rounds, timeout=600)
    received = sum(record.bytes for record in records)
    bound = bounds.minimal_bytes(transfer.shape, transfer.src, transfer.dst, ITEMSIZE)
    measure.forget_elements()
    ms, cpu = (
        {name: 1e3 * statistics.median(seconds(records, name, i) for i in range(rounds)) for name in STRATEGIES}
        for seconds in (measure.duration, measure.cpu_seconds)
    )
    return {
        "name": transfer.name,
        "direction": transfer.direction,
        "tensor_bytes": transfer.bytes,
        "transport": records[0].transport,
        "bytes": received,
        "bound": bound,
        "bytes_over_bound": 1.0 if received == bound else received / bound if bound else math.inf,
        **{f"ms_{name}": round(value, 3) for name, value in ms.items()},
        **{f"cpu_ms_{name}": round(value, 3) for name, value in cpu.items()},
        "time_ratio_vs_bare": round(_ratio(records, "planned", "bare", rounds), 3),
        "time_ratio_vs_gather": round(ms["planned"] / ms["gather"], 3),
        "time_ratio_vs_leader": round(ms["planned"] / ms["leader"], 3),
        "cpu_ratio_vs_gather": round(cpu["planned"] / cpu["gather"], 3),
        "has_target": transfer.has_target,
        "messages": sum(record.messages for record in records) // 2,
        "sums": bool(transfer.src.partial_axes),
    }


def _ratio(records: list[measure.Record], name: str, other: str, rounds: int) -> float:
    """Median over rounds of two strategies' times in the same round."""
    return statistics.median(
        measure.duration(records, name, i) / measure.duration(records, other, i) for i in range(rounds)
    )


def table(result: dict[str, Any]) -> str:
    """The result for people; a star marks the transfers that the time target is about."""
    width = max((len(e["name"]) for e in result["scenarios"]), default=8)
    lines = [
        f"{'':{width}} {'':8} {'MB':>6} {'/bound':>6} {'ms':>7} {'bare':>7} {'ratio':>6} {'gather':>7} {'leader':>7} "
        f"{'ratio':>6}"
    ]
    lines += [
        f"{e['name']:{width}} {e['direction']:8} {e['bytes'] / 1e6:6.1f} {e['bytes_over_bound']:6.2f} "
        f"{e['ms_planned']:7.1f} {e['ms_bare']:7.1f} {e['time_ratio_vs_bare']:6.2f} "
        f"{e['ms_gather']:7.1f} {e['ms_leader']:7.1f} {e['time_ratio_vs_gather']:6.2f}"
        f"{'*' if e['has_target'] else ' '} {e['transport']}"
        for e in result["scenarios"]
    ]
    for ranks, times in result["plan_cases"].items():
        lines += [
            f"plan among {ranks} ranks, {name}: {t['ms']:.1f} ms ({t['cpu_ms']:.1f} ms CPU)"
            for name, t in times.items()
        ]
    costs = result["link_costs"]
    lines += [
        f"a P2P message costs {costs['message_us']} us, an all-to-all {costs['collective_us']} us per member each way",
        f"bytes over bound: {result['min_bytes_over_bound']} to {result['max_bytes_over_bound']}",
        f"time over bare messages: median {result['median_time_ratio_vs_bare']}, at most "
        f"{result['max_time_ratio_vs_bare']}; of small ones at most {result['small_time_ratio_vs_bare']}",
        f"time (*), at most: {result['max_time_ratio_vs_gather']} of gather-and-broadcast, "
        f"{result['max_time_ratio_vs_leader']} of leader-then-broadcast; "
        f"CPU time {result['max_cpu_ratio_vs_gather']} of gather-and-broadcast",
    ]
    return "\n".join(lines)
