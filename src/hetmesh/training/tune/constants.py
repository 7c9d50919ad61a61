"""A machine's constants, fitted to measured steps and to what ranks did in them.

Steps are piecewise linear in the seconds that constants stand for, so a few Gauss-Newton rounds in logarithms find the
fit. A derivative takes a simulation of all layouts that ran, so moves between rounds correct those that are known by
what they meet (Broyden 1965, Mathematics of Computation 19, 577). What few layouts cannot tell apart stays where it
was: a change by a factor of three costs as much as a residual of one standard deviation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hetmesh.cost import Machine
from hetmesh.training.tune.findings import Findings
from hetmesh.training.tune.guesses import Guess, Layouts

LEAST = {
    "efficiency": 1e-4,
    "memory_bandwidth": 0.0,
    "operation_overhead": 1e-6,
    "launch_overhead": 0.0,
    "action_overhead": 3e-4,
    "shard_overhead": 3e-4,
    "step_overhead": 1e-4,
    "node_bandwidth": 0.0,
    "node_latency": 1e-6,
    "network_bandwidth": 0.0,
    "network_latency": 1e-6,
}
"""The constants that are fitted, each from its value or this; 0: from its value alone, of which 0 says "unknown"."""
BUSY = "busy_slowdown"
_PRIOR = math.log(3.0)
_STEP, _PART = 0.08, 0.4  # standard deviations of logarithms of predicted over measured seconds
_LEAST_PART = 0.03  # of a step: smaller parts say nothing
_CLEAR = 2.0  # standard deviations, beyond which a residual counts by its size and not by its square
_LONGEST = 1.5  # of a step in logarithms
_NUDGE = 0.05  # by which derivatives are taken
_ROUNDS, _MOVES = 3, 5
_LEAST_GAIN = 1.0  # of a round, for which another follows: a residual of one standard deviation


def fitted_names(machine: Machine, ranks: int) -> list[str]:
    """The constants of a machine that this number of ranks shows."""
    far = 0 < machine.ranks_per_node < ranks
    names = [
        name
        for name, least in LEAST.items()
        if (getattr(machine, name) or least) and (far or not name.startswith("network"))
    ]
    near = min(ranks, machine.ranks_per_node or ranks)
    return names + [f"{BUSY} {k}" for k in range(2, near + 1) if machine.busy_slowdown]


def with_factors(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with constants multiplied by the exponentials of `factors`; of a slowdown, what is above 1."""
    changed: dict[str, Any] = {
        name: max(getattr(machine, name), LEAST[name]) * math.exp(factor)
        for name, factor in factors.items()
        if name in LEAST
    }
    known = machine.busy_slowdown
    most = max((int(name.split()[1]) for name in factors if name.startswith(BUSY)), default=0)
    # ranks beyond those that the file knows share what these have
    slowdown = [*known, *(known[-1] * k / len(known) for k in range(len(known) + 1, most + 1))]
    for k, factor in ((int(name.split()[1]), factor) for name, factor in factors.items() if name.startswith(BUSY)):
        slowdown[k - 1] = 1.0 + max(slowdown[k - 1] - 1.0, 0.01) * math.exp(factor)
    changed["busy_slowdown"] = tuple(itertools.accumulate(slowdown, max))
    if (over := changed.get("efficiency", 0.0)) > 1.0:  # then the peak was wrong
        changed |= {"efficiency": 1.0, "peak_flops": {k: over * v for k, v in machine.peak_flops.items()}}
    return replace(machine, **changed)


def fit_constants(layouts: Layouts, machine: Machine, findings: Findings) -> dict[str, float]:
    """Logarithms of the factors by which `machine` meets what was measured, from those of `findings` on. Pure."""
    names = fitted_names(machine, layouts.problem.ranks)
    measured = {name: findings.parts(name) for name in findings.seconds if name in layouts.plans}
    x = np.array([findings.factors.get(name, 0.0) for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        guesses = layouts.guesses(with_factors(machine, dict(zip(names, x, strict=True))), measured, parts=True)
        return np.concatenate([_residuals(findings, name, measured[name], own) for name, own in guesses.items()])

    def cost(x: np.ndarray, r: np.ndarray) -> float:
        size = np.abs(r)
        huber = np.where(size < _CLEAR, size**2, _CLEAR * (2 * size - _CLEAR))
        return float(huber.sum() + (x**2).sum() / _PRIOR**2)

    r = residuals(x)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(x + _NUDGE * own) - r) / _NUDGE for own in np.eye(len(x))], axis=1)
        begun = cost(x, r)
        for _ in range(_MOVES):
            weights = np.minimum(1.0, _CLEAR / np.maximum(np.abs(r), 1e-9))[:, None]
            normal = slopes.T @ (weights * slopes) + np.eye(len(x)) / _PRIOR**2
            move = -np.linalg.solve(normal, slopes.T @ (weights[:, 0] * r) + x / _PRIOR**2)
            move = np.clip(move, -_LONGEST, _LONGEST)
            if not move.any():
                break
            after = residuals(x + move)
            slopes += np.outer(after - r - slopes @ move, move) / (move @ move)
            if cost(x + move, after) < cost(x, r):
                x, r = x + move, after
        if cost(x, r) > begun - _LEAST_GAIN:
            break
    return {name: float(value) for name, value in zip(names, x, strict=True)}


def _residuals(findings: Findings, name: str, measured: Mapping[str, float], guess: Guess) -> np.ndarray:
    """In standard deviations; of parts of a step that one of both takes to be worth it."""
    least = _LEAST_PART * findings.seconds[name]
    parts = [
        math.log(max(guess.parts.get(part, 0.0), least) / max(seconds, least)) / _PART
        for part, seconds in sorted(measured.items())
    ]
    return np.array([math.log(guess.seconds / findings.seconds[name]) / _STEP, *parts])


def corrected_memory(layouts: Layouts, machine: Machine, findings: Findings, guesses: Mapping[str, Guess]) -> Machine:
    """The machine whose ranks hold so much beside what is predicted that measured peaks and layouts that ran out of
    memory are explained: in `context_bytes`; where its memory is not known, it is less than what these take. `guesses`:
    of all layouts on `machine`."""
    limit = layouts.limit(machine)
    full_names = {own.layout for own in findings.each if own.out_of_memory}
    full = [own for name, own in guesses.items() if name in full_names]
    if full and not limit:
        limit = min(own.peak_bytes + own.reserved for own in full) - 1
        machine = replace(machine, memory_bytes=limit * 10 // 9)
    missing = [limit + 1 - own.peak_bytes - own.reserved for own in full]
    missing += [own.peak_bytes - guesses[own.layout].peak_bytes for own in findings.each if own.layout in guesses]
    return replace(machine, context_bytes=machine.context_bytes + max([0, *missing]))
