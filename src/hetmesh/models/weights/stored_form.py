"""How a checkpoint stores a tensor of a module: as one tensor, or as blocks that are separate tensors.

Checkpoints on the Hub store the experts of a layer one by one, gate and up separately; a module has all of them in one
parameter. These are pure values: what a rank reads of which stored tensors follows from its share of the parameter, and
what an export writes follows from the same blocks, in the other direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetmesh.layout.intervals import Interval, Intervals

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredBlock:
    """A block of a module's tensor that lies in one stored tensor.

    Attributes:
        place: per dim of the module's tensor, the interval that the block takes.
        dims: per dim of the module's tensor, the dim of the stored one that runs along it; None: it has none, and the
            block is 1 long there.
        begin: per dim of the stored tensor, where the block begins in it.
    """

    stored: str
    place: tuple[Interval, ...]
    dims: tuple[int | None, ...]
    begin: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.place)

    def slices(self, place: Sequence[Interval]) -> tuple[slice, ...]:
        """The slices of the stored tensor that hold the part `place` of `self.place`."""
        found = [slice(0)] * len(self.begin)
        for (start, stop), (base, _), dim in zip(place, self.place, self.dims, strict=True):
            if dim is not None:
                shift = self.begin[dim] - base
                found[dim] = slice(start + shift, stop + shift)
        return tuple(found)

    def to_module(self, value: Tensor) -> Tensor:
        """A value read from the stored tensor, with the dims of the module's tensor."""
        value = value.permute([dim for dim in self.dims if dim is not None])
        for i, dim in enumerate(self.dims):
            if dim is None:
                value = value.unsqueeze(i)
        return value

    def to_file(self, value: Tensor) -> Tensor:
        """A part of the module's tensor inside the block, with the stored one's dims: the inverse of `to_module`."""
        present = [i for i, dim in enumerate(self.dims) if dim is not None]
        value = value.squeeze([i for i, dim in enumerate(self.dims) if dim is None])
        order = sorted(range(len(present)), key=lambda k: self.dims[present[k]] or 0)
        return value.permute(order)


@dataclass(frozen=True)
class StoredForm:
    """A tensor of a module in a checkpoint: its shape, and the blocks that make it up."""

    shape: Shape
    blocks: tuple[StoredBlock, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is one stored tensor, unchanged."""
        return len(self.blocks) == 1 and self == whole(self.blocks[0].stored, self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors, in the order of their blocks."""
        return tuple(dict.fromkeys(block.stored for block in self.blocks))


def whole(name: str, shape: Sequence[int]) -> StoredForm:
    """The form of a tensor that is stored unchanged."""
    shape = tuple(shape)
    block = StoredBlock(name, tuple((0, size) for size in shape), tuple(range(len(shape))), (0,) * len(shape))
    return StoredForm(shape, (block,))


def stacked(forms: Sequence[StoredForm], dim: int) -> StoredForm:
    """Tensors along a new dim, as `torch.stack`. Raises ValueError if their shapes differ."""
    if len({form.shape for form in forms}) != 1:
        raise ValueError("tensors of several shapes cannot be stacked")
    blocks = [
        StoredBlock(b.stored, _with(b.place, dim, (i, i + 1)), _with(b.dims, dim, None), b.begin)
        for i, form in enumerate(forms)
        for b in form.blocks
    ]
    return StoredForm(_with(forms[0].shape, dim, len(forms)), tuple(blocks))


def joined(forms: Sequence[StoredForm], dim: int) -> StoredForm:
    """Tensors one after another along a dim, as `torch.cat`. Raises ValueError if their other dims differ."""
    if len({_put(form.shape, dim, 0) for form in forms}) != 1 or dim >= len(forms[0].shape):
        raise ValueError("tensors whose other dims differ cannot be joined")
    blocks, offset = [], 0
    for form in forms:
        blocks += [_moved(b, dim, offset) for b in form.blocks]
        offset += form.shape[dim]
    return StoredForm(_put(forms[0].shape, dim, offset), tuple(blocks))


def exchanged(form: StoredForm, a: int, b: int) -> StoredForm:
    """With two dims exchanged, as `torch.transpose`."""
    order = list(range(len(form.shape)))
    order[a], order[b] = b, a
    blocks = [
        StoredBlock(b.stored, tuple(b.place[i] for i in order), tuple(b.dims[i] for i in order), b.begin)
        for b in form.blocks
    ]
    return StoredForm(tuple(form.shape[i] for i in order), tuple(blocks))


def cut(form: StoredForm, dim: int, start: int, stop: int) -> StoredForm:
    """A part along a dim, as `torch.narrow`."""
    blocks = []
    for b in form.blocks:
        low, high = max(b.place[dim][0], start), min(b.place[dim][1], stop)
        if low < high:
            inside = _put(b.place, dim, (low, high))
            begin = tuple(piece.start for piece in b.slices(inside))
            blocks.append(_moved(StoredBlock(b.stored, inside, b.dims, begin), dim, -start))
    return StoredForm(_put(form.shape, dim, stop - start), tuple(blocks))


def in_parts(form: StoredForm, dim: int, count: int) -> StoredForm:
    """With a dim split into two, the first of size `count`: `unflatten(dim, (count, -1))`."""
    size, rest = divmod(form.shape[dim], count)
    if rest:
        raise ValueError(f"a dim of {form.shape[dim]} has no {count} equal parts")
    return stacked([cut(form, dim, i * size, (i + 1) * size) for i in range(count)], dim)


def refitted(form: StoredForm, shape: Shape) -> StoredForm:
    """`form` in another `shape` of the same memory: the same shape, or one with a dim split into two."""
    for dim in range(len(form.shape)) if form.shape != shape else ():
        count = shape[dim] if dim < len(shape) else 0
        if count and form.shape[dim] % count == 0 and in_parts(form, dim, count).shape == shape:
            return in_parts(form, dim, count)
    if form.shape != shape:
        raise ValueError(f"values of {list(form.shape)} do not lie in {list(shape)} in the same order")
    return form


def _moved(block: StoredBlock, dim: int, by: int) -> StoredBlock:
    start, stop = block.place[dim]
    return StoredBlock(block.stored, _put(block.place, dim, (start + by, stop + by)), block.dims, block.begin)


def _put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _with(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i:])


