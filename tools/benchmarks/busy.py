"""How much ranks that compute at the same time slow each other down, by plain torch code alone: blocks, or attention.

Every rank of a pool runs a forward and backward again and again, first each rank alone while the others sleep, then all
together. What a benchmark predicts from seconds alone, or measures together, it brings to the other by this factor
(`Machine.busy_slowdown`). Measure in the same run and in turns with what is compared: a machine changes within minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh.cost import StepCosts
from hetmesh.testing.pool import WorkerPool

JUDGES = ()
"""What an output of it judges (`kept.py`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--ranks", type=int, default=2, help="each on a core of its own (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="of each alone and all together (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each turn (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of a block (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="blocks (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The value for a machine's file, and what each rank measured."""
    sizes = Sizes(args.width, args.width * 11 // 4, layers=args.layers)
    with WorkerPool(args.ranks) as pool:
        measured = pool.run(_measure, sizes, args.rounds, args.seconds, timeout=900)
    factors = [statistics.mean(together) / statistics.mean(alone) for alone, together in measured]
    return {"busy_slowdown": busy_slowdown(measured), "ranks": factors, "rounds": args.rounds}


def table(result: dict[str, Any]) -> str:
    """The line for a machine's file."""
    return f"busy_slowdown = {[round(factor, 3) for factor in result['busy_slowdown']]}"


def _measure(rank: int, sizes: Sizes, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    pin(rank)
    meter = BusyMeter(blocks(sizes), seconds)
    for _ in range(rounds):
        meter.round()
    return meter.alone, meter.together


def pin(rank: int) -> None:
    """Keep this process, gloo's threads included, on one core."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(os.getppid()))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[rank % len(cores)]})


@dataclass(frozen=True)
class Sizes:
    """Of the stack and of what it reads. Its gradients accumulate, as those of microbatches do."""

    width: int
    inner: int
    heads: int = 4
    layers: int = 3
    samples: int = 4
    tokens: int = 66


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm that is written out, as transformers' LLMs have them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        self.heads = sizes.heads
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[samples, tokens, width]` to the same."""
        heads = self.qkv(self._normed(x, 0)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self._normed(x, 1)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    def _normed(self, x: Tensor, i: int) -> Tensor:
        return self.norms[i] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def blocks(sizes: Sizes) -> Callable[[], None]:
    """A forward and backward of the stack."""
    stack = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
    x = torch.randn(sizes.samples, sizes.tokens, sizes.width, requires_grad=True)

    def both() -> None:
        y = stack(x)
        y.backward(y.detach())

    return both


def attention(heads: int, features: int, tokens: int) -> Callable[[], None]:
    """A forward and backward of attention alone."""
    inputs = [torch.randn(1, heads, tokens, features, requires_grad=True) for _ in range(3)]

    def both() -> None:
        y = nn.functional.scaled_dot_product_attention(*inputs)
        y.backward(y.detach())

    return both


class BusyMeter:
    """Measures rounds of `work` on this rank; every rank of the job makes one and calls `round` alike.

    Attributes:
        alone, together: per round, seconds of `work`.
        kept_off: per turn of this rank, the share of it in which the process did not have its core.
    """

    def __init__(self, work: Callable[[], None], seconds: float = 0.4) -> None:
        self.work, self.seconds = work, seconds
        self.alone: list[float] = []
        self.together: list[float] = []
        self.kept_off: list[float] = []
        self._run()
        self.kept_off.clear()

    def round(self) -> None:
        """Each rank alone, then all together; every other round begins at the end."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        turns: list[int | None] = [*range(ranks), None]
        for turn in turns[::-1] if len(self.alone) % 2 else turns:
            dist.barrier()
            if turn == rank:
                self.alone.append(self._run())
            elif turn is None:
                self.together.append(self._run())
        dist.barrier()

    def _run(self) -> float:
        count, spent, started, ran = 0, 0.0, time.perf_counter(), time.process_time()
        while not count or spent < self.seconds:
            self.work()
            count, spent = count + 1, time.perf_counter() - started
        self.kept_off.append(max(1.0 - (time.process_time() - ran) / spent, 0.0))
        return spent / count


def busy_slowdown(
    measured: Iterable[tuple[Sequence[float], Sequence[float]]], *, waiting: bool = False
) -> tuple[float, ...]:
    """`Machine.busy_slowdown` of as many ranks as have measured; with fewer of them busy, a line between.

    Args:
        measured: each rank's `BusyMeter.alone` and `together`. Means count, not medians: bad moments, more frequent
            while all are busy, are part of what a step of seconds takes.
        waiting: whether the ranks wait for each other, as the stages of a pipeline without slack do: then a bad moment
            of one is one of all, and the slowest of each turn counts. Stages with slack make up for it.
    """
    each = [(statistics.mean(alone), together) for alone, together in measured]
    ratios = [[seconds / alone for seconds in together] for alone, together in each]
    if waiting:
        ratios = [[max(turn) for turn in zip(*ratios, strict=True)]]
    factor, others = max(statistics.mean(map(statistics.mean, ratios)), 1.0), max(len(each) - 1, 1)
    return tuple(1.0 + (factor - 1.0) * k / others for k in range(len(each)))


MOST_LOAD, MOST_NOISE = 0.05, 0.10
"""Up to which a machine counts as quiet; see `Quiet`."""


@dataclass(frozen=True)
class Quiet:
    """Whether times of a run can be judged, by the plain code that ran in turns with what was timed.

    Attributes:
        load: the share of the time of the plain code in which something else had its core; the mean over turns.
        noise: how far the turns of the plain code scatter: the middle half of them, each in medians of its kind, lies
            within this.
    """

    load: float
    noise: float

    @classmethod
    def of(cls, series: Iterable[Sequence[float]], kept_off: Iterable[float]) -> Quiet:
        """From repeated seconds of the same work, a series per rank and kind of turn, and `BusyMeter.kept_off`."""
        turns = [seconds / statistics.median(same) for same in series for seconds in same]
        low, _, high = statistics.quantiles(turns, n=4, method="inclusive")
        return cls(statistics.mean(kept_off), high - low)

    def __bool__(self) -> bool:
        return self.load <= MOST_LOAD and self.noise <= MOST_NOISE


def apart(costs: StepCosts, slowdown: tuple[float, ...]) -> StepCosts:
    """Costs of a machine of that slowdown, from `costs` of stages that were measured while all ranks were busy."""
    stages = {
        key: replace(
            cost,
            forward=cost.forward / slowdown[-1],
            backward_input=cost.backward_input / slowdown[-1],
            backward_weight=cost.backward_weight / slowdown[-1],
        )
        for key, cost in costs.stages.items()
    }
    return replace(costs, stages=stages, busy_slowdown=slowdown)


def seconds_together(alone: Sequence[float], slowdown: Sequence[float]) -> float:
    """Until the last of some ranks is done that begin at once and take `alone` by themselves."""
    total, done = 0.0, 0.0
    for i, seconds in enumerate(sorted(alone)):
        total += (seconds - done) * slowdown[min(len(alone) - i, len(slowdown)) - 1]
        done = seconds
    return total
