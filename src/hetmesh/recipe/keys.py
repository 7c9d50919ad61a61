"""Which keys a recipe may hold: valid, torchtitan's alone (`torchtitan_keys.py`), or unknown (with a suggestion)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from hetmesh.errors import Refusals
from hetmesh.recipe import sections as sections
from hetmesh.recipe.torchtitan_keys import ELSEWHERE, FOREIGN, VALUES, Foreign

SECTIONS: Mapping[str, type[sections.Section]] = {
    "job": sections.JobKeys,
    "model": sections.ModelKeys,
    "modules": sections.Module,  # one table per module
    "boundaries": sections.Boundary,  # an array of tables
    "parallelism": sections.ModuleParallelism,  # flat, and one table per module
    "data": sections.Data,
    "balance": sections.Balance,
    "training": sections.Training,
    "activation_checkpoint": sections.ActivationCheckpoint,
    "compile": sections.Compile,
    "optimizer": sections.Optimizer,
    "lr_scheduler": sections.LRScheduler,
    "checkpoint": sections.Checkpoint,
    "metrics": sections.Metrics,
    "validation": sections.Validation,
    "profiling": sections.Profiling,
    "comm": sections.Comm,
    "elastic": sections.Elastic,
    "debug": sections.Debug,
}
"""Every table of a recipe and the class that holds its keys."""


def valid_keys(section: str) -> tuple[str, ...]:
    """The keys that tables of `section` may hold, as written in TOML."""
    return tuple(field.alias or name for name, field in SECTIONS[section].model_fields.items())


def is_flag(section: str, key: str) -> bool:
    """Whether a key of hetmesh's or torchtitan's may be true or false."""
    if section in SECTIONS and key in (fields := SECTIONS[section].model_fields):
        return fields[key].annotation is bool or True in get_args(fields[key].annotation)
    row = FOREIGN.get(section, {}).get(key)
    return row is not None and row.accepted in ((True,), (False,))


def is_list(section: str, key: str) -> bool:
    """Whether a key's value is a list of names."""
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    return key in fields and get_origin(fields[key].annotation) is tuple


def unknown(what: str, name: str, valid: Iterable[str]) -> str:
    """`"unknown key 'stpes'; did you mean 'steps'? Valid are ..."`"""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what} {name!r}{hint} Valid are: {', '.join(valid)}"


def check_keys(raw: Mapping[str, Any], refusals: Refusals) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`raw` without the keys that mean nothing to hetmesh: accepted ones, and those that `refusals` then names because
    they are unknown or not taken. Also a line for each key that is accepted and has no effect."""
    check = _Check(raw, refusals)
    kept = {}
    for section, value in raw.items():
        if section not in SECTIONS and section not in FOREIGN:
            refusals.add(f"[{section}]: {unknown('table', section, SECTIONS)}")
        elif (valid := check.section(section, value)) is not None:
            kept[section] = valid
    return kept, tuple(check.without_effect)


class _Check:
    """One recipe's keys; on all of it, `raw`, it may depend whether a key matters."""

    def __init__(self, raw: Mapping[str, Any], refusals: Refusals) -> None:
        self.raw, self.refusals = raw, refusals
        self.without_effect: list[str] = []

    def section(self, section: str, value: Any) -> Any:
        if section == "boundaries":
            if not isinstance(value, list):
                self.refusals.add("boundaries: write each boundary as its own [[boundaries]] table")
                return None
            return [self.table(section, f"boundaries[{i}]", table) for i, table in enumerate(value)]
        if not isinstance(value, Mapping):
            self.refusals.add(f"{section}: must be a table of keys, got {value!r}")
            return None
        if section == "modules":
            return {name: self.table(section, f"modules.{name}", table) for name, table in value.items()}
        if section == "parallelism":
            tables = {k: v for k, v in value.items() if isinstance(v, Mapping)}
            flat = self.table(section, section, {k: v for k, v in value.items() if k not in tables})
            return flat | {k: self.table(section, f"parallelism.{k}", table) for k, table in tables.items()}
        kept = self.table(section, section, value)
        return kept if section in SECTIONS else None

    def table(self, section: str, where: str, table: Any) -> dict[str, Any]:
        """The keys of one table that are fields of its section."""
        if not isinstance(table, Mapping):
            self.refusals.add(f"{where}: must be a table of keys, got {table!r}")
            return {}
        fields = valid_keys(section) if section in SECTIONS else ()
        foreign = FOREIGN.get(section, {})
        kept = {}
        for key, value in _flat(table, fields, foreign):
            elsewhere = ELSEWHERE.get(f"{section}.{key}")
            if key in foreign and not self._taken(f"{where}.{key}", value, foreign[key]):
                continue
            if key in fields:
                if isinstance(value, str) and (instead := VALUES.get(f"{section}.{key}", {}).get(value)):
                    self.refusals.add(f"{where}.{key} = {value!r}: hetmesh does not have it; {instead}")
                else:
                    kept[key] = value
            elif elsewhere:
                self.refusals.add(f"{where}.{key}: hetmesh has no such key; {elsewhere}")
            elif key not in foreign:
                table_inside = key.rpartition(".")[0]
                beside = [key for key in foreign if table_inside and key.rpartition(".")[0] == table_inside]
                self.refusals.add(f"{where}.{key}: {unknown('key', key, beside or fields or foreign)}")
        return kept

    def _taken(self, key: str, value: Any, foreign: Foreign) -> bool:
        """Whether a key of torchtitan's may have this value; if not, it is refused."""
        if not foreign.matters(self.raw) or value in foreign.accepted:
            return True
        if value in foreign.without_effect:
            self.without_effect.append(f"{key} = {value!r}: {foreign.note}")
            return True
        accepted = foreign.accepted if isinstance(foreign.accepted, tuple) else ()
        which = (
            f"of torchtitan's values hetmesh has only {' and '.join(map(repr, accepted))}"
            if accepted
            else "a key of torchtitan's that hetmesh does not have"
        )
        self.refusals.add(f"{key} = {value!r}: {which}; {foreign.instead}")
        return False


def _flat(table: Mapping[str, Any], fields: Iterable[str], foreign: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Keys and values; those of tables inside that torchtitan has by names with dots."""
    for key, value in table.items():
        if isinstance(value, Mapping) and key not in fields and any(name.startswith(f"{key}.") for name in foreign):
            inside = [name.removeprefix(f"{key}.") for name in foreign if name.startswith(f"{key}.")]
            yield from ((f"{key}.{name}", inner) for name, inner in _flat(value, (), inside))
        else:
            yield key, value
