"""Predicted memory: what each rank holds when it holds most, by what it is, and whether a machine has as much.

Peaks depend on the order alone, not on times: every rank runs its work in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from hetmesh.balance import BatchPlan
from hetmesh.cost import StaticMemory, StepCosts
from hetmesh.graph import Stage
from hetmesh.schedule import Schedule, holding
from hetmesh.simulate.program import RECEIVE, Program, program
from hetmesh.simulate.stage_facts import StageFacts
from hetmesh.simulate.step_model import StepModel
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, REDUCE, TRANSFER


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's device at its fullest moment of a step.

    Attributes:
        parameters, gradients, optimizer: what stays from step to step; gradients, as far as they are there by then.
        activations: kept from forwards to their backwards; where they are recomputed, inputs of layers.
        gathered: parameters that FSDP has gathered.
        temporaries: what the action at hand holds beyond that: logits and their gradients, gradients of activations,
            what is computed again, whole gradients before they are sharded, an optimizer's intermediate tensors.
        sums: gradients packed to be summed over ranks.
        rows: of boundaries, and their gradients.
        communicators: of all process groups of the rank.
        context: what a process holds before its first tensor.
        at: the moment: an action (`"llm.0 B3"`) or `"optimizer"`.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    temporaries: int = 0
    sums: int = 0
    rows: int = 0
    communicators: int = 0
    context: int = 0
    at: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are."""
        return {name: size for name, size in asdict(self).items() if name != "at"}

    @property
    def tensors(self) -> int:
        """Bytes of all tensors: what torch has allocated."""
        return self.total - self.communicators - self.context

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryFit:
    """Whether what ranks hold fits a machine.

    Attributes:
        machine, memory_bytes: its name, and the memory of one of its devices; 0: unknown.
        ranks: what each holds at most, on the largest batch.
        samples, drawn: how many were looked at for that batch, and how many the run draws.
    """

    machine: str
    memory_bytes: int
    ranks: Mapping[int, RankMemory]
    samples: int = 0
    drawn: int = 0

    @property
    def fullest(self) -> int:
        """The rank that holds most; of equal ones the first."""
        return max(self.ranks, key=lambda rank: (self.ranks[rank].total, -rank))

    @property
    def peak_bytes(self) -> int:
        return self.ranks[self.fullest].total

    @property
    def spare_bytes(self) -> int:
        """What is left on the fullest rank; below 0, what it lacks."""
        return self.memory_bytes - self.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None where the machine's memory is not known."""
        return self.spare_bytes >= 0 if self.memory_bytes else None


def largest_memory(predictions: Iterable[Mapping[int, RankMemory]]) -> dict[int, RankMemory]:
    """Per rank the largest of several predictions."""
    found: dict[int, RankMemory] = {}
    for ranks in predictions:
        for rank, memory in ranks.items():
            if rank not in found or memory.total > found[rank].total:
                found[rank] = memory
    return found


def rank_memory(
    model: StepModel, schedule: Schedule, costs: StepCosts, communicators: Mapping[int, int] | None = None
) -> dict[int, RankMemory]:
    """Per rank that runs a stage of `schedule`, in order, what its device holds when it holds most.

    What a kernel allocates inside and what an allocator loses in fragments is not in it.

    Args:
        costs: of `schedule`, from `model.costs`.
        communicators: how many each rank is a member of; none: 0.

    Raises:
        GraphError: there is no cost for a stage and microbatch.
    """
    columns = program(schedule, costs)
    found: dict[int, RankMemory] = {}
    actions = schedule.actions
    for ranks, static, peak in zip(columns.tracks, columns.static_bytes, peaks(schedule, costs, columns), strict=True):
        at = "optimizer" if peak.at == UPDATE else str(actions[peak.at]) if actions else ""
        for rank in ranks:
            found[rank] = replace(
                _tensors(peak, static, _on_device(model, rank)),
                communicators=(communicators or {}).get(rank, 0) * model.machine.communicator_bytes,
                context=model.machine.context_bytes,
                at=at,
            )
    return dict(sorted(found.items()))


def _tensors(peak: Peak, static: int, own: StaticMemory) -> RankMemory:
    """What a rank holds of tensors at a peak of its track, of which the rank that holds most has `static` bytes."""
    missing = static - peak.bytes[STATIC]  # gradients of stages whose first backward is yet to come
    activations, gathered, temporaries, sums, rows = peak.bytes[ACTIVATIONS:]
    static_of_rank = own.parameters, max(own.gradients - missing, 0), own.optimizer
    return RankMemory(*static_of_rank, activations, gathered, temporaries, sums, rows)


