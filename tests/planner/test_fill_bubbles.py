"""Costs that `bubble_fill` decides by: the same whatever the last bits that a processor rounds to."""

import random
from dataclasses import replace

from hetmesh.cost import StageCost, StepCosts, TransferCost
from hetmesh.graph import Edge, Route, Stage
from hetmesh.planner.fill_bubbles import on_grid


def drawn(seed, noise=0.0):
    rng, last_bits = random.Random(seed), random.Random(seed + 1)

    def seconds():
        return rng.uniform(1e-4, 1e-2) * (1 + noise * last_bits.uniform(-1, 1))

    a, b = Stage("a", 0), Stage("b", 0)
    stages = {(s, m): StageCost(seconds(), seconds(), seconds(), seconds() / 8) for s in (a, b) for m in range(9)}
    route = Route(Edge(a, b), 0, 0)
    return StepCosts(stages, {route: TransferCost(seconds(), 5)}, {a: seconds()}, {b: seconds()}, {0: seconds()})


def test_last_bits_do_not_matter_and_sums_are_exact():
    for seed in range(50):
        costs = on_grid(drawn(seed))
        assert costs == on_grid(drawn(seed, 1e-14))
        forwards = [cost.forward for cost in costs.stages.values()]
        assert sum(forwards) == sum(reversed(forwards))
        before = drawn(seed)
        for key, cost in costs.stages.items():
            assert abs(cost.forward - before.stages[key].forward) <= 2**-16 * 2e-2  # of the longest backward
            assert replace(cost, forward=0.0).backward_input > 0


def test_costs_of_nothing_stay():
    nothing = StepCosts({(Stage("a", 0), 0): StageCost(0.0)})
    assert on_grid(nothing) == nothing
