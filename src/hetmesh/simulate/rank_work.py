"""What the ranks of a module compute in a microbatch: real tokens of packed samples, and shares of context parallelism.

Padded lanes count every position that is computed. A packed lane counts its tokens, and of attention the entries that
a kernel of blocks of 128 query rows computes on the keys that its rows see.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetmesh.balance import BatchPlan
from hetmesh.context import Mask, needed_keys, tile_counts
from hetmesh.context.pieces import plan_pieces
from hetmesh.context.token_owners import LaneTokens
from hetmesh.cost import Work, computed_work
from hetmesh.cost.recurrence import RankCuts
from hetmesh.graph import ModuleSpec, SampleMeta
from hetmesh.layout import Intervals
from hetmesh.layout.hashing import memoized
from hetmesh.layout.intervals import coalesce, extent, overlap

BLOCK_ROWS = 128
"""Query rows that a kernel works on together, and positions in whose multiples keys are fetched."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank has to do.

    Attributes:
        work: rows and targets that it computes, and the (query, key) pairs of attention. Of a causal row pairs count as
            those of a padded batch do, where a kernel computes half of the square: twice the entries computed.
        fetched: key rows of other ranks that each attention takes.
        served: own key rows that others take, counted once per taker: gradients come back for these.
        cuts: over which recurrences send what they remember.
    """

    work: Work
    fetched: int = 0
    served: int = 0
    cuts: RankCuts = field(default_factory=RankCuts)


@memoized
def rank_work(plan: BatchPlan, name: str, microbatch: int) -> tuple[RankWork, ...]:
    """Per lane, and within a lane per rank along `cp`, what a rank computes of module `name`; all other ranks of the
    lane (along `tp`) do the same."""
    module = plan.graph[name]
    found: list[RankWork] = []
    for lane in range(module.num_lanes):
        samples = [plan.samples[i] for i in plan.samples_of(name, microbatch, lane)]
        if module.packed or module.tokens_per_row:
            tokens = plan.lane_tokens(name, microbatch, lane)
            found += _shares(plan, module, samples, tokens, plan.lane_mask(name, microbatch, lane))
        else:
            found.append(RankWork(computed_work(plan.graph, name, samples)))
    return tuple(found)


def _shares(
    plan: BatchPlan, module: ModuleSpec, samples: Sequence[SampleMeta], tokens: LaneTokens, mask: Mask
) -> list[RankWork]:
    """Of the ranks that share the tokens of a lane."""
    llm = module.name == plan.graph.llm.name
    predicting = _predicting(samples, tokens.starts) if llm else ()
    return shared_work(mask, tokens.shares, module, llm=llm, predicting=predicting)


def shared_work(
    mask: Mask, shares: Sequence[Intervals], module: ModuleSpec, *, llm: bool, predicting: Intervals = ()
) -> list[RankWork]:
    """Of the ranks that share the tokens of one row of `module`, each keeping its part of `shares`. `predicting`: the
    positions that predict a target."""
    unit, twice = module.tokens_per_row or 1, 2 if llm else 1
    kept = [coalesce(sorted(share)) for share in shares]
    wanted = [needed_keys(mask, runs, BLOCK_ROWS) if len(kept) > 1 else () for runs in kept]
    found = []
    for r, runs in enumerate(kept):
        rows, pairs = extent(runs) // unit, twice * computed_entries(mask, runs) // unit**2
        work = Work(max(rows, 1) if llm else rows, pairs, overlap(predicting, runs))
        others = sum(overlap(keys, runs) for o, keys in enumerate(wanted) if o != r)
        cuts = rank_cuts(mask, tuple(shares), r) if any(module.token_costs) else RankCuts()
        found.append(RankWork(work, extent(wanted[r]) - overlap(wanted[r], runs), others, cuts))
    return found


def rank_cuts(mask: Mask, shares: tuple[Intervals, ...], rank: int) -> RankCuts:
    """Of one of the ranks that share the tokens of a lane."""
    pieces = plan_pieces(mask, shares, rank)
    cuts, rows = pieces.cuts, np.diff(pieces.bounds)
    return RankCuts(len(cuts), len(cuts.leaving), len(cuts.entering), int(rows[cuts.leaving].sum()))


def computed_entries(mask: Mask, runs: Intervals) -> int:
    """Entries of the attention matrix that a kernel of blocks computes for the rows `runs`, ascending."""
    if not extent(runs):
        return 0
    long = mask.stops - mask.starts >= BLOCK_ROWS
    cuts = np.unique(np.concatenate([mask.starts[long], mask.stops[long]]))  # a block ends where a long segment does
    starts: list[np.ndarray] = []
    for a, b in runs:
        inside = [a, *cuts[(cuts > a) & (cuts < b)].tolist(), b]
        starts += [np.arange(low, high, BLOCK_ROWS) for low, high in itertools.pairwise(inside)] + [np.array([b])]
    edges = np.unique(np.concatenate(starts))
    rows, own = np.diff(edges), np.isin(edges[:-1], [b for _, b in runs], invert=True)
    return int((tile_counts(mask, edges, 1) * rows)[own].sum())


def _predicting(samples: Sequence[SampleMeta], starts: Sequence[int]) -> Intervals:
    """The flat positions that predict a target: each is the one before it."""
    return tuple(
        (first + a - 1, first + b - 1) for s, first in zip(samples, starts, strict=True) for a, b in s.targets if b > a
    )
