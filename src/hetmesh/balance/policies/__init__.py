"""The balancers. To add one: a function of loads and slots in a file here, and its line in POLICIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.policies.auto import auto
from hetmesh.balance.policies.baselines import buckets, by_length, lpt, none
from hetmesh.balance.policies.disttrain import disttrain
from hetmesh.balance.policies.entrain import entrain
from hetmesh.balance.policies.two_dim import two_dim

Policy = Callable[[BatchLoads, Slots], Assignment]
"""(work of samples, in the order of their keys; what there is to fill) -> who is where."""

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "auto": auto,
        "buckets": buckets,
        "disttrain": disttrain,
        "entrain": entrain,
        "lpt": lpt,
        "none": none,
        "sorted": by_length,
        "two_dim": two_dim,
    }
)
"""Balancing policies by name; the one list of them."""

DEFERRING = ("auto", "entrain", "two_dim")
"""Those that can defer."""
