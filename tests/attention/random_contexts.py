"""Masks of any segments, and assignments that no policy would make."""

import itertools

from hetmesh.context import Mask, Rule, Sees, Segment


def random_mask(rng, length):
    """Any segments: gaps, interleaved documents, instances of many segments, mixed rules."""
    segments, at = [], 0
    longest = rng.choice([3, 40, 400])
    while at < length:
        stop = min(length, at + rng.randint(1, longest))
        if rng.random() < 0.9:
            rule, sees = rng.choice(list(Rule)), Sees(rng.choice([0, 0, 2, 3, rng.randint(0, 15)]))
            document, instance = rng.randrange(3), rng.randint(0, 4)
            segments.append(Segment(document, instance, at, stop, rule, sees))
        at = stop
    return Mask(tuple(segments), length)


def random_shares(rng, length, ranks):
    """Cuts anywhere, runs in any order, some ranks empty."""
    cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randint(0, 3 * ranks)))})
    runs = list(itertools.pairwise(cuts))
    rng.shuffle(runs)
    members = rng.sample(range(ranks), rng.randint(1, ranks))
    shares = [[] for _ in range(ranks)]
    for run in runs:
        shares[rng.choice(members)].append(run)
    return tuple(tuple(share) for share in shares)
