"""Windows: what may begin before its place, and that it holds no more and waits for nothing when it does."""

from functools import partial

import pytest

from hetmesh.graph import Edge
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.schedule import Kind, ahead, dependencies, holding, uses_collectives, validate, windows
from support.parity_cases import INNER, filled, table

KEY = "bubble_fill_in_collectives = true"


def schedule_of(*tables, inner="1f1b", key=KEY, count=6, training=True, **options):
    given = filled(inner, *tables, extra=f"bubble_fill_layers_per_slice = 2\n{key}", **options)
    return recipe_schedule(given, resolve(given).graph, count, training)


def stays(route):
    return {route.edge.source.module, route.edge.destination.module} <= {"vision", "projector"}


TWO = table("vision", "0-1"), table("projector", "0-1"), table("llm", "0-1", tp=2)
FOUR = table("vision", "0-3"), table("projector", "0-3"), table("llm", "0-3", tp=2, pp=2)
CASES = {
    "TP": partial(schedule_of, *TWO),
    "frozen": partial(schedule_of, *TWO, trained="frozen encoder"),
    "all but the LLM frozen, a cap": partial(
        schedule_of,
        *TWO,
        trained="frozen encoder",
        projector="trainable = false",
        key=f"{KEY}\nbubble_fill_in_flight = 3",
    ),
    "all but the LLM frozen, one at a time": partial(
        schedule_of,
        *TWO,
        trained="frozen encoder",
        projector="trainable = false",
        key=f"{KEY}\nbubble_fill_in_flight = 1",
    ),
    **{f"PP, {inner}": partial(schedule_of, *FOUR, inner=inner) for inner in INNER},
    "PP, frozen": partial(schedule_of, *FOUR, inner="zero_bubble", trained="frozen encoder"),
}


def test_forwards_may_begin_at_once_and_backwards_where_their_gradients_have_come():
    schedule = schedule_of(*TWO, count=3)
    begin = windows(schedule, 0, stays)
    own = schedule.of_rank(0)
    compute = [str(a) for a in own if a.kind in (Kind.FORWARD, Kind.BACKWARD) and not str(a).startswith("vision.0")]
    assert compute == [
        "vision.1 F0", "projector.0 F0", "llm.0 F0", "llm.0 B0", "vision.1 F1", "projector.0 F1", "llm.0 F1",
        "llm.0 B1", "projector.0 B0", "vision.1 B0", "vision.1 F2", "projector.0 F2", "llm.0 F2", "llm.0 B2",
        "projector.0 B1", "vision.1 B1", "projector.0 B2", "vision.1 B2",
    ]  # fmt: skip
    at = {str(a): begin[a] for a in begin}
    assert at["projector.0 F0"] == at["projector.0 F1"] == 0
    for m in range(3):
        gradients = next(i for i, a in enumerate(own) if str(a) == f"llm.0->projector.0 RECV{m}")
        assert str(own[gradients - 1]) == f"llm.0->projector.0 SEND{m}"
        assert at[f"projector.0 B{m}"] == at[f"vision.1 B{m}"] == gradients + 1
    assert at["vision.0 F2"] == at["vision.0 B0"]  # behind a backward, and so within the cap
    assert not any("llm" in each or "REDUCE" in each for each in at)


