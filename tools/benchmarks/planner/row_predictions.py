"""What the planner's own predictor says of the layouts of a published row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from benchmarks.planner.architectures import decoder, encoder, projector
from benchmarks.planner.published_rows import Row
from hetmesh.balance import BalanceOptions
from hetmesh.cost import StepCosts, load_machine, module_memory
from hetmesh.cost.flops import SampleCosts
from hetmesh.graph import Activation, BoundarySpec, MediaItem, MetaArrays, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout import MeshSpec
from hetmesh.planner import LayoutPlan, ModuleFacts, Predictor, Problem, laid_out
from hetmesh.schedule import Schedule
from hetmesh.simulate import Timeline, simulate
from hetmesh.simulate.timeline import OPTIMIZER, REDUCE

IMAGE = 1024
"""Patches of an image, each of which becomes one token of the LLM, as LLaVA has it."""
RECOMPUTED = 1.0
"""Billions of parameters above which encoders are recomputed; the LLM never is (section "Evaluation" of the paper)."""
_STATE = 2 + 4, 12
"""Bytes per parameter of Megatron-LM's distributed optimizer: bf16 weights and fp32 gradients on every rank; fp32
weights and both moments, shared over the replicas."""


@dataclass(frozen=True)
class Predicted:
    """One layout.

    Attributes:
        step_s: seconds of a step, or of what the row's `phase` says.
        peak_bytes: with parameters and optimizer state as the measured framework keeps them.
        own_peak_bytes: as hetmesh keeps them: all in fp32 on every replica.
        parts: seconds that the mean rank spends computing, and idle by class.
    """

    step_s: float
    peak_bytes: int
    own_peak_bytes: int
    parts: Mapping[str, float]


def row_problem(row: Row, machine: str = "h100", ranks: int | None = None) -> Problem:
    """The model, data and batch of a row on its GPUs. Everything is trained; all positions have a target, since the
    measured framework computes the logits of all; sequence parallelism is on."""
    tower, llm = encoder(row.encoder), decoder(row.llm)
    shapes = {"vision": tower.shape(), "projector": projector(tower, llm), "llm": llm.shape()}
    widths = {"vision": tower.width, "projector": llm.width, "llm": 0}
    options = ModuleOptions(compute_dtype=torch.bfloat16, sequence_parallel=True)
    mesh = MeshSpec((0,), ("dp_replicate",), (1,))
    modules = tuple(
        ModuleSpec(
            name,
            mesh,
            tuple(layer.name for layer in shape.layers),
            media="image" if name == "vision" else None,
            features=widths[name],
            options=options,
        )
        for name, shape in shapes.items()
    )
    graph = ModuleGraph(modules, (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")))
    facts = {
        "vision": ModuleFacts(shapes["vision"], Activation(tower.width), tensor_degrees=(1, 2, 4, 8)),
        "projector": ModuleFacts(shapes["projector"], alone=False),
        "llm": ModuleFacts(
            shapes["llm"], Activation(llm.width, True), tensor_degrees=(1, 2, 4, 8), context_parallel=True
        ),
    }
    costs = {name: SampleCosts.of(shape, upstream=name != "vision") for name, shape in shapes.items()}
    return Problem(
        graph,
        facts,
        load_machine(machine),
        ranks or row.gpus[0],
        MetaArrays.of([_sample(row, i) for i in range(row.global_batch)]),
        row.global_batch,
        balance=BalanceOptions("auto", costs),
    )


def _sample(row: Row, index: int) -> SampleMeta:
    rows = round(row.vision * row.seq)
    images = max(round(rows / IMAGE), 1)
    each = [rows * (i + 1) // images - rows * i // images for i in range(images)]
    media, position = [], 0
    for count in each:
        media.append(MediaItem("image", (3, 14, 14 * count), position, count))
        position += count
    of_modules = MappingProxyType({"vision": rows, "projector": rows})
    return SampleMeta(f"sample {index}", row.seq, tuple(media), ((1, row.seq),), of_modules)


def row_plan(row: Row, which: int) -> LayoutPlan:
    """The homogeneous layout of a row (0), or its other one (1), under the schedule that such layouts have."""
    layout = row.layouts[which]
    pipeline = layout.llm[2] > 1
    placement = "homogeneous" if not which else "disjoint" if row.disjoint else "colocated"
    schedule = "1f1b" if pipeline or placement == "disjoint" else "sequential"
    if placement == "colocated" and pipeline:
        schedule = "three_phase"
    modules = layout.plans(placement == "disjoint", row.encoder > RECOMPUTED)
    return LayoutPlan(placement, modules, schedule, row.microbatch_size(which))


def predict_row(row: Row, machine: str = "h100") -> tuple[Predicted, Predicted]:
    """Both layouts of a row.

    Raises:
        HetmeshError: one of them cannot be laid out or run.
    """
    problem = row_problem(row, machine)
    return predicted(problem, row_plan(row, 0), row), predicted(problem, row_plan(row, 1), row)


def predicted(problem: Problem, plan: LayoutPlan, row: Row) -> Predicted:
    """One plan, by the predictor that decides in `hetmesh plan`."""
    problem = replace(problem, ranks=row.gpus[plan.placement != "homogeneous"])
    predictor = Predictor(problem, lanes=4)
    (step,) = predictor.steps(plan)
    timeline = simulate(*step)
    found = predictor.summary(plan, [timeline])
    seconds = _without_optimizer(timeline) if row.forward_backward else found.step_s
    return Predicted(seconds, _megatron_peak(problem, plan, *step), found.peak_bytes, found.bubbles)


def _without_optimizer(timeline: Timeline) -> float:
    kept = ~((timeline.work.kind == REDUCE) | (timeline.work.kind == OPTIMIZER))
    return float(timeline.work.stop[kept].max())


def _megatron_peak(problem: Problem, plan: LayoutPlan, schedule: Schedule, costs: StepCosts) -> int:
    """The peak of the same step with parameters, gradients and optimizer state as `_STATE` says."""
    graph, (each, shared), held = laid_out(problem, plan), _STATE, dict.fromkeys(costs.static_bytes, 0)
    for name in graph.order:
        replicas = graph[name].mesh.axis_size("dp_replicate")
        for rank, memory in module_memory(problem.facts[name].shape, graph[name], problem.optimizer).items():
            if rank in held:
                held[rank] += round(memory.elements * (each + shared / replicas))
    return max(simulate(schedule, replace(costs, static_bytes=held, stage_bytes={})).peak_bytes)
