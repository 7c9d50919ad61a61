"""Peak memory of each track. It depends on the order alone, not on times: every rank runs its work in one order."""

from __future__ import annotations

from hetmesh.schedule import Schedule
from hetmesh.simulate.program import RECEIVE, Program
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, REDUCE, TRANSFER


def peak_bytes(schedule: Schedule, columns: Program) -> tuple[int, ...]:
    """Per track, the most bytes at a time of the rank that holds most: static, activations, and buffers of boundaries.

    Activations live from their forward to the end of the backward (its second part where it is split). A stage that is
    recomputed holds its inputs instead, and its activations during the backward alone. Offloaded ones are in the
    memory of the host. Where no backward follows, the output lives until the consumers' forwards have read it. A
    receive buffer lives from the SEND, at whose place it is posted, to the end of what reads it.
    """
    count, table = schedule.microbatches, columns.stage_tracks
    facts = _Facts(schedule, columns)
    held = list(columns.static_bytes)
    peak = list(held)
    # per stage and microbatch: bytes that its forward and its backward read, and its own output where it is kept
    inputs, gradients = [0] * (len(table) * count), [0] * (len(table) * count)
    outputs, readers = [0] * (len(table) * count), [0] * (len(table) * count)

    def add(stage: int, size: int) -> None:
        if size:
            for track in table[stage]:
                held[track] += size
                if held[track] > peak[track]:
                    peak[track] = held[track]

    forward_edges = len(columns.sources) // 2
    for kind, target, m, size in zip(columns.kinds, columns.targets, columns.microbatches, columns.bytes, strict=True):
        if kind in (RECEIVE, REDUCE):
            continue
        if kind == TRANSFER:
            reader = columns.destinations[target]
            (inputs if target < forward_edges else gradients)[reader * count + m] += size
            add(reader, size)
            source = columns.sources[target]
            kept = size - outputs[source * count + m]
            if target < forward_edges and not facts.backward[source] and kept > 0:
                outputs[source * count + m] += kept
                add(source, kept)
            continue
        at = target * count + m
        if kind == FORWARD:
            kept = 0 if facts.recompute[target] or facts.offload[target] or not facts.backward[target] else size
            add(target, kept)
            readers[at] = len(facts.consumers_of[target])
            if not facts.recompute[target] or facts.offload[target]:
                add(target, -inputs[at])
                inputs[at] = 0
            for producer in facts.producers_of[target]:
                readers[producer * count + m] -= 1
                if not readers[producer * count + m]:
                    add(producer, -outputs[producer * count + m])
            continue
        if kind in (BACKWARD, BACKWARD_INPUT) and facts.recompute[target]:
            add(target, size)
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            add(target, -(0 if facts.offload[target] and not facts.recompute[target] else size))
            add(target, -inputs[at])
        if kind in (BACKWARD, BACKWARD_INPUT):
            add(target, -gradients[at])
    return tuple(peak)


class _Facts:
    """What the walk asks about stages, by index."""

    def __init__(self, schedule: Schedule, columns: Program) -> None:
        stages = schedule.stages.stages
        self.backward = [schedule.training and stage in schedule.stages.backward_stages for stage in stages]
        self.recompute = [stage in schedule.recompute for stage in stages]
        self.offload = [stage in schedule.offload for stage in stages]
        forward_edges = len(columns.sources) // 2
        pairs = list(zip(columns.sources[:forward_edges], columns.destinations[:forward_edges], strict=True))
        self.producers_of = [[a for a, b in pairs if b == i] for i in range(len(stages))]
        self.consumers_of = [[b for a, b in pairs if a == i] for i in range(len(stages))]
