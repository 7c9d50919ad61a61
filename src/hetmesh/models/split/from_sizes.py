"""What a directory's processor makes of a text and of media of which only sizes are known: the tokens of metadata.

It is given meta tensors, which torchvision resizes and cuts without computing anything. Whether it then makes the same
is tried on a few sizes; where it does not, it gets zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetmesh._processes import one_torch_thread
from hetmesh.models.split.made import Made, Unit, as_tensor
from hetmesh.models.split.processor import EXAMPLES, Clip, Processor, position_keys


class FromSizes:
    """Of one processor."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self._found = cache(self._found_anew)

    @one_torch_thread()
    def __call__(self, text: str, sizes: Mapping[str, Sequence[Any]], answer: str | None = None) -> Made:
        """As `Processor.__call__` with `blanks`; of units there is what positions depend on."""
        runs_as_one = bool(sizes) and answer is None and self.runs_as_one(sizes)
        if sizes and answer is None and all(self.takes_shapes(kind) for kind in sizes):
            with suppress(Exception):  # of zeros it may make something, or says what is wrong with the sizes
                return self._made(text, sizes, runs_as_one)
        return self.processor(text, {}, answer, sizes, runs_as_one)

    def takes_shapes(self, kind: str) -> bool:
        """Whether the processor makes the same of meta tensors, for a few sizes, as of zeros."""
        return self._found(kind)[0]

    def runs_as_one(self, kinds: Collection[str]) -> bool:
        """Whether the processor makes the same of media of these kinds, for a few sizes, when of runs of row tokens one
        is tokenised."""
        return all(self._found(kind)[1] for kind in kinds)

    @one_torch_thread()
    def _found_anew(self, kind: str) -> tuple[bool, bool]:
        tried, token = [], self.processor.written(kind)
        for sizes in (*zip(EXAMPLES[kind], strict=False), EXAMPLES[kind][:2]):
            text = "\na, b\n" + f"{token} c." * len(sizes) + " d \n"
            with suppress(Exception):  # some take one item of a kind
                tried.append((text, {kind: sizes}, self.processor(text, {}, blanks={kind: sizes})))

        def makes_the_same(make: Callable[..., Made], keys: Sequence[str]) -> bool:
            with suppress(Exception), _without_warnings():  # which would be about meta tensors
                return bool(tried) and all(_is_like(make(text, sizes), made, keys) for text, sizes, made in tried)
            return False

        def short(text: str, sizes: Mapping[str, Sequence[Any]]) -> Made:
            return self.processor(text, {}, blanks=sizes, runs_as_one=True)

        shapes = kind != "audio" and makes_the_same(self._made, position_keys(kind))
        return shapes, makes_the_same(short, self.processor.keys[kind])

    def _made(self, text: str, sizes: Mapping[str, Sequence[Any]], runs_as_one: bool = False) -> Made:
        items = {kind: [self._without_contents(kind, size) for size in each] for kind, each in sizes.items()}
        with _ShapesOnly():
            made = self.processor(text, items, runs_as_one=runs_as_one)
        return replace(made, units={kind: _of_positions(kind, unit) for kind, unit in made.units.items()})

    def _without_contents(self, kind: str, size: Any) -> Any:
        """Meta tensors: an image of that size, `[3, height, width]`, or such a clip, `[frames, 3, height, width]`."""
        if kind == "image":
            return torch.empty((3, *size), dtype=torch.uint8, device="meta")
        clip = size if isinstance(size, Clip) else self.processor.blank(kind, size)
        frames, height, width, _ = clip.frames.shape
        pixels = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        return replace(clip, frames=pixels)


def _of_positions(kind: str, made: Mapping[str, Any]) -> Unit:
    """What positions depend on."""
    unit = {key: as_tensor(made[key]) for key in position_keys(kind) if key in made}
    if any(value.is_meta for value in unit.values()):
        raise ValueError("the grid has no numbers")
    return unit


def _is_like(composed: Made, made: Made, keys: Sequence[str]) -> bool:
    mine, its = ((m.given, m.expanded, m.ids.tolist(), m.offsets.tolist(), m.places) for m in (composed, made))
    pairs = [[unit[key] for unit in m.units.values() for key in keys if key in unit] for m in (composed, made)]
    return mine == its and len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))


@contextmanager
def _without_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _ShapesOnly(TorchFunctionMode):
    """Meta tensors become arrays of zeros where arrays are asked for. What changes numbers in place, and stacks, have
    known shapes, which torch finds in Python, in 0.2 to 5 ms."""

    IN_PLACE = frozenset([Tensor.clamp_, Tensor.round_, Tensor.sub_, Tensor.mul_, Tensor.div_])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if function is Tensor.cpu or function in self.IN_PLACE:
                return args[0]
            if function is Tensor.numpy:
                return np.broadcast_to(np.float32(0), args[0].shape)
        if function is torch.stack and len(args) == 1 and len({(t.shape, t.device.type) for t in args[0]}) == 1:
            return args[0][0].new_empty((len(args[0]), *args[0][0].shape)) if args[0][0].is_meta else function(*args)
        return function(*args, **(kwargs or {}))