@pytest.mark.parametrize("case", CASES)
def test_begun_as_early_as_it_may_be_nothing_waits_or_holds_more_than_its_cap(case):
    """Each rank runs what may begin at once, before anything else: the most that gaps could ever do."""
    schedule = CASES[case]()
    assert validate(schedule) == schedule
    assert uses_collectives(schedule)
    stages = schedule.stages
    for rank in sorted({rank for ranks in stages.ranks for rank in ranks}):
        begin = windows(schedule, rank, stays)
        assert begin
        own, done, order, waiting = schedule.of_rank(rank), set(), [], list(begin)
        place = {action: i for i, action in enumerate(schedule.actions)}
        for i, action in enumerate(own):
            while waiting and begin[waiting[0]] <= i:
                order.append((waiting.pop(0), place[action]))
            if action not in begin:
                order.append((action, place[action]))
            else:
                assert action not in waiting
        assert not waiting
        for action, _ in order:
            assert all(
                other in done for other in dependencies(action, stages, schedule.routes, schedule.split) if other in own
            )
            done.add(action)
        # What other ranks do beside lies in the order of places.
        elsewhere = [(action, i) for action, i in place.items() if action not in done]
        mixed = [action for action, _ in sorted([*order, *elsewhere], key=lambda pair: pair[1])]
        held = dict.fromkeys(stages.stages, 0)
        for stage, _, change in holding(mixed, stages, schedule.routes, True, schedule.split):
            held[stage] += change
            if stage in schedule.beside:
                assert held[stage] <= schedule.in_flight[stage]


def test_messages_to_other_ranks_stay_at_their_places():
    schedule = CASES["PP, 1f1b"]()
    for rank in range(4):
        for action in windows(schedule, rank, stays):
            assert not isinstance(action.target, Edge) or stays(action.route)
        inside = windows(schedule, rank, lambda route: False)
        assert not any(isinstance(action.target, Edge) for action in inside)


@pytest.mark.parametrize("options", [{"key": ""}, {"training": False}], ids=["without the key", "without training"])
def test_nothing_begins_early(options):
    schedule = schedule_of(*TWO, **options)
    assert [windows(schedule, rank, stays) for rank in (0, 1)] == [{}, {}]


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (TWO, {"count": 1}),
        (FOUR, {"count": 1}),
        (TWO, {"key": f"{KEY}\nbubble_fill_in_flight = 1"}),
        (TWO, {"key": ""}),
    ],
    ids=["one microbatch", "one microbatch, PP", "one at a time", "without the key"],
)
def test_what_comes_right_behind_what_it_needs_has_no_collectives_to_use(tables, options):
    assert not uses_collectives(schedule_of(*tables, **options))


def test_a_rank_with_nothing_else_has_no_collectives_to_use():
    schedule = schedule_of(table("vision", "0-3"), table("projector", "0-3"), table("llm", "0-1", tp=2))
    assert [bool(windows(schedule, rank, stays)) for rank in range(4)] == [True, True, False, False]


def compute(actions):
    return [str(a) for a in actions if a.kind in (Kind.FORWARD, Kind.BACKWARD) and not str(a).startswith("vision.0")]


def test_a_device_is_given_what_runs_beside_before_the_actions_that_it_runs_beside():
    schedule = ahead(schedule_of(*TWO, count=4))
    assert compute(schedule.actions) == [
        "vision.1 F0", "projector.0 F0", "vision.1 F1", "projector.0 F1", "llm.0 F0", "llm.0 B0",
        "projector.0 B0", "vision.1 B0", "vision.1 F2", "projector.0 F2", "llm.0 F1", "llm.0 B1",
        "projector.0 B1", "vision.1 B1", "vision.1 F3", "projector.0 F3", "llm.0 F2", "llm.0 B2",
        "projector.0 B2", "vision.1 B2", "llm.0 F3", "llm.0 B3", "projector.0 B3", "vision.1 B3",
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_comes_ahead_is_valid_within_caps_and_leaves_others_in_order(case):
    schedule = CASES[case]()
    early = ahead(schedule)
    assert validate(early) == early
    assert compute(early.actions) != compute(schedule.actions)
    for some in (schedule.beside, frozenset(schedule.stages.stages) - schedule.beside):
        for rank in sorted({rank for ranks in schedule.stages.ranks for rank in ranks}):
            before, after = ([a for a in each.of_rank(rank) if a.target in some] for each in (schedule, early))
            assert [a for a in before if a.kind is not Kind.REDUCE] == [a for a in after if a.kind is not Kind.REDUCE]
    assert ahead(schedule_of(*TWO, key="")) == schedule_of(*TWO, key="")
