"""How the tensors that a processor makes of single samples become those of a batch: one rule per name, measured.

Seen in some fifty families: joined along a dim (nearly always the first), padded to the largest and then joined, side
by side in a list, or joined where indices into another tensor move along. `measure` takes the first rule that makes of
two samples, prepared one by one, what the processor makes of both at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetmesh.errors import RecipeError
from hetmesh.models.collate import joined
from hetmesh.models.split.made import Unit, as_tensor
from hetmesh.models.split.processor import EXAMPLES, Clip, Processor, processor_at
from hetmesh.models.split.whole_model import WholeModel
from hetmesh.recipe.hf_path import PROCESSOR_FILES


@dataclass(frozen=True)
class Cat:
    """Joined along `dim`."""

    dim: int

    def join(self, tensors: Sequence[Tensor], units: Sequence[Unit]) -> Any:
        """The tensor of a batch of those of its samples. `units`: all tensors of each sample."""
        return torch.cat(list(tensors), self.dim) if self.dim else joined(tensors)


@dataclass(frozen=True)
class Pad:
    """Padded with `fill` to the largest, all dims but the first, then joined along that."""

    fill: float

    def join(self, tensors: Sequence[Tensor], units: Sequence[Unit]) -> Any:
        largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        out = tensors[0].new_full((sum(len(tensor) for tensor in tensors), *largest), self.fill)
        start = 0
        for tensor in tensors:
            out[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
            start += len(tensor)
        return out


@dataclass(frozen=True)
class Offset:
    """Joined along the first dim; values from 0 on index rows of `of`, as many as its first `dims` dims say."""

    of: str
    dims: int

    def join(self, tensors: Sequence[Tensor], units: Sequence[Unit]) -> Any:
        moved, start = [], 0
        for tensor, unit in zip(tensors, units, strict=True):
            moved.append(torch.where(tensor >= 0, tensor + start, tensor))
            start += int(torch.Size(unit[self.of].shape[: self.dims]).numel())
        return torch.cat(moved)


@dataclass(frozen=True)
class Listed:
    """Side by side, in a list."""

    def join(self, tensors: Sequence[Tensor], units: Sequence[Unit]) -> Any:
        return list(tensors)


BatchRule = Cat | Pad | Offset | Listed


@dataclass(frozen=True)
class Batching:
    """The rule of each name, for media of one kind.

    Attributes:
        examples: the tensors of items of several sizes; the first is for a batch without items.
        blank_rows: rows that it makes.
        lists: names whose tensors the model takes as lists of numbers.
    """

    rules: Mapping[str, BatchRule]
    examples: tuple[Unit, ...]
    blank_rows: int
    lists: frozenset[str] = frozenset()

    def as_taken(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The same with lists of numbers where the model takes these."""
        return {key: value.tolist() if key in self.lists else value for key, value in tensors.items()}

    def collate(self, units: Sequence[Unit]) -> dict[str, Any]:
        """At least one sample's tensors -> those of all."""
        out = {}
        for key, rule in self.rules.items():
            holders = [unit for unit in units if key in unit]
            if holders:
                out[key] = rule.join([unit[key] for unit in holders], holders)
        return out


def batching_of(whole: WholeModel, media: str) -> tuple[Batching | None, str]:
    """None without a processor of such media, and with one why it cannot be used."""
    path = whole.pretrained.path
    if not any((path / name).is_file() for name in PROCESSOR_FILES):
        return None, ""
    try:
        processor = processor_at(path, str(whole.pretrained))
        if media not in processor.kinds:
            return None, ""
        batching = measure(processor, media)
        item, written = processor.blank(media, EXAMPLES[media][0]), processor.written(media)
        made = [processor(text, {media: [item]}) for text in (written, f"a {written}")]
    except RecipeError as error:
        return None, str(error)
    except Exception as error:  # whatever a processor raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None, f"{processor.key}: {type(processor.own).__name__} does not take a text with {media!r}: {reason}"
    taken = inspect.signature(whole.model.forward).parameters
    lengths = [{key: t.shape == (1, len(m.ids)) for key, t in m.units[media].items()} for m in made]
    per_token = [key for key in lengths[0] if key in taken and all(of.get(key) for of in lengths)]
    if per_token := [key for key in per_token if not hasattr(processor.own, f"create_{key}")]:  # `HfLlmAdapter._types`
        raise RecipeError(
            f"{whole.pretrained}: {whole.model_class.__name__} takes {', '.join(per_token)} of each token, which its "
            "processor makes and hetmesh does not hand to the LLM"
        )
    return batching, ""


