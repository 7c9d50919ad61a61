"""Graphs and costs that tests of timelines share."""

from hetmesh.cost import StageCost, StepCosts
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, StageGraph, stage_graph
from hetmesh.layout import MeshSpec


def module(name: str, ranks: list[int], pp: int, stages: int | None = None, **options: object) -> ModuleSpec:
    """A module of `stages` layers, one per stage, on `pp` pipeline ranks; what is left of `ranks` is data parallel."""
    stages = stages or pp
    layers = tuple(f"layer{i}" for i in range(stages))
    mesh = MeshSpec.make(ranks, pp=pp, dp_replicate=len(ranks) // pp)
    splits = tuple((layer,) for layer in layers)
    return ModuleSpec(name, mesh, layers=layers, splits=splits, activation=Activation(1, True), **options)


def pipeline(p: int, v: int = 1) -> StageGraph:
    """One module of p x v stages on p ranks."""
    return stage_graph(ModuleGraph((module("llm", list(range(p)), p, p * v),)))


def encoder_and_llm(encoder: ModuleSpec, llm: ModuleSpec) -> StageGraph:
    """`encoder` feeds `llm`."""
    return stage_graph(ModuleGraph((encoder, llm), (BoundarySpec(encoder.name, llm.name),)))


def equal_costs(stages: StageGraph, microbatches: int, cost: StageCost, **others: object) -> StepCosts:
    """The same cost for every stage and microbatch."""
    return StepCosts({(s, m): cost for s in stages.stages for m in range(microbatches)}, **others)