def _on_device(model: StepModel, rank: int) -> StaticMemory:
    """What stays on the device of a rank: nothing of modules whose parameters are offloaded to the host."""
    held = StaticMemory()
    for name, ranks in model.memory.items():
        if rank in ranks and not model.graph[name].options.cpu_offload:
            held = held.beside(ranks[rank])
    return held


CONTENTS = ("static", "activations", "gathered", "temporaries", "sums", "rows")
"""What memory is full of: parameters, optimizer state and gradients; what is kept from forward to backward; parameters
that FSDP has gathered; what actions and the optimizer's step hold for a moment; gradients packed to be summed over
ranks; rows of boundaries and their gradients."""
STATIC, ACTIVATIONS, GATHERED, TEMPORARIES, SUMS, ROWS = range(len(CONTENTS))

UPDATE = -1
"""The moment of a peak that is no action: the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank of a track holds at a time: bytes of each of `CONTENTS`, and during which action (its place
    in the schedule's order, or `UPDATE`)."""

    bytes: tuple[int, ...]
    at: int

    @property
    def total(self) -> int:
        return sum(self.bytes)


class _HeldBytes:
    """What ranks hold, by track, and the most of it so far."""

    def __init__(self, static: list[int]) -> None:
        self.total, self.peak = list(static), list(static)
        self.of = [[size] + [0] * (len(CONTENTS) - 1) for size in static]
        self.most = [(tuple(contents), 0) for contents in self.of]
        self.at = 0

    def add(self, tracks: tuple[int, ...], size: int, what: int) -> None:
        if size:
            for track in tracks:
                self.of[track][what] += size
                self.total[track] += size
                if self.total[track] > self.peak[track]:
                    self.peak[track] = self.total[track]
                    self.most[track] = tuple(self.of[track]), self.at


