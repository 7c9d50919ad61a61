"""What a message costs on this machine: the numbers of `hetmesh.boundary.transport.LINK_COSTS`.

Eight ranks, each of which sends one row to k others and receives one from k others, through hetmesh's own exchange.
With small rows P2P time grows with the 2k messages of a rank: `message_us` is the slope of that line. An all-to-all
costs the same whatever k is: `collective_us` is its time above the line's start, per member sent to and received from.
With large rows the all-to-all loses by its copies into and out of one flat buffer, which P2P does without:
`copy_us_per_mb`, per MB that a rank sends and receives.
"""

from __future__ import annotations

import statistics

import numpy as np
from torch.distributed.tensor import Shard

from benchmarks.boundary.measure import duration, measure
from benchmarks.boundary.scenarios import ITEMSIZE, RANKS, Transfer, layout
from hetmesh.layout import RowSplit
from hetmesh.testing.pool import WorkerPool

PEERS = (1, 3, 5, 7)
SMALL, LARGE = 256, 65536  # features of a row, float32: 1 KiB, which costs what an empty message does, and 256 KiB
TRANSPORTS = ("p2p", "all_to_all")


def link_costs(pool: WorkerPool, rounds: int) -> dict[str, object]:
    """Measure on the 8 workers of `pool`; the times behind the costs are medians of `rounds`, in ms."""
    small, large = ({k: _times(pool, spread(k, n), rounds) for k in PEERS} for n in (SMALL, LARGE))
    slope, start = np.polyfit([2 * k for k in PEERS], [small[k]["p2p"] for k in PEERS], 1)
    whole = statistics.median(small[k]["all_to_all"] for k in PEERS)
    copies = [_lost(large[k]) - _lost(small[k]) for k in PEERS]
    megabytes = [2 * k * LARGE * ITEMSIZE / 1e6 for k in PEERS]
    return {
        "message_us": round(1e3 * float(slope), 1),
        "collective_us": round(1e3 * float(whole - start) / (2 * (RANKS - 1)), 1),
        "copy_us_per_mb": round(1e3 * statistics.median(c / mb for c, mb in zip(copies, megabytes, strict=True)), 1),
        "ms_by_peers": {
            size: {name: {str(k): round(by[k][name], 3) for k in PEERS} for name in TRANSPORTS}
            for size, by in (("1 KiB", small), ("256 KiB", large))
        },
    }


def _times(pool: WorkerPool, transfer: Transfer, rounds: int) -> dict[str, float]:
    records = pool.run(measure, transfer, TRANSPORTS, rounds, timeout=300)
    return {name: 1e3 * statistics.median(duration(records, name, i) for i in range(rounds)) for name in TRANSPORTS}


def _lost(times: dict[str, float]) -> float:
    return times["all_to_all"] - times["p2p"]


def spread(peers: int, features: int) -> Transfer:
    """Rank r holds 8 rows and sends row i to rank r + i, for i up to `peers`; it keeps the others."""
    rows: list[list[int]] = [[] for _ in range(RANKS)]
    for row in range(RANKS * RANKS):
        rank, i = divmod(row, RANKS)
        rows[(rank + i) % RANKS if i <= peers else rank].append(row)
    kept = RowSplit(0, tuple(tuple((row, row + 1) for row in some) for some in rows))
    src, dst = (layout(range(RANKS), [placement], dp=RANKS) for placement in (Shard(0), kept))
    return Transfer(f"{peers} peers", "forward", (RANKS * RANKS, features), src, dst)
