"""How long balancers take: milliseconds of CPU on one core, the median of some runs."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from benchmarks.balance.cases import Case
from hetmesh.balance import assign

SMALL = (4096, 16)
LARGE = (65536, 512)


def assign_ms(
    case: Case, policy: str, samples: int, lanes: int, *, runs: int, deferral: bool = False, free: bool = False
) -> float:
    """Of `policy` for one batch, to `lanes` lanes of 32 microbatches, or, if `free`, another number."""
    loads = case.loads(samples, 3)
    slots = replace(case.slots(lanes), deferral=deferral, free=free)
    assign(loads, slots, policy)  # what is cached by layout is made once per run
    taken = []
    for _ in range(runs):
        start = time.process_time()
        assign(loads, slots, policy)
        taken.append(time.process_time() - start)
    return 1e3 * statistics.median(taken)
