"""Drawn pairs of layouts between which a job changes, without a file: steps, bytes and memory

Two steps in the first layout, a relayout, three in the second: losses are those of the job that stays (error below
1e-10), ranks receive no more than what they lack, and hold at most 1.25 of their larger share. The model has an
encoder, a projector and an LLM, with experts or adapters, with something frozen, tied, or trained by Muon
(`support.relayouts`). Memory is that of the new modules and of what moves, without the table of names, beside which
these models are small."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hetmesh.testing.pool import WorkerPool
from support.relayouts import drawn, judge, recipe_in

JUDGES = (
    "src/hetmesh/layout",
    "src/hetmesh/boundary",
    "src/hetmesh/parallel",
    "src/hetmesh/checkpoint/relayout.py",
    "src/hetmesh/training/job.py",
    "tests/support/relayouts.py",
    "tests/support/layout_pairs.py",
)
"""What an output of it judges (`kept.py`)."""

MAX_ERROR, MAX_PEAK = 1e-10, 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside --n and --seed."""
    parser.set_defaults(n=30)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Draw, run and compare; a dict of figures and failures."""
    failures, errors, peaks, sent, bound = list[str](), [], [], 0, 0
    with WorkerPool(4) as pool:
        for number, (first, second, variant) in enumerate(drawn(args.n, args.seed)):
            what = f"{number}: {first} -> {second}, {variant}"
            print(what, file=sys.stderr, flush=True)
            try:
                found = judge(pool, [recipe_in(name, variant) for name in (first, second)], [2, 3])
            except Exception as error:
                failures.append(f"{what}: {error}")
                continue
            errors.append(found.error)
            peaks.append(found.peak)
            sent, bound = sent + found.sent, bound + found.bound
            if found.error >= MAX_ERROR or found.sent != found.bound or found.peak > MAX_PEAK:
                failures.append(f"{what}: {found}")
    return {
        "pairs": args.n,
        "seed": args.seed,
        "failures": failures,
        "max_error": max(errors, default=None),
        "bytes_over_bound": sent / bound if bound else None,
        "max_peak": max(peaks, default=None),
    }


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    figures = [f"{name:18} {value}" for name, value in result.items() if name not in ("failures", "kept")]
    return "\n".join([*figures, *(f"FAILED {failure}" for failure in result["failures"])])
