"""Bubble fill: slices of encoders in the bubbles of the LLM's pipeline, on its ranks (Optimus, arXiv 2408.03505)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import lru_cache

from hetmesh.cost.step_costs import Lanes
from hetmesh.errors import ScheduleError
from hetmesh.graph import Edge, Routes, Stage, StageGraph
from hetmesh.schedule.fill_pass import Filled, coarse, fill, late, lazy, longest_tails
from hetmesh.schedule.fill_problem import FillProblem, fill_problem
from hetmesh.schedule.interleaved import interleaved
from hetmesh.schedule.list_schedule import Durations, SetDurations, nominal
from hetmesh.schedule.one_f_one_b import by_caps
from hetmesh.schedule.schedule import DEFAULT, NO_STAGES, Action, Kind, PolicyOptions, Schedule, schedule_of

Score = Callable[[Schedule], float]
"""What a schedule takes, in any unit."""

INNER_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
"""Schedules of the LLM by itself that `bubble_fill` fills."""

_AIM_SHARES = (0.0, 0.125, 0.25, 0.5)
"""What is tried: so much of the way from a makespan's lower bound to the coarse one. Two passes each."""


def bubble_fill(
    stages: StageGraph,
    microbatches: Routes | int,
    training: bool = True,
    options: PolicyOptions = DEFAULT,
    *,
    durations: Durations | None = None,
    score: Score | None = None,
    lanes: Lanes | None = None,
    on_sets: SetDurations | None = None,
) -> Schedule:
    """A validated schedule in which the LLM's module runs as it would by itself (`options.inner`), and the stages of
    all other modules in its gaps: the slices of an encoder are its stages.

    The coarse placement has all forwards of encoders before the LLM and all backwards after it, as far as
    `options.in_flight` allows. It is refined by passes that place slices into gaps for shorter and shorter makespans;
    what they find is taken only if its score is lower. Where microbatches differ, those of which the encoders are done
    first may come first: the i-th that the encoders finish is the LLM's i-th, under its own number.

    With `options.in_collectives` two more candidates have slices as late as they can be, which leaves most to
    collectives: forwards one by one, which is what there is without a score, or in rounds of as many microbatches as
    the LLM's pipeline has ranks.

    Args:
        durations: what compute actions take, to find gaps by; None: nominal ones.
        score: what decides; None: the makespan by `durations`, messages left out.
        lanes: which ranks of a stage start together, and who waits for whom; None: all.
        on_sets: what actions take on each of the sets of `lanes`; None: `durations` on all.

    Raises:
        ScheduleError: `options.in_flight` is lower than what the order of the LLM's microbatches needs, and may not be
            raised, or there is no such inner schedule.
    """
    routes = Routes.of(stages, microbatches)
    if durations is None and score is None and lanes is None:
        return _filled(stages, routes, training, options)
    return _filled.__wrapped__(stages, routes, training, options, durations, score, lanes, on_sets)


@lru_cache(maxsize=64)
def _filled(
    stages: StageGraph,
    routes: Routes,
    training: bool,
    options: PolicyOptions,
    durations: Durations | None = None,
    score: Score | None = None,
    lanes: Lanes | None = None,
    on_sets: SetDurations | None = None,
) -> Schedule:
    inner = inner_schedule(stages, routes, training, options)
    seconds = durations or nominal(stages, routes, inner.split)
    order = [action for action in inner.actions if isinstance(action.target, Stage) and action.kind is not Kind.REDUCE]
    problem = fill_problem(stages, routes, training, order, seconds, inner.split, lanes, inner.in_flight, on_sets)
    caps = _caps(problem, lazy(problem), options)

    def schedule(found: Filled, names: Callable[[Action], Action]) -> Schedule:
        actions = [names(problem.actions[i]) for i in found.order]
        in_flight = {**inner.in_flight, **{s: n for s, n in zip(problem.stages, caps, strict=True) if n is not None}}
        encoders = frozenset(stages.stages) - frozenset(stages.of_module(stages.llm.module))
        rest = training, in_flight, inner.split, options.validated, encoders, options.in_collectives and training
        return schedule_of(actions, stages, routes, *rest)

    if options.in_collectives and score is None:  # durations do not say what happens in collectives
        return schedule(late(problem, caps), _renamed(None))
    found = [(coarse(problem, caps), _renamed(None))]
    if options.in_collectives:
        pipeline = set(map(stages.ranks_of, stages.of_module(stages.llm.module)))
        rounds = routes.count(stages.llm.module) // len(pipeline)
        found += [(late(problem, caps, some), _renamed(None)) for some in dict.fromkeys((0, rounds))]
    for numbers in _orders(stages, routes, problem) if options.refine else ():
        names = _renamed(numbers)
        own = problem if numbers is None else problem.renamed(names)
        found += [(refined, names) for refined in _refined(own, caps, found[0][0].makespan)]
    if score is None:
        return schedule(*min(found, key=lambda order: order[0].makespan))
    return min((schedule(*order) for order in found), key=score)


