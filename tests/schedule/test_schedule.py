"""Schedules: what validation refuses, and the sequential policy."""

from dataclasses import replace

import pytest

from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec, Stage, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import Action, Kind, one_f_one_b, sequential, validate

ONE = MeshSpec.make([0], dp_replicate=1)


def stages(frozen=()):
    names = ("vision", "audio", "projector", "llm")
    edges = (("vision", "projector"), ("projector", "llm"), ("audio", "llm"))
    modules = tuple(ModuleSpec(n, ONE, trainable=n not in frozen) for n in names)
    return stage_graph(ModuleGraph(modules, tuple(BoundarySpec(a, b) for a, b in edges)))


def test_the_sequential_order_reads_like_a_step():
    schedule = sequential(stages(frozen=("vision",)), 1)
    assert [str(a) for a in schedule.actions] == [
        "vision.0 F0", "vision.0->projector.0 SEND0", "audio.0 F0", "audio.0->llm.0 SEND0",
        "vision.0->projector.0 RECV0", "projector.0 F0", "projector.0->llm.0 SEND0",
        "projector.0->llm.0 RECV0", "audio.0->llm.0 RECV0", "llm.0 F0",
        "llm.0 B0", "llm.0->projector.0 SEND0", "llm.0->audio.0 SEND0",
        "llm.0->projector.0 RECV0", "projector.0 B0",
        "llm.0->audio.0 RECV0", "audio.0 B0",
        "llm.0 REDUCE", "projector.0 REDUCE", "audio.0 REDUCE",
    ]  # fmt: skip


def test_a_frozen_encoder_has_no_backward_and_gets_no_gradient():
    text = " ".join(str(a) for a in sequential(stages(frozen=("vision",)), 3).actions)
    assert "vision.0 B" not in text
    assert "projector.0->vision.0" not in text
    assert "vision.0 REDUCE" not in text


def test_without_training_there_are_forwards_alone():
    kinds = {a.kind for a in sequential(stages(), 2, training=False).actions}
    assert kinds == {Kind.FORWARD, Kind.SEND, Kind.RECV}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_single_mistake_is_refused(microbatches):
    schedule = sequential(stages(), microbatches)
    actions = schedule.actions
    for i, action in enumerate(actions):
        with pytest.raises(GraphError, match="missing"):
            validate(replace(schedule, actions=actions[:i] + actions[i + 1 :]))
        with pytest.raises(GraphError, match="comes 2 times"):
            validate(replace(schedule, actions=(*actions, action)))
    with pytest.raises(GraphError, match="does not belong"):
        validate(replace(schedule, actions=(*actions, Action(Kind.FORWARD, Stage("llm"), microbatches))))
    with pytest.raises(GraphError, match="comes before"):
        validate(replace(schedule, actions=tuple(reversed(actions))))


def test_a_receive_before_its_send_is_refused():
    schedule = sequential(stages(), 1)
    actions = list(schedule.actions)
    send = next(i for i, a in enumerate(actions) if a.kind is Kind.SEND)
    receive = next(i for i, a in enumerate(actions) if a.kind is Kind.RECV and a.target == actions[send].target)
    actions[send], actions[receive] = actions[receive], actions[send]
    with pytest.raises(GraphError, match="comes before"):
        validate(replace(schedule, actions=tuple(actions)))


def test_a_consumer_of_several_outputs_releases_a_microbatch_once():
    """A frozen encoder with side outputs: one forward of the LLM ends what all of them wait for."""
    modules = (ModuleSpec("vision", ONE, trainable=False), ModuleSpec("llm", ONE))
    boundaries = [BoundarySpec("vision", "llm", "image")] + [
        BoundarySpec("vision", "llm", output=o) for o in ("a", "b")
    ]
    schedule = one_f_one_b(stage_graph(ModuleGraph(modules, tuple(boundaries))), 4)
    assert schedule.peaks_in_flight()[Stage("vision")] <= 2
