"""What a typical microbatch gives one lane of a module to do."""

from __future__ import annotations

from hetmesh.cost import Work
from hetmesh.planner.problem import Problem


def typical_work(problem: Problem, name: str, samples: float) -> Work:
    """The mean of that many samples of the problem, on one lane; at least one row."""
    work = problem.mean_work[name] * samples
    rows, pairs, targets = (max(round(float(each)), 1) for each in work)
    return Work(rows, pairs, targets)
