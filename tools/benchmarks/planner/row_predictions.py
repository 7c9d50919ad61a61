"""What the planner's own predictor says of the layouts of a published row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from benchmarks.planner.architectures import decoder, encoder, projector
from benchmarks.planner.published_rows import Row
from hetmesh.balance import BalanceOptions
from hetmesh.cost import load_machine
from hetmesh.cost.flops import SampleCosts
from hetmesh.graph import Activation, BoundarySpec, MediaItem, MetaArrays, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout import MeshSpec
from hetmesh.planner import LayoutPlan, ModuleFacts, Predictor, Problem
from hetmesh.resolve.splits import TYPICAL
from hetmesh.simulate import RankMemory, Timeline, simulate
from hetmesh.simulate.timeline import OPTIMIZER, REDUCE

IMAGE = 1024
"""Patches of an image, each of which becomes one token of the LLM, as LLaVA has it."""
RECOMPUTED = 1.0
"""Billions of parameters above which encoders are recomputed; the LLM never is (section "Evaluation" of the paper)."""
OPTIONS = ModuleOptions(
    compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, sequence_parallel=True, compile_backend="inductor"
)
"""What the measured framework does: bf16 weights, gradients that add up in bf16 (`grad_reduce_in_fp32` of Megatron-Core
is off unless it is asked for; which one they took is not published), optimizer state in fp32 over the replicas, shares
of the logits, and fused kernels between products, for which torch.compile stands here."""
VARIANTS = {
    "gradients in fp32": replace(OPTIONS, reduce_dtype=None),
    "without torch.compile": replace(OPTIONS, compile_backend=None),
}
"""What is not published, the other way round."""


@dataclass(frozen=True)
class Predicted:
    """One layout.

    Attributes:
        step_s: seconds of a step, or of what the row's `phase` says.
        memory: of the rank that holds most, at its fullest.
        parts: seconds that the mean rank spends computing, and idle by class.
    """

    step_s: float
    memory: RankMemory
    parts: Mapping[str, float]


def row_problem(row: Row, machine: str = "h100", ranks: int | None = None, options: ModuleOptions = OPTIONS) -> Problem:
    """The model, data and batch of a row on its GPUs. Everything is trained; all positions have a target, since the
    measured framework computes the logits of all."""
    tower, llm = encoder(row.encoder), decoder(row.llm)
    shapes = {"vision": tower.shape(), "projector": projector(tower, llm), "llm": llm.shape()}
    widths = {"vision": tower.width, "projector": llm.width, "llm": 0}
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
        "vision": ModuleFacts(
            shapes["vision"],
            Activation(tower.width),
            tensor_degrees=(1, 2, 4, 8),
            context_parallel=True,
            tokens_per_row=1,
            sequence_parallel=True,
        ),
        "projector": ModuleFacts(shapes["projector"], alone=False),
        "llm": ModuleFacts(
            shapes["llm"],
            Activation(llm.width, True),
            tensor_degrees=(1, 2, 4, 8),
            context_parallel=True,
            sequence_parallel=True,
        ),
    }
    costs = {name: SampleCosts.of(shape, TYPICAL, upstream=name != "vision") for name, shape in shapes.items()}
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
    ((_, *step),) = predictor.steps(plan)
    timeline = simulate(*step)
    found = predictor.summary(plan, [timeline])
    seconds = _without_optimizer(timeline) if row.forward_backward else found.step_s
    return Predicted(seconds, fullest(predictor, plan), found.bubbles)


def fullest(predictor: Predictor, plan: LayoutPlan) -> RankMemory:
    """What the rank that holds most does."""
    return max(predictor.memory(plan).values(), key=lambda memory: memory.total)


def _without_optimizer(timeline: Timeline) -> float:
    kept = ~((timeline.work.kind == REDUCE) | (timeline.work.kind == OPTIMIZER))
    return float(timeline.work.stop[kept].max())