def peaks(schedule: Schedule, costs: StepCosts, columns: Program) -> list[Peak]:
    """Per track, the most bytes at a time of the rank that holds most: static, activations, what actions hold for a
    moment, and buffers of boundaries.

    Activations live from their forward to the end of the backward (its second part where it is split). A stage that is
    recomputed holds its inputs instead, and its activations during the backward alone. Offloaded ones are in the
    memory of the host. Where no backward follows, the output lives until the consumers' forwards have read it. A
    receive buffer lives from the SEND, at whose place it is posted, to the end of what reads it; where a microbatch is
    fed by several, their rows are there twice for the moment in which they are put together. Gradients are there from a
    stage's first backward on, what is packed to be summed from its REDUCE on. Between the parts of a split backward
    activations stay, and gradients of what has weights join them, with what it reads where that was computed again.
    Where FSDP keeps parameters whole during a step, they are there from the stage's first action to its last, and whole
    gradients from its first backward on: the last one makes shards of them. The optimizer's step comes last, with
    nothing beside it but what is static.
    """
    count, table, facts = columns.most, columns.stage_tracks, StageFacts(schedule, costs, columns)
    static = list(columns.static_bytes)
    if schedule.training:
        for stage, tracks in enumerate(table):
            for track in tracks:
                static[track] -= facts.fixed[stage].gradients
    held = _HeldBytes(static)
    fresh, in_flight, gathered = [True] * len(table), [0] * len(table), [False] * len(table)
    left = list(facts.forwards)  # microbatches of which the last action is to come
    # per stage and microbatch: bytes that its forward and its backward read, and its own output where it is kept
    inputs, gradients = [0] * (len(table) * count), [0] * (len(table) * count)
    outputs, readers = [0] * (len(table) * count), list(facts.readers)
    flown: dict[tuple[int, int], int] = {}  # bytes, by edge and the microbatch of its source

    def add(stage: int, size: int, what: int) -> None:
        held.add(table[stage], size, what)

    def join(stage: int, size: int, what: int = TEMPORARIES) -> None:
        add(stage, size, what)
        add(stage, -size, what)

    def compute(stage: int, size: int) -> None:
        """For a moment what an action holds beyond what is kept."""
        gathering = min(facts.fixed[stage].gathering, size)
        add(stage, gathering, GATHERED)
        join(stage, size - gathering)
        add(stage, -gathering, GATHERED)

    def gather(stage: int) -> None:
        """For the microbatch that begins."""
        in_flight[stage] += 1
        if not gathered[stage]:
            gathered[stage] = True
            add(stage, facts.fixed[stage].gathered, GATHERED)

    def let_go(stage: int) -> None:
        """The last action of a microbatch is over."""
        in_flight[stage] -= 1
        left[stage] -= 1
        if not (left if facts.fixed[stage].whole else in_flight)[stage]:
            gathered[stage] = False
            add(stage, -facts.fixed[stage].gathered, GATHERED)

    def finish(stage: int, moment: int) -> None:
        """One microbatch less is in flight; the first leaves gradients: shards, or whole ones until the last."""
        own, first, fresh[stage] = facts.fixed[stage], fresh[stage], False
        let_go(stage)
        adds_up = own.whole and left[stage] > 0
        if not adds_up:
            add(stage, 0 if first else -own.whole_gradients, TEMPORARIES)
            join(stage, own.scattered)
        if first or (own.whole and not adds_up):
            add(stage, *((own.whole_gradients, TEMPORARIES) if adds_up else (own.gradients, STATIC)))
        if first:
            compute(stage, moment)

    joined = facts.joined
    forward_edges = len(columns.sources) // 2
    for held.at, (kind, target, m, to, size) in enumerate(
        zip(columns.kinds, columns.targets, columns.microbatches, columns.to, columns.bytes, strict=True)
    ):
        if kind == RECEIVE:
            continue
        if kind == REDUCE:
            add(target, facts.fixed[target].summed, SUMS)
            continue
        if kind == TRANSFER:
            reader = columns.destinations[target]
            (inputs if target < forward_edges else gradients)[reader * count + to] += size
            add(reader, size, ROWS)
            source = columns.sources[target]
            if target < forward_edges and not facts.backward[source]:
                flown[target, m] = flown.get((target, m), 0) + size
                kept = flown[target, m] - outputs[source * count + m]
                if kept > 0:
                    outputs[source * count + m] += kept
                    add(source, kept, ROWS)
            continue
        at = target * count + m
        cost = facts.costs[at]
        if kind == FORWARD:
            if (at, True) in joined:
                join(target, joined[at, True], ROWS)
            kept = 0 if facts.recompute[target] or facts.offload[target] or not facts.backward[target] else size
            if facts.backward[target] or facts.fixed[target].whole:
                gather(target)
            add(target, kept, ACTIVATIONS)
            compute(target, cost.forward_bytes)
            if facts.fixed[target].whole and not facts.backward[target]:
                let_go(target)
            if facts.offload[target] or not (facts.recompute[target] or facts.backward[target]):
                add(target, -inputs[at], ROWS)
                inputs[at] = 0
            for producer in facts.feeding.get(at, ()):
                readers[producer] -= 1
                if not readers[producer]:
                    add(producer // count, -outputs[producer], ROWS)
            continue
        if kind in (BACKWARD, BACKWARD_INPUT):
            if (at, False) in joined:
                join(target, joined[at, False], ROWS)
            if facts.recompute[target]:
                add(target, size, ACTIVATIONS)
            if kind == BACKWARD_INPUT:
                add(target, cost.split_bytes, ACTIVATIONS)
            compute(target, cost.input_bytes if kind == BACKWARD_INPUT else cost.backward_bytes)
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            add(target, -(0 if facts.offload[target] and not facts.recompute[target] else size), ACTIVATIONS)
            add(target, -inputs[at], ROWS)
            add(target, -(cost.split_bytes if kind == BACKWARD_WEIGHT else 0), ACTIVATIONS)
            finish(target, cost.backward_bytes)
        if kind in (BACKWARD, BACKWARD_INPUT):
            add(target, -gradients[at], ROWS)
    return _with_update(held, columns) if schedule.training else [Peak(*most) for most in held.most]


def _with_update(held: _HeldBytes, columns: Program) -> list[Peak]:
    """The peaks, or the optimizer's step where it holds more."""
    found = []
    for most, static, update in zip(held.most, columns.static_bytes, columns.update_bytes, strict=True):
        contents = [0] * len(CONTENTS)
        contents[STATIC], contents[TEMPORARIES] = static, update
        found.append(Peak(*most) if sum(most[0]) >= static + update else Peak(tuple(contents), UPDATE))
    return found


def peak_rows(plan: BatchPlan, schedule: Schedule) -> Mapping[Stage, int]:
    """Per stage, the most rows that one of its lanes holds at a time: those its module emits, or the LLM's tokens, of
    all microbatches between their forward and the end of their backward (`hetmesh.schedule.holding`)."""
    graph = plan.graph
    rows: dict[str, list[np.ndarray]] = {}
    for name in graph.order:
        each = [s.tokens if name == graph.llm.name else s.rows.get(name, 0) for s in plan.samples]
        rows[name] = [np.array([sum(each[i] for i in lane) for lane in lanes]) for lanes in plan.lanes[name]]
    held = {stage: np.zeros(graph[stage.module].num_lanes, np.int64) for stage in schedule.stages.stages}
    most = dict.fromkeys(schedule.stages.stages, 0)
    s = schedule
    for stage, m, change in holding(s.actions, s.stages, s.routes, s.training, s.split):
        held[stage] += change * rows[stage.module][m]
        most[stage] = max(most[stage], int(held[stage].max()))
    return most
