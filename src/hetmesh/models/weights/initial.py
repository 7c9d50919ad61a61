"""A parameter's initial values: the operations that initialise it, replayed on blocks of its rows.

Each block has its own generator, seeded by the recipe's seed, the module, the parameter and the block. A rank that
needs some rows draws the blocks that contain them, in full width, and gets the same values in any layout. Draws are
made on the CPU, whatever device they are for: a GPU's generator would give other weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetmesh._torch_compat import seeded_generator
from hetmesh.errors import RecipeError

BLOCK = 1 << 18
"""Elements of a block, which has whole rows and at least one. Changing it changes the drawn weights."""


@dataclass(eq=False)
class Identity:
    """What seeds the draws of a parameter, and of what is copied from it.

    Attributes:
        place: `seed:module`.
        name: the first FQN of the parameter in its module, or a number if it is not in the module.
    """

    place: str
    name: str
    draws: int = 0

    def seed(self, number: int, block: int) -> int:
        """The seed of a block in random operation `number`: 128 bits. With 32 bits, one model in ten would have two
        equal seeds among the 31,000 blocks of 8 billion parameters."""
        text = f"{self.place}:{self.name}:{number}:{block}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


@dataclass(frozen=True)
class Elements:
    """A part of a contiguous tensor, by size, stride and offset as for `torch.as_strided`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Elements:
        """The part of its storage that `tensor` shows, without dims of size 1."""
        dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
        return cls(tuple(n for n, _ in dims), tuple(step for _, step in dims), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def is_run(self) -> bool:
        """Whether its elements are adjacent."""
        return _run_length(zip(reversed(self.stride), reversed(self.size), strict=True)) is not None

    def covers(self, numel: int) -> bool:
        """Whether it has every element of a tensor of `numel`, each once."""
        return self.offset == 0 and _run_length(sorted(zip(self.stride, self.size, strict=True))) == numel

    def row_dim(self, width: int) -> int | None:
        """The dim that runs over rows of `width` elements while all others stay inside a row; -1 if the part lies in
        one row; None if there is no such dim."""
        over = [dim for dim, step in enumerate(self.stride) if step % width == 0]
        if len(over) > 1:
            return None
        inside = sum(
            (n - 1) * step for dim, (n, step) in enumerate(zip(self.size, self.stride, strict=True)) if dim not in over
        )
        if self.offset % width + inside >= width:
            return None
        return over[0] if over else -1

    def can_be_cut(self, width: int) -> bool:
        """Whether `within` works for it."""
        return self.numel == 0 or self.row_dim(width) is not None or self.is_run

    def within(self, width: int, start: int, stop: int) -> tuple[Elements, Callable[[Tensor], Tensor]] | None:
        """The part of it in rows [start, stop) of `width` elements, with offsets relative to row `start`, and a
        function that cuts a tensor of shape `size` alike; None if nothing lies there."""
        if self.numel == 0:
            return None
        dim, first = self.row_dim(width), self.offset // width
        if dim == -1:
            part = Elements(self.size, self.stride, self.offset - start * width)
            return (part, lambda value: value) if start <= first < stop else None
        if dim is not None:
            step = self.stride[dim] // width
            low, high = -(-max(start - first, 0) // step), min(-(-max(stop - first, 0) // step), self.size[dim])
            if low >= high:
                return None
            size = (*self.size[:dim], high - low, *self.size[dim + 1 :])
            part = Elements(size, self.stride, self.offset + low * self.stride[dim] - start * width)
            return part, lambda value: value.narrow(dim, low, high - low)
        low = max(self.offset, start * width)
        high = min(self.offset + self.numel, stop * width)
        if low >= high:
            return None
        part = Elements((high - low,), (1,), low - start * width)
        return part, lambda value: value.reshape(-1)[low - self.offset : high - self.offset]


def _run_length(dims: Iterable[tuple[int, int]]) -> int | None:
    """The elements of dims `(stride, size)`, innermost first, that lie one after another; None if there are gaps."""
    length = 1
    for step, n in dims:
        if step != length:
            return None
        length *= n
    return length


@dataclass(frozen=True, eq=False)
class Operation:
    """One in-place operation on a part of a parameter.

    Attributes:
        apply: called with the part, the arguments and, if it draws, `generator`.
        draws: what seeds the draw, and its number; None if nothing is random.
    """

    apply: Callable[..., Any]
    part: Elements
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    draws: tuple[Identity, int] | None = None

    def on(self, rows: Tensor, width: int, block: int, start: int) -> None:
        """Apply it to `rows` of block `block`, which begins at row `start`."""
        cut = self.part.within(width, start, start + len(rows))
        if cut is None:
            return
        part, same = cut
        target = rows.as_strided(part.size, part.stride, part.offset)
        arguments = [same(a.expand(self.part.size)) if isinstance(a, Tensor) and a.dim() else a for a in self.arguments]
        keywords = dict(self.keywords)
        if self.draws is not None:
            identity, number = self.draws
            keywords["generator"] = seeded_generator(identity.seed(number, block))
        self.apply(target, *arguments, **keywords)


@dataclass(frozen=True, eq=False)
class Initial:
    """The initial values of a parameter. Indexing with slices (without steps) draws the blocks needed. `shape`,
    `dtype`: of the drawn values; the parameter may have another dtype."""

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Operation, ...]

    @classmethod
    def of_value(cls, where: str, value: Tensor) -> Initial:
        """The initial values `value`, which is held in full."""
        step = Operation(torch.Tensor.copy_, Elements.of(torch.empty(value.shape, device="meta")), (value.squeeze(),))
        return cls(where, tuple(value.shape), value.dtype, (step,))

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return max(math.prod(self.shape[1:]), 1)

    @property
    def rows_per_block(self) -> int:
        return max(BLOCK // self.width, 1)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """First row and values `[rows, *shape[1:]]` of every block that contains some of rows [start, stop)."""
        for block in range(start // self.rows_per_block, -(-stop // self.rows_per_block)):
            yield block * self.rows_per_block, self._block(block)

    def _block(self, block: int) -> Tensor:
        start = block * self.rows_per_block
        rows = min(self.rows_per_block, self.rows - start)
        known = bool(self.steps) and self.steps[0].part.covers(self.rows * self.width)
        empty = torch.empty(rows, *self.shape[1:], dtype=self.dtype)
        values = empty if known or not self.dtype.is_floating_point else empty.fill_(math.nan)
        with torch.no_grad():
            for step in self.steps:
                step.on(values, self.width, block, start)
        if not known and (not self.dtype.is_floating_point or values.isnan().any()):
            raise RecipeError(
                f"{self.where}: nothing initialises some of its elements; they would hold whatever was in memory, "
                "different on every rank"
            )
        return values

    def __getitem__(self, index: Any) -> Tensor:
        index = () if index is ... else index if isinstance(index, tuple) else (index,)
        whole = tuple(slice(0, n) for n in self.shape[len(index) :])
        at = tuple(slice(*part.indices(n)[:2]) for part, n in zip((*index, *whole), self.shape, strict=True))
        first, last = (at[0].start, at[0].stop) if at else (0, 1)
        parts = []
        for start, values in self.blocks(first, last):
            rows = values[max(first - start, 0) : last - start]
            parts.append(rows[(slice(None), *at[1:])] if at else rows[0])
        if not parts:
            return torch.empty([piece.stop - piece.start for piece in at], dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
