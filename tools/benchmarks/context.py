"""Token assignment to context-parallel ranks: balance, runs, key/value traffic and planning time per mask family.

65,536 tokens on 8 ranks with every policy, 1,048,576 tokens on 64 ranks with `balanced` and `lpt`, and blockwise causal
masks of 16,384 tokens. Work is the number of visible tiles of 128 rows x 32 keys; imbalance is the largest rank's
share over (tiles of the uncut sequence / ranks). Planning is timed from the list of segments to the intervals of each
rank, tile counts included, in one thread; wall times mean something on a quiet machine, CPU times nearly always.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import numpy as np

from hetmesh.context import POLICIES, Mask, assign, block_edges, tile_counts
from support.mask_families import blockwise, families, loads

JUDGES = ("src/hetmesh/context",)
"""What an output of it judges (`kept.py`)."""

RANKS, LARGE_RANKS = 8, 64
TOKENS, LARGE_TOKENS, BLOCKWISE_TOKENS = 65_536, 1_048_576, 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=51, help="timed rounds of each case (default: %(default)s)")
    parser.add_argument("--large-rounds", type=int, default=7, help="the same for a million tokens; 0 leaves them out")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of texts, images and documents")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All families, then the blockwise masks."""
    small = {
        name: {policy: _measure(mask, RANKS, policy, args.rounds) for policy in sorted(POLICIES)}
        for name, mask in families(TOKENS, args.seed).items()
    }
    large: dict[str, Any] = {}
    if args.large_rounds:
        large = {
            name: {policy: _measure(mask, LARGE_RANKS, policy, args.large_rounds) for policy in ("balanced", "lpt")}
            for name, mask in families(LARGE_TOKENS, args.seed).items()
        }
    ours = {name: methods["balanced"] for name, methods in small.items()}
    ours_large = {name: methods["balanced"] for name, methods in large.items()}
    rows = _blockwise(args.seed)
    plain = [name for name in ours if name != "prefix_documents"]
    result = {
        "worst_tile_imbalance": max(m["tile_imbalance"] for m in ours.values()),
        "worst_token_imbalance": max(m["token_imbalance"] for m in ours.values()),
        **{f"worst_tile_imbalance_{policy}": _worst(small, policy) for policy in ("contiguous", "zigzag")},
        "mean_runs": max(ours[name]["mean_runs"] for name in plain),
        "mean_runs_prefix": ours["prefix_documents"]["mean_runs"],
        "mean_runs_lpt": mean(m["lpt"]["mean_runs"] for m in small.values()),
        "assign_ms_64k": max(ours[name]["ms"] for name in plain),
        "assign_cpu_ms_64k": max(ours[name]["cpu_ms"] for name in plain),
        "assign_ms_64k_prefix": ours["prefix_documents"]["ms"],
        "assign_ms_1m": None,
        "kv_over_lpt_image_bits": _traffic_ratio(small["image_bits"]),
        "kv_over_lpt_packed": _traffic_ratio(small["packed_documents"]),
        "blockwise_rows": rows["row_imbalance"],
        "blockwise": rows,
        "families": small,
        "families_1m": large,
        "load_average": os.getloadavg()[0],
    }
    if large:
        result |= {
            "worst_tile_imbalance_1m": max(ours_large[name]["tile_imbalance"] for name in plain),
            "tile_imbalance_1m_prefix": ours_large["prefix_documents"]["tile_imbalance"],
            "worst_token_imbalance_1m": max(m["token_imbalance"] for m in ours_large.values()),
            "mean_runs_1m": max(m["mean_runs"] for m in ours_large.values()),
            "assign_ms_1m": max(ours_large[name]["ms"] for name in plain),
            "assign_cpu_ms_1m": max(ours_large[name]["cpu_ms"] for name in plain),
            "assign_ms_1m_prefix": ours_large["prefix_documents"]["ms"],
        }
    return result


def _worst(families: dict[str, Any], policy: str) -> float:
    return max(methods[policy]["tile_imbalance"] for methods in families.values())


