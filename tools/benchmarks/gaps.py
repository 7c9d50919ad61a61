"""Encoders in the LLM's collectives: what a step gains of what it could, two processes, TP 2, over an emulated link.

On a virtual clock, so that other work on the machine counts little: a rank's CPU seconds, its waits in collectives, and
what a hand-over takes. A collective ends a gap after the later rank has begun; its own CPU seconds do not count. Steps
with and without lending are taken in turns, of one schedule. Of the time in gaps a step can gain at most what it has in
encoder work but for the first forward and the last backward, beside which there is nothing of the LLM.

What it does not show: gloo, whose collectives are emulated. `lent_share` is near 1 unless the side returns too early,
as a gap is lent to its end. Predictions take what they need from steps of the same run that do not lend but have stops,
and from lending to what does nothing; not in them is that what runs in turns finds its data in no cache.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
import torch.distributed as dist
from torch import nn

from hetmesh.boundary import World
from hetmesh.cost import StageCost, StageParts, StepCosts
from hetmesh.graph import Stage
from hetmesh.parallel import gaps, key_heads, linear, sequence_parallel, vocabulary
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import Runtime
from hetmesh.runtime.runtime import Reducer
from hetmesh.runtime.side import Side
from hetmesh.runtime.step_runner import StepRunner
from hetmesh.runtime.step_transfers import StepTransfers
from hetmesh.schedule import Action, Kind, Schedule
from hetmesh.simulate import simulate
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.job import Job

JUDGES = ("src/hetmesh/runtime", "src/hetmesh/parallel", "src/hetmesh/schedule", "src/hetmesh/simulate/beside.py")
HAND_OVER_S = 30e-6
"""Between the end of one thread and the beginning of the other, in which neither has CPU seconds."""
GAPS_MS = (5.0, 2.0)
RECIPE = """
[modules.vision]
model = "siglip"
[modules.vision.config]
hidden_size = {width}
num_hidden_layers = {layers}
num_attention_heads = 4
intermediate_size = {inner}
patch_size = 4
image_size = 32
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 32
intermediate_size = 256
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[parallelism.vision]
ranks = [0, 1]
[parallelism.projector]
ranks = [0, 1]
[parallelism.llm]
ranks = [0, 1]
tensor_parallel_degree = 2
pipeline_parallel_schedule = "bubble_fill"
pipeline_parallel_microbatch_size = 4
bubble_fill_in_collectives = true
[balance]
policy = "none"
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ image = [3, 32, 32] }}
items = 1
[training]
local_batch_size = {batch}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=16, help="steps of each kind and gap (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=5, help="of a step (default %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the encoder (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Gains by gap, shares and ratios."""
    sizes = {"width": args.width, "inner": 2 * args.width, "layers": args.layers, "batch": 4 * args.microbatches}
    with WorkerPool(2) as pool:
        ranks = pool.run(_measure, RECIPE.format(**sizes), args.rounds, timeout=1200)
    found: dict[str, Any] = {"clock": "virtual", "rounds": args.rounds, "gaps": {}}
    lent, ratios = [], []
    for i, gap in enumerate(GAPS_MS):
        each = [rank[i] for rank in ranks]
        steps = [[max(pair) for pair in zip(*(of[kind] for of in each), strict=True)] for kind in ("plain", "lending")]
        bound = min(min(of["gap_time"], of["hideable"]) for of in each)
        gains = [(plain - lending) / bound for plain, lending in zip(*steps, strict=True)]
        lent.append(sum(of["lent"] for of in each) / sum(of["had_work"] for of in each))
        ratios.append(each[0]["predicted"] / statistics.median(steps[1]))
        found["gaps"][f"{gap:g} ms"] = {
            "gain": statistics.median(gains),
            "gains": gains,
            "lent_share": lent[-1],
            "predicted_over_measured": ratios[-1],
            "step_ratio": statistics.median(p / f for p, f in zip(*steps, strict=True)),
            **{key: each[0][key] for key in ("gap_time", "hideable", "pieces_ms")},
        }
        found[f"gain_{gap:g}ms"] = statistics.median(gains)
    empty = [statistics.median(b / a for a, b in zip(*rank[-2], strict=True)) for rank in ranks]
    found["hand_over_us"] = 1e6 * statistics.mean(rank[-1] for rank in ranks)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return found | {"lent_share": min(lent), "predicted_over_measured": worst, "empty_overhead": statistics.mean(empty)}


def table(result: dict[str, Any]) -> str:
    """A line per gap."""
    lines = [
        f"gaps of {gap}: gain {of['gain']:.0%} of the bound, {of['lent_share']:.0%} of the gap time with work lent, "
        f"step {of['step_ratio']:.2f} times as fast, predicted over measured {of['predicted_over_measured']:.2f}"
        for gap, of in result["gaps"].items()
    ]
    return "\n".join([*lines, f"without gaps the step takes {result['empty_overhead']:.3f} of one without the key"])


@dataclass
class Clock:
    """The virtual time of this rank, and what its collectives were used for."""

    gap: float = 0.0
    waited: float = 0.0  # less what does not count
    gap_time: float = 0.0
    lent: float = 0.0
    had_work: float = 0.0
    side: Side | None = None
    parts: list[tuple[str, float]] | None = None  # of the action that runs: computation and collectives in turns
    since: float = 0.0
    main: int = field(default_factory=threading.get_ident)
    outside: float = 0.0  # of actions, in a timed step: before the first, behind the last, sums of gradients

    def cpu(self) -> float:
        """CPU seconds of both flows."""
        own = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
        if self.side is None or self.side._thread.ident is None:
            return own
        idents = {self.main, self.side._thread.ident} - {threading.get_ident()}
        return own + sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)

    def now(self) -> float:
        return self.cpu() + self.waited

    def collective(self, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """In place of `gaps.collective`."""
        started = self.now()
        latest = torch.tensor(started, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        begin(*args, **kwargs)
        self.waited -= self.now() - started
        end = float(latest) + self.gap
        self.gap_time += end - started
        if self.parts is not None:
            self.parts += [("mlp", started - self.since), ("collective", end - started)]
        side = self.side
        if gaps._lend is not None and side is not None and side._jobs:
            gaps._lend((lambda: self.now() >= end) if self.gap >= 0 else lambda: True)
            self.lent += min(self.now(), end) - started
            self.had_work += (end if side._jobs else min(self.now(), end)) - started
        self.waited += max(end - self.now(), 0.0)
        self.since = self.now()


@contextmanager
def emulated(clock: Clock) -> Iterator[None]:
    """Collectives of the body take what `clock` says."""
    modules = (linear, vocabulary, sequence_parallel, key_heads)
    enter, leave, hand_over = Side.__enter__, Side.__exit__, Side._hand_over

    def entered(side: Side) -> Side:
        clock.side = side
        return enter(side)

    def left(side: Side, *error: object) -> None:
        clock.waited += clock.cpu() - time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)  # of a thread that ends
        clock.side = None
        leave(side, *error)

    def handed_over(side: Side, until: Callable[[], bool]) -> None:
        clock.waited += HAND_OVER_S
        hand_over(side, until)

    patches = [patch.object(module, "collective", clock.collective) for module in modules]
    patches += [patch.object(Side, "__enter__", entered), patch.object(Side, "__exit__", left)]
    patches.append(patch.object(Side, "_hand_over", handed_over))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


Spent = dict[Action, list[tuple[float, list[tuple[str, float]]]]]
"""Per action, in some steps, its seconds, and its computation and collectives in turns."""


def _measure(rank: int, text: str, rounds: int) -> list[Any]:
    torch.set_num_threads(1)
    job = Job.assemble(resolve(parse_recipe(text)), World.current())
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    schedule = job.schedule(plan)
    transfers = StepTransfers(plan, schedule, rank)
    transfers.prepare()  # as a run does while the step before is computed
    spent: Spent = {}
    reducers = job.runtime.reducers

    def step(clock: Clock, lends: bool, timed: bool = False, stops: bool = False) -> float:
        execute = StepRunner.execute
        began = ended = None

        def noting(runner: StepRunner, action: Action) -> None:
            nonlocal began, ended
            clock.parts, clock.since = [], clock.now()
            started = clock.since
            began = started if began is None else began
            execute(runner, action)
            ended = clock.now()
            rest = ended - clock.since
            spent.setdefault(action, []).append((ended - started, [*clock.parts, ("mlp", rest)]))

        def begins(reducer: Reducer) -> Callable[[], None]:
            started = clock.now()
            finish = reducer()
            clock.outside += clock.now() - started
            return finish

        for parameter in job.root.parameters():
            parameter.grad = None
        feed = job.feed(drawn, plan, 0)
        feed.load_all(job.world.watchdog)
        idle = Side(lambda _: None, rank, job.world.watchdog)
        with (
            emulated(clock),
            patch.object(Runtime, "_lends", PropertyMock(return_value=lends)),
            patch.object(StepRunner, "execute", noting if timed else execute),
            patch.object(job.runtime, "reducers", {k: partial(begins, r) for k, r in reducers.items()}),
            job.runtime.stops.of(idle) if stops else nullcontext(),
        ):
            latest = torch.tensor(clock.now(), dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX)
            clock.waited += float(latest) - clock.now()  # or the first collective would wait for the rank that is ahead
            started = clock.now()
            job.runtime.run(schedule, plan, feed, step=0, transfers=transfers)
            taken = clock.now() - started
        if began is not None and ended is not None:
            clock.outside += taken - (ended - began)
        return taken

    hand_over, wall = _hand_over(job.world)
    stops = {stage: _matrices(job.runtime.modules[stage]) for stage in schedule.beside}
    each = [_of_gap(gap / 1e3, rounds, step, spent, schedule, hand_over, stops) for gap in GAPS_MS]
    return [*each, _empty(rounds, step), wall]


def _matrices(module: nn.Module) -> int:
    """How many parts of a module hold one."""
    return sum(any(p.dim() > 1 for p in part.parameters(recurse=False)) for part in module.modules())


def _hand_over(world: World) -> tuple[float, float]:
    """Seconds of a lending in which nothing is done: of the virtual clock, and of this machine."""

    def run(_: Action) -> None:
        while True:
            side.stop()

    clock, count = Clock(), 300
    with emulated(clock), Side(run, world.rank, world.watchdog) as side:
        side.submit(Action(Kind.FORWARD, Stage("none"), 0))
        taken = []
        for _ in range(2):  # the first one starts the thread
            started, wall = clock.now(), time.perf_counter()
            for _ in range(count):
                side.lend(iter((False, True)).__next__)
            taken = [(clock.now() - started) / count, (time.perf_counter() - wall) / count]
    return taken[0], taken[1]


def _of_gap(
    gap: float,
    rounds: int,
    step: Callable[..., float],
    spent: Spent,
    schedule: Schedule,
    hand_over: float,
    stops: dict[Stage, int],
) -> dict[str, Any]:
    """What one rank measured with gaps of so many seconds."""
    step(Clock(gap), True)  # from now on there are stops
    spent.clear()
    plain, lending, with_stops, outside = [], [], [], []
    plain_clock, clock = Clock(gap), Clock(gap)
    for _ in range(rounds):  # what is predicted from comes from the same minutes as what it is compared with
        plain.append(step(plain_clock, False))
        lending.append(step(clock, True))
        with_stops.append(step(Clock(gap), False, stops=True))
        timed = Clock(gap)
        step(timed, False, timed=True, stops=True)
        outside.append(timed.outside)
    around = statistics.median(outside)
    median = {action: sorted(each)[len(each) // 2] for action, each in spent.items()}
    compute = {
        action: seconds for action, (seconds, _) in median.items() if action.kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    last = max(action.microbatch for action in compute)
    ends = {(Kind.FORWARD, 0), (Kind.BACKWARD, last)}
    beside = {action: seconds for action, seconds in compute.items() if action.stage in schedule.beside}
    counted, stop = [0], Side.stop

    def counting(side: Side) -> None:
        counted[0] += 1
        stop(side)

    with patch.object(Side, "stop", counting):
        step(Clock(gap), True)
    return {
        "plain": plain,
        "lending": lending,
        "gap_time": plain_clock.gap_time / rounds,
        "hideable": sum(s for action, s in beside.items() if (action.kind, action.microbatch) not in ends),
        "lent": clock.lent,
        "had_work": clock.had_work,
        "pieces_ms": 1e3 * sum(beside.values()) / counted[0],
        "predicted": _predicted(
            schedule,
            {
                action: [("piece", seconds / stops[action.stage])] * stops[action.stage] if action in beside else parts
                for action, (seconds, parts) in median.items()
                if action in compute
            },
            (statistics.median(with_stops) - around - sum(compute.values())) / len(compute),
            around,
            hand_over,
        ),
    }


def _predicted(
    schedule: Schedule, parts: dict[Action, list[tuple[str, float]]], overhead: float, outside: float, hand_over: float
) -> float:
    """What the simulator says of a step whose actions take what was measured. `overhead`: of the runtime, per action;
    `outside`: of all actions."""
    stages, each = {}, {}
    for action in parts:
        key = action.stage, action.microbatch
        forward, backward = (tuple(parts[Action(kind, *key)]) for kind in (Kind.FORWARD, Kind.BACKWARD))
        seconds = [sum(s for _, s in some) for some in (forward, backward)]
        inside = [sum(s for kind, s in some if kind == "collective") for some in (forward, backward)]
        stages[key], each[key] = StageCost(seconds[0], seconds[1], 0.0, *inside), StageParts(forward, backward, ())
    beside = {stage.module for stage in schedule.beside}
    costs = StepCosts(stages, optimizer={0: outside, 1: outside}, parts=each, action_overhead=overhead)
    return simulate(schedule, replace(costs, hand_over=hand_over), beside=beside).makespan


def _empty(rounds: int, step: Callable[..., float]) -> tuple[list[float], list[float]]:
    """Steps in which collectives are over at once, without and with a side, in changing order."""
    off, on = [], []
    for i in range(2 * rounds):
        for lends in (i % 2 == 0, i % 2 == 1):
            (on if lends else off).append(step(Clock(-1.0), lends))
    return off, on
