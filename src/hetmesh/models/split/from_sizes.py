"""What a directory's processor makes of a text and of media of which only sizes are known: the tokens of metadata.

What it puts in the place of media is remembered by the sizes of all that a sample has of a kind, so a sample of sizes
that were seen costs its text alone. For sizes that were not, media are meta tensors, which torchvision resizes and cuts
without computing anything. The text is then put together as `ProcessorMixin.__call__` does, and of each run of row
tokens one is tokenised. Whether that is what a processor makes is tried on a few sizes; where it is not, the whole
processor is given meta tensors, or zeros.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetmesh._processes import one_torch_thread
from hetmesh.models.split.made import Made, Unit, as_tensor, place_of
from hetmesh.models.split.processor import ARGUMENTS, EXAMPLES, METHODS, Clip, Processor, position_keys

MOST_KNOWN = 1024
"""Of how many samples' sizes it is remembered what is made of them; the texts of one may take 50 kB."""


class Way(enum.Enum):
    """What a processor is given instead of media."""

    META = "meta tensors"
    ZEROS = "zeros"
    WHOLE = "meta tensors, and the text with them"


@dataclass(frozen=True)
class _Blank:
    """A size, or a clip without contents, and what makes it equal to another."""

    key: Any
    media: Any = field(compare=False)


class FromSizes:
    """Of one processor."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self._text_arguments: dict[str, Any] = {}
        self._found = cache(self._found_anew)
        self._replaced = lru_cache(MOST_KNOWN)(self._replaced_anew)

    @one_torch_thread()
    def __call__(self, text: str, sizes: Mapping[str, Sequence[Any]], answer: str | None = None) -> Made:
        """As `Processor.__call__` with `blanks`; of units there is what positions depend on."""
        ways = {kind: self.way(kind) for kind in sizes}
        if sizes and answer is None and None not in ways.values():
            written = {kind: self.processor.written(kind) for kind in self.processor.kinds}
            if all(text.count(token) == len(sizes.get(kind, ())) for kind, token in written.items()):
                with suppress(Exception):  # of zeros it may make something, or says what is wrong with the sizes
                    return self._made(text, sizes, ways)
        return self.processor(text, {}, answer, sizes)

    def way(self, kind: str) -> Way | None:
        """The first in which the same comes out, for a few sizes, as when the processor gets zeros; None: none."""
        return self._found(kind)[0]

    def runs_as_one(self, kinds: Collection[str]) -> bool:
        """Whether the processor makes the same of media of these kinds, for a few sizes, when of runs of row tokens one
        is tokenised."""
        return all(self._found(kind)[1] for kind in kinds)

    @one_torch_thread()
    def _found_anew(self, kind: str) -> tuple[Way | None, bool]:
        tried, token = [], self.processor.written(kind)
        for sizes in (*zip(EXAMPLES[kind], strict=False), EXAMPLES[kind][:2]):
            text = "\na, b\n" + f"{token} c." * len(sizes) + " d \n"
            with suppress(Exception):  # some take one item of a kind
                tried.append((text, {kind: sizes}, self.processor(text, {}, blanks={kind: sizes})))
        self._text_arguments = self.processor.text_arguments | {"return_tensors": None}

        def are_like(found: Sequence[Made], keys: Sequence[str]) -> bool:
            return all(_is_like(mine, made, keys) for mine, (*_, made) in zip(found, tried, strict=True))

        for way in (Way if kind != "audio" else (Way.ZEROS,)) if tried else ():
            with suppress(Exception), _without_warnings():  # which would be about meta tensors
                if not are_like([self._made(t, sizes, {kind: way}) for t, sizes, _ in tried], position_keys(kind)):
                    continue
                with suppress(Exception):  # some ask for more of a tokenizer's output than arrays
                    short = [self.processor(text, {}, blanks=sizes, runs_as_one=True) for text, sizes, _ in tried]
                    return way, are_like(short, self.processor.keys(kind))
                return way, False
        return None, False

    def _made(self, text: str, sizes: Mapping[str, Sequence[Any]], ways: Mapping[str, Any]) -> Made:
        if Way.WHOLE in ways.values():
            items = {kind: self._items(kind, [*map(_blank, each)], ways[kind]) for kind, each in sizes.items()}
            with _ShapesOnly():
                made = self.processor(text, items)
            return replace(made, units={kind: _of_positions(kind, unit) for kind, unit in made.units.items()})
        replaced = {kind: self._replaced(kind, (*map(_blank, each),), ways[kind]) for kind, each in sizes.items()}
        texts = [list(replaced[kind][0]) if kind in replaced else [] for kind in METHODS]
        (expanded,), (places,) = self.processor.own.get_text_with_replacements([text], *texts)
        arguments = self._text_arguments | self.processor.without_bos(text)
        ids, offsets, _ = self.processor.tokenized(expanded, arguments)
        units = {kind: unit for kind, (_, unit) in replaced.items()}
        return Made(text, expanded, ids, offsets, [*map(place_of, places)], units, [])

    def _replaced_anew(self, kind: str, blanks: tuple[_Blank, ...], way: Way) -> tuple[tuple[str, ...], Unit]:
        """The texts in the places of media, and what positions depend on."""
        media = self._items(kind, blanks, way)
        arguments = self.processor.arguments({kind: [media]})
        given, known = arguments.pop(ARGUMENTS[kind]), self.processor.media_arguments[kind]
        known |= {name: value for name, value in arguments.items() if name in known}
        with _ShapesOnly() if way is Way.META else nullcontext():
            made, texts = getattr(self.processor.own, METHODS[kind])(given, **known)
        return tuple(texts), _of_positions(kind, made)

    def _items(self, kind: str, blanks: Sequence[_Blank], way: Way) -> list[Any]:
        meta = way is not Way.ZEROS
        sized = meta and kind == "image"
        items = [b.media if sized or isinstance(b.media, Clip) else self.processor.blank(kind, b.media) for b in blanks]
        return [*map(_without_contents, items)] if meta else items


def _of_positions(kind: str, made: Mapping[str, Any]) -> Unit:
    """What positions depend on."""
    unit = {key: as_tensor(made[key]) for key in position_keys(kind) if key in made}
    if any(value.is_meta for value in unit.values()):
        raise ValueError("the grid has no numbers")
    return unit


def _blank(size: Any) -> _Blank:
    return _Blank((size.frames.shape, repr(size.metadata)) if isinstance(size, Clip) else tuple(size), size)


def _without_contents(item: Any) -> Any:
    """An image of that size, `[3, height, width]`, or that clip, `[frames, 3, height, width]`, as meta tensors."""
    if isinstance(item, Clip):
        frames, height, width, _ = item.frames.shape
        pixels = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        return replace(item, frames=pixels)  # type: ignore[arg-type]
    return torch.empty((3, *item), dtype=torch.uint8, device="meta")


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
