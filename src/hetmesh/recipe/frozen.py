"""Values of free tables that cannot be changed, and copies of them that can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FrozenDict(dict):
    """A dict that cannot be changed, so that a Recipe is a value: hashable, picklable, shareable."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a recipe is frozen; change it with overrides when it is loaded")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """`value` with every dict inside it frozen and every list a tuple."""
    if isinstance(value, Mapping):
        return FrozenDict({k: freeze(v) for k, v in value.items()})
    return tuple(freeze(v) for v in value) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`: a copy in plain dicts and lists, for code that changes what it is given."""
    if isinstance(value, Mapping):
        return {k: thaw(v) for k, v in value.items()}
    return [thaw(v) for v in value] if isinstance(value, list | tuple) else value
