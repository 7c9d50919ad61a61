"""Samples that cannot be read, whether all ranks know it from metadata or one finds out: a step leaves them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.errors import SampleError
from hetmesh.graph.sample import LOSS_UNITS
from hetmesh.training.feed import Feed

_NAMED = 3  # samples that an error names


def describe_unreadable(reasons: Sequence[str]) -> str:
    """Why none of some samples can be read, and what to do."""
    shown = "; ".join(reason.rstrip(".") for reason in reasons[:_NAMED])
    more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return f"{shown}{more}; fix or remove such samples"


def leave_out_unreadable(feed: Feed, world: World) -> tuple[BatchPlan, dict[int, str]]:
    """Load what this rank needs of a step, and agree with all others on the samples that any of them cannot read.

    Shapes were planned before, and stay: such a sample keeps its tokens and rows, its payload is blank where it could
    not be read, and none of its tokens is a target. So it adds nothing to any gradient. Collective.

    Returns:
        The plan of the step without the targets of these samples, which `feed` follows from now on; and why each of
        them is left out, by index in the batch. Both are equal on all ranks.

    Raises:
        SampleError: the metadata of a sample could be read on some ranks only, so that their plans differ. On all.
    """
    drawn = feed.drawn
    mine = feed.load_all(world.watchdog)
    known, here = torch.zeros(2, len(drawn), dtype=torch.bool)
    known[list(drawn.unreadable)] = True
    here[list(mine)] = True
    votes = torch.stack([here.int(), known.int(), -known.int()]).to(world.device)
    with world.waiting("which samples any rank cannot read"):
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=world.group(range(world.size)))
    found, most, least = votes.cpu()
    if torch.any(most != -least):
        where = torch.nonzero(most != -least).flatten().tolist()
        raise SampleError(
            f"the metadata of {len(where)} samples could be read on some ranks only, the first is number "
            f"{drawn[where[0]].index} of the data source: {drawn[where[0]].unreadable or 'readable here'}"
        )
    reasons = dict(drawn.unreadable)
    if torch.any(found):
        told = gather_objects(mine, world, "why some rank cannot read a sample")
        for each in reversed(told):  # the lowest rank has the last word
            reasons |= each
    if reasons:
        none = {name + LOSS_UNITS: 0 for name, loss in feed.plan.graph.losses.items() if loss.unit != "tokens"}
        samples = [
            replace(meta, targets=(), rows={**meta.rows, **none}) if i in reasons else meta
            for i, meta in enumerate(feed.plan.samples)
        ]
        feed.plan = replace(feed.plan, samples=tuple(samples))
    return feed.plan, dict(sorted(reasons.items()))
