"""Values of keys that are more than a type: what they may be, and what a recipe may write for them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

MAX_RANKS = 1_000_000
"""Ranks that a job may have: a slip of the keyboard shall not fill the memory."""


def parse_ranks(value: Any) -> Any:
    """`[0, 1]`, `3`, `"0-1"`, `"0-3,6"` or `"all"` as ascending or given ranks; `None` stands for all ranks.
    Raises ValueError: it is none of these, or a rank is repeated."""
    if value is None or value == "all":
        return None
    ranks: list[int] = []
    for part in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]:
        first, dash, last = part.partition("-") if isinstance(part, str) else (part, "", part)
        try:
            if isinstance(part, bool | float):
                raise ValueError
            start, stop = int(first), int(last if dash else first)
            if start > stop or stop >= MAX_RANKS:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"{part!r} is no rank; write ranks as [0, 1], '0-1', '0-3,6' or 'all'") from None
        ranks.extend(range(start, stop + 1))
    if not ranks or min(ranks) < 0:
        raise ValueError("ranks must be one or more numbers >= 0: [0, 1], '0-1', '0-3,6' or 'all'")
    if repeated := sorted(rank for rank, times in Counter(ranks).items() if times > 1):
        raise ValueError(f"rank {', '.join(map(str, repeated))} is given more than once")
    return tuple(ranks)


def within(value: str) -> str:
    """The path of a folder that lies in another one. Raises ValueError: it may lie elsewhere."""
    path = PurePath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{value!r} must lie in job.dump_folder: a name, or a path without '..'; move that instead")
    return value


def regular_expression(value: str) -> str:
    """A pattern that is searched in names of parameters. Raises ValueError: it is none."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from None
    return value


def parse_trainable(value: Any) -> Any:
    """True, False, or patterns of parameter names. Raises ValueError: it is none of these."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, tuple) or not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError("should be true, false, or a list of patterns of parameter names")
    for pattern in value:
        regular_expression(pattern.removeprefix("!"))
    return value


def optimizer_arguments(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keyword arguments of an optimizer. Raises ValueError: one that `[optimizer]` has too is not what it may be."""
    for key in sorted({"lr", "weight_decay"} & value.keys()):
        given = value[key]
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
            raise ValueError(f"{key} = {given!r} should be a number that is finite and not negative")
    return value


PLAIN_OPTIMIZERS = ("AdamW", "Adam", "SGD")
"""Classes of torch.optim whose arguments are keys of `[optimizer]`."""


def optimizer_name(value: str) -> str:
    """An optimizer's name. Raises ValueError: it is none."""
    if value not in PLAIN_OPTIMIZERS and ":" not in value:
        names = ", ".join(map(repr, PLAIN_OPTIMIZERS))
        raise ValueError(f"should be {names} or 'package.module:Class', as 'torch.optim:RMSprop'")
    return value
