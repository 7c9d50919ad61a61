"""Masks of any segments."""

from hetmesh.context.rule import Rule, Sees
from hetmesh.context.segments import Mask, Segment


def random_mask(rng):
    """Any segments: gaps, interleaved documents, instances of many segments, mixed rules."""
    length = rng.choice([rng.randint(0, 12), rng.randint(1, 40), rng.randint(1, 60)])
    if rng.random() < 0.05:
        length = rng.randint(100, 200)
    documents, instances, gaps = rng.randint(1, 4), rng.randint(0, 4), rng.random() < 0.3
    longest = rng.choice([1, 3, 12, 60])
    segments, at = [], 0
    while at < length:
        stop = min(length, at + rng.randint(1, longest))
        if not (gaps and rng.random() < 0.3):
            rule, sees = rng.choice(list(Rule)), Sees(rng.choice([0, 0, 2, rng.randint(0, 15)]))
            segments.append(Segment(rng.randrange(documents), rng.randint(0, instances), at, stop, rule, sees))
        at = stop
    rng.shuffle(segments)
    return Mask(tuple(segments), length)
