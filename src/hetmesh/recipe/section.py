"""What the tables of a recipe have in common: a frozen base class, and free tables that cannot be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr


def table_in(tables: Any, name: str) -> Mapping[str, Any]:
    """A table of raw ones; empty where there is none, or something else in its place."""
    table = tables.get(name, {}) if isinstance(tables, Mapping) else {}
    return table if isinstance(table, Mapping) else {}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values in a table, and in those inside it, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


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


def thawed(field: str) -> property:
    """A property: the free table `field` as a new copy, since libraries that read one may also write into it."""
    return property(lambda table: thaw(getattr(table, field)))


class Section(BaseModel):
    """Base of the tables: frozen, no unknown keys, no conversion between types except int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class NamesCode(Section):
    """A table that may name custom code, `"package.module:Class"`, which may lie beside the recipe's file."""

    _folder: str | None = PrivateAttr(default=None)  # no key: it says where the file was, not what it says

    @property
    def folder(self) -> str | None:
        """The folder of the file that the recipe was read from, if it names code."""
        return self._folder

    def beside(self, folder: str | None) -> None:
        """Say where the recipe's file lies."""
        self._folder = folder


SCHEDULE_NAMES: Mapping[str, str] = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved"}
"""Schedules that torch has too, as recipes write them -> their names in `hetmesh.schedule.POLICIES`, also taken."""


def schedule_name(value: Any) -> Any:
    """The name of a policy in `hetmesh.schedule` for torch's, whose case does not count, as for torch; else `value`."""
    policies = {name.lower(): policy for name, policy in SCHEDULE_NAMES.items()}
    return policies.get(value.lower(), value) if isinstance(value, str) else value


def schedule_spelling(name: str) -> str:
    """A policy as recipes write it: torch's name where it has one."""
    return {v: k for k, v in SCHEDULE_NAMES.items()}.get(name, name)
