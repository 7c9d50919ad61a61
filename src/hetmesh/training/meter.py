"""Meter: what a step did and cost: FLOPs and MFU per module, imbalance, memory, bytes and waits per boundary."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hetmesh.balance import BalanceOptions, BatchPlan, assign, batch_loads, graph_slots
from hetmesh.balance.batch_load import BatchLoad, batch_load, plan_assignment
from hetmesh.balance.from_graph import within_range
from hetmesh.boundary import World
from hetmesh.cost import Work, find_machine, imbalance, lane_work, load_machine, module_flops
from hetmesh.training.balance import sample_costs
from hetmesh.training.expert_loads import Loads
from hetmesh.training.feed import Loaded
from hetmesh.training.module_shapes import module_shapes

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe
    from hetmesh.training.job import Job

DIRECTIONS = ("forward", "backward")
_SMALLEST, _LARGEST = 64, 1024  # of the square matrix product that stands for a CPU's peak
_LONG_ENOUGH = 0.01  # s


@dataclass(frozen=True)
class PeakFlops:
    """The FLOP/s of one device that MFU refers to, None if unknown, and where the number comes from."""

    flops: float | None
    dtype: str
    origin: str

    def __str__(self) -> str:
        if self.flops is None:
            return f"no MFU: {self.origin}"
        return f"MFU refers to {self.flops / 1e9:,.0f} GFLOP/s in {self.dtype} per rank ({self.origin})"


@dataclass(frozen=True)
class StepCost:
    """What every rank knows about a step from metadata.

    Attributes:
        flops: per module, forward and backward, over all its ranks; modules of unknown sizes are left out.
        module_mfu: the module's FLOPs over what its own ranks could have done in the time of the step at their peak in
            the dtype in which it computes.
        mfu: the time that all allocated ranks would have needed at their peak, over the time that they took.
        imbalance: per module: the busiest lane's rows over the mean lane's (`hetmesh.cost.imbalance`).
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    module_mfu: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    imbalance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLoad:
    """How even the microbatches and lanes of a step were.

    Attributes:
        drawn: had every sample stayed where it was drawn, in as many microbatches as the recipe asks for.
        balanced: as they were.
    """

    drawn: BatchLoad
    balanced: BatchLoad

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl has of it: `load` by module, and `deferred_samples`."""
        load = {
            name: asdict(each) | {f"drawn_{key}": value for key, value in asdict(self.drawn.modules[name]).items()}
            for name, each in self.balanced.modules.items()
        }
        rounded = {name: {key: round(value, 4) for key, value in each.items()} for name, each in load.items()}
        return {"load": rounded, "deferred_samples": self.balanced.deferred}


@dataclass(frozen=True)
class Measured:
    """What the ranks measured in one step, gathered.

    Attributes:
        memory_bytes: the largest peak of any rank so far: allocated on CUDA, else resident.
        active_ranks: ranks that hold a module.
        allocated_ranks: ranks of the job.
        boundary_bytes: received over all ranks, by boundary and direction.
        wait_s: seconds that the rank which waited longest did nothing but wait for a boundary's messages.
        data: of the samples, `bytes_read` and `bytes_needed` over all ranks, `bytes_read_most` by any rank, and
            `wait_s`, the seconds that the rank which waited longest for them did.
        experts: how even routing was, by module.
    """

    memory_bytes: int
    active_ranks: int
    allocated_ranks: int
    boundary_bytes: Mapping[str, Mapping[str, int]]
    wait_s: Mapping[str, float]
    data: Mapping[str, float] = field(default_factory=dict)
    experts: Loads = field(default_factory=dict)


class Meter:
    """Measures the steps of a job on this rank. Building it takes no memory; it measures a CPU's peak if it has to.

    Raises:
        RecipeError: `[metrics] machine` names none.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.graph, self.world = job, job.graph, job.world
        self.shapes = module_shapes(job.recipe, job.adapters)
        dtypes = {name: job.graph[name].options.row_dtype for name in job.graph.order}
        found = {dtype: find_peak(job.recipe, job.world, dtype) for dtype in dict.fromkeys(dtypes.values())}
        self.experts = job.expert_placement
        self.peaks = {name: found[dtype] for name, dtype in dtypes.items()}
        # Also without a balancer work is counted as balancers do; caps are no matter of how samples were drawn.
        self.unbalanced = BalanceOptions(
            costs=sample_costs(job.graph, self.shapes),
            microbatch_sizes=job.balance.microbatch_sizes,
            microbatch_shares=job.balance.microbatch_shares,
        )

    def describe(self) -> list[str]:
        """What MFU refers to, a line per dtype."""
        return list(dict.fromkeys(map(str, self.peaks.values())))

    def cost(self, plan: BatchPlan, seconds: float) -> StepCost:
        """The cost of one training step that took `seconds`; from metadata, without communication."""
        flops: dict[str, int] = {}
        uneven: dict[str, float] = {}
        for name in self.graph.order:
            work = lane_work(plan, name)
            uneven[name] = round(imbalance(work), 4)
            if (shape := self.shapes[name]) is not None:
                upstream = any(self.graph.needs_gradient(b) for b in self.graph.inputs(name))
                flops[name] = module_flops(shape, Work.sum_of(work), upstream=upstream).total
        # Seconds that the work of each module takes one rank at its peak: modules may compute in different dtypes.
        ideal = {name: n / peak for name, n in flops.items() if (peak := self.peaks[name].flops)}
        each = {name: busy / (seconds * self.graph[name].mesh.size) for name, busy in ideal.items()}
        known = len(ideal) == len(self.graph.order)
        return StepCost(flops, each, sum(ideal.values()) / (seconds * self.world.size) if known else None, uneven)

    def load(self, plan: BatchPlan) -> StepLoad:
        """How even the step of `plan` is, and would be without balancing; from metadata, without communication."""
        options = within_range(self.graph, plan.samples, self.unbalanced)
        loads = batch_loads(self.graph, plan.samples, options)
        slots = graph_slots(self.graph, self.job.recipe.batch.num_microbatches, options, len(plan.samples))
        padded = not self.graph.sink.packed
        drawn = batch_load(loads, assign(loads, slots, "none"), padded=padded)
        return StepLoad(drawn, batch_load(loads, plan_assignment(plan), padded=padded))

    def measure(self, loaded: Loaded, targets: int) -> Measured:
        """What all ranks measured since their communication logs were cleared. Collective: one small all-reduce.

        Args:
            loaded: what this rank loaded meanwhile.
            targets: of the last step.
        """
        names = [boundary.name for boundary in self.graph.boundaries]
        log = self.world.log
        mine = [float(loaded.bytes_read), float(loaded.bytes_needed), loaded.wait_s]
        mine += [float(peak_memory(self.world.device))]
        mine += [float(log.bytes_received(name, way)) for name in names for way in DIRECTIONS]
        mine += [log.seconds_waited(name) for name in names]
        everyone = gather_over_ranks(mine, self.world, self.experts.loads.mine())
        everyone, routed = everyone[:, : len(mine)], everyone[:, len(mine) :]
        samples, everyone = everyone[:, :3], everyone[:, 3:]
        received = everyone[:, 1 : 1 + 2 * len(names)].sum(0).reshape(-1, 2).tolist()
        waited = everyone[:, 1 + 2 * len(names) :].amax(0).tolist()
        return Measured(
            int(everyone[:, 0].max()),
            len(self.graph.ranks),
            self.world.size,
            {
                name: dict(zip(DIRECTIONS, map(int, sizes), strict=True))
                for name, sizes in zip(names, received, strict=True)
            },
            {name: round(seconds, 6) for name, seconds in zip(names, waited, strict=True)},
            {
                "bytes_read": int(samples[:, 0].sum()),
                "bytes_needed": int(samples[:, 1].sum()),
                "bytes_read_most": int(samples[:, 0].max()),
                "wait_s": round(float(samples[:, 2].max()), 6),
            },
            self.experts.loads.read(routed.sum(0), targets, self.experts.placements),
        )