def _measure(mask: Mask, ranks: int, policy: str, rounds: int) -> dict[str, float]:
    def plan() -> None:
        assign(Mask(mask.segments, mask.length), ranks, policy=policy)  # a new mask: nothing is remembered

    def count() -> None:
        tile_counts(Mask(mask.segments, mask.length), block_edges(mask.length, 128))

    wall, cpu = _time(plan, rounds)
    found = loads(mask, assign(mask, ranks, policy=policy))
    return {
        "tile_imbalance": round(found.tile_imbalance, 5),
        "token_imbalance": round(found.token_imbalance, 5),
        "mean_runs": mean(found.runs),
        "remote_key_tiles": sum(found.remote),
        "ms": wall,
        "cpu_ms": cpu,
        "of_which_counts_ms": _time(count, rounds)[0],
    }


def _time(work: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median wall and CPU milliseconds."""
    wall, cpu = [], []
    work()
    for _ in range(rounds):
        a, b = time.perf_counter(), time.thread_time()
        work()
        wall.append(time.perf_counter() - a)
        cpu.append(time.thread_time() - b)
    return round(1e3 * median(wall), 3), round(1e3 * median(cpu), 3)


def _traffic_ratio(methods: dict[str, Any]) -> float:
    return round(methods["balanced"]["remote_key_tiles"] / methods["lpt"]["remote_key_tiles"], 4)


def _blockwise(seed: int) -> dict[str, float]:
    """Work as the CPU path pays it: by rows, cut anywhere, or in tiles of 16 rows x 16 keys."""
    mask = blockwise(BLOCKWISE_TOKENS, seed)
    row_work = np.append(0, np.cumsum(tile_counts(mask, block_edges(mask.length, 1), 1)))
    by_row = assign(mask, RANKS, block=1, tile=1)
    shares = [sum(int(row_work[b] - row_work[a]) for a, b in runs) for runs in by_row]
    by_tile = assign(mask, RANKS, block=16, tile=16)
    return {
        "row_imbalance": round(max(shares) * RANKS / sum(shares), 5),
        "row_runs": mean(map(len, by_row)),
        "row_token_imbalance": round(loads(mask, by_row).token_imbalance, 5),
        "row_imbalance_128_row_kernel": round(loads(mask, by_row).tile_imbalance, 5),
        "tile16_imbalance": round(loads(mask, by_tile, block=16, tile=16).tile_imbalance, 5),
        "tile16_imbalance_128_row_kernel": round(loads(mask, by_tile).tile_imbalance, 5),
        "block128_imbalance_128_row_kernel": round(loads(mask, assign(mask, RANKS)).tile_imbalance, 5),
        "lpt128_imbalance_128_row_kernel": round(loads(mask, assign(mask, RANKS, policy="lpt")).tile_imbalance, 5),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    columns = (("tiles", 7), ("tokens", 7), ("runs", 6), ("remote keys", 11), ("ms", 8), ("cpu ms", 8))
    head = f"{'family':<20} {'policy':<10} " + " ".join(f"{name:>{width}}" for name, width in columns)
    lines = []
    for title, found in (("65,536 tokens, 8 ranks", "families"), ("1,048,576 tokens, 64 ranks", "families_1m")):
        if not result[found]:
            continue
        lines += [title, head]
        lines += [
            f"{name:<20} {policy:<10} {m['tile_imbalance']:>7.4f} {m['token_imbalance']:>7.4f} {m['mean_runs']:>6.2f} "
            f"{m['remote_key_tiles']:>11} {m['ms']:>8.2f} {m['cpu_ms']:>8.2f}"
            for name, methods in result[found].items()
            for policy, m in methods.items()
        ]
    lines.append("16,384 tokens, blockwise causal, 8 ranks")
    lines += [f"{name:<40} {value:>8.4f}" for name, value in result["blockwise"].items()]
    lines += [f"{key:<40} {value}" for key, value in result.items() if isinstance(value, (int, float))]
    return "\n".join(lines)
