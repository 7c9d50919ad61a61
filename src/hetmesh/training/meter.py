"""Meter: what a step did and cost: FLOPs and MFU per module, imbalance, memory, bytes and waits per boundary; and the
peak FLOP/s of a device, which MFU refers to."""

from __future__ import annotations

import resource
import sys
from dataclasses import astuple, dataclass

import torch

from hetmesh.balance import BalanceOptions, BatchPlan, assign, batch_loads, graph_slots
from hetmesh.balance.imbalance import batch_load, plan_assignment
from hetmesh.balance.plan_batch import within_range
from hetmesh.boundary import World
from hetmesh.boundary.world import gather_over_ranks
from hetmesh.cost import Work, find_machine, imbalance, load_machine, module_flops
from hetmesh.data.source import COSTS
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.metrics import Measured, StepCost, StepLoad
from hetmesh.resolve.recipe_step_model import measure_peak
from hetmesh.training.feed import Loaded
from hetmesh.training.job import Job

DIRECTIONS = ("forward", "backward")


class Meter:
    """Measures the steps of a job on this rank. Building it takes no memory; it measures a CPU's peak if it has to.
    Raises RecipeError: `[metrics] machine` names none."""

    def __init__(self, job: Job) -> None:
        self.job, self.graph, self.world = job, job.graph, job.world
        self.shapes, balance = job.resolved.shapes, job.resolved.balance
        dtypes = {name: job.graph[name].options.row_dtype for name in job.graph.order}
        found = {dtype: find_peak(job.recipe, job.world, dtype) for dtype in dict.fromkeys(dtypes.values())}
        self.experts = job.expert_placement
        self.peaks = {name: found[dtype] for name, dtype in dtypes.items()}
        # Also without a balancer work is counted as balancers do; caps are no matter of how samples were drawn.
        self.unbalanced = BalanceOptions(
            costs=job.resolved.costs,
            microbatch_sizes=balance.microbatch_sizes,
            microbatch_shares=balance.microbatch_shares,
        )

    def describe(self) -> list[str]:
        """What MFU refers to, a line per dtype."""
        return list(dict.fromkeys(map(str, self.peaks.values())))

    def cost(self, plan: BatchPlan, seconds: float) -> StepCost:
        """The cost of one training step that took `seconds`; from metadata, without communication."""
        flops: dict[str, int] = {}
        uneven: dict[str, float] = {}
        for name in self.graph.order:
            work = plan.lane_work(name)
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
        padded = not self.graph.llm.packed
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
        kept = (*COSTS, "wait_s")
        mine = [float(getattr(loaded, name)) for name in kept]
        mine += [float(peak_memory(self.world.device))]
        mine += [float(log.bytes_received(name, way)) for name in names for way in DIRECTIONS]
        mine += [log.seconds_waited(name) for name in names]
        mine += astuple(self.job.runtime.gap_time)
        everyone = gather_over_ranks(mine, self.world, self.experts.loads.mine())
        everyone, routed = everyone[:, : len(mine)], everyone[:, len(mine) :]
        samples, everyone = everyone[:, : len(kept)], everyone[:, len(kept) :]
        data = dict(zip(kept, samples.T, strict=True))
        counts = {name: int(data[name].sum()) for name in COSTS if name != "load_s"}
        received = everyone[:, 1 : 1 + 2 * len(names)].sum(0).reshape(-1, 2).tolist()
        waited = everyone[:, 1 + 2 * len(names) : -2].amax(0).tolist()
        gap_s, lent_s = (everyone[:, -2:].sum(0) / max(int((everyone[:, -2] > 0).sum()), 1)).tolist()
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
                **{name: count for name, count in counts.items() if count or "bytes" in name},
                "bytes_read_most": int(data["bytes_read"].max()),
                **{name: round(float(data[name].max()), 6) for name in ("load_s", "wait_s")},
            },
            self.experts.loads.read(routed.sum(0), targets, self.experts.placements),
            {"gap_s": round(gap_s, 6), "lent_s": round(lent_s, 6)} if gap_s else {},
        )


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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors have taken on a CUDA device, else the most that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


def device_name(device: torch.device) -> str:
    """The name of a CUDA device, else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_peak(recipe: Recipe, world: World, dtype: torch.dtype) -> PeakFlops:
    """The peak of `[metrics] machine`, else of the machine with the CUDA device's name, else measured on the CPU."""
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
