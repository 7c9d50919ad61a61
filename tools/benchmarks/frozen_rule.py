"""The rule of frozen parts: measured backward over forward time of eight MLP blocks against t + g, with recomputation.

Cornstarch (arXiv 2503.11367): a backward takes (t + g) x the forward, t for trainable, g for a trainable ancestor.
Times are CPU times of one thread, which other processes do not add to; forwards and backwards of all cases take turns,
and ratios are of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

JUDGES = ("src/hetmesh/cost/layer_time.py",)
"""What an output of it judges (`kept.py`)."""

BLOCKS = 8
CASES = {
    "trainable, trainable before it": (True, True),
    "trainable, nothing before it": (True, False),
    "frozen, trainable before it": (False, True),
    "frozen, nothing before it": (False, False),
}
TOLERANCE = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--width", type=int, default=512, help="of a block; it is 4 x wider inside (default %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=256, help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=9, help="default %(default)s")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, with and without recomputation."""
    torch.set_num_threads(1)
    width, inner = args.width, 4 * args.width
    blocks = [nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(BLOCKS)]
    rows = torch.randn(args.rows, width)
    spent: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for repeat in range(1 + args.repeats):
        for name, (trainable, upstream) in CASES.items():
            for recompute in (False, True):
                measured = _measure(blocks, rows, trainable, upstream, recompute)
                if repeat:
                    spent.setdefault((name, recompute), []).append(measured)
    results = []
    for (name, recompute), measured in spent.items():
        forward, backward = (statistics.median(column) for column in zip(*measured, strict=True))
        rule = _rule(*CASES[name], recompute)
        ratio = backward / forward
        results.append(
            {
                "case": name,
                "recompute": recompute,
                "forward_ms": 1e3 * forward,
                "backward_ms": 1e3 * backward,
                "ratio": ratio,
                "rule": rule,
                "within": abs(ratio - rule) <= TOLERANCE * max(rule, 1.0),
            }
        )
    return {"width": width, "rows": args.rows, "repeats": args.repeats, "tolerance": TOLERANCE, "cases": results}


def _rule(trainable: bool, upstream: bool, recompute: bool) -> float:
    """Backward over forward of all blocks: the first linear of the first block has nothing trainable before it, if
    `upstream` is False. Recomputing stops before a block's last product, whose result the backward does not read."""
    linears = 2 * BLOCKS
    backward = sum(trainable + (upstream or (trainable and i > 0)) for i in range(linears)) / linears
    return backward + (0.5 if recompute and backward else 0.0)


def _measure(
    blocks: list[nn.Sequential], rows: Tensor, trainable: bool, upstream: bool, recompute: bool
) -> tuple[float, float]:
    for block in blocks:
        block.requires_grad_(trainable)
    x = rows.clone().requires_grad_(upstream)
    started = time.thread_time()
    y = x
    for block in blocks:
        y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
    forward = time.thread_time() - started
    gradient = torch.ones_like(y)
    wanted = [p for block in blocks for p in block.parameters() if trainable] + [x] * upstream
    started = time.thread_time()
    if wanted:
        torch.autograd.grad(y, wanted, gradient)
    return forward, time.thread_time() - started if wanted else 0.0


def table(result: dict[str, Any]) -> str:
    """A line per case."""
    lines = [f"{'case':32} {'recompute':>9} {'forward':>9} {'backward':>9} {'ratio':>6} {'rule':>6}"]
    lines += [
        f"{case['case']:32} {case['recompute']!s:>9} {case['forward_ms']:7.1f}ms {case['backward_ms']:7.1f}ms "
        f"{case['ratio']:6.2f} {case['rule']:6.2f}{'' if case['within'] else '  off'}"
        for case in result["cases"]
    ]
    return "\n".join(lines)
