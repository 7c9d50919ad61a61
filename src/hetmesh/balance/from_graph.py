"""Between a graph with the metadata of samples and what balancers see: arrays in, a BatchPlan out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.cost.work import sample_work
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta

SampleWork = Callable[[str, SampleMeta], int]
"""(module, expanded sample) -> time of its forward through all layers of the module, in any unit common to modules."""

WIDTH = 1024
"""Of blocks, where no price is given: a block of width h costs 24 h^2 per row and 4 h per pair (query, key), so that
rows count 6 h times as much as pairs."""


@dataclass(frozen=True)
class BalanceOptions:
    """What a recipe may ask of balancing; `Slots` says more of each.

    Attributes:
        max_tokens: module -> tokens (rows, of an encoder) of one lane and microbatch.
        microbatches: `"recipe"`, as many as the batch sizes say, or `"free"`.
        deferral: the sink may take samples one microbatch late.
        equal_counts: every lane and microbatch has as many samples as every other.
    """

    max_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    microbatches: str = "recipe"
    deferral: bool = False
    equal_counts: bool = False


DEFAULT = BalanceOptions()


def batch_loads(graph: ModuleGraph, samples: Sequence[SampleMeta], work: SampleWork | None = None) -> BatchLoads:
    """The loads of modules in `graph.order`, the sink last. Samples are who they are by their place in the batch.

    Modules between an encoder and the sink (projectors) count as no work: they are small, and follow the others.

    Args:
        work: what a sample costs; None: in proportion to rows and attended pairs, as if the modules' pipelines were
            equally loaded by the batch, which is what a static plan aims at.
    """
    tokens, columns = [], []
    for name in graph.order:
        each = [sample_work(graph, name, sample) for sample in samples]
        rows = np.array([part.rows for part in each], np.int64)
        between = bool(graph.inputs(name)) and name != graph.sink.name
        if between:
            column = np.zeros_like(rows)
        elif work is not None:
            column = np.array([work(name, sample) for sample in samples], np.int64)
        else:
            column = _even(6 * WIDTH * rows + np.array([part.pairs for part in each], np.int64))
        tokens.append(rows)
        columns.append(column)
    shape = (len(samples), len(columns))
    ids = tuple(sample.id for sample in samples)
    return BatchLoads(
        graph.order, np.array(columns, np.int64).T.reshape(shape), np.array(tokens, np.int64).T.reshape(shape), ids=ids
    )


def _even(work: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion, about 2**20 on average."""
    total = int(work.sum())
    return np.rint(work / total * (len(work) << 20)).astype(np.int64) if total else work


def graph_slots(graph: ModuleGraph, microbatches: int, options: BalanceOptions = DEFAULT) -> Slots:
    """What a step of `graph` with so many microbatches has to fill.

    Raises:
        GraphError: `options` names an unknown module or number of microbatches.
    """
    if unknown := sorted(set(options.max_tokens) - set(graph.order)):
        raise GraphError(f"balance: max_tokens names {unknown}; the modules are {list(graph.order)}")
    if options.microbatches not in ("recipe", "free"):
        raise GraphError(f"balance: microbatches must be 'recipe' or 'free', got {options.microbatches!r}")
    modules = [graph[name] for name in graph.order]
    return Slots(
        tuple(module.num_lanes for module in modules),
        (microbatches,) * len(modules),
        max_tokens=tuple(options.max_tokens.get(module.name) for module in modules),
        stages=tuple(module.num_stages for module in modules),
        backward=tuple(2.0 * graph.backward_reaches(module.name) for module in modules),
        free=options.microbatches == "free",
        equal_counts=options.equal_counts,
        deferral=options.deferral,
        lockstep=graph.sink.num_lanes > 1 and graph.sink.mesh.axis_size("dp_shard") > 1,
        affinity=tuple(_affinity(graph, name) for name in graph.order),
    )


def _affinity(graph: ModuleGraph, name: str) -> np.ndarray | None:
    """How many ranks the lanes of a module share with those of the sink; None where they share none."""
    module, sink = graph[name], graph.sink
    if module is sink:
        return None
    out = np.zeros((module.num_lanes, sink.num_lanes), np.int64)
    for rank in module.mesh.ranks:
        own, other = module.lane_of(rank), sink.lane_of(rank)
        if own is not None and other is not None:
            out[own, other] += 1
    return out if out.any() else None


def batch_plan_of(graph: ModuleGraph, samples: Sequence[SampleMeta], assignment: Assignment) -> BatchPlan:
    """The BatchPlan of an assignment whose modules are those of `graph.order`.

    Inside a lane of the sink, samples lie in the order of the encoder lanes that they come from: where the ranks of a
    lane share its tokens in runs, most rows then stay on the rank that made them.
    """
    lanes = {}
    for i, name in enumerate(graph.order):
        count, own = assignment.microbatches[i], assignment.lanes[i]
        bins = assignment.microbatch[:, i] * own + assignment.lane[:, i]
        from_lane = assignment.lane[:, 0] if name == graph.sink.name else np.zeros_like(bins)
        order = np.lexsort((np.arange(len(bins)), from_lane, bins))
        cuts = np.searchsorted(bins[order], np.arange(count * own + 1)).tolist()
        places = order.tolist()
        runs = [tuple(places[a:b]) for a, b in itertools.pairwise(cuts)]
        lanes[name] = tuple(tuple(runs[m * own : (m + 1) * own]) for m in range(count))
    return BatchPlan(graph, tuple(samples), lanes)
