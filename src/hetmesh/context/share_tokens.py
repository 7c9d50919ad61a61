"""Which rank of a lane keeps which of its tokens: the whole lane, equal shares, or what context parallelism assigns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from hetmesh.context import (
    Mask,
    Sees,
    assign,
    causal,
    of_sample,
    packed,
    prefix_of_sample,
    runs_of_sample,
    text_with_instances,
)
from hetmesh.context.token_owners import LaneTokens
from hetmesh.graph import ModuleSpec, SampleMeta

BLOCK = 128
"""Query rows that an attention kernel works on together; shorter sequences are cut more finely."""


MASKS: Mapping[str, Callable[[SampleMeta], Mask]] = MappingProxyType(
    {
        "causal": lambda sample: causal(sample.tokens),
        "isolated_media": of_sample,
        "bidirectional_media": partial(of_sample, instances_see=Sees.DOCUMENT),
        "bidirectional_runs": runs_of_sample,
        "prefix": prefix_of_sample,
    }
)
"""What tokens of a sample see, by the name a recipe gives it: what lies before them, media items like text; or media
items that see themselves in both directions, and nothing else (one bit per item of Cornstarch's bit field) or also what
lies before them, each for itself or those side by side together (Gemma 3); or all before the first target sees itself
in both directions (PaliGemma). Text always sees all that lies before it."""


def lane_mask(samples: Sequence[SampleMeta], kind: str = "causal") -> Mask:
    """What an LLM sees of a lane whose samples lie one behind the other: each token of its own sample, as `kind`
    says."""
    return packed(MASKS[kind](sample) for sample in samples)


def media_mask(sizes: Sequence[int]) -> Mask:
    """What an encoder sees of media items that lie one behind the other: each token all of its own item."""
    return packed(text_with_instances(size, [(0, size)]) for size in sizes if size)


def share_media(module: ModuleSpec, samples: Sequence[SampleMeta]) -> tuple[LaneTokens, Mask]:
    """The tokens of the media of one lane in one microbatch of an encoder whose ranks share them, and what they see of
    each other. No cut along `cp` splits a row. `samples` are expanded."""
    unit, ranks = module.tokens_per_row, module.mesh.axis_size("cp")
    mask = media_mask([unit * item.rows for s in samples for item in s.media if item.name == module.media])
    starts = tuple(itertools.accumulate((unit * s.rows.get(module.name, 0) for s in samples), initial=0))
    block = unit * max(1, min(BLOCK, starts[-1] // (4 * ranks)) // unit)
    shares = assign(mask, ranks, policy=module.assignment, block=block)
    return LaneTokens(starts[:-1], starts[-1], shares, _parts(module)), mask


def share_tokens(module: ModuleSpec, samples: Sequence[SampleMeta]) -> tuple[LaneTokens, Mask | None]:
    """The tokens of one lane in one microbatch of `module`, and what they see of each other where they are packed.
    `samples` are expanded."""
    if module.tokens_per_row:
        return share_media(module, samples)
    lengths = [sample.tokens for sample in samples]
    if not module.packed:
        width = max(lengths, default=1)
        total = len(samples) * width
        return LaneTokens(tuple(i * width for i in range(len(samples))), total, (((0, total),),), _parts(module)), None
    starts = tuple(itertools.accumulate(lengths, initial=0))
    ranks = module.mesh.axis_size("cp")
    mask = lane_mask(samples, module.attention_mask)
    # Few tokens are cut finely enough that every rank gets some: a kernel of whole blocks would not matter there.
    block = max(1, min(BLOCK, starts[-1] // (4 * ranks)))
    shares = assign(mask, ranks, policy=module.assignment, block=block)
    return LaneTokens(starts[:-1], starts[-1], shares, _parts(module)), mask


def _parts(module: ModuleSpec) -> int:
    return module.mesh.axis_size("tp") if "tp" in module.token_axes else 1
