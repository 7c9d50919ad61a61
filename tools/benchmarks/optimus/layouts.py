"""Layouts: one chain of all layers in a pipeline, the LLM alone, and an encoder with a plan of its own on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from benchmarks.optimus import models
from benchmarks.optimus.encoder_plans import EncoderPlan
from hetmesh.balance import BalanceOptions, BatchPlan, plan_batch
from hetmesh.cost import partition
from hetmesh.cost.stage_cuts import Ties, runs
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec
from hetmesh.planner.predict import some_lanes
from hetmesh.schedule import POLICIES, PolicyOptions
from hetmesh.simulate import LayerCosts, StepModel, simulate

EARLY = True  # Megatron-LM's warm-up, which the baselines ran with


@lru_cache(maxsize=8)
def layer_costs(machine_key: tuple[tuple[str, float], ...]) -> LayerCosts:
    """Layers are measured once per machine."""
    return LayerCosts(models.machine(dict(machine_key)))


def flops(name: str) -> list[int]:
    """Of each layer, relative: its parameters."""
    return [sum(weight.numel for weight in layer.weights) for layer in models.SHAPES[name].layers]


def chain(name: str, dp: int, counts: tuple[int, ...]) -> ModuleGraph:
    """Layers of one module in stages of so many."""
    layers = tuple(layer.name for layer in models.SHAPES[name].layers)
    mesh = MeshSpec.make(range(models.PP * dp * models.TP), pp=models.PP, dp_replicate=dp, tp=models.TP)
    return ModuleGraph((_module(name, mesh, layers, counts),))


def colocated(dp: int, plan: EncoderPlan, virtual: int) -> ModuleGraph:
    """The LLM in stages of equal size, and the encoder on the same ranks."""
    ranks = range(models.PP * dp * models.TP)
    llm = MeshSpec.make(ranks, pp=models.PP, dp_replicate=dp, tp=models.TP)
    lanes = {"dp_replicate": plan.lanes * dp, "tp": plan.tp}
    mesh = MeshSpec.make(ranks, **({"pp": plan.pp} if plan.pp > 1 else {}), **lanes)
    layers = {name: tuple(layer.name for layer in models.SHAPES[name].layers) for name in ("vision", "llm")}
    stages, own = models.PP * virtual, plan.pp * plan.virtual
    modules = (
        _module("vision", mesh, layers["vision"], (models.ENCODER_LAYERS // own,) * own, media="image"),
        _module("llm", llm, layers["llm"], (models.LLM_LAYERS // stages,) * stages),
    )
    return ModuleGraph(modules, (BoundarySpec("vision", "llm", "image"),))


def _module(
    name: str, mesh: MeshSpec, layers: tuple[str, ...], counts: tuple[int, ...], media: str | None = None
) -> ModuleSpec:
    return ModuleSpec(
        name,
        mesh,
        layers,
        media,
        features=models.LLM if media else 0,
        token_axes=() if media else ("tp",),
        packed=not media,
        splits=tuple(runs(layers, counts)) if len(counts) > 1 else (),
        activation=Activation(models.ENCODER if media else models.LLM, not media),
        options=models.OPTIONS,
    )


def step(graph: ModuleGraph, constants: dict[str, float], size: int = 0) -> tuple[StepModel, BatchPlan]:
    """The model and the batch of one replica, of which all are equal.

    Args:
        size: samples per microbatch and lane of the encoder; 0: those of the LLM.
    """
    small, share = some_lanes(graph)
    shapes = {name: models.SHAPES[name] for name in graph.order}
    known = layer_costs(tuple(sorted(constants.items())))
    model = StepModel(small, shapes, known.machine, layers=known, whole=graph, sample=4)
    balance = BalanceOptions(microbatch_sizes={"vision": size} if size else {})
    return model, plan_batch(small, models.samples(round(models.BATCH * share)), models.MICROBATCH, balance)


def chain_seconds(name: str, dp: int, counts: tuple[int, ...], constants: dict[str, float]) -> float:
    """Seconds of a step of one chain: interleaved where ranks have several stages."""
    model, plan = step(chain(name, dp, counts), constants)
    policy = "interleaved" if len(counts) > models.PP else "1f1b"
    schedule = POLICIES[policy](model.stages, plan.routes, True, PolicyOptions(early=EARLY))
    return simulate(schedule, model.costs(plan, schedule)).makespan


def balanced_counts(ties: Ties) -> tuple[int, ...]:
    """Layers of each of the V x PP virtual stages of the balanced baseline."""
    return partition(flops("mllm"), models.VIRTUAL * models.PP, ties=ties)


def megatron_counts() -> Iterator[tuple[str, tuple[int, ...]]]:
    """All encoder layers in the first of PP stages: beside as many of the LLM as others have, or so that the slowest
    stage is as fast as possible."""
    each = models.LLM_LAYERS // models.PP
    yield "literal", (models.ENCODER_LAYERS + each, *(each,) * (models.PP - 1))
    costs = flops("mllm")
    joined = [sum(costs[: models.ENCODER_LAYERS]), *costs[models.ENCODER_LAYERS :]]
    first, *rest = partition(joined, models.PP)
    yield "rebalanced", (models.ENCODER_LAYERS + first - 1, *rest)