@dataclass(frozen=True)
class Read:
    """One read: slices `source` of the stored tensor of `block` go to slices `target` of the share that is filled."""

    block: StoredBlock
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def reads(form: StoredForm, share: Sequence[Intervals]) -> Iterator[Read]:
    """The reads that fill a share of a tensor: nothing outside it, and nothing twice. `share`: per dim the ordered
    intervals of the tensor whose concatenation is the share's extent."""
    for piece in itertools.product(*map(with_offsets, share)):
        for block in form.blocks:
            inside = [
                (max(start, low), min(stop, high))
                for (_, start, stop), (low, high) in zip(piece, block.place, strict=True)
            ]
            if all(low < high for low, high in inside):
                target = tuple(
                    slice(offset + low - start, offset + high - start)
                    for (offset, start, _), (low, high) in zip(piece, inside, strict=True)
                )
                yield Read(block, block.slices(inside), target)


def with_offsets(intervals: Intervals, rows: int | None = None) -> Iterator[tuple[int, int, int]]:
    """`(local start, global start, global stop)` of each interval, cut at multiples of `rows` if given."""
    offset = 0
    for start, stop in intervals:
        while start < stop:
            end = stop if rows is None else min(stop, start - start % rows + rows)
            yield offset, start, end
            offset += end - start
            start = end


def by_stored(forms: Mapping[str, StoredForm]) -> dict[str, list[tuple[str, StoredBlock]]]:
    """Per stored tensor its blocks, each with the name in `forms` of the module's tensor that has its values."""
    found: dict[str, list[tuple[str, StoredBlock]]] = {}
    for name, form in forms.items():
        for block in form.blocks:
            found.setdefault(block.stored, []).append((name, block))
    return found


def stored_shape(blocks: Sequence[tuple[str, StoredBlock]]) -> Shape | None:
    """The shape of the stored tensor that `blocks` make up; None if they leave something out."""
    ends = [tuple(piece.stop for piece in block.slices(block.place)) for _, block in blocks]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    return shape if math.prod(shape) == sum(block.numel for _, block in blocks) else None


def renumbered(name: str, old: int, new: int) -> str:
    """The name of an item of a list, from that of another one."""
    before, found, after = name.rpartition(f".{old}.")
    return f"{before}.{new}.{after}" if found else name
