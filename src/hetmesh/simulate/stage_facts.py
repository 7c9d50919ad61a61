"""What a walk over the actions of a step asks about its stages."""

from __future__ import annotations

from hetmesh.cost import StageBytes, StageCost, StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.program import Program
from hetmesh.simulate.timeline import FORWARD, TRANSFER


class StageFacts:
    """What the walk asks about stages, by index, and about their microbatches, by cell.

    Attributes:
        feeding: the cells whose rows a cell reads, once per edge.
        readers: how many forwards, by edge, read the rows of a cell.
        forwards, fixed: per stage, how many there are, and what it holds whatever the microbatches.
        costs: of cells.
        joined: (cell, whether rows or gradients): bytes that come from several microbatches and are put together.
    """

    def __init__(self, schedule: Schedule, costs: StepCosts, columns: Program) -> None:
        stages = schedule.stages.stages
        self.backward = [schedule.training and stage in schedule.stages.backward_stages for stage in stages]
        self.recompute = [stage in schedule.recompute for stage in stages]
        self.offload = [stage in schedule.offload for stage in stages]
        count, forward_edges = columns.most, len(columns.sources) // 2
        self.fixed = [costs.stage_bytes.get(stage, StageBytes()) for stage in stages]
        index = {stage: i for i, stage in enumerate(stages)}
        cells = len(stages) * count
        self.costs = [StageCost(0.0)] * cells
        for (stage, m), cost in costs.stages.items():
            if stage in index and m < count:
                self.costs[index[stage] * count + m] = cost
        self.forwards = [0] * len(stages)
        for kind, target in zip(columns.kinds, columns.targets, strict=True):
            if kind == FORWARD:
                self.forwards[target] += 1
        self.readers = [0] * cells
        self.feeding: dict[int, list[int]] = {}
        transfers = [i for i, kind in enumerate(columns.kinds) if kind == TRANSFER]
        for i in transfers:
            target = columns.targets[i]
            if target < forward_edges:
                source = columns.sources[target] * count + columns.microbatches[i]
                self.readers[source] += 1
                self.feeding.setdefault(columns.destinations[target] * count + columns.to[i], []).append(source)
        self.joined: dict[tuple[int, bool], int] = {}
        pieces: dict[tuple[int, int], list[int]] = {}
        for i in transfers if schedule.routes.pairs else ():
            pieces.setdefault((columns.targets[i], columns.to[i]), []).append(columns.bytes[i])
        for (edge, to), sizes in pieces.items():
            if len(sizes) > 1:
                key = columns.destinations[edge] * count + to, edge < forward_edges
                self.joined[key] = self.joined.get(key, 0) + sum(sizes)
