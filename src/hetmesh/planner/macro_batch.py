"""How many samples say how ranks are to be parted between modules, or that no number does: what is certified is that
the parting is stable, not that it is the best, so that a search looks at its neighbours too.

Entrain (arXiv 2605.27918, macro batches): double the size of a batch until k random batches of that size all part the
ranks alike. Were more than a share p of all batches to part them otherwise, k would agree with a probability below
(1 - p)^k <= alpha. Shares of work are ratios of sums, not means of ratios. Data that drift are refused: random batches
of all of it would agree on what is right at no time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hetmesh.cost import Work, module_flops
from hetmesh.cost.work import samples_work
from hetmesh.errors import HetmeshError
from hetmesh.graph import MetaArrays
from hetmesh.planner.problem import Problem

SECTIONS = 8
"""Parts of a run that are compared with the rest of it."""
SHARE, PER_SAMPLE = "share of the work", "work per sample"
"""What may drift: the first moves ranks from one module to another, both make other microbatches best."""
MIN_CHANGE = 0.05
"""Part of itself by which it must differ; less moves no rank unless a module has tens of them."""
_POOL_BATCHES = 8  # batches' worth of samples from which batches are drawn: of fewer, they would be the same samples
_ALPHA, _DISAGREEING = 0.05, 0.05
AGREEING_BATCHES = math.ceil(math.log(_ALPHA) / math.log(1 - _DISAGREEING))
"""Random batches that must agree, so that with confidence 1 - alpha fewer than that share of all disagree."""
DRIFT_ALPHA = 0.01
"""How often data without drift may be taken for some that drift."""


@dataclass(frozen=True)
class Drift:
    """What of a module changes along the run.

    Attributes:
        module, measure: its name, and `SHARE` or `PER_SAMPLE`.
        place: from where to where in the run, 0 to 1, it is farthest from the rest.
        here, elsewhere: the share of all FLOPs, or FLOPs per sample, there and in the rest of the run.
    """

    module: str
    measure: str
    place: tuple[float, float]
    here: float
    elsewhere: float


@dataclass(frozen=True)
class MacroBatch:
    """What was certified.

    Attributes:
        samples: how many divide the ranks as any other draw of that size does; 0 where nothing is certified.
        split: ranks of each module with a mesh of its own; of the largest batch looked at where nothing is certified.
        agreed, drawn: how many random batches of that size agreed, and samples that were looked at.
        drifts: what drifted.
        splits: how many different ways the batches of the largest size looked at parted the ranks.
    """

    samples: int
    split: tuple[int, ...]
    agreed: int
    drawn: int
    drifts: tuple[Drift, ...] = ()
    splits: int = 1


def certify(work: np.ndarray, modules: Sequence[str], ranks: int) -> MacroBatch:
    """Find the least power of two of samples whose batches part `ranks` alike. Deterministic.

    Args:
        work: FLOPs of each sample in each module, in the order of training; float `[samples, modules]`.
        modules: their names.
        ranks: at least one for each module.

    Raises:
        HetmeshError: no samples or no work, or fewer ranks than modules.
    """
    work = np.asarray(work, float)
    if work.ndim != 2 or work.shape[1] != len(modules) or not work.sum() > 0:
        raise HetmeshError(f"macro batch: no work of {list(modules)} in {len(work)} samples")
    if ranks < len(modules):
        raise HetmeshError(f"macro batch: {ranks} ranks cannot be parted between {len(modules)} modules")
    count = len(work)
    whole = tuple(split_ranks(work.sum(0)[None], ranks)[0].tolist())
    if drifts := tuple(find_drifts(work, modules)):
        return MacroBatch(0, whole, 0, count, drifts)
    rng, size, different = np.random.default_rng(0), 1, 1
    while _POOL_BATCHES * size <= count:
        batches = np.stack([work[rng.choice(count, size, replace=False)].sum(0) for _ in range(AGREEING_BATCHES)])
        found = np.unique(split_ranks(batches, ranks), axis=0)
        if len(found) == 1:
            return MacroBatch(size, tuple(found[0].tolist()), AGREEING_BATCHES, count)
        size, different = 2 * size, len(found)
    return MacroBatch(0, whole, 0, count, splits=different)


def split_ranks(work: np.ndarray, ranks: int) -> np.ndarray:
    """Ranks for modules in proportion to their work, each at least one; what is left over goes where the remainders are
    largest, of equal ones to the first. int64 `[batches, modules]` of work `[batches, modules]`."""
    modules = work.shape[1]
    total = work.sum(1, keepdims=True)
    ideal = np.divide(work, total, out=np.full_like(work, 1 / modules), where=total > 0) * (ranks - modules)
    whole = np.floor(ideal + 1e-9).astype(np.int64)
    left = ranks - modules - whole.sum(1)
    place = np.argsort(np.argsort(whole - ideal, axis=1, kind="stable"), axis=1, kind="stable")
    return 1 + whole + (place < left[:, None])


def find_drifts(work: np.ndarray, modules: Sequence[str]) -> list[Drift]:
    """What changes along the run, by more than chance and by more than `MIN_CHANGE`: a module's share of the work or
    its work per sample in some section, of which the least likely counts; or, also where no section stands out, samples
    that have ever more or less work for it (Spearman's rank correlation with their place), told by the halves."""
    count = len(work)
    if count < 4 * SECTIONS:
        return []
    edges = np.linspace(0, count, SECTIONS + 1).astype(int).tolist()
    limit = NormalDist().inv_cdf(1 - DRIFT_ALPHA / (2 * len(modules) * (2 * SECTIONS + 1)))
    ones = np.ones(count)
    found = []
    for module, part in zip(modules, work.T, strict=True):
        for measure, of in ((SHARE, work.sum(1)), (PER_SAMPLE, ones)):
            sections = [_compared(part, of, a, b) for a, b in itertools.pairwise(edges)]
            worst = max(range(SECTIONS), key=lambda i: sections[i][0])
            z, here, elsewhere = sections[worst]
            if z <= limit and measure == PER_SAMPLE and _trend(part) > limit:
                z, worst, (_, here, elsewhere) = _trend(part), -1, _compared(part, of, count // 2, count)
            if z > limit and abs(here - elsewhere) > MIN_CHANGE * part.sum() / of.sum():
                place = (0.5, 1.0) if worst < 0 else (worst / SECTIONS, (worst + 1) / SECTIONS)
                found.append(Drift(module, measure, place, here, elsewhere))
    return found


def _compared(part: np.ndarray, of: np.ndarray, a: int, b: int) -> tuple[float, float, float]:
    """How unlikely the ratio of the sums of `part` and `of` over samples a to b is, in standard deviations; the ratio
    there, and elsewhere."""
    count, own, rest = len(part), of[a:b].sum(), of.sum() - of[a:b].sum()
    residuals = part - of * (part.sum() / of.sum())  # what a ratio of sums varies by, to first order
    spread = float(residuals.std())
    if not spread or not own or not rest:
        return 0.0, 0.0, 0.0
    z = abs(residuals[a:b].sum()) / (spread * math.sqrt((b - a) * (1 - (b - a) / count)))
    return float(z), float(part[a:b].sum() / own), float((part.sum() - part[a:b].sum()) / rest)


def _trend(part: np.ndarray) -> float:
    """Spearman's rank correlation of values with their places, in standard deviations of no correlation."""
    _, inverse, counts = np.unique(part, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # of equal values the mean
    if len(counts) == 1:
        return 0.0
    return float(abs(np.corrcoef(ranks, np.arange(len(part)))[0, 1]) * math.sqrt(len(part) - 1))


def sample_flops(problem: Problem, samples: MetaArrays) -> np.ndarray:
    """FLOPs of samples, forward and backward, in each module of `problem.own`: float64 `[samples, modules]`. A module
    without a mesh of its own counts with the first that it feeds."""
    graph, own = problem.graph, problem.own
    found = np.zeros((len(samples), len(own)))
    for name, facts in problem.facts.items():
        upstream = any(map(graph.needs_gradient, graph.inputs(name)))
        ones = (Work(1), Work(0, 1), Work(0, 0, 1))
        each = [module_flops(facts.shape, one, upstream=upstream).total for one in ones]
        at = name
        while at not in own:
            at = graph.outputs(at)[0].destination
        found[:, own.index(at)] += samples_work(graph, name, samples) @ np.array(each, float)
    return found