def measure(processor: Processor, kind: str) -> Batching:
    """Find the rules for media of one kind, with two samples of other sizes. Raises RecipeError: the processor does not
    take them, or makes of both together what no rule makes of each."""
    items = [random_item(processor.blank(kind, size)) for size in EXAMPLES[kind]]
    pairs, errors = list[tuple[Mapping[str, Any], tuple[Unit, Unit]]](), list[str]()
    for counts in ((items[:1], items[1:]), (items, items[1:2]), (items[:1], items[1:2]), (items[:1], items[2:])):
        if len(pairs) == 2:
            break
        try:
            pairs.append(_pair(processor, kind, counts))
        except Exception as error:  # whatever a processor raises: some take one item a sample, or of equal length
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    if not pairs:
        raise RecipeError(
            f"{processor.key}: {type(processor.own).__name__} does not take two samples of {kind!r}: {errors[-1]}"
        )
    rules = {}
    for key in processor.keys[kind]:
        if seen := [(both[key], units) for both, units in pairs if all(key in held for held in (both, *units))]:
            rules[key] = _rule(key, seen, processor)
    made = [processor(processor.written(kind), {kind: [item]}) for item in items]
    rows, units = int((made[0].ids == processor.row_tokens[kind]).sum()), tuple(each.units[kind] for each in made)
    return Batching(rules, units, rows, frozenset(processor.lists & rules.keys()))


def _pair(
    processor: Processor, kind: str, samples: Sequence[Sequence[Any]]
) -> tuple[Mapping[str, Any], tuple[Unit, Unit]]:
    """What the processor makes of two samples at once, and of each."""
    texts = [processor.written(kind) * len(each) for each in samples]
    one, other = (processor(t, {kind: each}).units[kind] for t, each in zip(texts, samples, strict=True))
    given = {"text": texts, "text_kwargs": {"padding": True}}  # and not recordings to the longest of a batch
    given |= {**processor.options, **processor.arguments({kind: samples})}
    try:
        both = processor.own(return_tensors="pt", **given)
    except ValueError:  # of some, one tensor cannot be made
        both = processor.own(return_tensors=None, **given)
    return both, (one, other)


def random_item(item: Any) -> Any:
    """An item of that size with random contents, so that a wrong rule shows."""
    draw = np.random.default_rng(0)
    if isinstance(item, Clip):
        return replace(item, frames=draw.integers(1, 255, item.frames.shape, dtype=np.uint8))
    if isinstance(item, np.ndarray):
        return np.float32(draw.standard_normal(item.shape) / 8)
    from PIL import Image

    return Image.fromarray(draw.integers(1, 255, (item.height, item.width, 3), dtype=np.uint8))


def _rule(key: str, seen: Sequence[tuple[Any, tuple[Unit, Unit]]], processor: Processor) -> BatchRule:
    """The first that holds for all pairs of samples."""
    first = seen[0][1][0]
    rules: list[BatchRule] = [Cat(dim) for dim in range(first[key].ndim)]
    if first[key].ndim > 1:
        rules += [Pad(fill) for fill in sorted({fill for both, units in seen for fill in _fills(both, units[0][key])})]
    if not first[key].is_floating_point():
        names = [name for name in first if name != key]
        rules += [Offset(name, dims) for name in names for dims in range(1, first[name].ndim + 1)]
    for rule in (*rules, Listed()):
        if all(_holds(rule, key, both, units) for both, units in seen):
            return rule
    if first[key].is_floating_point() and any(name.endswith("mask") for name in first):
        return Pad(0.0)  # with features of silence, which a mask hides: the self-check sees it if it does not
    raise RecipeError(
        f"{processor.key}: {type(processor.own).__name__} makes {key!r} of two samples in a way that hetmesh does not "
        f"know, of {[tuple(unit[key].shape) for unit in seen[0][1]]}"
    )


def _holds(rule: BatchRule, key: str, both: Any, units: tuple[Unit, Unit]) -> bool:
    try:
        made = rule.join([unit[key] for unit in units], units)
        return _equal(made, both if isinstance(made, list) else as_tensor(both))
    except (RuntimeError, ValueError):  # of shapes that do not go together
        return False


def _fills(both: Any, one: Tensor) -> set[float]:
    """What may have been padded with: the last value of the smaller one's part."""
    try:
        joined = as_tensor(both)
    except (RuntimeError, ValueError):
        return set()
    return {0.0, 1.0, *(float(joined[at].flatten()[-1]) for at in (0, -1))} if joined.ndim == one.ndim else set()


def _equal(made: Any, both: Any) -> bool:
    if isinstance(made, list):
        return isinstance(both, list) and len(made) == len(both) and all(map(_equal, made, both))
    return isinstance(both, Tensor) and made.shape == both.shape and bool(torch.allclose(made.double(), both.double()))
