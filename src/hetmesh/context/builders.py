"""Masks of samples: text with images, packed and prefix documents, blockwise causal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetmesh.context.masks import Mask, Segment, join
from hetmesh.context.rule import TEXT, Rule, Sees
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
    text_sees: Sees = Sees.INSTANCES,
    shared: bool = False,
) -> Mask:
    """One document: causal text with bidirectional instances in it.

    Args:
        length: tokens, instances included.
        instances: `[start, stop)` of each image or recording, ascending and disjoint.
        instances_see: what instances see beside themselves; `Sees.TEXT` for the text that precedes them.
        text_sees: what text sees beside the text before it.
        shared: all of them are one instance, as with one bit for all vision tokens.

    Raises:
        LayoutError: instances overlap or leave the sequence.
    """
    segments: list[Segment] = []
    at = 0
    for number, (start, stop) in enumerate(instances):
        if at < start:
            segments.append(Segment(0, TEXT, at, start, Rule.CAUSAL, text_sees))
        segments.append(Segment(0, 1 if shared else number + 1, start, stop, Rule.BIDIRECTIONAL, instances_see))
        at = stop
    if at < length:
        segments.append(Segment(0, TEXT, at, length, Rule.CAUSAL, text_sees))
    return Mask(tuple(segments), length)


def of_sample(sample: SampleMeta, *, instances_see: Sees = Sees.NOTHING) -> Mask:
    """The mask of one expanded sample: its media items are instances, whatever their kind.

    Raises:
        SampleError: media items overlap or leave the sample.
    """
    spans: Intervals = tuple((item.position, item.position + item.rows) for item in sample.media)
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or not all(0 <= edge <= sample.tokens for edge in edges):
        raise SampleError(
            f"sample {sample.id!r}: media must be in order, disjoint and within its {sample.tokens} tokens, got "
            f"{list(spans)}"
        )
    return text_with_instances(sample.tokens, [s for s in spans if s[0] < s[1]], instances_see=instances_see)


def runs_of_sample(sample: SampleMeta) -> Mask:
    """`of_sample` with items that lie side by side as one instance, and instances that see all that lies before them:
    as transformers has it for Gemma 3."""
    runs: list[tuple[int, int]] = []
    for start, stop in ((item.position, item.position + item.rows) for item in sample.media if item.rows):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return text_with_instances(sample.tokens, runs, instances_see=Sees.DOCUMENT)


def prefix_of_sample(sample: SampleMeta) -> Mask:
    """All before the first target sees itself in both directions, the rest is causal (PaliGemma, arXiv 2407.07726)."""
    first = min((start for start, _ in sample.targets), default=sample.tokens)
    return text_with_instances(sample.tokens, [(0, first)] if first else [])


def packed(documents: Iterable[Mask]) -> Mask:
    """Documents in one row that do not see each other."""
    return join(documents)


def prefix(documents: Iterable[Mask]) -> Mask:
    """Documents in one row of which every token sees all earlier documents, beside what it saw before."""
    joined = join(documents)
    segments = (replace(s, sees=s.sees | Sees.EARLIER_DOCUMENTS) for s in joined.segments)
    return Mask(tuple(segments), joined.length)


def padded(mask: Mask, length: int) -> Mask:
    """The same with padding up to `length`."""
    return Mask(mask.segments, length)


def blockwise_causal(lengths: Sequence[int], *, rule: Rule = Rule.CAUSAL) -> Mask:
    """Blocks that see themselves, by `rule`; the last one sees everything before it too (few-shot examples, then the
    question: FlashMask, arXiv 2410.01359).
    """
    segments, at = [], 0
    for document, length in enumerate(lengths):
        sees = Sees.EARLIER_DOCUMENTS if document == len(lengths) - 1 else Sees.NOTHING
        segments.append(Segment(document, TEXT, at, at + length, rule, sees))
        at += length
    return Mask(tuple(segments), at)
