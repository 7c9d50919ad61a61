"""How recipes spell schedules: torch's name where it has one, else that of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEDULE_NAMES: Mapping[str, str] = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved"}
"""Schedules that torch has too, as recipes write them -> their names in `hetmesh.schedule.POLICIES`, also taken."""


def schedule_name(value: Any) -> Any:
    """The name of a policy in `hetmesh.schedule` for torch's, whose case does not count, as for torch; else `value`."""
    policies = {name.lower(): policy for name, policy in SCHEDULE_NAMES.items()}
    return policies.get(value.lower(), value) if isinstance(value, str) else value


def schedule_spelling(name: str) -> str:
    """A policy as recipes write it: torch's name where it has one."""
    return {v: k for k, v in SCHEDULE_NAMES.items()}.get(name, name)
