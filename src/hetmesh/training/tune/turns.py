"""Which layout runs next, from what ran so far. Pure.

First a few short turns of layouts that share little, the fast ones of them. Then whoever is predicted to win by more
than measurements scatter; in the end those of the leaders that are closer than that, by halves and for longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from hetmesh.planner import LayoutPlan
from hetmesh.planner.layout_plan import AXES
from hetmesh.training.tune.findings import Findings
from hetmesh.training.tune.guesses import Guess, Layouts

FIRST, FEWEST, MOST = 6, 7, 12
"""One in `FIRST` layouts, at least `FEWEST` and at most `MOST`, runs before constants are fitted."""
SHORT, STEPS = 2, 3
"""Timed steps of a turn: of the first one of a layout, and of those that decide."""
FINALISTS = ((SHORT, 3), (SHORT + STEPS, 2))
"""Of layouts with so many steps, how many of the fastest take more, where scatter cannot tell them apart."""
_DISTURBED, _MOST_AGAIN = 1.25, 2
"""Times what the simulator says, or the fastest step was: a layout that takes longer and would else win has another
turn, and one more; as has one that leads by turns that were disturbed."""
_LEAST_DOUBT = 0.04  # in logarithms


class Turn(NamedTuple):
    """A layout that runs next, and its timed steps."""

    layout: str
    steps: int


@dataclass(frozen=True)
class Ranking:
    """What is predicted of all layouts that fit.

    Attributes:
        seconds: by layout.
        expected: of those that ran, between these and their measured steps, as sure as either is.
        doubt: how far they are off where it is known: root mean square of logarithms.
        traits: of each layout (`traits`).
    """

    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    expected: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    doubt: float = 0.0
    traits: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def first(self) -> int:
        """How many layouts run before constants are fitted."""
        return min(max(-(-len(self.seconds) // FIRST), FEWEST), MOST)

    def at_best(self, layout: str) -> float:
        """Its seconds, if they are less than predicted by the doubt."""
        return self.seconds[layout] * math.exp(-self.doubt)


def traits(plan: LayoutPlan) -> frozenset[str]:
    """What layouts may have in common: one that shares none with those that ran says most of the machine."""
    found = [plan.placement, f"microbatches of {plan.microbatch_size}"]
    for name, own in plan.modules.items():
        degrees = {**dict(zip(AXES, own.degrees, strict=True)), "ep": own.expert_parallel, "turns": own.stages_per_rank}
        found += [f"{name} {axis}" for axis, degree in degrees.items() if degree > 1]
        found.append(f"{name} {own.activation_checkpoint}")
        if own.degree("dp_shard") > 1:
            found.append(f"{name} gathers: {own.reshard_after_forward}")
    return frozenset(found)


def rank(layouts: Layouts, guesses: Mapping[str, Guess], findings: Findings) -> Ranking:
    """What is predicted of layouts, and how far that is off for those that ran."""
    seconds = findings.seconds
    off = [math.log(own / guesses[name].seconds) for name, own in seconds.items() if name in guesses]
    doubt = max(math.sqrt(statistics.mean(own**2 for own in off)), _LEAST_DOUBT) if off else _LEAST_DOUBT
    simulated = {name: guess.seconds for name, guess in guesses.items()}
    expected = {}
    for name, steps in findings.steps.items():
        weight = doubt**2 / (doubt**2 + findings.scatter**2 * STEPS / len(steps))
        expected[name] = seconds[name] ** weight * simulated.get(name, seconds[name]) ** (1 - weight)
    return Ranking(simulated, expected, doubt, {name: traits(layouts.plans[name]) for name in simulated})


def next_turn(ranking: Ranking, findings: Findings, common: Collection[str]) -> Turn | None:
    """Whose turn it is; None: what is left is not predicted to win. `common`: layouts of which one runs early."""
    seconds, turns = findings.seconds, findings.turns
    left = [name for name in ranking.seconds if name not in seconds and name not in findings.failed]
    failed = findings.failed.values()
    alike = len({own.failed for own in failed}) == 1 and not any(own.out_of_memory for own in failed)
    if not seconds and len(failed) >= ranking.first and alike:  # what is wrong is not the layout
        return None
    if len(seconds) < ranking.first and left:
        own = [name for name in left if name in common] if seconds and not common & seconds.keys() else []
        if own or not seconds:
            return Turn(min(own or left, key=lambda name: ranking.seconds[name]), SHORT)
        seen = {trait for name in seconds for trait in ranking.traits.get(name, ())}
        new = {name: len(ranking.traits[name] - seen) for name in left}
        ran = [ranking.traits[name] for name in seconds if name in ranking.traits]
        unlike = {name: min((len(ranking.traits[name] ^ own) for own in ran), default=1) for name in left}
        return Turn(max(left, key=lambda name: (new[name], unlike[name] / ranking.seconds[name])), SHORT)
    if not seconds:
        return None
    expected, steps, scatter = ranking.expected, findings.steps, findings.scatter
    leader = min(expected, key=lambda name: expected[name])
    best = expected[leader]
    if left:
        in_vain = len(seconds) > max(ranking.first, list(seconds).index(leader) + 1)  # the last one was not faster
        hope = min(left, key=ranking.at_best)
        if (ranking.seconds[hope] if in_vain else ranking.at_best(hope)) < best * (1 - scatter):
            return Turn(hope, SHORT)
    for name, measured in seconds.items():
        least = min(ranking.seconds.get(name, measured), *steps[name])
        again = least < best and statistics.median_high(steps[name]) > _DISTURBED * least
        if turns[name] <= _MOST_AGAIN and (again or (name == leader and name not in findings.calm)):
            return Turn(name, STEPS)
    for known, finalists in FINALISTS:
        most = best * (1 + scatter * math.sqrt(2 * STEPS / known))  # the error of a difference
        close = sorted((own, name) for name, own in expected.items() if len(steps[name]) >= known and own <= most)
        for _, name in close[:finalists] if len(close) > 1 else []:
            if len(steps[name]) < known + STEPS and turns[name] <= _MOST_AGAIN + len(FINALISTS):
                return Turn(name, STEPS)
    return None
