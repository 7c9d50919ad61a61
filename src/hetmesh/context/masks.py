"""Masks of samples, a recipe's `attention_mask` among them: a new one is a function here, entered in `MASKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from hetmesh.context.rule import TEXT, Rule, Sees
from hetmesh.context.segments import Mask, Segment, join
from hetmesh.errors import SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.layout import Intervals


def causal(length: int) -> Mask:
    """Plain text."""
    return text_with_instances(length, ())


def text_with_instances(
    length: int,
    instances: Sequence[tuple[int, int]],
    *,
    instances_see: Sees = Sees.NOTHING,
    numbers: Sequence[int] = (),
) -> Mask:
    """One document: causal text with bidirectional instances in it.

    Args:
        length: tokens, instances included.
        instances: `[start, stop)` of each image or recording, or of its parts, ascending and disjoint.
        instances_see: what instances see beside themselves; `Sees.TEXT` for the text that precedes them.
        numbers: above 0, equal for the parts of one instance; by default each is one of its own.

    Raises:
        LayoutError: instances overlap or leave the sequence.
    """
    segments: list[Segment] = []
    at = 0
    for number, (start, stop) in zip(numbers or range(1, len(instances) + 1), instances, strict=True):
        if at < start:
            segments.append(Segment(0, TEXT, at, start, Rule.CAUSAL, Sees.INSTANCES))
        segments.append(Segment(0, number, start, stop, Rule.BIDIRECTIONAL, instances_see))
        at = stop
    if at < length:
        segments.append(Segment(0, TEXT, at, length, Rule.CAUSAL, Sees.INSTANCES))
    return Mask(tuple(segments), length)


def of_sample(sample: SampleMeta, *, instances_see: Sees = Sees.NOTHING) -> Mask:
    """The mask of one expanded sample: its media items are instances, whatever their kind. Raises SampleError if media
    items overlap or leave the sample."""
    parts = [(number, at, at + rows) for number, item in enumerate(sample.media, 1) for at, rows in item.spans]
    spans: Intervals = tuple((start, stop) for _, start, stop in parts)
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or not all(0 <= edge <= sample.tokens for edge in edges):
        raise SampleError(
            f"sample {sample.id!r}: media must be in order, disjoint and within its {sample.tokens} tokens, got "
            f"{list(spans)}"
        )
    filled = [part for part in parts if part[1] < part[2]]
    numbers = [number for number, _, _ in filled]
    return text_with_instances(
        sample.tokens, [(start, stop) for _, start, stop in filled], instances_see=instances_see, numbers=numbers
    )


def runs_of_sample(sample: SampleMeta) -> Mask:
    """Rows that lie side by side are an instance, of whatever items but recordings, and instances see all that lies
    before them: as transformers has it for Gemma 3."""
    runs: list[tuple[int, int]] = []
    for start, rows in (span for item in sample.media if item.rows and item.name != "audio" for span in item.spans):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + rows)
        else:
            runs.append((start, start + rows))
    return text_with_instances(sample.tokens, runs, instances_see=Sees.DOCUMENT)


def prefix_of_sample(sample: SampleMeta) -> Mask:
    """All before the first target sees itself in both directions, the rest is causal (PaliGemma, arXiv 2407.07726)."""
    first = min((start for start, _ in sample.targets), default=sample.tokens)
    return text_with_instances(sample.tokens, [(0, first)] if first else [])


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
    """What an LLM sees of a lane whose samples lie one after another: each token of its own sample, as `kind`
    says."""
    return join(MASKS[kind](sample) for sample in samples)


def media_mask(sizes: Sequence[int]) -> Mask:
    """What an encoder sees of media items that lie one after another: each token all of its own item."""
    return join(text_with_instances(size, [(0, size)]) for size in sizes if size)
