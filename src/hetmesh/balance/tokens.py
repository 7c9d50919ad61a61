"""Which rank of a lane keeps which of its tokens: the whole lane, equal shares, or what context parallelism assigns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetmesh.context import Mask, assign, causal, packed
from hetmesh.graph import ModuleSpec, SampleMeta
from hetmesh.graph.tokens import LaneTokens

BLOCK = 128
"""Query rows that an attention kernel works on together; shorter sequences are cut more finely."""


def lane_mask(samples: Sequence[SampleMeta]) -> Mask:
    """What a causal LLM sees of a lane whose samples lie one behind the other: each token its sample, up to itself."""
    return packed(causal(sample.tokens) for sample in samples)


def share_tokens(module: ModuleSpec, samples: Sequence[SampleMeta]) -> tuple[LaneTokens, Mask | None]:
    """The tokens of one lane in one microbatch of `module`, and what they see of each other where they are packed.
    `samples` are expanded."""
    parts = module.mesh.axis_size("tp") if "tp" in module.token_axes else 1
    lengths = [sample.tokens for sample in samples]
    if not module.packed:
        width = max(lengths, default=1)
        total = len(samples) * width
        return LaneTokens(tuple(i * width for i in range(len(samples))), total, (((0, total),),), parts), None
    starts = tuple(itertools.accumulate(lengths, initial=0))
    ranks = module.mesh.axis_size("cp")
    mask = lane_mask(samples)
    # Few tokens are cut finely enough that every rank gets some: a kernel of whole blocks would not matter there.
    block = max(1, min(BLOCK, starts[-1] // (4 * ranks)))
    shares = assign(mask, ranks, policy=module.assignment, block=block)
    return LaneTokens(starts[:-1], starts[-1], shares, parts), mask
