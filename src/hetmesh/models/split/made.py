"""What a directory's processor made of one text and its media."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Unit = Mapping[str, Tensor]
"""The tensors of a sample's media of one kind, by the names that the model's own method takes them by."""


@dataclass(frozen=True)
class PlaceOfItem:
    """Where an item stands: its kind, and characters `[start, stop)` of the text before and after it was expanded."""

    kind: str
    before: tuple[int, int]
    after: tuple[int, int]


def place_of(replaced: Mapping[str, Any]) -> PlaceOfItem:
    """The same as `get_text_with_replacements` says it."""
    return PlaceOfItem(replaced["type"], tuple(replaced["span"]), tuple(replaced["new_span"]))


def places_between(text: str, expanded: str, written: Mapping[str, str]) -> list[PlaceOfItem]:
    """Where items are of a processor that expands a text in its own way: between what lies around them. `written`: kind
    by what stands for an item. Raises ValueError: the processor changes more of the text."""
    if not (items := [*re.finditer("|".join(map(re.escape, written)), text)]):
        return []
    starts, ends = [0, *(item.end() for item in items)], [*(item.start() for item in items), len(text)]
    around = [re.escape(text[start:end]) for start, end in zip(starts, ends, strict=True)]
    if (found := re.fullmatch("(.*?)".join(around), expanded, re.DOTALL)) is None:
        raise ValueError("it changes more of the text than what stands for items")
    return [PlaceOfItem(written[item[0]], item.span(), found.span(i)) for i, item in enumerate(items, 1)]


@dataclass(frozen=True, eq=False)
class Made:
    """What a processor made of one text and its media.

    Attributes:
        given, expanded: the text that it expanded (the caller's, perhaps with a BOS before it), and what it became.
        ids: token ids, int64 `[tokens]`.
        offsets: characters `[start, stop)` of the expanded text that each token stands for, int64 `[tokens, 2]`;
            `(0, 0)` for one that stands for none.
        places: of the items, in order.
        units: tensors by kind of media.
        answer: which tokens are the suffix; empty without one.
    """

    given: str
    expanded: str
    ids: np.ndarray
    offsets: np.ndarray
    places: list[PlaceOfItem]
    units: Mapping[str, Unit]
    answer: list[bool]


def as_tensor(value: Any) -> Tensor:
    """A value of a processor as a tensor; a list of tensors of one shape side by side. Raises ValueError for others."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(each, Tensor) for each in value):
        if len({each.shape for each in value}) > 1:
            raise ValueError(f"its tensors have the shapes {sorted({tuple(each.shape) for each in value})}")
        return torch.stack(list(value))
    return torch.as_tensor(np.asarray(value))