def gather_over_ranks(values: list[float], world: World, more: torch.Tensor | None = None) -> torch.Tensor:
    """`values` of every rank, and behind them `more`, which lies on its device: float64 `[ranks, numbers]` on the CPU.
    Collective over all ranks of the job."""
    own = world.accelerator.pinned(torch.tensor(values, dtype=torch.float64)).to(world.device, non_blocking=True)
    own = own if more is None else torch.cat([own, more])
    everyone = torch.zeros(world.size, len(own), dtype=torch.float64, device=world.device)
    everyone[world.rank] = own
    with world.waiting("metrics of all ranks"):
        dist.all_reduce(everyone, group=world.group(range(world.size)))
        return everyone.cpu()


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors have taken on a CUDA device, else the most that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


def device_name(device: torch.device) -> str:
    """What a CUDA device reports to be, else its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_peak(recipe: Recipe, world: World, dtype: torch.dtype) -> PeakFlops:
    """The peak of `[metrics] machine`, else of what the CUDA device reports to be, else measured on the CPU."""
    device, name, kind = world.device, recipe.metrics.machine, str(dtype).removeprefix("torch.")
    reported = device_name(device) if device.type == "cuda" else None
    machine = load_machine(name) if name else find_machine(reported) if reported else load_machine("cpu")
    if machine is None:
        return PeakFlops(None, kind, f"no machine description fits {reported!r}; give one as [metrics] machine")
    if (flops := machine.peak(kind)) is not None:
        return PeakFlops(flops, kind, f"machine {machine.name!r}")
    if device.type == "cuda":
        return PeakFlops(None, kind, f"machine {machine.name!r} has no peak for {kind}")
    return PeakFlops(measure_peak(dtype), kind, "measured by a matrix product on every rank at once")


def measure_peak(dtype: torch.dtype, times: int = 3) -> float:
    """FLOP/s of this process in a square matrix product: the best of `times`, large enough to take milliseconds."""
    size, seconds = _SMALLEST, 0.0
    while size < _LARGEST and seconds < _LONG_ENOUGH:  # a CPU without bfloat16 units is 50 times slower in it
        size *= 2
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        torch.mm(a[:32], b)  # starts threads and loads kernels
        seconds = min(_seconds(a, b) for _ in range(times))
    return 2 * size**3 / seconds


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - started