def _refined(problem: FillProblem, caps: tuple[int | None, ...], most: float) -> list[Filled]:
    """The shortest that passes find in each way, for makespans between one that no order is below and `most`.

    Passes know neither transfers nor what runs beside collectives, so the shortest by them of all ways need not have
    the best score: 5.06 instead of 5.05 s for ViT-22B + GPT-175B on 3,072 GPUs.
    """
    tails = longest_tails(problem, lazy(problem).order)
    busy = [0.0] * len(problem.sequences)
    for own, groups in zip(problem.seconds, problem.groups, strict=True):
        for seconds, tracks in zip(own, groups, strict=True):
            for track in tracks:
                busy[track] += seconds
    shortest = max([*itertools.chain.from_iterable(tails), *busy], default=0.0)
    best: dict[tuple[int, ...], Filled] = {}
    for ahead in (True, False):
        found: Filled | None = None
        for share in _AIM_SHARES:
            wanted = shortest + share * max(most - shortest, 0.0)
            each = fill(problem, caps, tails, wanted, ahead)
            if found is None or each.makespan < found.makespan:
                found = each
            if found.makespan <= wanted * (1 + 1e-9):
                break  # aiming lower is better, and was tried
        assert found is not None
        best.setdefault(found.order, found)
    return list(best.values())


def inner_schedule(stages: StageGraph, routes: Routes, training: bool, options: PolicyOptions) -> Schedule:
    """The schedule of the LLM's module alone. Raises ScheduleError: there is no such inner schedule."""
    if options.inner not in INNER_SCHEDULES:
        valid = ", ".join(INNER_SCHEDULES)
        raise ScheduleError(f"bubble_fill: there is no inner schedule {options.inner!r}; valid are {valid}")
    module = stages.llm.module
    own = stages.of_module(module)

    def inside(edges: Iterable[Edge]) -> tuple[Edge, ...]:
        return tuple(edge for edge in edges if edge.source in own and edge.destination in own)

    wanted = stages.backward_stages, stages.trainable_stages, stages.splittable_stages
    backward, trainable, splittable = (some & frozenset(own) for some in wanted)
    gradient_edges, ranks = frozenset(inside(stages.gradient_edges)), tuple(map(stages.ranks_of, own))
    sets = backward, gradient_edges, trainable
    alone = StageGraph(own, inside(stages.edges), *sets, ranks, splittable, module, frozenset(own[-1:]))
    if options.inner == "interleaved":
        return interleaved(alone, routes.count(module), training, options)
    split = splittable if training and options.inner == "zero_bubble" else NO_STAGES
    return by_caps(alone, Routes.of(alone, routes.count(module)), training, split, options.validated)


def _caps(problem: FillProblem, least: Filled, options: PolicyOptions) -> tuple[int | None, ...]:
    """How many microbatches each stage may hold; None for those of the LLM's module."""
    llm, cap = set(problem.stage[: problem.fixed]), options.in_flight
    for i, held in enumerate(least.held):
        if cap is not None and held > cap and i not in llm and not options.raise_in_flight:
            raise ScheduleError(
                f"bubble_fill: stage {problem.stages[i]} may hold {cap} microbatches at a time, but the "
                f"order of the LLM needs {held}"
            )
    most = [2 * max(held, 1) if cap is None else max(cap, held) for held in least.held]
    return tuple(None if i in llm else held for i, held in enumerate(most))


def _orders(stages: StageGraph, routes: Routes, problem: FillProblem) -> Iterable[tuple[int, ...] | None]:
    """Orders of microbatches worth a look: by number (None), and those of the least work for encoders first."""
    yield None
    count = routes.count(stages.llm.module)
    plain = all(routes.same_numbers(edge) for edge in stages.edges)
    if not plain or any(routes.count(stage.module) != count for stage in stages.stages):
        return
    work = [0.0] * count
    for i in range(problem.fixed, problem.backwards):
        work[problem.actions[i].microbatch] += max(problem.seconds[i])
    rising = tuple(sorted(range(count), key=work.__getitem__))
    if rising != tuple(range(count)):
        yield rising


def _renamed(numbers: tuple[int, ...] | None) -> Callable[[Action], Action]:
    """The action that is meant by one of the i-th microbatch."""
    if numbers is None:
        return lambda action: action
    return lambda action: Action(action.kind, action.target, numbers[action.microbatch], action.to)
