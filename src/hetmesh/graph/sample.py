"""What is known of a sample before its payload is loaded: lengths, media shapes, target spans and row counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

UNIT_ROWS, UNIT_ITEMS = " before the cut", " items before the cut"
"""Behind a module's name in `SampleMeta.rows`: what it computes of samples whose media `seq_len` cut in part, since the
unit that a processor made of them stays whole."""

LOSS_UNITS = " units of loss"
"""Behind a module's name in `SampleMeta.rows`: what its loss counts of a sample (`LossSpec.unit`), where not tokens."""


def kinds_of(media: str) -> tuple[str, ...]:
    """The kinds of media that a module reads, or whose placeholders its rows replace: `"image+video"` are two."""
    return tuple(media.split("+"))


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, clip or recording of a sample.

    Attributes:
        name: the kind of media, which is also the placeholder name (`"image"`).
        shape: shape of the raw tensor, e.g. `(channels, height, width)`; may be `()` for a placed item.
        position: index of its first placeholder token in the token sequence.
        rows: placeholder tokens it takes in the token sequence; 1 as a source gives it, and the rows that reach the
            LLM for this item once the sample was expanded (`hetmesh.data.expand`).
        size: what its rows depend on beside the shape, where the model says so. Of a placed item what positions depend
            on: `(frames, height, width)` of the grid of its rows, and where they depend on time, too, the picoseconds
            of a frame of it.
        runs: of a placed item, one whose source has given it its rows, as a model's processor does: `(position, rows)`
            of each stretch of placeholder tokens, ascending, with text between them (row breaks, timestamps). Empty:
            its placeholders lie at `position`. No part of `repr`, of which a place in the data keeps checksums.
    """

    name: str
    shape: tuple[int, ...]
    position: int
    rows: int = 1
    size: tuple[int, ...] = ()
    runs: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`(position, rows)` of each stretch of its placeholder tokens."""
        return self.runs or ((self.position, self.rows),)

    @property
    def stop(self) -> int:
        """The position after its last placeholder token."""
        return sum(self.spans[-1])

    @property
    def extent(self) -> tuple[int, ...]:
        """All that its rows depend on: its shape, then its size."""
        return self.shape + self.size


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """The plannable facts of one sample. Cheap to make, equal on every rank, no tensors.

    Attributes:
        id: unique within the data source; every error about the sample names it.
        tokens: length of the token sequence, placeholders included.
        media: the sample's media items in the order of their positions.
        targets: `[start, stop)` spans of token positions whose token is predicted and carries loss (never position 0).
        rows: rows that each module emits for this sample, by module name, and see `UNIT_ROWS`; empty until expanded.
        position_ids: set by adapters whose position ids are not `0..tokens-1` (multimodal RoPE); None otherwise.
    """

    id: str
    tokens: int
    media: tuple[MediaItem, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    position_ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that carry loss."""
        return sum(stop - start for start, stop in self.targets)

    def num_items(self, name: str) -> int:
        return sum(item.name in kinds_of(name) for item in self.media)
