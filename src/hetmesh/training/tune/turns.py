"""Which layout runs next, from what ran so far. Pure.

First a few run of which the simulator says that they are fast, or of which it can say least. Then whoever is predicted
to win by more than measurements scatter; in the end those of the leaders that are closer than that, by halves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hetmesh.planner import LayoutPlan
from hetmesh.planner.layout_plan import AXES
from hetmesh.training.tune.findings import Findings
from hetmesh.training.tune.guesses import Guess, Layouts

FIRST = 6
"""Layouts that run before constants are fitted."""
STEPS = 3
"""Timed steps of a turn; in each further turn twice as many."""
MOST_TURNS = 2
_ALL, _FEATURE, _OWN = 1.0, 0.1, 0.04
"""Standard deviations of what the simulator is off by, in logarithms: of all layouts alike, of those that share a
degree, a schedule or another trait, and of one alone."""
_DISTURBED = 2.0
"""Times what the simulator says: a layout that takes longer and would else win has another turn."""
_CURIOUS, _DOUBT = 2.0, 1.0  # standard deviations that count in favour of what has not run: first, and later


class Turn(NamedTuple):
    """A layout that runs next, and its timed steps."""

    layout: str
    steps: int


@dataclass(frozen=True)
class Ranking:
    """What is predicted of all layouts that fit.

    Attributes:
        seconds: by layout.
        doubt: its standard deviation, in logarithms.
        simulated: seconds as the simulator says them.
    """

    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    doubt: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    simulated: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def at_best(self, layout: str, deviations: float) -> float:
        """Its seconds, if they are that much less."""
        return self.seconds[layout] * math.exp(-deviations * self.doubt[layout])


def traits(plan: LayoutPlan) -> dict[str, float]:
    """What layouts have in common by which predictions of them may be off alike."""
    found = {f"placement {plan.placement}": 1.0, f"schedule {plan.step}": 1.0}
    found["microbatch"] = math.log2(plan.microbatch_size)
    for name, own in plan.modules.items():
        found |= {f"{name} {axis}": math.log2(degree) for axis, degree in zip(AXES, own.degrees, strict=True)}
        found |= {f"{name} ep": math.log2(own.expert_parallel), f"{name} turns": math.log2(own.stages_per_rank)}
        found |= {f"{name} {own.activation_checkpoint}": 1.0, f"{name} {own.reshard_after_forward}": 1.0}
    return found


def rank(layouts: Layouts, guesses: Mapping[str, Guess], findings: Findings) -> Ranking:
    """The guesses, corrected by how far those of layouts with the same traits were off (a Gaussian process)."""
    names = list(guesses)
    each = [traits(layouts.plans[name]) for name in names]
    columns = sorted({trait for own in each for trait in own})
    x = np.array([[own.get(trait, 0.0) for trait in columns] for own in each]).reshape(len(names), len(columns))
    alike = _ALL**2 + _FEATURE**2 * x @ x.T + _OWN**2 * np.eye(len(names))
    seconds = findings.seconds
    ran = [i for i, name in enumerate(names) if name in seconds]
    off = np.array([math.log(seconds[names[i]] / guesses[names[i]].seconds) for i in ran])
    noise = findings.scatter**2 * np.eye(len(ran))
    gain = np.linalg.solve(alike[np.ix_(ran, ran)] + noise, alike[ran]).T if ran else np.zeros((len(names), 0))
    mean = gain @ off if ran else np.zeros(len(names))
    variance = np.diag(alike) - (gain * alike[:, ran]).sum(1)
    simulated = {name: guess.seconds for name, guess in guesses.items()}
    return Ranking(
        {name: simulated[name] * math.exp(more) for name, more in zip(names, mean.tolist(), strict=True)},
        dict(zip(names, np.sqrt(np.maximum(variance, 0.0)).tolist(), strict=True)),
        simulated,
    )


def next_turn(ranking: Ranking, findings: Findings, common: Collection[str]) -> Turn | None:
    """Whose turn it is; None: what is left is not predicted to win. `common`: layouts of which one runs early."""
    seconds, turns = findings.seconds, findings.turns
    left = [name for name in ranking.seconds if name not in seconds and name not in findings.failed]
    if len(seconds) < FIRST and left:
        own = [name for name in left if name in common] if seconds and not common & seconds.keys() else []
        curious = _CURIOUS if seconds and not own else 0.0
        return Turn(min(own or left, key=lambda name: ranking.at_best(name, curious)), STEPS)
    if not seconds:
        return None
    best, scatter = min(seconds.values()), findings.scatter
    if left:
        hope = min(left, key=lambda name: ranking.at_best(name, _DOUBT))
        if ranking.at_best(hope, _DOUBT) < best * (1 - scatter):
            return Turn(hope, STEPS)
    for name, measured in seconds.items():
        simulated = ranking.simulated.get(name, measured)
        if turns[name] == 1 and simulated < best and measured > _DISTURBED * simulated:
            return Turn(name, STEPS)
    for times in range(1, MOST_TURNS):
        most = best * (1 + scatter * math.sqrt(2 * STEPS / (STEPS * (2**times - 1))))  # the error of a difference
        close = sorted((own, name) for name, own in seconds.items() if turns[name] >= times and own <= most)
        half = close[: max(math.ceil(len(close) / 2), 2)] if len(close) > 1 else []
        for _, name in half:
            if turns[name] == times:
                return Turn(name, STEPS * 2**times)
    return None
